"""The official client through the gateway: what its users write works as it does with OpenAI's own servers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from gateway.config import TimeoutsConfig
from gateway.openai_schema import CHAT
from tests.gateway.api_answers import answer_in_shape
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.mock_engine import MockEngine, answer_status, break_off_stream, never_answer, start_stream
from tests.gateway.samples import MODEL

TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
MESSAGES: Any = [{"role": "user", "content": "hello"}]
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bonn"}'}}
SOUND = bytes(range(256)) * 40


async def answer_as_openai(engine: MockEngine, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    """What a server with one model answers at each endpoint, in the shapes of OpenAI's reference."""
    if request.path == "/v1/embeddings":
        rows = [{"object": "embedding", "index": n, "embedding": [0.5, n]} for n, _ in enumerate(fields["input"])]
        usage = {"prompt_tokens": 2, "total_tokens": 2}
        return web.json_response({"object": "list", "model": MODEL, "data": rows, "usage": usage})
    if request.path == "/v1/audio/speech":
        return web.Response(body=SOUND, content_type="audio/mpeg")
    if request.path == "/v1/audio/transcriptions":
        return web.json_response({"text": "hello there"})
    if request.path == "/v1/completions":
        choice = {"index": 0, "text": "ok", "finish_reason": "stop", "logprobs": None}
        return web.json_response(
            {"id": "c", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice], "usage": USAGE}
        )
    if request.path != CHAT:
        return await answer_in_shape(engine, request, fields)
    said: dict[str, Any] = {"role": "assistant", "content": "ok"}
    if fields.get("tools"):
        said = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    if not fields.get("stream"):
        choice = {"index": 0, "message": said, "finish_reason": "tool_calls" if "tool_calls" in said else "stop"}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
        return web.json_response({**answer, "usage": USAGE})
    stream = await start_stream(request)
    for delta in ({"role": "assistant"}, said, {}):
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        reason = None if delta else "stop"
        choices = [{"index": 0, "delta": delta, "finish_reason": reason}]
        await stream.write(b"data: " + orjson.dumps({**chunk, "choices": choices}) + b"\n\n")
    if fields.get("stream_options"):
        await stream.write(b"data: " + orjson.dumps({**chunk, "choices": [], "usage": USAGE}) + b"\n\n")
    await stream.write(b"data: [DONE]\n\n")
    return stream


def client_of(gateway: TestGateway, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=gateway.url + "/v1", api_key="key", **{"max_retries": 0, "timeout": 30.0, **options})


@pytest.fixture
async def served() -> AsyncIterator[tuple[MockEngine, TestGateway, AsyncOpenAI]]:
    async with MockEngine("a", answer_as_openai) as engine, gateway_for([engine]) as gateway:
        async with client_of(gateway) as client:
            yield engine, gateway, client


Served = tuple[MockEngine, TestGateway, AsyncOpenAI]


async def test_chats_and_completions_are_answered(served: Served) -> None:
    engine, _, client = served
    chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"cache_salt": "s"})
    assert chat.choices[0].message.content == "ok"
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 4
    assert orjson.loads(engine.received[-1][0])["cache_salt"] == "s"
    assert engine.received[-1][1]["authorization"] == "Bearer key"
    completion = await client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=1)
    assert completion.choices[0].text == "ok"


async def test_streams_come_in_chunks_with_usage_if_it_is_asked_for(served: Served) -> None:
    _, gateway, client = served
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "ok"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 5
    plain = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert all(chunk.usage is None for chunk in [chunk async for chunk in plain])
    assert gateway.ledger.engines() == ()


async def test_tools_are_called_whole_and_in_streams(served: Served) -> None:
    _, _, client = served
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="auto")
    calls = whole.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert calls[0].function.arguments == '{"city":"Bonn"}'
    async with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[TOOL]) as stream:
        final = await stream.get_final_completion()
    said = final.choices[0].message.tool_calls
    assert said is not None
    assert said[0].function.name == "weather"
    turns = [*MESSAGES, whole.choices[0].message, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    assert (await client.chat.completions.create(model=MODEL, messages=turns)).choices[0].message.content == "ok"


async def test_other_endpoints_pass(served: Served) -> None:
    engine, _, client = served
    embedded = await client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
    assert [row.embedding for row in embedded.data] == [[0.5, 0], [0.5, 1]]
    heard = await client.audio.transcriptions.create(model=MODEL, file=("a.wav", SOUND))
    assert heard.text == "hello there"
    assert SOUND in engine.received[-1][0]
    spoken = await client.audio.speech.create(model=MODEL, voice="alloy", input="hello")
    assert spoken.content == SOUND
    async with client.audio.speech.with_streaming_response.create(model=MODEL, voice="alloy", input="x") as speech:
        assert b"".join([piece async for piece in speech.iter_bytes()]) == SOUND
    response = await client.responses.create(model=MODEL, input="hello", stream=True)
    assert [event.type async for event in response][-1] == "response.completed"
    models = await client.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors_are_the_clients_own_kinds_and_carry_the_request_id(served: Served) -> None:
    _, _, client = served
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=MESSAGES, extra_headers={"x-request-id": "mine"})
    assert (missing.value.code, missing.value.param, missing.value.request_id) == ("model_not_found", "model", "mine")
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=MODEL, messages=[])
    assert (wrong.value.type, wrong.value.param) == ("invalid_request_error", "messages")
    with pytest.raises(openai.NotFoundError):
        await client.files.list()


async def test_an_engines_refusals_arrive_as_such() -> None:
    kinds = {400: openai.BadRequestError, 401: openai.AuthenticationError, 422: openai.UnprocessableEntityError}
    kinds |= {429: openai.RateLimitError, 503: openai.InternalServerError}  # type: ignore[dict-item]
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway, client_of(gateway) as client:
        for status, kind in kinds.items():
            engine.behaviour = answer_status(status)
            with pytest.raises(kind) as refused:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)
            assert f"a says {status}" in str(refused.value)


async def test_the_client_retries_what_the_gateway_could_not_mend() -> None:
    async with MockEngine("a", fail_twice) as engine, gateway_for([engine]) as gateway:
        async with client_of(gateway, max_retries=2) as client:
            chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert chat.choices[0].message.content == "ok"
    ids = {headers["x-stainless-retry-count"] for _, headers in engine.received}
    assert ids == {"0", "1", "2"}


async def fail_twice(engine: MockEngine, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    if len(engine.received) < 3:
        return web.json_response({"error": {"message": "busy"}}, status=503, headers={"retry-after-ms": "1"})
    return await answer_as_openai(engine, request, fields)


async def test_a_client_that_gives_up_ends_the_engines_work_and_one_that_waits_is_told() -> None:
    async with MockEngine("a", never_answer) as engine:
        async with gateway_for([engine], timeouts=TimeoutsConfig(connect_s=0.2, first_byte_s=0.3)) as gateway:
            async with client_of(gateway) as client:
                with pytest.raises(openai.InternalServerError) as late:
                    await client.chat.completions.create(model=MODEL, messages=MESSAGES)
                assert (late.value.status_code, late.value.code) == (504, "upstream_timeout")
        engine.gone = asyncio.Event()
        async with gateway_for([engine]) as gateway, client_of(gateway) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model=MODEL, messages=MESSAGES, timeout=1.0)
            await eventually(lambda: engine.gone.is_set() or len(engine.received) == 1, 30)
            await eventually(lambda: gateway.ledger.engines() == (), 30)


async def test_a_stream_that_breaks_raises_with_the_gateways_words() -> None:
    async with MockEngine("a", break_off_stream) as engine, gateway_for([engine]) as gateway:
        async with client_of(gateway) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            seen = []
            with pytest.raises(openai.APIError) as broken:
                async for chunk in stream:
                    seen.append(chunk)
    assert len(seen) == 2
    assert "the engine failed while it was answering" in broken.value.message


async def test_a_stream_that_the_client_leaves_is_ended_at_the_engine(served: Served) -> None:
    engine, gateway, client = served
    engine.behaviour = stream_on
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await asyncio.wait_for(engine.gone.wait(), 30)
    await eventually(lambda: gateway.ledger.engines() == (), 30)


async def stream_on(engine: MockEngine, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    stream = await start_stream(request)
    while True:
        await stream.write(b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
        await asyncio.sleep(0.005)
