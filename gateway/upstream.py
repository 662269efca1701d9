"""Towards an engine: connect, send, wait for the first byte, stream. Bytes pass through untouched.

`upstream_http` does the HTTP; its errors are translated here, once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self

from gateway.config import TimeoutsConfig
from gateway.header_rules import Headers, towards_client, towards_engine
from gateway.upstream_http.errors import AnswerTimedOut, BadRequest, ConnectionBroken, ConnectTimedOut, ExchangeFailed
from gateway.upstream_http.exchange import Exchange
from gateway.upstream_http.http_client import HttpClient
from gateway.upstream_http.request import Request

IDLE_KEEP_S = 3.0
"""Shorter than uvicorn's five seconds, so that the engine seldom closes first."""
WHOLE_BODY_BYTES_MAX = 8 * 2**20
STATUSES = range(200, 600)
"""What can be passed on."""


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
        """Those that pass to the client."""
        return towards_client(self._exchange.headers)

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
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeouts.first_byte_s
        try:
            request = Request(method, url, towards_engine(headers, api_key), body)
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
