"""A connection to the agent's HTTP: uvicorn's, with bounds on how many there are, and on the head of a request.

uvicorn waits for ever for a head that doesn't end, or doesn't begin. Each such connection keeps a descriptor, and what
the agent's HTTP takes of those, its door, its drives and its peers don't have.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONNECTIONS_MAX = 256
HEAD_S = 5.0
"""How long a request's head may take from its first byte, and a fresh connection until its first head is there."""
HEAD_BYTES_MAX = 64 * 1_024
"""Checked after each read, so the last one may exceed it."""


class HttpConnection(HttpToolsProtocol):
    """One connection; uvicorn makes it, as its `http` option. What exceeds a bound is closed without a word."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_bytes = 0
        self._head_deadline: asyncio.TimerHandle | None = None
        self._is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has connected."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.close()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; give up on a head that is too large."""
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.transport.close()

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self._await_head()

    def on_headers_complete(self) -> None:
        """A request's head is there."""
        self._is_in_head = False
        self._forget_deadline()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._forget_deadline()
        self._head_deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None
