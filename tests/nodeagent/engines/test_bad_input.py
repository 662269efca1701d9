"""Whatever a client sends to the engine itself, it gets an answer that names the field, and the engine serves on."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from nodeagent.engines.reference import server
from nodeagent.engines.reference.loaded_model import LoadedModel
from nodeagent.engines.reference.openai_schema import _ASKS_NOTHING
from nodeagent.engines.reference.serve import _listen
from nodeagent.engines.reference.server import create_app
from tests import bad_input
from tests.nodeagent.engines.fakes import build_service

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
CHAT_BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "n"}],
    "max_tokens": 1,
    "temperature": 0,
    "stop": ["zzz"],
    "stream_options": None,
}
COMPLETION_BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 1, "temperature": 0}
TOKENIZE_BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
BODIES = {CHAT: CHAT_BODY, COMPLETIONS: COMPLETION_BODY, TOKENIZE: TOKENIZE_BODY}

NULL, FLAG, STRINGS = {"null"}, {"boolean", "false"}, {"string", "empty string"}
WHOLE = {"integer", "zero", "negative", "huge"}
NOTHING_BY_VALUE = {name: {kind for kind, value in bad_input.TYPES.items()
                           if any(value == each and isinstance(value, bool) == isinstance(each, bool)
                                  for each in harmless)}
                    for name, harmless in _ASKS_NOTHING.items()}  # fmt: skip
FIELDS: list[tuple[str, tuple[str | int, ...], set[str]]] = [
    *((CHAT, (name,), {*right, "null"}) for name, right in NOTHING_BY_VALUE.items()),
    (CHAT, ("model",), {"null"}),
    (CHAT, ("stream",), {*FLAG, "null"}),
    (CHAT, ("stream_options",), {"null"}),
    (CHAT, ("max_tokens",), {"integer", "null"}),
    (CHAT, ("max_completion_tokens",), {"integer", "null"}),
    (CHAT, ("temperature",), {"zero", "fraction", "null"}),
    (CHAT, ("top_p",), {"null"}),
    (CHAT, ("seed",), {*WHOLE, "null"}),
    (CHAT, ("stop",), {"string", "empty list", "null"}),
    (CHAT, ("stop", 0), {"string"}),
    (CHAT, ("cache_salt",), {"string", "null"}),
    (CHAT, ("ignore_eos",), {*FLAG, "null"}),
    (CHAT, ("add_generation_prompt",), {*FLAG, "null"}),
    (CHAT, ("continue_final_message",), {"false", "null"}),
    (CHAT, ("chat_template_kwargs",), {"object", "empty object", "null"}),
    (CHAT, ("messages",), set()),
    (CHAT, ("messages", 0), set()),
    (CHAT, ("messages", 0, "role"), set()),
    (CHAT, ("messages", 0, "content"), {*STRINGS, "empty list", "null"}),
    (CHAT, ("messages", 0, "content", 0), STRINGS),
    (CHAT, ("messages", 0, "content", 0, "type"), {"string"}),
    (CHAT, ("messages", 0, "content", 0, "text"), STRINGS),
    (CHAT, ("messages", 0, "name"), {*STRINGS, "null"}),
    (CHAT, ("messages", 0, "tool_calls"), {"null", "empty list"}),
    (CHAT, ("messages", 0, "function_call"), {"null", "empty list"}),
    (COMPLETIONS, ("model",), {"null"}),
    (COMPLETIONS, ("prompt",), {"string", "list"}),
    (COMPLETIONS, ("max_tokens",), {"integer", "null"}),
    (COMPLETIONS, ("stream",), {*FLAG, "null"}),
    (TOKENIZE, ("model",), {"null"}),
    (TOKENIZE, ("prompt",), STRINGS),
    (TOKENIZE, ("return_token_strs",), {*FLAG, "null"}),
]
"""Every field that is read, and which rows of `bad_input.TYPES` it takes."""


@pytest.fixture
async def client(tiny: LoadedModel) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(build_service(tiny))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        yield client
        assert (await client.post(COMPLETIONS, json=COMPLETION_BODY)).status_code == 200, "the engine serves on"


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text[:300]
    error = bad_input.check_error_shape(answer.content)
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, TOKENIZE])
async def test_a_body_that_holds_no_json_object_is_a_400(client: httpx.AsyncClient, endpoint: str) -> None:
    for content in bad_input.NOT_AN_OBJECT.values():
        refused(await client.post(endpoint, content=content))


@pytest.mark.parametrize(
    ("endpoint", "path", "right"), FIELDS, ids=[f"{row[0]} {bad_input.param_of(row[1])}" for row in FIELDS]
)
async def test_a_wrong_type_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, endpoint: str, path: tuple[str | int, ...], right: set[str]
) -> None:
    for name, value in bad_input.TYPES.items():
        content = bad_input.encoded(bad_input.replaced(BODIES[endpoint], path, value))
        answer = await client.post(endpoint, content=content)
        if name in right:
            assert answer.status_code == 200, (name, answer.text)
            continue
        status = 404 if path == ("model",) and name in STRINGS else 400
        error = refused(answer, status)
        named = bad_input.param_of(path)
        assert error["param"] is not None, (name, error)
        assert error["param"].startswith(named) or named.startswith(error["param"]), (name, error)
        assert error["param"].split(".")[-1].split("[")[0] in error["message"], error


async def test_options_of_a_stream_are_read_too(client: httpx.AsyncClient) -> None:
    streamed = {**CHAT_BODY, "stream": True, "stream_options": {"include_usage": True}}
    for _, value in bad_input.wrong_types({"object", "empty object", "null"}):
        content = bad_input.encoded({**streamed, "stream_options": value})
        assert refused(await client.post(CHAT, content=content))["param"] == "stream_options"
    for _, value in bad_input.wrong_types({*FLAG, "null"}):
        content = bad_input.encoded({**streamed, "stream_options": {"include_usage": value}})
        assert refused(await client.post(CHAT, content=content))["param"] == "stream_options.include_usage"


async def test_depth_costs_its_own_request_only(client: httpx.AsyncClient) -> None:
    for path in (("extra",), ("chat_template_kwargs", "a")):
        content = bad_input.encoded(
            bad_input.replaced({**CHAT_BODY, "chat_template_kwargs": {}}, path, bad_input.deep_list(1000))
        )
        assert (await client.post(CHAT, content=content)).status_code == 200
    for path in (("messages", 0, "content"), ("messages", 0, "content", 0), ("tools",), ("stop",), ("logit_bias",)):
        content = bad_input.encoded(bad_input.replaced(CHAT_BODY, path, bad_input.deep_list(1000)))
        refused(await client.post(CHAT, content=content))


async def test_what_a_client_said_at_length_is_not_repeated_in_full(client: httpx.AsyncClient) -> None:
    refused(await client.post(CHAT, json={**CHAT_BODY, "model": "m" * 100_000}), 404)
    refused(await client.post("/v1/" + "x" * 5_000), 404)


async def test_a_compressed_body_is_a_415(client: httpx.AsyncClient) -> None:
    for encoding in ("gzip", "x"):
        answer = await client.post(CHAT, content=gzip.compress(b"{}"), headers={"content-encoding": encoding})
        assert "content-encoding" in refused(answer, 415)["message"]


async def test_another_method_is_a_405_that_names_the_right_one(client: httpx.AsyncClient) -> None:
    for method, path, right in [("GET", CHAT, "POST"), ("PUT", COMPLETIONS, "POST"), ("POST", "/v1/models", "GET")]:
        answer = await client.request(method, path)
        refused(answer, 405)
        assert answer.headers["allow"] == right


@asynccontextmanager
async def listening(tiny: LoadedModel) -> AsyncIterator[int]:
    """The engine on a socket; its port."""
    config = uvicorn.Config(create_app(build_service(tiny)), log_level="error", lifespan="on", access_log=False)
    listener = _listen("127.0.0.1", 0)
    running = uvicorn.Server(config)
    task = asyncio.create_task(running.serve(sockets=[listener]))
    async with asyncio.timeout(60):
        while not running.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        running.should_exit = True
        await task


async def test_a_body_that_does_not_come_is_a_408_and_others_are_served(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.3)
    async with listening(tiny) as port:
        slow = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            slow.append((reader, writer))
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            url = f"http://127.0.0.1:{port}{COMPLETIONS}"
            assert (await client.post(url, json=COMPLETION_BODY)).status_code == 200
        for reader, writer in slow:
            assert b" 408 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
            writer.close()
            await writer.wait_closed()


async def test_the_official_client_raises_the_right_error_for_each_kind(tiny: LoadedModel) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    async with listening(tiny) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            ask = client.chat.completions.create
            with pytest.raises(openai.BadRequestError, match="temperature must be") as bad:
                await ask(model="tiny", messages=messages, temperature=9)
            assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
            with pytest.raises(openai.BadRequestError, match="prompt and reply together") as long:
                await ask(model="tiny", messages=[{"role": "user", "content": "x " * 5_000}])
            assert long.value.code == "context_length_exceeded"
            with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
                await ask(model="other", messages=messages)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.APIStatusError, match="larger than") as large:
                await ask(model="tiny", messages=[{"role": "user", "content": "x" * (17 << 20)}])
            assert large.value.status_code == 413
            assert (await ask(model="tiny", messages=messages, max_tokens=1)).choices
