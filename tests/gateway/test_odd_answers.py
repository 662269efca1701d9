"""What engines and clients may send that no specification foresees: it costs neither a request nor a booking."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from gateway.client_connection import ClientConnection
from gateway.openai_schema import CHAT, RESPONSES
from tests.gateway import mock_engine as mock
from tests.gateway.api_answers import events_of
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.byte_engine import WHOLE, ByteEngine
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

CHAT_BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


class RawEngine(ByteEngine):
    """Sends `raw` for an answer, and keeps the heads of what it is asked."""

    raw = b""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.heads: list[bytes] = []

    def answer(self, head: bytes, body: dict[str, Any]) -> bytes:
        self.heads.append(head)
        return self.raw


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        yield client


@pytest.fixture
async def raw() -> AsyncIterator[tuple[RawEngine, TestGateway]]:
    async with RawEngine("a") as engine, gateway_for([engine]) as gateway:  # type: ignore[list-item]
        yield engine, gateway


def whole(status: str = "200 OK", extra: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (status.encode(), len(WHOLE))
    return head + extra + b"\r\n" + WHOLE


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_status_that_http_does_not_have_is_a_failure_of_the_engine(
    client: httpx.AsyncClient, raw: tuple[RawEngine, TestGateway], stream: bool
) -> None:
    engine, gateway = raw
    for status in ("600 Odd", "666 Odd", "999 Odd", "101 Odd"):
        engine.raw = whole(status)
        answer = await client.post(gateway.url + CHAT, json={**CHAT_BODY, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error"), status
        assert gateway.ledger.engines() == ()


async def test_a_header_that_cannot_be_passed_on_is_left_out_and_costs_no_answer(
    client: httpx.AsyncClient, raw: tuple[RawEngine, TestGateway]
) -> None:
    engine, gateway = raw
    for line in (b"x-odd: a\x01b", b"set-cookie: a=\x7f", b"x-odd: \x1b[31m"):
        engine.raw = whole(extra=line + b"\r\nx-even: a\tb \xe9\r\n")
        answer = await client.post(gateway.url + CHAT, json=CHAT_BODY)
        assert (answer.status_code, answer.content) == (200, WHOLE), line
        assert line.partition(b":")[0].decode() not in answer.headers
        assert (b"x-even", b"a\tb \xe9") in answer.headers.raw


async def test_a_clients_headers_reach_the_engine_with_the_bytes_they_had(
    client: httpx.AsyncClient, raw: tuple[RawEngine, TestGateway]
) -> None:
    engine, gateway = raw
    engine.raw = whole()
    headers = [(b"x-title", "naïve café 😀".encode()), (b"accept-encoding", b"gzip")]
    assert (await client.post(gateway.url + CHAT, json=CHAT_BODY, headers=headers)).status_code == 200
    assert b"\r\nx-title: %s\r\n" % headers[0][1] in engine.heads[0]
    assert b"accept-encoding" not in engine.heads[0], "what the gateway reads on its way isn't asked for compressed"


async def test_a_comment_before_the_first_event_hides_no_response_and_is_no_token(client: httpx.AsyncClient) -> None:
    may_go_on = asyncio.Event()

    async def comment_first(engine: MockEngine, request: Any, body: dict[str, Any]) -> Any:
        stream = await mock.start_stream(request)
        await stream.write(b": keep-alive\n\n")
        await may_go_on.wait()
        for each in events_of(RESPONSES, "resp_7"):
            await stream.write(each)
        return stream

    async with MockEngine("a", comment_first) as engine, gateway_for([engine]) as gateway:
        asked = {"model": MODEL, "input": "hello", "stream": True}
        async with client.stream("POST", gateway.url + RESPONSES, json=asked) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b": keep-alive\n\n"
            assert gateway.ledger.prefills("a") == 1
            may_go_on.set()
            assert b"".join([piece async for piece in pieces]) == b"".join(events_of(RESPONSES, "resp_7"))
        kept = await client.get(f"{gateway.url}{RESPONSES}/resp_7")
        assert (kept.status_code, engine.stored) == (200, [f"GET {RESPONSES}/resp_7"])


async def test_a_client_that_stops_reading_is_left_and_its_engine_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def flood(engine: MockEngine, request: Any, body: dict[str, Any]) -> Any:
        stream = await mock.start_stream(request)
        while True:
            await stream.write(mock.event(1) * 1000)

    monkeypatch.setattr(ClientConnection, "stalled_timeout_s", 0.1)
    async with MockEngine("a", flood) as engine, gateway_for([engine]) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps({**CHAT_BODY, "stream": True})
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        await reader.readuntil(b"\r\n\r\n")
        await eventually(engine.gone.is_set)
        await eventually(lambda: gateway.ledger.engines() == ())
        assert gateway.count("warmroute_requests_total", model=MODEL, endpoint=CHAT, status="499") == 1
        writer.close()
