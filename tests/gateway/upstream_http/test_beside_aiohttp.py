"""The same bytes mean the same to this client and to aiohttp's, however damaged they are."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.upstream_http.errors import ExchangeFailed, NotHttp
from gateway.upstream_http.http_client import HttpClient
from gateway.upstream_http.request import Request
from tests.gateway.upstream_http.answers import WireAnswer, answers
from tests.gateway.upstream_http.scripted_server import ScriptedServer


@dataclass(frozen=True)
class Outcome:
    """What a client made of an answer, and of the connection behind it."""

    end: Literal["whole", "broken", "not http"]
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


async def by_ours(client: HttpClient, url: str) -> Outcome:
    try:
        exchange = await client.send(Request("POST", url, (), b"{}"), 60.0)
    except ExchangeFailed as failure:
        return Outcome("not http" if isinstance(failure, NotHttp) else "broken")
    body = b""
    try:
        while piece := await exchange.read(60.0):
            body += piece
    except ExchangeFailed:
        return Outcome("broken", exchange.status, tuple(exchange.headers), body)
    finally:
        exchange.close()
    return Outcome("whole", exchange.status, tuple(exchange.headers), body)


async def by_aiohttp(session: aiohttp.ClientSession, url: str) -> Outcome:
    status, headers, body = 0, (), b""
    try:
        async with session.post(url, data=b"{}", allow_redirects=False) as answer:
            status, headers = answer.status, answer.raw_headers
            while piece := await answer.content.readany():
                body += piece
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError):
        return Outcome("broken", status, headers, body)
    except aiohttp.ClientError:
        return Outcome("not http")
    return Outcome("whole", status, headers, body)


class Both:
    """The two clients, and the server that sends the same to both."""

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self._server = await stack.enter_async_context(ScriptedServer())
            self._ours = await stack.enter_async_context(HttpClient(5.0, 60.0))
            connector = aiohttp.TCPConnector(force_close=True)
            session = aiohttp.ClientSession(auto_decompress=False, connector=connector)
            self._theirs = await stack.enter_async_context(session)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ours(self, wire: bytes) -> Outcome:
        self._server.answers = [[wire, "close"]]
        return await by_ours(self._ours, self._server.url)

    async def theirs(self, wire: bytes) -> Outcome:
        self._server.answers = [[wire, "close"]]
        return await by_aiohttp(self._theirs, self._server.url)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def both(runner: asyncio.Runner) -> Iterator[Both]:
    pair = Both()
    yield runner.run(pair.__aenter__())
    runner.run(pair.__aexit__())


def damaged(wire: bytes, place: float, how: str, byte: int) -> bytes:
    spot = int(place * (len(wire) - 1))
    if how == "cut":
        return wire[:spot]
    if how == "left out":
        return wire[:spot] + wire[spot + 1 :]
    return wire[:spot] + bytes([byte]) + wire[spot + (how == "changed") :]


damages = st.tuples(
    st.floats(0, 1),
    st.sampled_from(["cut", "left out", "changed", "put in"]),
    st.sampled_from(list(b"\r\n :;,0129aAz\x00\xff")) | st.integers(0, 255),
)


async def compare(both: Both, wire: bytes) -> None:
    """What both can read is the same. Where they differ, it is in these ways only:

    - bytes behind a whole answer fail it in aiohttp, if they come along with it; here they end the connection;
    - a body that breaks off after its head is a broken connection here; in aiohttp it is no HTTP, if both come along;
    - a transfer coding that isn't `chunked` is refused here.
    """
    ours, theirs = await both.ours(wire), await both.theirs(wire)
    if theirs.end == "whole":
        codings = [value.lower() for name, value in theirs.headers if name.lower() == b"transfer-encoding"]
        assert ours == theirs or (ours.end == "not http" and set(codings) - {b"chunked"})
    elif ours.end == "whole":
        shorter = range(len(wire) - 1, 0, -1)
        assert any([await both.theirs(wire[:length]) == ours for length in shorter]), "but for what stands behind it"
    elif ours.end == "not http":
        assert theirs.end == "not http"
    elif theirs.end == "broken":
        assert (ours.status, ours.headers) == (theirs.status, theirs.headers)
        assert ours.body.startswith(theirs.body)


@settings(max_examples=80, deadline=None)
@given(answers, damages)
def test_damaged_bytes_mean_the_same_to_both(
    runner: asyncio.Runner, both: Both, answer: WireAnswer, damage: tuple[float, str, int]
) -> None:
    runner.run(compare(both, damaged(answer.wire, *damage)))


HEAD = b"HTTP/1.1 200 OK\r\n"
ODD = {
    "lines without CR": b"HTTP/1.1 200 OK\ncontent-length: 2\n\nab",
    "no reason": b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nab",
    "a folded header": HEAD + b"x: a\r\n b\r\ncontent-length: 2\r\n\r\nab",
    "control characters": HEAD + b"x: a\x01\x1b\x7fb\r\ncontent-length: 2\r\n\r\nab",
    "an empty value": HEAD + b"x:\r\ncontent-length: 2\r\n\r\nab",
    "spaces behind a size": HEAD + b"transfer-encoding: chunked\r\n\r\n2  \r\nab\r\n0\r\n\r\n",
    "a size with zeros": HEAD + b"transfer-encoding: chunked\r\n\r\n0002\r\nab\r\n000\r\n\r\n",
    "CHUNKED": HEAD + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    "a status of its own": b"HTTP/1.1 299 Odd\r\ncontent-length: 2\r\n\r\nab",
    "a status above all": b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\nab",
    "204": b"HTTP/1.1 204 No\r\n\r\n",
    "304 with a length": b"HTTP/1.1 304 No\r\ncontent-length: 9\r\n\r\n",
    "an empty line before": b"\r\n" + HEAD + b"content-length: 2\r\n\r\nab",
    "lengths that agree": HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\nab",
    "a list of lengths": HEAD + b"content-length: 2, 2\r\n\r\nab",
    "length and chunks": HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length with a sign": HEAD + b"content-length: +2\r\n\r\nab",
    "http/1.0 kept": b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nab",
    "gzip": HEAD + b"transfer-encoding: gzip\r\n\r\nab",
    "a compressed body": HEAD + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\nab",
    "nothing": b"",
}


@pytest.mark.parametrize("wire", ODD.values(), ids=ODD)
def test_odd_answers_mean_the_same_to_both(runner: asyncio.Runner, both: Both, wire: bytes) -> None:
    runner.run(compare(both, wire))
