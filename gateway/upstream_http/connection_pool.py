"""Connections that are open, by server; those without a request wait here for the next one, the last used first."""

import asyncio

from gateway.upstream_http.connection import Connection
from gateway.upstream_http.origin import Origin

IDLE_PER_ORIGIN_MAX = 512
"""Connections to one server that wait for a request. More are closed."""
CLOSE_TIMEOUT_S = 1.0
"""How long the transports may take to close when the pool does."""


class ConnectionPool:
    """The keeper of connections. Idle ones are closed after `keep_s`. Close it at the end: then all are aborted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, keep_s: float) -> None:
        self._loop, self._keep_s = loop, keep_s
        self._idle: dict[Origin, dict[Connection, None]] = {}
        self._open: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._when_empty: asyncio.Future[None] | None = None
        self._is_closed = False

    def take(self, origin: Origin) -> Connection | None:
        """The connection that was used last, if one can be used. It goes back when its exchange is over."""
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            if connection.is_usable and self._loop.time() - connection.idle_since < self._keep_s:
                return connection
            connection.abort()
        return None

    def idle(self, origin: Origin) -> int:
        """How many wait for a request to it."""
        return len(self._idle.get(origin, ()))

    def open(self) -> int:
        """How many there are, at work or not."""
        return len(self._open)

    async def close(self) -> None:
        """Abort them all, and wait until their sockets are closed."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self._idle.clear()
        for connection in list(self._open):
            connection.abort()
        if self._open:
            self._when_empty = self._loop.create_future()
            await asyncio.wait([self._when_empty], timeout=CLOSE_TIMEOUT_S)

    def made(self, connection: Connection) -> None:
        """See `Keeper`."""
        self._open.add(connection)
        if self._is_closed:
            connection.abort()

    def rested(self, connection: Connection) -> None:
        """See `Keeper`."""
        idle = self._idle.setdefault(connection.origin, {})
        if len(idle) >= IDLE_PER_ORIGIN_MAX:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        idle[connection] = None
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._keep_s, self._expire)

    def lost(self, connection: Connection) -> None:
        """See `Keeper`."""
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.origin]
        if not self._open and self._when_empty is not None and not self._when_empty.done():
            self._when_empty.set_result(None)

    def _expire(self) -> None:
        """Close what waited too long; the first of each server has waited longest."""
        self._sweep = None
        now = self._loop.time()
        next_s = self._keep_s
        for idle in self._idle.values():
            for connection in list(idle):
                left_s = connection.idle_since + self._keep_s - now
                if left_s > 0:
                    next_s = min(next_s, left_s)
                    break
                del idle[connection]
                connection.abort()
        if any(self._idle.values()):
            self._sweep = self._loop.call_later(next_s, self._expire)
