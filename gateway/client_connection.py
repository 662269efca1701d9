"""A client's connection: uvicorn's HTTP with bounds on the head of a request, and errors in OpenAI's shape.

uvicorn waits for ever for headers that don't end, and keeps all of them. Here a head has `head_timeout_s` from its
first byte (a fresh connection from its beginning) and about `HEAD_BYTES_MAX` bytes. A client that doesn't read
its answer for `stalled_timeout_s` counts as gone: its engine would wait with it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.errors import GatewayError, HeadersTooLarge, InvalidRequest, RequestTimeout

DOWNSTREAM = "warmroute.downstream"
"""The name of a `Downstream` among the extensions of a request's scope."""
HEAD_BYTES_MAX = 128 * 1024
"""Checked after each read, so the last read may exceed it."""


class ClientConnection(HttpToolsProtocol):
    """One connection of a client; uvicorn makes it, as its `http` option."""

    head_timeout_s: ClassVar[float] = 30.0
    stalled_timeout_s: ClassVar[float] = 120.0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_bytes = 0
        self._head_deadline: asyncio.TimerHandle | None = None
        self._stall_watch: StallWatch  # made with the connection
        self._is_in_head = True
        self._has_begun = False
        self._departure = Departure()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._stall_watch = StallWatch(transport, self.loop, self.stalled_timeout_s)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._forget_deadline()
        self._stall_watch.end()
        super().connection_lost(exc)
        self._departure.has_come()

    def pause_writing(self) -> None:
        """More is written than the client reads."""
        super().pause_writing()
        self._stall_watch.begin()

    def resume_writing(self) -> None:
        """It has read."""
        self._stall_watch.end()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse what came; give up on a head that is too large."""
        self._has_begun = True
        try:
            super().data_received(data)
        except UnicodeDecodeError:  # uvicorn takes paths for ASCII
            self.send_400_response("the path isn't ASCII; percent-encode it")
            return
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(HeadersTooLarge(f"the request's head is larger than {HEAD_BYTES_MAX} bytes"))

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self._await_head()

    def on_headers_complete(self) -> None:
        """A request's head is there."""
        self._is_in_head = False
        self._forget_deadline()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # its task begins later
            extensions: dict[str, Any] = {DOWNSTREAM: Downstream(self.cycle, self._departure)}
            self.cycle.scope["extensions"] = extensions

    def send_400_response(self, msg: str) -> None:
        """What came isn't HTTP."""
        self._refuse(
            InvalidRequest(msg if msg != "Invalid HTTP request received." else "this is no valid HTTP request")
        )

    def _await_head(self) -> None:
        self._forget_deadline()
        self._head_deadline = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _forget_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _head_is_late(self) -> None:
        if not self._has_begun:
            self.transport.close()
            return
        self._refuse(RequestTimeout(f"the request's head didn't arrive within {self.head_timeout_s:g} s"))

    def _refuse(self, error: GatewayError) -> None:
        """Answer what has no request yet, and close; behind a running answer there is no place for words."""
        self._forget_deadline()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_free = cycle is None or cycle.response_complete
        if is_free or not (self._is_in_head or cycle.response_started):
            body = error.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


class Departure:
    """When a client goes: tells all who are at work for it, on however many requests."""

    __slots__ = ("_told", "is_over")

    def __init__(self) -> None:
        self._told: set[Callable[[], object]] = set()
        self.is_over = False

    def has_come(self) -> None:
        """The client has gone."""
        self.is_over = True
        for tell in tuple(self._told):
            tell()

    @contextlib.contextmanager
    def told(self, tell: Callable[[], object]) -> Iterator[None]:
        """Call `tell` if the client goes inside this block, or has gone before."""
        self._told.add(tell)
        if self.is_over:
            tell()
        try:
            yield
        finally:
            self._told.discard(tell)


class Downstream:
    """The way back to the client of one request: shorter than ASGI's, for what is needed most."""

    __slots__ = ("_cycle", "departure")

    def __init__(self, cycle: RequestResponseCycle, departure: Departure) -> None:
        self._cycle, self.departure = cycle, departure

    def push(self, piece: bytes) -> bool:
        """Send a piece of a body that is sent in chunks; false, and nothing is sent, where ASGI's way must be taken.

        That is before the head was sent, while the client is behind, and when it has gone.
        """
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True


class StallWatch:
    """Ends a connection on which nothing was read for `timeout_s` to twice that, while something waits to be read."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._transport, self._loop, self._timeout_s = transport, loop, timeout_s
        self._next_look: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """From now on something waits."""
        self.end()
        waiting_bytes = self._transport.get_write_buffer_size()
        self._next_look = self._loop.call_later(self._timeout_s, self._look, waiting_bytes)

    def end(self) -> None:
        """Nothing waits any more."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _look(self, waiting_bytes_before: int) -> None:
        if self._transport.get_write_buffer_size() < waiting_bytes_before:
            self.begin()
        else:
            self._transport.abort()
