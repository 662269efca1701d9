"""Towards an engine: connect, send, wait for the first byte, stream. Bytes pass through untouched.

aiohttp does the HTTP; its exceptions are translated here, once. A connection that the engine closed while it lay idle
is no failure of the engine: the request is sent again on a fresh one, once, when not a byte of an answer had come.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from gateway.config import TimeoutsConfig

IDLE_KEEP_S = 3.0
"""Shorter than uvicorn's five seconds, so that the engine seldom closes first."""
WHOLE_BODY_BYTES_MAX = 8 * 2**20
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
OURS = frozenset({"host", "content-length", "expect", "x-warmroute-explain", "accept-encoding"})
"""Headers of a client that end here. Answers are read on their way, so none is asked for compressed."""
STATUSES = range(200, 600)
"""What can be passed on."""
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

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, timeouts: TimeoutsConfig) -> None:
        self._response, self._timeouts = response, timeouts
        self.status = response.status
        self.first = first
        self.has_ids = False
        """Whether its prompt was sent as token ids: then its count of them is the gateway's own."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The end-to-end headers, in their order and case. A value with control characters is nothing HTTP can tell."""
        named = _connection_named(self._response.headers.getall("Connection", []))
        return [
            (name, value)
            for name, value in self._response.raw_headers
            if (lower := name.decode("latin-1").lower()) not in HOP_BY_HOP
            and lower not in named
            and not _CONTROLS.search(value)
        ]

    @property
    def content_type(self) -> str:
        """The media type, without parameters."""
        return self._response.content_type

    @property
    def is_end_told(self) -> bool:
        """Whether HTTP says where the body ends; else it ends with the connection, whyever that ends."""
        headers = self._response.headers
        return "Content-Length" in headers or "chunked" in headers.get("Transfer-Encoding", "").lower()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body: the first piece, then the others as they come. Raises `EngineFailed` where it breaks."""
        piece = self.first
        while piece:
            yield piece
            piece = await _read_piece(self._response, self._timeouts.idle_s)

    async def read_whole(self) -> bytes | None:
        """The whole body, or `None` when it is larger than `WHOLE_BODY_BYTES_MAX` (`first` then holds what came).

        Raises `EngineFailed`: nothing of it was sent on yet, so the request may go elsewhere.
        """
        whole = bytearray(self.first)
        while piece := await _read_piece(self._response, self._timeouts.idle_s):
            whole += piece
            if len(whole) > WHOLE_BODY_BYTES_MAX:
                self.first = bytes(whole)
                return None
        return bytes(whole)

    def close(self) -> None:
        """Give the connection back if the body was read to its end, else close it: the engine sees that at once."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """The pool of connections to engines. Use as an async context manager."""

    def __init__(self, timeouts: TimeoutsConfig) -> None:
        self._timeouts = timeouts
        self._sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None

    async def __aenter__(self) -> Self:
        pooled = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_KEEP_S)
        self._sessions = (self._open_session(pooled), self._open_session(aiohttp.TCPConnector(force_close=True)))
        return self

    def _open_session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect_s),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            trace_configs=[trace],
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions or ():
            await session.close()

    async def send(
        self, url: str, headers: Headers, body: bytes, api_key: str | None = None, method: str = "POST"
    ) -> Answer:
        """Send a request and wait for the first piece of the answer's body. Raises `EngineFailed`.

        `api_key` stands in for the client's credentials, if it is given.
        """
        if api_key is not None:
            kept = [(name, value) for name, value in headers if name.lower() not in CREDENTIALS]
            headers = [*kept, (b"authorization", b"Bearer " + api_key.encode())]
        assert self._sessions is not None, "entered"
        pooled, fresh = self._sessions
        reused = SimpleNamespace(connection=False)
        try:
            return await self._send_once(pooled, method, url, headers, body, reused)
        except EngineFailed as failure:
            if not (failure.is_connection and reused.connection):
                raise
        return await self._send_once(fresh, method, url, headers, body, reused)

    async def _send_once(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        headers: Headers,
        body: bytes,
        reused: SimpleNamespace,
    ) -> Answer:
        response: aiohttp.ClientResponse | None = None
        with _map_failures():
            try:
                async with asyncio.timeout(self._timeouts.first_byte_s):
                    response = await session.request(
                        method,
                        URL(url, encoded=True),
                        data=body or None,
                        headers=_upstream_headers(headers),
                        allow_redirects=False,
                        trace_request_ctx=reused,
                    )
                    if response.status not in STATUSES:
                        raise EngineFailed(f"answered with status {response.status}, which HTTP doesn't have")
                    reused.connection = False  # it has answered: what breaks now doesn't come of lying idle
                    first = await response.content.readany()
            except BaseException:
                if response is not None:
                    response.close()
                raise
        return Answer(response, first, self._timeouts)


async def _note_reuse(_session: object, context: SimpleNamespace, _params: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.connection = True


async def _read_piece(response: aiohttp.ClientResponse, idle_s: float) -> bytes:
    with _map_failures():
        async with asyncio.timeout(idle_s):
            return await response.content.readany()


def _upstream_headers(headers: Headers) -> CIMultiDict[str]:
    """The client's end-to-end headers."""
    named = _connection_named([value.decode("latin-1") for name, value in headers if name.lower() == b"connection"])
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        lower = name.decode("latin-1").lower()
        if lower not in HOP_BY_HOP and lower not in OURS and lower not in named and not lower.startswith("proxy-"):
            kept.add(lower, _as_text(value))
    return kept


def _as_text(value: bytes) -> str:
    """A header's value such that its bytes go on as they came: aiohttp writes UTF-8. What isn't becomes UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _connection_named(values: Sequence[str]) -> set[str]:
    return {name.strip().lower() for value in values for name in value.split(",")}


@contextlib.contextmanager
def _map_failures() -> Iterator[None]:
    """aiohttp's exceptions, and timeouts, as `EngineFailed`."""
    try:
        yield
    except aiohttp.ServerTimeoutError as error:
        raise EngineFailed("didn't accept a connection in time", is_timeout=True, is_connection=True) from error
    except TimeoutError as error:
        raise EngineFailed("didn't answer in time", is_timeout=True) from error
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
        raise EngineFailed(f"connection failed: {type(error).__name__}", is_connection=True) from error
    except aiohttp.ClientError as error:
        raise EngineFailed(f"answered what isn't HTTP: {type(error).__name__}") from error
