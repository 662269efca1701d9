import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from nodeagent.engines.reference.loaded_model import LoadedModel
from nodeagent.engines.reference.server import BODY_BYTES_MAX, create_app
from nodeagent.engines.reference.service import EngineService
from tests.nodeagent.engines.fakes import GatedModel, build_service
from tests.nodeagent.engines.tiny_model import CHUNK_TOKENS, CONTEXT_TOKENS, words

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello world"}], "temperature": 0, "max_tokens": 4}


@asynccontextmanager
async def serving(service: EngineService) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(service)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        yield client


@pytest.fixture
async def client(tiny: LoadedModel) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(build_service(tiny)) as client:
        yield client


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def test_a_chat_is_answered(client: httpx.AsyncClient, tiny: LoadedModel) -> None:
    body = (await client.post(CHAT, json={**HELLO, "model": "tiny"})).json()
    choice = body["choices"][0]
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("length", "stop")
    prompt = "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert body["usage"] == {
        "prompt_tokens": len(tiny.tokenizer.encode(prompt)),
        "completion_tokens": 4,
        "total_tokens": len(tiny.tokenizer.encode(prompt)) + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_has_the_role_the_text_the_reason_and_the_usage(client: httpx.AsyncClient) -> None:
    whole = (await client.post(CHAT, json=HELLO)).json()
    response = await client.post(CHAT, json={**HELLO, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, usage = events(response.text)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * (len(parts) - 1) + [whole["choices"][0]["finish_reason"]]
    assert all(part["usage"] is None for part in parts)
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert usage["usage"]["completion_tokens"] == 4


async def test_a_stream_without_usage_mentions_none(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={**HELLO, "stream": True})
    assert all("usage" not in event for event in events(response.text))


@pytest.mark.parametrize("wrap", [lambda prompt: prompt, lambda prompt: [prompt]], ids=["bare", "list-of-one"])
async def test_a_completion_takes_text_and_token_ids_alike(
    client: httpx.AsyncClient, tiny: LoadedModel, wrap: Any
) -> None:
    text = "hello world 12"
    answers = [
        (await client.post(COMPLETIONS, json={"prompt": wrap(prompt), "temperature": 0})).json()
        for prompt in (text, tiny.tokenizer.encode(text))
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["object"] == "text_completion"
    assert answers[0]["usage"]["completion_tokens"] <= 16


async def test_a_completion_streams_the_same_text(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hello", "temperature": 0}
    whole = (await client.post(COMPLETIONS, json=body)).json()
    parts = events((await client.post(COMPLETIONS, json={**body, "stream": True})).text)
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]


async def test_a_repeated_prompt_reports_cached_tokens(client: httpx.AsyncClient) -> None:
    body = {"prompt": words(3 * CHUNK_TOKENS + 2), "temperature": 0}
    first, second = [(await client.post(COMPLETIONS, json=body)).json() for _ in range(2)]
    salted = (await client.post(COMPLETIONS, json={**body, "cache_salt": "s"})).json()
    assert first["choices"] == second["choices"] == salted["choices"]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, second, salted)]
    assert cached == [0, 3 * CHUNK_TOKENS, 0]


async def test_a_reset_empties_the_engines_own_cache_and_not_its_hosts(tiny: LoadedModel) -> None:
    service = build_service(tiny)
    prompt = {"prompt": words(2 * CHUNK_TOKENS + 1), "max_tokens": 1, "temperature": 0}
    async with serving(service) as client:
        await client.post(COMPLETIONS, json=prompt)
        assert len(service._gpu) == 2
        answer = await client.post("/reset_prefix_cache")
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        assert len(service._gpu) == 0
        usage = (await client.post(COMPLETIONS, json=prompt)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * CHUNK_TOKENS, "from dram"


async def test_a_seed_repeats_an_answer(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hello", "seed": -3, "max_tokens": 12}
    answers = [(await client.post(COMPLETIONS, json=body)).json()["choices"] for _ in range(2)]
    assert answers[0] == answers[1]


async def test_a_stop_string_ends_the_text_before_it(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hello world", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    text = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    stopped = (await client.post(COMPLETIONS, json={**body, "stop": stop})).json()["choices"][0]
    assert stopped == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop",
        "text": text[: text.index(stop)],
    }


USER = [{"role": "user", "content": "hi"}]
REFUSED: list[tuple[str, Any, str | None]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": USER, "n": 2}, "n"),
    (CHAT, {"messages": USER, "n": True}, "n"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": USER, "logprobs": True}, "logprobs"),
    (CHAT, {"messages": USER, "logit_bias": {"1": 5}}, "logit_bias"),
    (CHAT, {"messages": USER, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": USER, "temperature": 3}, "temperature"),
    (CHAT, {"messages": USER, "top_p": 0}, "top_p"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": 1.5}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "max_tokens": CONTEXT_TOKENS}, "max_tokens"),
    (CHAT, {"messages": USER, "stop": ""}, "stop"),
    (CHAT, {"messages": USER, "stop": [1]}, "stop"),
    (CHAT, {"messages": USER, "stop": ["x"] * 17}, "stop"),
    (CHAT, {"messages": USER, "stream": "yes"}, "stream"),
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": USER, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT, {"messages": USER, "seed": "x"}, "seed"),
    (CHAT, {"messages": USER, "cache_salt": ""}, "cache_salt"),
    (CHAT, {"messages": USER, "cache_salt": 5}, "cache_salt"),
    (CHAT, {"messages": USER, "model": 5}, "model"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 60_000}]}, "messages"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, -1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 1}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 4}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_what_cant_be_served_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, path: str, body: Any, param: str
) -> None:
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"text"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 5000 + b"]" * 5000],
    ids=["empty", "cut", "list", "string", "bad-utf8", "lone-surrogate", "deep"],
)
async def test_a_body_that_isnt_a_json_object_is_a_400(client: httpx.AsyncClient, content: bytes) -> None:
    response = await client.post(COMPLETIONS, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_too_large_is_a_413(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, content=b" " * (BODY_BYTES_MAX + 1))
    assert response.status_code == 413


async def test_another_model_is_a_404(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={**HELLO, "model": "gpt-9"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_an_unknown_path_and_a_wrong_method_have_openais_shape(client: httpx.AsyncClient) -> None:
    for response, status in ((await client.get("/v1/nothing"), 404), (await client.get(CHAT), 405)):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_fields_that_ask_for_nothing_and_unknown_ones_are_ignored(client: httpx.AsyncClient) -> None:
    extra = {"n": 1, "tools": [], "tool_choice": "none", "logprobs": False, "frequency_penalty": 0, "user": "u", "x": 1}
    response = await client.post(CHAT, json={**HELLO, **extra, "response_format": {"type": "text"}, "stop": None})
    assert response.status_code == 200


async def test_tokenize_shows_what_a_prompt_and_a_chat_become(client: httpx.AsyncClient, tiny: LoadedModel) -> None:
    text = (await client.post("/tokenize", json={"prompt": "hello world", "return_token_strs": True})).json()
    assert text == {
        "count": 2,
        "max_model_len": CONTEXT_TOKENS,
        "tokens": tiny.tokenizer.encode("hello world"),
        "token_strs": ["hello", "Ġworld"],
    }
    chat = (await client.post("/tokenize", json={"messages": USER})).json()
    assert chat["tokens"] == tiny.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert chat["token_strs"] is None


async def test_models_health_and_metrics_are_served(client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()
    assert [(each["id"], each["max_model_len"]) for each in models["data"]] == [("tiny", CONTEXT_TOKENS)]
    assert (await client.get("/health")).status_code == 200
    await client.post(CHAT, json=HELLO)
    text = (await client.get("/metrics")).text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_count",
    ):
        assert f'{name}{{engine="0",model_name="tiny"}}' in text
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 4.0' in text


async def test_load_is_reported_to_the_host(tiny: LoadedModel) -> None:
    service = build_service(tiny)
    async with serving(service) as client:
        await client.post(CHAT, json=HELLO)
        async with asyncio.timeout(30):
            while not service._store.loads:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
    assert service._store.is_stopped  # type: ignore[attr-defined]
    assert service._store.loads[0][2] > 0  # type: ignore[attr-defined]


class Caller:
    """A client as ASGI sees it: sends one request, and closes its connection when told to."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.started = asyncio.Event()
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1"}
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def hang_up(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.started.set()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", ["prefill", "reply"])
async def test_a_client_that_goes_frees_its_place(tiny: LoadedModel, stream: bool, phase: str) -> None:
    gated = GatedModel(tiny.model)
    service = build_service(tiny, gated, running_max=1)
    app = create_app(service)
    async with app.router.lifespan_context(app), asyncio.timeout(60):
        body = {"prompt": words(3 * CHUNK_TOKENS), "max_tokens": 300, "ignore_eos": True, "stream": stream}
        caller = Caller(app, COMPLETIONS, body)
        if phase == "reply":
            for _ in range(5):
                await asyncio.to_thread(gated.step)
        await asyncio.to_thread(gated.wait_for_pass)
        caller.hang_up()
        await caller.task
        gated.open_gate()
        other = Caller(app, COMPLETIONS, {"prompt": words(5), "max_tokens": 1})
        await other.task
        assert other.sent[0]["status"] == 200
        assert sum(gated.passes) <= 3 * CHUNK_TOKENS + 5 + 8
    if not stream:
        assert caller.sent[0]["status"] == 499


async def test_a_stopping_engine_says_503_before_the_first_token_and_an_error_event_after(tiny: LoadedModel) -> None:
    gated = GatedModel(tiny.model)
    service = build_service(tiny, gated, running_max=1)
    app = create_app(service)
    async with asyncio.timeout(60):
        async with app.router.lifespan_context(app):
            body = {"prompt": words(5), "max_tokens": 300, "ignore_eos": True, "stream": True}
            begun = Caller(app, COMPLETIONS, body)
            await asyncio.to_thread(gated.step)
            await begun.started.wait()
            waiting = Caller(app, COMPLETIONS, body)
            whole = Caller(app, COMPLETIONS, {**body, "stream": False})
            await asyncio.to_thread(gated.wait_for_pass)
            while service._scheduler.waiting < 2:
                await asyncio.sleep(0)
            gated.open_gate()
        await asyncio.gather(begun.task, waiting.task, whole.task)
    assert waiting.sent[0]["status"] == whole.sent[0]["status"] == 503
    assert begun.sent[0]["status"] == 200
    text = b"".join(message.get("body", b"") for message in begun.sent).decode()
    assert events(text)[-1]["error"]["type"] == "service_unavailable"


async def test_the_official_client_is_served(tiny: LoadedModel) -> None:
    config = uvicorn.Config(create_app(build_service(tiny)), port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    serving_task = asyncio.create_task(server.serve())
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            messages: Any = [{"role": "user", "content": "hello"}]
            whole = await client.chat.completions.create(
                model="tiny", messages=messages, temperature=0, max_completion_tokens=6
            )
            text = ""
            stream = await client.chat.completions.create(
                model="tiny",
                messages=messages,
                temperature=0,
                max_completion_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                usage = chunk.usage
            assert text == whole.choices[0].message.content
            assert usage.prompt_tokens == whole.usage.prompt_tokens
            assert usage.completion_tokens == whole.usage.completion_tokens == 6
            assert usage.prompt_tokens_details.cached_tokens == CHUNK_TOKENS
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="x")
            assert [model.id async for model in client.models.list()] == ["tiny"]
        server.should_exit = True
        await serving_task
