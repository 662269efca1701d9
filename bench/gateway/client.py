"""The client: so many connections, each with one request after another, and what became of all of them.

No task a request: what is measured is the router, on the same machine.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools

MARK = b"@@@@@@@@"
"""In a body: the place of a number of eight digits, another one in each request."""
NO_ANSWER = "no answer"
REFUSED_PAUSE_S = 0.02
_numbers = itertools.count(10_000_000)


@dataclass(slots=True)
class Outcome:
    """`statuses` of whole answers; `errors` by kind: `refused`, `no answer`, `cut`, `late`, `error event`.

    Seconds: of whole good answers, and until their first token where they are streamed.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def good(self) -> int:
        """Requests that were answered well and whole."""
        return self.statuses[200]

    @property
    def total(self) -> int:
        """All of them."""
        return self.statuses.total() + self.errors.total()


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` in all, over `connections`, or as many as fit into `lasts_s`. A request has `timeout_s`.

    `pause_s`: between an answer and the next request. `keeps`: connections are kept, else each has one request.
    """

    bodies: Sequence[bytes]
    connections: int
    requests: int | None = None
    lasts_s: float | None = None
    timeout_s: float = 30.0
    pause_s: float = 0.0
    keeps: bool = True
    ramp_s: float = 0.0


async def run_load(port: int, load: Load) -> Outcome:
    """All of it; returns when the last answer has ended."""
    outcome, loop = Outcome(), asyncio.get_running_loop()
    numbers = iter(range(load.requests)) if load.requests is not None else itertools.count()
    until = loop.time() + load.lasts_s if load.lasts_s is not None else float("inf")

    async def one(number: int) -> None:
        await asyncio.sleep(load.ramp_s * number / load.connections)
        exchange: Exchange | None = None
        try:
            for request in _while(numbers, loop, until):
                exchange = await _ask(port, load, load.bodies[request % len(load.bodies)], outcome, exchange)
                if load.pause_s:
                    await asyncio.sleep(load.pause_s)
        finally:
            if exchange is not None:
                exchange.close()

    async with asyncio.TaskGroup() as group:
        for number in range(load.connections):
            group.create_task(one(number))
    return outcome


def _while(numbers: Iterator[int], loop: asyncio.AbstractEventLoop, until: float) -> Iterator[int]:
    for number in numbers:
        if loop.time() >= until:
            return
        yield number


async def _ask(
    port: int, load: Load, template: bytes, outcome: Outcome, exchange: "Exchange | None"
) -> "Exchange | None":
    """One request, on the connection if there is one; the connection, if it can have another."""
    body = template.replace(MARK, b"%08d" % next(_numbers))
    connection = b"keep-alive" if load.keeps else b"close"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    wire = b"%bconnection: %b\r\ncontent-length: %d\r\n\r\n%b" % (head, connection, len(body), body)
    started_at, error = time.monotonic(), ""
    try:
        async with asyncio.timeout(load.timeout_s):
            if exchange is not None:
                error = await exchange.ask(wire)
            if exchange is None or error == NO_ANSWER:  # one that is kept may have been closed just then
                exchange = None
                exchange = await _connect(port)
                error = await exchange.ask(wire)
    except TimeoutError:
        error = "late"
    except OSError:
        error = "refused"
        await asyncio.sleep(REFUSED_PAUSE_S)
    _note(outcome, exchange, error, started_at)
    if exchange is None or (exchange.is_usable and load.keeps and not error):
        return exchange
    exchange.close()
    return None


async def _connect(port: int) -> "Exchange":
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_connection(lambda: Exchange(loop), "127.0.0.1", port)
    return exchange


def _note(outcome: Outcome, exchange: "Exchange | None", error: str, started_at: float) -> None:
    if exchange is None or error:
        outcome.errors[error] += 1
        return
    outcome.statuses[exchange.status] += 1
    outcome.tokens += exchange.tokens
    if exchange.status == 200:
        outcome.seconds.append(time.monotonic() - started_at)
        if exchange.first_token_at:
            outcome.first_token_s.append(exchange.first_token_at - started_at)


class Exchange(asyncio.Protocol):
    """One connection, and the answer on it. The methods named `on_` are httptools'."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport
        self._ended: asyncio.Future[str] | None = None
        self.is_usable = False
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = self.tokens = 0
        self.first_token_at = 0.0
        self._tail = b""
        self._has_bytes = self._is_stream = self._has_error = False

    async def ask(self, wire: bytes) -> str:
        """Send a request; what went wrong with its answer, if anything did."""
        self._begin()
        self._ended = self._loop.create_future()
        self._transport.write(wire)
        return await self._ended

    def close(self) -> None:
        """Leave it."""
        self.is_usable = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_usable = cast(asyncio.Transport, transport), True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_usable = False
        self._end("cut" if self._has_bytes else NO_ANSWER)

    def data_received(self, data: bytes) -> None:
        self._has_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end("not HTTP")
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_body(self, piece: bytes) -> None:
        if not self._is_stream:
            return
        if not self.tokens:
            self.first_token_at = time.monotonic()
        self.tokens += piece.count(b'"delta"')
        self._tail = piece[-64:]
        self._has_error |= b'data: {"error"' in piece

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.is_usable = self.is_usable and self._parser.should_keep_alive()
        is_whole = not self._is_stream or b"[DONE]" in self._tail
        self._end("error event" if self._has_error else "" if is_whole else "cut")

    def _end(self, error: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)
