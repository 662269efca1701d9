"""Gives this host's chunks to other hosts' agents that know the fleet's token.

A chunk goes out straight from its slot, which is held meanwhile; one on disk is read into DRAM first, as for an engine.
Engines of this host come first: where they hold most slots, or wait for reads, a peer is told that a chunk isn't here.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from nodeagent.errors import PeerBadBytes, PeerError, PeerRefused
from nodeagent.metrics import AgentMetrics
from nodeagent.peers.protocol import (
    HEADER_BYTES,
    PREAMBLE_BYTES,
    PROOF_BYTES,
    Absent,
    Ask,
    Chunk,
    Preambles,
    body_length,
    check_preamble,
    decode_ask,
    draw_preamble,
    frame,
)
from nodeagent.peers.wire import PlainWire, TlsWire, Wire, receive, send
from nodeagent.tiers.dram import DramTier
from nodeagent.tiers.hierarchy import Entry, Hierarchy
from nodeagent.tiers.promotion import LowerTier, is_crowded

CONNECTIONS_MAX = 256
GREETING_S = 5.0
ASK_WAIT_S = 60.0
"""How long after an answer the next question must be there."""
SENDS_MAX = 8
"""Chunks that are on their way out at a time; more wait for their turn."""
IDLE_S = 5.0
SEND_S = 30.0
"""How long a piece, and how long a chunk, may take to be taken; it is held meanwhile."""
DISK_WAIT_S = 1.0
ACCEPT_PAUSE_S = 0.2

logger = logging.getLogger(__name__)


class PeerServer:
    """Listens on a bound, non-blocking socket that its caller closes. `context` is there for TLS."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        context: ssl.SSLContext | None,
        dram: DramTier,
        lower: Callable[[], LowerTier],
        metrics: AgentMetrics,
    ) -> None:
        self._listener = listener
        self._token = token
        self._context = context
        self._dram = dram
        self._lower = lower
        self._metrics = metrics
        self._sends = asyncio.Semaphore(SENDS_MAX)
        self.connections = 0

    async def run(self) -> None:
        """Let peers in until cancelled; then every connection is closed, and no chunk held."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    logger.warning("a peer's connection can't be accepted: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                if self.connections >= CONNECTIONS_MAX:
                    self._metrics.peer_failures.labels("server_full").inc()
                    connection.close()
                    continue
                self.connections += 1
                group.create_task(self._attend(connection))

    async def _attend(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(GREETING_S):
                    wire = await self._welcome(connection)
                while True:
                    await self._serve_one(wire)
        except (PeerRefused, PeerBadBytes) as error:
            self._metrics.peer_failures.labels("refused" if isinstance(error, PeerRefused) else "bad_client").inc()
            logger.warning("a peer's connection is closed: %s", error)
        except (PeerError, OSError, TimeoutError) as error:
            logger.debug("a peer's connection has ended: %s", error)
        except Exception:  # the edge of the loop: one connection's fault stays its own
            logger.exception("a peer's connection met a fault and is closed")
        finally:
            self.connections -= 1

    async def _welcome(self, connection: socket.socket) -> Wire:
        """The greeting of `protocol.py`. Raises `PeerError`."""
        wire: Wire
        if self._context is None:
            wire = PlainWire(connection)
        else:
            wire = secured = TlsWire(connection, self._context)
            await secured.shake_hands(GREETING_S)
        theirs = await receive(wire, PREAMBLE_BYTES, GREETING_S)
        check_preamble(theirs)
        preambles = Preambles(theirs, draw_preamble())
        await send(wire, preambles.server, IDLE_S)
        if not preambles.is_proof(self._token, b"client", await receive(wire, PROOF_BYTES, GREETING_S)):
            raise PeerRefused("it doesn't know the fleet's token (peers.token)")
        await send(wire, preambles.proof(self._token, b"server"), IDLE_S)
        return wire

    async def _serve_one(self, wire: Wire) -> None:
        async with asyncio.timeout(ASK_WAIT_S):
            header = await receive(wire, HEADER_BYTES, ASK_WAIT_S)
            ask = decode_ask(header, await receive(wire, body_length(header), IDLE_S))
        async with self._sends:
            hierarchy, entry = self._dram.hierarchy, await self._hold(ask)
            if hierarchy is None or entry is None:
                await send(wire, frame(Absent(ask.directory_key)), IDLE_S)
                return
            try:
                async with asyncio.timeout(SEND_S):
                    await self._send_chunk(wire, hierarchy, ask, entry)
            finally:
                hierarchy.let_go(entry)
                self._dram.account()

    async def _send_chunk(self, wire: Wire, hierarchy: Hierarchy, ask: Ask, entry: Entry) -> None:
        label = entry.label
        answer = Chunk(
            ask.directory_key,
            entry.identity,
            label.storage_key,
            label.parent,
            label.position,
            entry.length,
            entry.checksum,
            label.salt_tag,
        )
        await send(wire, frame(answer), IDLE_S)
        with hierarchy.arena.view(entry.slot, entry.length) as view:
            await wire.send(view, IDLE_S)
        self._metrics.peer_bytes.labels("sent").inc(entry.length)

    async def _hold(self, ask: Ask) -> Entry | None:
        """The chunk, held until `let_go`; `None` where it isn't here, or isn't to be had now."""
        hierarchy = self._dram.hierarchy
        if hierarchy is None or is_crowded(hierarchy):
            return None
        for key in hierarchy.storage_keys(ask.directory_key):
            entry = hierarchy.find(key)
            if entry is not None and entry.identity in ask.identities:
                hierarchy.hold(entry)
                return entry
        run = await self._lower().open_labelled(ask.directory_key, ask.identities, DISK_WAIT_S)
        try:
            entry = hierarchy.find(run.keys[0]) if run.keys else None
            if entry is None or entry.identity not in ask.identities or entry.label.directory_key != ask.directory_key:
                return None
            hierarchy.hold(entry)
            return entry
        finally:
            run.let_go()
