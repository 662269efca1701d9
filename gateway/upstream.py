"""Towards an engine: connect, send, wait for the first byte, stream. Bytes pass through untouched.

`upstream_http` does the HTTP; its errors are translated here, once.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from gateway.config import TimeoutsConfig
from gateway.upstream_http.errors import AnswerTimedOut, BadRequest, ConnectionBroken, ConnectTimedOut, ExchangeFailed
from gateway.upstream_http.exchange import Exchange
from gateway.upstream_http.http_client import HttpClient
from gateway.upstream_http.request import Request

IDLE_KEEP_S = 3.0
"""Shorter than uvicorn's five seconds, so that the engine seldom closes first."""
WHOLE_BODY_BYTES_MAX = 8 * 2**20
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
OURS = frozenset({b"host", b"content-length", b"expect", b"x-warmroute-explain", b"accept-encoding"})
"""Headers of a client that end here. Answers are read on their way, so none is asked for compressed."""
STATUSES = range(200, 600)
"""What can be passed on."""
_ENDING_HERE = HOP_BY_HOP | OURS
_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that was read to its end."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class EngineFailed(Exception):
    """The engine failed. `is_timeout`: it was too slow; `is_connection`: it refused or dropped the connection.

    `answer` is what it said, where it said that it can't serve this now.
    """

    def __init__(
        self,
        reason: str,
        *,
        is_timeout: bool = False,
        is_connection: bool = False,
        answer: WholeAnswer | None = None,
    ) -> None:
        super().__init__(reason)
        self.is_timeout, self.is_connection, self.answer = is_timeout, is_connection, answer


class Answer:
    """An engine's answer whose first piece has arrived. Close it, whatever happens."""

    def __init__(self, exchange: Exchange, first: bytes, timeouts: TimeoutsConfig) -> None:
        self._exchange, self._timeouts = exchange, timeouts
        self.status = exchange.status
        self.first = first
        self.has_ids = False
        """Whether its prompt was sent as token ids: then its count of them is the gateway's own."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The end-to-end headers, in their order and case. A value with control characters is nothing HTTP can tell."""
        headers = self._exchange.headers
        left_out = HOP_BY_HOP | _connection_named(headers)
        return [
            (name, value) for name, value in headers if name.lower() not in left_out and not _CONTROLS.search(value)
        ]

    @property
    def content_type(self) -> str:
        """The media type, without parameters."""
        for name, value in self._exchange.headers:
            if name.lower() == b"content-type":
                return value.partition(b";")[0].strip().lower().decode("latin-1")
        return "application/octet-stream"

    @property
    def is_end_told(self) -> bool:
        """Whether HTTP says where the body ends; else it ends with the connection, whyever that ends."""
        return self._exchange.is_end_told

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body: the first piece, then the others as they come. Raises `EngineFailed` where it breaks."""
        piece = self.first
        while piece:
            yield piece
            piece = await self._read()

    async def pass_to(self, take: Callable[[bytes], bool]) -> bool:
        """Give the pieces behind the first one to `take` as they come, until it says false or they end.

        Whether they have ended. Raises `EngineFailed` where the body breaks, after what came before.
        """
        try:
            return await self._exchange.pass_to(take, self._timeouts.idle_s)
        except ExchangeFailed as failure:
            raise _engine_failed(failure) from failure

    async def read_whole(self) -> bytes | None:
        """The whole body, or `None` when it is larger than `WHOLE_BODY_BYTES_MAX` (`first` then holds what came).

        Raises `EngineFailed`: nothing of it was sent on yet, so the request may go elsewhere.
        """
        whole = bytearray(self.first)
        while piece := await self._read():
            whole += piece
            if len(whole) > WHOLE_BODY_BYTES_MAX:
                self.first = bytes(whole)
                return None
        return bytes(whole)

    def close(self) -> None:
        """Close the connection, unless the answer has come to its end: the engine sees that at once."""
        self._exchange.close()

    async def _read(self) -> bytes:
        try:
            return await self._exchange.read(self._timeouts.idle_s)
        except ExchangeFailed as failure:
            raise _engine_failed(failure) from failure


class Upstream:
    """The connections to engines. Use as an async context manager."""

    def __init__(self, timeouts: TimeoutsConfig) -> None:
        self._timeouts = timeouts
        self._client = HttpClient(timeouts.connect_s, IDLE_KEEP_S)

    def configure(self, timeouts: TimeoutsConfig) -> None:
        """These timeouts are in force for requests that are sent from now on."""
        self._timeouts = timeouts
        self._client.connect_s = timeouts.connect_s

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    async def send(
        self, url: str, headers: Headers, body: bytes, api_key: str | None = None, method: str = "POST"
    ) -> Answer:
        """Send a request and wait for the first piece of the answer's body. Raises `EngineFailed`.

        `api_key` stands in for the client's credentials, if it is given.
        """
        if api_key is not None:
            kept = [(name, value) for name, value in headers if name.lower() not in CREDENTIALS]
            headers = [*kept, (b"authorization", b"Bearer " + api_key.encode())]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeouts.first_byte_s
        try:
            request = Request(method, url, _end_to_end(headers), body)
            exchange = await self._client.send(request, self._timeouts.first_byte_s)
            try:
                if exchange.status not in STATUSES:
                    raise EngineFailed(f"answered with status {exchange.status}, which HTTP doesn't have")
                first = await exchange.read(deadline - loop.time())
            except BaseException:
                exchange.close()
                raise
        except ExchangeFailed as failure:
            raise _engine_failed(failure) from failure
        return Answer(exchange, first, self._timeouts)


def _end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The client's end-to-end headers."""
    left_out = _ENDING_HERE | _connection_named(headers)
    lowered = [(name.lower(), value) for name, value in headers]
    return [each for each in lowered if each[0] not in left_out and not each[0].startswith(b"proxy-")]


def _connection_named(headers: Headers) -> frozenset[bytes]:
    """The headers that are for this connection only, because `Connection` names them."""
    values = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(name.strip().lower() for value in values for name in value.split(b","))


def _engine_failed(failure: ExchangeFailed) -> EngineFailed:
    match failure:
        case ConnectTimedOut():
            return EngineFailed("didn't accept a connection in time", is_timeout=True, is_connection=True)
        case AnswerTimedOut():
            return EngineFailed("didn't answer in time", is_timeout=True)
        case ConnectionBroken():
            return EngineFailed(f"connection failed: {failure}", is_connection=True)
        case BadRequest():
            return EngineFailed(f"can't be sent this request: {failure}")
        case _:
            return EngineFailed(f"answered what isn't HTTP: {failure}")
