"""How bytes pass between two agents: straight between the socket and a slot, by TCP; through one buffer more, by TLS.

Everything happens on the event loop, a piece at a time; between two pieces others get their turn, so that an engine's
request never waits for a chunk. Once a call has ended, in whatever way, nothing is read into its buffer any more.
"""

import asyncio
import socket
import ssl
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from nodeagent.errors import PeerUnreachable

PIECE_BYTES = 256 * 1_024
TLS_PIECE_BYTES = 64 * 1_024

Value = TypeVar("Value")


class Wire(Protocol):
    """One connection. Its methods raise `PeerUnreachable`, also where no piece passes within `idle_s` seconds."""

    async def fill(self, target: memoryview, idle_s: float) -> None:
        """Receive exactly as many bytes as `target` takes."""
        ...

    async def send(self, data: memoryview, idle_s: float) -> None:
        """Send all of `data`."""
        ...

    def close(self) -> None:
        """Close the connection. Idempotent; nobody may be using it."""
        ...


async def receive(wire: Wire, length: int, idle_s: float) -> bytes:
    """The next `length` bytes, for what is small. Raises as `Wire` does."""
    data = bytearray(length)
    with memoryview(data) as view:
        await wire.fill(view, idle_s)
    return bytes(data)


async def send(wire: Wire, data: bytes, idle_s: float) -> None:
    """Send what is small. Raises as `Wire` does."""
    with memoryview(data) as view:
        await wire.send(view, idle_s)


class PlainWire:
    """A `Wire` over a connected, non-blocking TCP socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    async def fill(self, target: memoryview, idle_s: float) -> None:
        """See `Wire`."""
        loop, filled = asyncio.get_running_loop(), 0
        while filled < len(target):
            with target[filled : filled + PIECE_BYTES] as piece:
                received = await _within(idle_s, loop.sock_recv_into(self._socket, piece))
            if not received:
                raise PeerUnreachable("the other agent has closed the connection")
            filled += received
            # A read that needn't wait doesn't let others go first.
            await asyncio.sleep(0)

    async def send(self, data: memoryview, idle_s: float) -> None:
        """See `Wire`."""
        loop = asyncio.get_running_loop()
        for start in range(0, len(data), PIECE_BYTES):
            with data[start : start + PIECE_BYTES] as piece:
                await _within(idle_s, loop.sock_sendall(self._socket, piece))
            await asyncio.sleep(0)

    def close(self) -> None:
        """See `Wire`."""
        self._socket.close()


class TlsWire:
    """A `Wire` by TLS over a connected, non-blocking TCP socket, which it owns; `shake_hands` comes first.

    asyncio's own TLS has no reads into a buffer of the caller's without a protocol class of callbacks; OpenSSL has.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """A server's side, unless `server_name` says whom a client means to meet."""
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )

    async def shake_hands(self, idle_s: float) -> None:
        """Agree on keys, and check the server's certificate. Raises as `Wire` does."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush(idle_s)
                await self._feed(idle_s)
            except ssl.SSLError as error:
                raise PeerUnreachable(f"no TLS with the other agent: {error}") from error
            else:
                await self._flush(idle_s)
                return

    async def fill(self, target: memoryview, idle_s: float) -> None:
        """See `Wire`."""
        filled = 0
        while filled < len(target):
            try:
                with target[filled : filled + TLS_PIECE_BYTES] as piece:
                    received = self._tls.read(len(piece), piece)
            except ssl.SSLWantReadError:
                await self._flush(idle_s)
                await self._feed(idle_s)
                continue
            except ssl.SSLError as error:
                raise PeerUnreachable(f"TLS with the other agent has failed: {error}") from error
            if not received:
                raise PeerUnreachable("the other agent has closed the connection")
            assert isinstance(received, int), "a read into a buffer is counted"
            filled += received

    async def send(self, data: memoryview, idle_s: float) -> None:
        """See `Wire`."""
        for start in range(0, len(data), TLS_PIECE_BYTES):
            try:
                with data[start : start + TLS_PIECE_BYTES] as piece:
                    self._tls.write(piece)
            except ssl.SSLError as error:
                raise PeerUnreachable(f"TLS with the other agent has failed: {error}") from error
            await self._flush(idle_s)

    def close(self) -> None:
        """See `Wire`."""
        self._socket.close()

    async def _feed(self, idle_s: float) -> None:
        loop = asyncio.get_running_loop()
        data = await _within(idle_s, loop.sock_recv(self._socket, TLS_PIECE_BYTES))
        if not data:
            raise PeerUnreachable("the other agent has closed the connection")
        self._incoming.write(data)
        await asyncio.sleep(0)

    async def _flush(self, idle_s: float) -> None:
        loop = asyncio.get_running_loop()
        while data := self._outgoing.read(TLS_PIECE_BYTES):
            await _within(idle_s, loop.sock_sendall(self._socket, data))
        await asyncio.sleep(0)


async def _within(idle_s: float, step: Coroutine[Any, Any, Value]) -> Value:
    try:
        async with asyncio.timeout(idle_s):
            return await step
    except TimeoutError:
        raise PeerUnreachable(f"nothing has passed for {idle_s:g} s") from None
    except OSError as error:
        raise PeerUnreachable(f"the connection has ended: {error}") from error
