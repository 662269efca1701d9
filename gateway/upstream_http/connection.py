"""One connection to a server: one exchange at a time, flow control both ways, one timer.

Most waits end long before their deadline, and arming a timer for each would cost more than parsing a token. So the
timer isn't moved when a wait begins, unless it would be late: when it goes off it looks at the deadline of the wait
that is on then, and goes to sleep until that.
"""

import asyncio
import math
import socket
from typing import Protocol, cast

from gateway.upstream_http.errors import ConnectionBroken
from gateway.upstream_http.exchange import BODY_BYTES_WAITING_MAX, Exchange
from gateway.upstream_http.origin import Origin

JOINED_BYTES_MAX = 32 * 1024
"""A body of so many bytes is copied behind its head and leaves with it; a larger one is written by itself."""
SLICE_BYTES = 256 * 1024
"""A large body is handed over in slices, the next one when the server has taken most of the last."""
TIMER_SLACK_S = 0.001
"""uvloop's timers count milliseconds, and may be this early."""


class Keeper(Protocol):
    """Who is told what becomes of a connection."""

    def made(self, connection: "Connection") -> None:
        """It is connected."""

    def rested(self, connection: "Connection") -> None:
        """Its exchange is over, and another request may follow."""

    def lost(self, connection: "Connection") -> None:
        """It has ended."""


class Connection(asyncio.Protocol):
    """Connect it, `begin` an exchange, write its request; `keeper` has it when the answer is over."""

    __slots__ = (
        "_exchange",
        "_is_aborted",
        "_is_sent",
        "_keeper",
        "_loop",
        "_timer",
        "_timer_at",
        "_transport",
        "_unsent",
        "idle_since",
        "is_held",
        "is_writable",
        "origin",
    )

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop, keeper: Keeper) -> None:
        self.origin, self._loop, self._keeper = origin, loop, keeper
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._unsent: memoryview | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._is_aborted = self._is_sent = False
        self.is_writable = True
        """Whether the server keeps up with what is written."""
        self.is_held = False
        """Whether nothing is read, until somebody takes what has been."""
        self.idle_since = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent now."""
        return (
            self._transport is not None
            and not self._is_aborted
            and self._exchange is None
            and not self._transport.is_closing()
        )

    def begin(self, is_bodiless: bool) -> Exchange:
        """A new exchange, whose request is to be written now; one that has failed, if the connection has just ended.

        `is_bodiless`: its answer has no body, whatever its headers say (HEAD).
        """
        exchange = Exchange(self, self._loop, is_bodiless)
        if self.is_usable:
            self._exchange, self._is_sent = exchange, False
        else:
            exchange.fail(ConnectionBroken("closed"))
        return exchange

    def send(self, head: bytes, body: bytes) -> None:
        """Write a whole request; what the server doesn't take at once goes when it does."""
        if len(body) <= JOINED_BYTES_MAX:
            self.write(head + body if body else head)
            self._is_sent = True
            return
        self.write(head)
        self._unsent = memoryview(body)
        self._send_slices()

    def send_end(self, last: bytes) -> None:
        """Write what ends a request that was written in pieces."""
        self.write(last)
        self._is_sent = True

    def write(self, piece: bytes | memoryview) -> None:
        """Write a piece of a request. It is lost where the connection has ended: its exchange has failed then."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(piece)

    def wake_at(self, deadline: float) -> None:
        """Look at the exchange's deadline then, or before."""
        if deadline < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._loop.call_at(deadline, self._look_at_clock), deadline

    def resume(self) -> None:
        """Read on."""
        self.is_held = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close it at once: the server sees that."""
        self._is_aborted, self._unsent = True, None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self._transport = cast(asyncio.Transport, transport)
        if self._is_aborted:
            self._transport.abort()
            return
        self._keeper.made(self)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """A part of an answer. What nobody asked for ends the connection: the next answer would be doubtful."""
        exchange = self._exchange
        if exchange is None:
            self.abort()
            return
        exchange.feed(data)
        if exchange.is_over or exchange.failure is not None:
            self._settle(exchange)
        elif exchange.waiting_bytes > BODY_BYTES_WAITING_MAX and not self.is_held and self._transport is not None:
            self.is_held = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """The server sends no more. What it hasn't read of the request isn't waited for."""
        self._end(None)
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended."""
        self._end(error)
        self._is_aborted, self._unsent = True, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._keeper.lost(self)

    def pause_writing(self) -> None:
        """The server is behind."""
        self.is_writable = False

    def resume_writing(self) -> None:
        """It has caught up."""
        self.is_writable = True
        self._send_slices()
        if self._exchange is not None:
            self._exchange.wake()

    def _send_slices(self) -> None:
        while self._unsent is not None and self.is_writable:
            piece, rest = self._unsent[:SLICE_BYTES], self._unsent[SLICE_BYTES:]
            self._unsent = rest or None
            self.write(piece)
            self._is_sent = self._unsent is None

    def _settle(self, exchange: Exchange) -> None:
        """An exchange has ended: to the pool with the connection, if the whole request was sent and nothing is odd."""
        self._exchange = None
        if not exchange.is_over or not exchange.is_clean or not self._is_sent or self._is_aborted:
            self.abort()
            return
        if self.is_held:
            self.resume()
        self._keeper.rested(self)

    def _end(self, error: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if error is None and not self._is_aborted:
            exchange.finish()
        else:
            exchange.fail(ConnectionBroken(type(error).__name__ if error else "closed"))

    def _look_at_clock(self) -> None:
        self._timer, self._timer_at = None, math.inf
        exchange = self._exchange
        if exchange is None or exchange.deadline == math.inf:
            return
        if exchange.look_at_clock(self._loop.time() + TIMER_SLACK_S):
            self.abort()
        else:
            self.wake_at(exchange.deadline)
