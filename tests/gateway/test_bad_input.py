"""Whatever a client sends, it gets an answer it can read, and the gateway serves on."""

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import orjson
import pytest

from gateway.config import TimeoutsConfig
from gateway.openai_schema import CHAT, COMPLETIONS
from tests import bad_input
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL
from tests.virtual_time import in_quiet_time

WAIT_S = 20.0
CHAT_BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ],
    "stream": False,
    "cache_salt": "s",
    "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "tools": [],
    "functions": [],
    "documents": [],
    "reasoning_effort": None,
    "user": "u",
    "session_id": "s",
    "prompt_cache_key": "k",
}
COMPLETION_BODY: dict[str, Any] = {"model": MODEL, "prompt": ["a", "b"], "stream": False, "cache_salt": "s"}
STRINGS = {"string", "empty string"}
FIELDS: list[tuple[str, tuple[str | int, ...], set[str]]] = [
    (CHAT, ("model",), {"string"}),
    (CHAT, ("stream",), {"boolean", "false", "null"}),
    (CHAT, ("cache_salt",), {"string", "null"}),
    (CHAT, ("messages",), set()),
    (CHAT, ("messages", 0), set()),
    (CHAT, ("messages", 1, "role"), {"string"}),
    (CHAT, ("messages", 1, "content"), {*STRINGS, "null", "list", "empty list", "list of lists", "list of null"}),
    (COMPLETIONS, ("model",), {"string"}),
    (COMPLETIONS, ("stream",), {"boolean", "false", "null"}),
    (COMPLETIONS, ("cache_salt",), {"string", "null"}),
    (COMPLETIONS, ("prompt",), {*STRINGS, "list"}),
    (COMPLETIONS, ("prompt", 1), {*STRINGS, "list"}),
]
"""What the gateway itself must be able to read, and which types are right there."""
LEFT_TO_THE_ENGINE: list[tuple[str | int, ...]] = [
    ("messages", 1, "content", 0, "type"),
    ("messages", 1, "content", 0, "text"),
    ("messages", 1, "name"),
    ("messages", 1, "tool_calls"),
    *((name,) for name in CHAT_BODY if name not in ("model", "messages", "stream", "cache_salt")),
]
"""What is read to render a prompt or to tell sessions apart; where it can't be read, the engine has the word."""


@pytest.fixture
async def gateway() -> AsyncIterator[TestGateway]:
    async with served() as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[TestGateway]:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        yield gateway
        async with httpx.AsyncClient(trust_env=False) as client:
            well = await client.post(gateway.url + COMPLETIONS, json=COMPLETION_BODY)
        assert well.status_code == 200, "the gateway serves on"
        assert gateway.ledger.engines() == ()


@pytest.fixture
async def client(gateway: TestGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_S, base_url=gateway.url) as client:
        yield client


def body_for(endpoint: str) -> dict[str, Any]:
    return CHAT_BODY if endpoint == CHAT else COMPLETION_BODY


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text[:300]
    assert answer.headers["x-request-id"]
    error = bad_input.check_error_shape(answer.content)
    assert error["type"] == "invalid_request_error"
    return error


async def test_a_body_that_holds_no_json_object_is_a_400(client: httpx.AsyncClient) -> None:
    for endpoint in (CHAT, COMPLETIONS):
        for content in bad_input.NOT_AN_OBJECT.values():
            refused(await client.post(endpoint, content=content))


@pytest.mark.parametrize(("endpoint", "path", "right"), FIELDS, ids=lambda value: str(value)[:40])
async def test_a_wrong_type_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, endpoint: str, path: tuple[str | int, ...], right: set[str]
) -> None:
    for name, value in bad_input.wrong_types(right):
        answer = await client.post(endpoint, json=bad_input.replaced(body_for(endpoint), path, value))
        error = refused(answer)
        named = bad_input.param_of(path)
        assert (error["param"] or "").startswith(named), (name, error)
        assert named.split("[")[0] in error["message"]
        assert "must" in error["message"], error


async def test_what_only_the_engine_understands_is_left_to_it_whatever_its_type(client: httpx.AsyncClient) -> None:
    for path in LEFT_TO_THE_ENGINE:
        for name, value in [*bad_input.TYPES.items(), ("deep", bad_input.deep_list(600))]:
            content = bad_input.encoded(bad_input.replaced(CHAT_BODY, path, value))
            answer = await client.post(CHAT, content=content)
            assert answer.status_code == 200, (path, name, answer.text[:300])


async def test_a_deep_value_costs_the_exact_encoding_and_nothing_else(client: httpx.AsyncClient) -> None:
    for levels in (200, 250, 260, 500, 1000):
        for path in (("messages", 1, "content", 0), ("messages", 1, "content"), ("extra",)):
            content = bad_input.encoded(bad_input.replaced(CHAT_BODY, path, bad_input.deep_list(levels)))
            assert (await client.post(CHAT, content=content)).status_code == 200, (levels, path)


async def test_the_last_of_two_keys_counts_as_engines_count_it(client: httpx.AsyncClient) -> None:
    wrong_last = b'{"model":"tiny","prompt":"a","prompt":7}'
    right_last = b'{"model":7,"model":"tiny","prompt":"a"}'
    assert refused(await client.post(COMPLETIONS, content=wrong_last))["param"] == "prompt"
    assert (await client.post(COMPLETIONS, content=right_last)).status_code == 200


async def test_a_long_name_is_not_repeated_in_full(client: httpx.AsyncClient) -> None:
    error = refused(await client.post(CHAT, json={**CHAT_BODY, "model": "m" * 100_000}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_a_compressed_body_is_a_415_that_says_so(client: httpx.AsyncClient) -> None:
    content = gzip.compress(orjson.dumps(CHAT_BODY))
    for encoding in ("gzip", "br", "x", "gzip, identity"):
        error = refused(await client.post(CHAT, content=content, headers={"content-encoding": encoding}), 415)
        assert "content-encoding" in error["message"]
    plain = await client.post(CHAT, json=CHAT_BODY, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


async def test_the_content_type_is_the_engines_business(client: httpx.AsyncClient) -> None:
    for content_type in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "nonsense",
        "",
        "application/json; charset=x",
    ):
        headers = {"content-type": content_type}
        assert (await client.post(CHAT, content=orjson.dumps(CHAT_BODY), headers=headers)).status_code == 200
    multipart = await client.post(CHAT, files={"file": b"x"}, data={"model": MODEL})
    assert refused(multipart)


async def test_another_method_is_a_405_that_names_the_right_one(client: httpx.AsyncClient) -> None:
    for path, wrong, right in [(CHAT, "GET", "POST"), (CHAT, "DELETE", "POST"), (COMPLETIONS, "PUT", "POST"),
                               ("/v1/models", "POST", "GET"), ("/v1/models/tiny", "DELETE", "GET"),
                               ("/healthz", "POST", "GET")]:  # fmt: skip
        answer = await client.request(wrong, path)
        assert right in refused(answer, 405)["message"]
        assert right in answer.headers["allow"]


async def test_odd_paths_are_404(client: httpx.AsyncClient) -> None:
    for path in (
        "/v1/models/%ff%fe",
        "/v1/models/%00",
        "/%2e%2e/etc/passwd",
        "/v1/chat/completions%00",
        "//",
        "/v1/x" * 500,
    ):
        refused(await client.get(path), 404)
    for path in ("/fleet", "/metrics"):
        error = refused(await client.get(path), 404)
        assert error["message"].endswith("; it is on the admin port")


async def send_raw(gateway: TestGateway, *parts: bytes, end: bool = False) -> bytes:
    """What the gateway answers to exactly these bytes, until it closes or an answer's body is there."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if end:
            writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return head + await reader.readexactly(length)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param([HEAD + b"content-length: 500\r\n\r\n{"], 408, id="a length that lies"),
        pytest.param([HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{", b'"a'], 408, id="a chunk that stops"),
        pytest.param([HEAD + b"content-length: 99999999999\r\n\r\n"], 413, id="a declared giant"),
        pytest.param([HEAD + b"content-length: -1\r\n\r\n{}"], 400, id="a negative length"),
        pytest.param([HEAD + b"content-length: " + b"9" * 5_000 + b"\r\n\r\n{}"], 400, id="a length of 5000 digits"),
        pytest.param([HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}"], 400, id="two lengths"),
        pytest.param([HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"], 400, id="a bad chunk size"),
        pytest.param([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200], 400, id="TLS on a plain port"),
        pytest.param([b"NONSENSE\r\n\r\n"], 400, id="no HTTP"),
        pytest.param([b"GET /v1/mod\xffels HTTP/1.1\r\nhost: x\r\n\r\n"], 400, id="a path that isn't ASCII"),
        pytest.param([b"POST http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n"], 400, id="a broken URL"),
        pytest.param([b"GET /"] + [b"a" * 60_000] * 20, 431, id="an endless path"),
        pytest.param([HEAD] + [b"x-" + b"a" * 60_000 + b": 1\r\n"] * 20, 431, id="endless header names"),
        pytest.param([HEAD + b"x: "] + [b"a" * 60_000] * 20, 431, id="an endless header value"),
        pytest.param([HEAD] + [b"a: b\r\n" * 10_000] * 20, 431, id="endless headers"),
    ],
)  # fmt: skip
@in_quiet_time
async def test_broken_http_has_an_answer_of_openais_shape(sent: list[bytes], status: int) -> None:
    async with served() as gateway:
        answer = await send_raw(gateway, *sent)
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert bad_input.check_error_shape(content)["type"] == "invalid_request_error"


async def test_headers_that_never_end_are_a_408(gateway: TestGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.client_connection import ClientConnection

    monkeypatch.setattr(ClientConnection, "head_timeout_s", 0.2)
    for sent in (HEAD, b"P", HEAD + b"x-slow: "):
        answer = await send_raw(gateway, sent)
        assert answer.startswith(b"HTTP/1.1 408 ")
        bad_input.check_error_shape(answer.partition(b"\r\n\r\n")[2])


async def test_a_connection_on_which_nothing_comes_is_closed(
    gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.client_connection import ClientConnection

    monkeypatch.setattr(ClientConnection, "head_timeout_s", 0.2)
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_goes_while_it_sends_leaves_nothing(gateway: TestGateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    for sent in (b"", b"POST", HEAD, HEAD + b"content-length: 100\r\n\r\n", HEAD + b"content-length: 100\r\n\r\n{"):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    await eventually(
        lambda: gateway.count("warmroute_requests_total", model="other", endpoint=COMPLETIONS, status="499") == 2
    )


@in_quiet_time
async def test_the_official_client_raises_the_right_error_for_each_kind() -> None:
    """Each row: the engines' behaviour, the request, the client's exception, its status, and words of its message."""
    messages: Any = [{"role": "user", "content": "hi"}]
    rows: list[tuple[Any, dict[str, Any], type[openai.APIStatusError], int, str]] = [
        (mock.answer_well, {"messages": []}, openai.BadRequestError, 400, "messages must be"),
        (mock.answer_well, {"model": "other"}, openai.NotFoundError, 404, "not served here"),
        (
            mock.answer_well,
            {"messages": [{"role": "user", "content": "x" * 2**21}]},
            openai.APIStatusError,
            413,
            "larger",
        ),
        (mock.answer_well, {"extra_headers": {"content-encoding": "gzip"}}, openai.APIStatusError, 415, "uncompressed"),
        (mock.answer_status(400), {}, openai.BadRequestError, 400, "says 400"),
        (mock.answer_status(401), {}, openai.AuthenticationError, 401, "says 401"),
        (mock.answer_status(403), {}, openai.PermissionDeniedError, 403, "says 403"),
        (mock.answer_status(409), {}, openai.ConflictError, 409, "says 409"),
        (mock.answer_status(422), {}, openai.UnprocessableEntityError, 422, "says 422"),
        (mock.answer_status(429), {}, openai.RateLimitError, 429, "says 429"),
        (mock.answer_status(500), {}, openai.InternalServerError, 500, "says 500"),
        (mock.answer_status(503), {}, openai.InternalServerError, 503, "says 503"),
        (mock.drop_connection, {}, openai.InternalServerError, 502, "every engine tried"),
        (mock.never_answer, {}, openai.InternalServerError, 504, "didn't answer in time"),
    ]
    for stream in (False, True):
        for behaviour, changes, kind, status, words in rows:
            async with MockEngine("a", behaviour) as engine:
                async with gateway_for([engine], TimeoutsConfig(connect_s=0.2, first_byte_s=0.2)) as gateway:
                    url = gateway.url + "/v1"
                    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
                        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": stream, **changes}
                        with pytest.raises(kind, match=words) as raised:
                            await client.chat.completions.create(**asked)
                        assert raised.value.status_code == status
                        assert isinstance(raised.value.body, dict), "the client found OpenAI's error object"


async def test_the_official_client_is_told_to_come_again_when_no_engine_is_ready() -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        engine.is_well = False
        for _ in range(2):
            await gateway.fleet.check_health()
        async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="k", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="no engine that serves") as raised:
                await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert raised.value.status_code == 503
        assert raised.value.response.headers["retry-after"] == "1"


async def test_the_admin_port_bounds_what_it_reads(gateway: TestGateway) -> None:
    transport = httpx.ASGITransport(app=gateway.admin)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        for content in bad_input.NOT_AN_OBJECT.values():
            answer = await client.post("/route/explain", content=content)
            assert answer.status_code == 400
            bad_input.check_error_shape(answer.content)
        large = await client.post("/route/explain", content=b" " * (2**20 + 1))
        assert large.status_code == 413
        assert (await client.post("/route/explain", json=COMPLETION_BODY)).status_code == 200
