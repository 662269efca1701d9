"""One connection to another host's agent: the greeting, a question, a chunk's bytes into a slot."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from nodeagent.errors import PeerBadBytes, PeerRefused, PeerUnreachable
from nodeagent.hints import PeerAddress
from nodeagent.peers.protocol import (
    HEADER_BYTES,
    PREAMBLE_BYTES,
    PROOF_BYTES,
    Ask,
    Chunk,
    Preambles,
    body_length,
    check_preamble,
    decode_answer,
    draw_preamble,
    frame,
)
from nodeagent.peers.wire import PlainWire, TlsWire, Wire, receive, send

CONNECT_S = 2.0
FIRST_BYTE_S = 2.0
IDLE_S = 1.0
ANSWER_S = 4.0
CHUNK_S = 20.0
"""How long a connection and its greeting, an answer's first byte, the next piece, all of an answer but for its chunk,
and all of the chunk may take."""
ADDRESSES_MAX = 4
"""Addresses of one name that are tried."""
LOOKUPS_MAX = 16
"""Names that are looked up at a time, with those that nobody waits for any more: a resolver can't be interrupted."""


@dataclass(frozen=True, slots=True)
class Dialer:
    """What it takes to be let in by peers. `context` is there for TLS."""

    token: bytes = field(repr=False)
    context: ssl.SSLContext | None = None
    lookups: set[asyncio.Future[Any]] = field(default_factory=set, repr=False)

    async def dial(self, address: PeerAddress) -> "PeerConnection":
        """A connection that is let in, within `CONNECT_S`. Raises `PeerError`."""
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._connected(address)
                try:
                    return PeerConnection(await self._greet(connection, address))
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError:
            raise PeerUnreachable(f"no connection within {CONNECT_S:g} s") from None
        except (OSError, UnicodeError) as error:  # a name with a part that DNS can't have
            raise PeerUnreachable(f"no connection: {error}") from error

    async def _connected(self, address: PeerAddress) -> socket.socket:
        """Raises `OSError`, or `PeerUnreachable`."""
        failure: OSError = OSError(f"{address.host} has no address")
        for family, place in await self._places(address):
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.get_running_loop().sock_connect(connection, place)
            except OSError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
            else:
                return connection
        raise failure

    async def _places(self, address: PeerAddress) -> list[tuple[int, tuple[str, int]]]:
        """Families and addresses to try. Raises as `_connected` does."""
        try:
            family = socket.AF_INET6 if ipaddress.ip_address(address.host).version == 6 else socket.AF_INET
        except ValueError:
            if len(self.lookups) >= LOOKUPS_MAX:
                raise PeerUnreachable(f"{LOOKUPS_MAX} names are being looked up already") from None
        else:
            return [(family, (address.host, address.port))]
        looking = asyncio.ensure_future(
            asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        )
        self.lookups.add(looking)
        looking.add_done_callback(self.lookups.discard)
        found = await asyncio.shield(looking)
        return [(each[0], (str(each[4][0]), address.port)) for each in found[:ADDRESSES_MAX]]

    async def _greet(self, connection: socket.socket, address: PeerAddress) -> Wire:
        wire: Wire
        if self.context is None:
            wire = PlainWire(connection)
        else:
            wire = secured = TlsWire(connection, self.context, address.host)
            await secured.shake_hands(CONNECT_S)
        ours = draw_preamble()
        await send(wire, ours, IDLE_S)
        theirs = await receive(wire, PREAMBLE_BYTES, CONNECT_S)
        check_preamble(theirs)
        preambles = Preambles(ours, theirs)
        await send(wire, preambles.proof(self.token, b"client"), IDLE_S)
        try:
            proof = await receive(wire, PROOF_BYTES, CONNECT_S)
        except PeerUnreachable:
            raise PeerRefused("the other agent didn't let this one in; do both have the same peers.token?") from None
        if not preambles.is_proof(self.token, b"server", proof):
            raise PeerRefused("who listens there doesn't know the fleet's token")
        return wire


class PeerConnection:
    """Asks for one chunk at a time. After anything is raised, or bytes are left unread, it can only be closed."""

    def __init__(self, wire: Wire) -> None:
        self.has_answered = False
        """Whether it was of use before: then it may have ended while nobody used it."""
        self._wire = wire

    async def ask(self, directory_key: bytes, identities: Collection[bytes]) -> Chunk | None:
        """What the chunk is, before its bytes, or `None` where the peer doesn't have it.

        Raises `PeerUnreachable`, or `PeerBadBytes` for an answer to another question.
        """
        await send(self._wire, frame(Ask(directory_key, list(identities))), IDLE_S)
        try:
            async with asyncio.timeout(ANSWER_S):
                header = await receive(self._wire, HEADER_BYTES, FIRST_BYTE_S)
                answer = decode_answer(header, await receive(self._wire, body_length(header), IDLE_S))
        except TimeoutError:
            raise PeerUnreachable(f"an answer hasn't come within {ANSWER_S:g} s") from None
        if answer.directory_key != directory_key:
            raise PeerBadBytes("another chunk was sent than was asked for")
        self.has_answered = True
        if not isinstance(answer, Chunk):
            return None
        if answer.identity not in identities:
            raise PeerBadBytes("a chunk of another identity was sent than was asked for")
        if not answer.label.is_sound():
            raise PeerBadBytes("a chunk was sent whose label can't be right")
        return answer

    async def receive(self, target: memoryview) -> None:
        """The chunk's bytes. Raises `PeerUnreachable`. Nothing writes into `target` once this has ended."""
        try:
            async with asyncio.timeout(CHUNK_S):
                await self._wire.fill(target, IDLE_S)
        except TimeoutError:
            raise PeerUnreachable(f"a chunk hasn't come within {CHUNK_S:g} s") from None

    def close(self) -> None:
        """Idempotent."""
        self._wire.close()
