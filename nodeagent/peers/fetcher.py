"""Brings chunks from other hosts' DRAM and NVMe into this host's DRAM, because a gateway said that they will be wanted.

    hint -> is it known here? does it pay (worth.py)? is there room? -> wishes, by peer
    fetch: ask -> the label is checked -> a slot is reserved -> bytes come into it -> they are checked -> indexed

Nobody waits for a fetch: an engine finds the chunk in DRAM, or doesn't. So whatever goes wrong costs the hint. What a
fetch brings is put as an engine would put it, and only for identities that an attached engine has. A slot is given
back when its bytes have stopped coming: this loop is the only one that writes into it, and it has ended its call.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from directory.members import PEERS_REPORTED_MAX
from directory.tiers import Tier
from nodeagent.errors import PeerBadBytes, PeerError, PeerRefused, PeerUnreachable
from nodeagent.hints import PeerAddress, PeerHint
from nodeagent.messages import PutOutcome
from nodeagent.metrics import AgentMetrics
from nodeagent.peers.connection import PeerConnection
from nodeagent.peers.peer import IDLE_MAX_S, LEFT_ALONE_S, UNREACHABLE_S, Peer, Wish
from nodeagent.peers.protocol import IDENTITIES_MAX, Chunk
from nodeagent.peers.worth import Computing, judge
from nodeagent.roster import AttachedEngine
from nodeagent.tiers.dram import DramTier
from nodeagent.tiers.hierarchy import Hierarchy, Source
from nodeagent.tiers.promotion import LowerTier, is_crowded

PEERS_KNOWN_MAX = 1_024
WISHES_MAX = 1_024
ROOM_FRACTION = 4
"""At most one slot in so many is wished for at a time: more would evict one another."""
WISH_S = 10.0
"""A chunk that couldn't be asked for so long after its hint isn't wanted any more."""
CONNECTIONS_PER_PEER_MAX = 2
FETCHES_MAX = 8
"""Chunks that are on their way in at a time."""
SWEEP_S = 5.0
PUBLISHED_S = 600.0
"""How long a measured rate is told to the directory."""

logger = logging.getLogger(__name__)


class Dials(Protocol):
    """Makes connections."""

    async def dial(self, address: PeerAddress) -> PeerConnection:
        """See `Dialer`."""
        ...


class PeerFetcher:
    """Follows hints while `run` does. All of it belongs to the event loop; `engines` are those attached now."""

    def __init__(
        self,
        dialer: Dials,
        dram: DramTier,
        lower: Callable[[], LowerTier],
        engines: Callable[[], Sequence[AttachedEngine]],
        metrics: AgentMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dialer = dialer
        self._dram = dram
        self._lower = lower
        self._engines = engines
        self._metrics = metrics
        self._clock = clock
        self._peers: OrderedDict[PeerAddress, Peer] = OrderedDict()
        self._wishes: dict[bytes, Wish] = {}
        self._fetching: set[bytes] = set()
        self._group: asyncio.TaskGroup | None = None

    def prefetch(self, hint: PeerHint) -> int:
        """Fetch chunks soon; returns how many will be tried. Never waits."""
        hierarchy, now_s = self._dram.hierarchy, self._clock()
        fresh = self._fresh(hint.keys)
        if not fresh or self._group is None:
            return 0
        peer, engines = self._peer(hint.address, now_s), self._engines()
        if hierarchy is None or not engines:
            return self._skip("no_engine", len(fresh))
        if peer is None:
            return self._skip("too_many_peers", len(fresh))
        if now_s < peer.left_alone_until_s:
            return self._skip("left_alone", len(fresh))
        if is_crowded(hierarchy):
            return self._skip("no_room", len(fresh))
        room = max(0, min(WISHES_MAX, hierarchy.arena.slots // ROOM_FRACTION) - len(self._wishes))
        self._skip("queue_full", len(fresh) - room)
        fresh = fresh[:room]
        computing = [_computing(engine) for engine in engines]
        queued = len(peer.waiting) + peer.fetching
        verdict = judge(len(fresh), queued, hierarchy.arena.slot_bytes, peer.estimate(), computing, now_s)
        if verdict.is_probe:
            peer.probed_at_s = now_s
        if verdict.refusal is not None:
            self._skip(verdict.refusal.value, len(fresh) - verdict.chunks)
        for key in fresh[: verdict.chunks]:
            self._wishes[key] = peer.waiting[key] = Wish(key, peer, now_s)
        self._begin_fetches()
        return verdict.chunks

    def cancel(self, hint: PeerHint) -> int:
        """Drop what this hint named, was not begun, and nobody else hinted at; returns how many."""
        cancelled = 0
        for key in dict.fromkeys(hint.keys):
            wish = self._wishes.get(key)
            if wish is None:
                continue
            wish.askers -= 1
            if not wish.askers:
                self._take(wish)
                cancelled += 1
        self._skip("cancelled", cancelled)
        return cancelled

    def rates(self) -> dict[str, float]:
        """Measured bytes/s of the peers that brought something lately, by address; at most `PEERS_REPORTED_MAX`."""
        now_s = self._clock()
        measured = [
            (each.measured_at_s, str(each.address), rate)
            for each in self._peers.values()
            if each.measured_at_s is not None
            and now_s - each.measured_at_s < PUBLISHED_S
            and (rate := each.rate.bytes_per_s) is not None
        ]
        return {address: rate for _, address, rate in sorted(measured, reverse=True)[:PEERS_REPORTED_MAX]}

    @property
    def under_way(self) -> int:
        """Chunks that are on their way in."""
        return len(self._fetching)

    @property
    def waiting(self) -> int:
        """Chunks that will be asked for."""
        return len(self._wishes)

    async def run(self) -> None:
        """Until cancelled; then fetches under way are broken off, and every connection is closed."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                try:
                    while True:
                        await asyncio.sleep(SWEEP_S)
                        for peer in self._peers.values():
                            peer.close_idle(self._clock() - IDLE_MAX_S)
                finally:
                    self._group = None
        finally:
            for peer in self._peers.values():
                peer.close_idle()

    def _fresh(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those that aren't here, and not on their way; who asks for one that waits is noted."""
        fresh = []
        for key in dict.fromkeys(keys):
            wish = self._wishes.get(key)
            if wish is not None:
                wish.askers += 1
            elif key not in self._fetching and not self._is_here(key):
                fresh.append(key)
        return fresh

    def _is_here(self, key: bytes) -> bool:
        hierarchy = self._dram.hierarchy
        return (hierarchy is not None and bool(hierarchy.storage_keys(key))) or self._lower().has_label(key)

    def _peer(self, address: PeerAddress, now_s: float) -> Peer | None:
        """What is known of a peer; where too many are known, the one that was hinted at longest ago is forgotten."""
        peer = self._peers.get(address)
        if peer is None:
            if len(self._peers) >= PEERS_KNOWN_MAX:
                old = next((each for each in self._peers.values() if not each.is_busy), None)
                if old is None:
                    return None
                old.close_idle()
                del self._peers[old.address]
            peer = self._peers[address] = Peer(address)
        self._peers.move_to_end(address)
        return peer

    def _begin_fetches(self) -> None:
        for peer in [each for each in self._peers.values() if each.waiting]:
            while peer.waiting and peer.fetching < CONNECTIONS_PER_PEER_MAX and len(self._fetching) < FETCHES_MAX:
                wish = next(iter(peer.waiting.values()))
                self._take(wish)
                if self._group is None or self._clock() - wish.made_at_s > WISH_S:
                    self._skip("late", 1)
                    continue
                self._fetching.add(wish.directory_key)
                peer.fetching += 1
                self._group.create_task(self._fetch(peer, wish.directory_key))

    async def _fetch(self, peer: Peer, key: bytes) -> None:
        """Fetch one chunk, and draw the consequences."""
        try:
            await self._bring(peer, key)
        except PeerError as error:
            self._note_failure(peer, error)
        except Exception:  # the edge of a task: one chunk's fault stays its own
            logger.exception("fetching a chunk from peer %s met a fault", peer.address)
            self._metrics.peer_failures.labels("fault").inc()
        finally:
            self._fetching.discard(key)
            peer.fetching -= 1
            self._dram.account()
        self._begin_fetches()

    async def _bring(self, peer: Peer, key: bytes) -> None:
        """Fetch one chunk, or count why not. Raises `PeerError`."""
        hierarchy = self._dram.hierarchy
        identities = list(dict.fromkeys(engine.identity_digest for engine in self._engines()))[:IDENTITIES_MAX]
        if hierarchy is None or not identities:
            self._skip("no_engine", 1)
        elif self._is_here(key):
            self._skip("held", 1)
        elif is_crowded(hierarchy):
            self._skip("no_room", 1)
        else:
            if not peer.has_idle:
                peer.give_idle(await self._dialer.dial(peer.address), self._clock())
            began_s, brought = self._clock(), 0
            peer.rate.begin(began_s)
            try:
                brought = await self._ask_and_receive(peer, key, identities, hierarchy)
            finally:
                now_s = self._clock()
                peer.rate.end(now_s, brought)
            if brought:
                peer.measured_at_s = now_s
                self._metrics.peer_fetched.inc()
                self._metrics.peer_bytes.labels("received").inc(brought)
                self._metrics.peer_fetch_seconds.observe(now_s - began_s)

    async def _ask_and_receive(self, peer: Peer, key: bytes, identities: Sequence[bytes], hierarchy: Hierarchy) -> int:
        """How many bytes were brought. Raises `PeerError`. The connection is kept where nothing is left unread."""
        connection, chunk = await self._ask(peer, key, identities)
        is_in_order = False
        try:
            outcome = await self._receive(connection, chunk, hierarchy) if chunk is not None else None
            is_in_order = outcome in (None, PutOutcome.STORED, PutOutcome.HAVE)
        finally:
            if is_in_order and self._clock() >= peer.left_alone_until_s:
                peer.give_idle(connection, self._clock())
            else:
                connection.close()
        if chunk is not None and outcome is PutOutcome.STORED:
            return chunk.length
        if outcome is PutOutcome.FORGOTTEN:
            self._metrics.admission_refused.labels(outcome.value).inc()
        self._skip("absent" if outcome is None else f"put_{outcome.value}", 1)
        return 0

    async def _ask(self, peer: Peer, key: bytes, identities: Sequence[bytes]) -> tuple[PeerConnection, Chunk | None]:
        """What the peer has, and the connection by which its bytes come. Raises `PeerError`."""
        while True:
            connection = peer.take_idle() or await self._dialer.dial(peer.address)
            asked_s = self._clock()
            try:
                chunk = await connection.ask(key, identities)
            except PeerUnreachable:
                connection.close()
                if connection.has_answered:
                    # It may have ended while nobody used it, which says nothing of the peer.
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            peer.note_first_byte(self._clock() - asked_s)
            return connection, chunk

    async def _receive(self, connection: PeerConnection, chunk: Chunk, hierarchy: Hierarchy) -> PutOutcome:
        """Reserve, fill, check, index. Raises `PeerError`. Then, and where nothing is reserved, bytes are unread."""
        if chunk.length > hierarchy.arena.slot_bytes:
            raise PeerBadBytes(f"a chunk of {chunk.length:,} bytes was sent, which no slot of this host holds")
        label = chunk.label
        if self._lower().meet(label, chunk.length, chunk.checksum) is PutOutcome.CONFLICT:
            return PutOutcome.CONFLICT
        granted = hierarchy.reserve(label, chunk.length, chunk.checksum, self, chunk.identity, Source.PEER)
        if granted.evicted:
            self._metrics.evictions.labels(Tier.DRAM.label, "demand").inc(granted.evicted)
        reservation = granted.reservation
        if reservation is None:
            # HAVE as well: the bytes that come are in nobody's way, but nobody reads them either.
            return PutOutcome.BUSY if granted.outcome is PutOutcome.HAVE else granted.outcome
        try:
            with hierarchy.arena.view(reservation.slot, reservation.length) as view:
                await connection.receive(view)
        except BaseException:
            hierarchy.abort(self, reservation.number)
            raise
        outcome = await self._dram.commit(self, reservation.number)
        if outcome is PutOutcome.CORRUPT:
            raise PeerBadBytes("a chunk's bytes aren't those of its checksum")
        return outcome

    def _note_failure(self, peer: Peer, error: PeerError) -> None:
        now_s = self._clock()
        match error:
            case PeerBadBytes():
                reason = "bad_bytes"
                peer.note_bad_answer(now_s)
            case PeerRefused():
                reason = "refused"
                peer.leave_alone(now_s, LEFT_ALONE_S)
            case _:
                reason = "unreachable"
                peer.leave_alone(now_s, UNREACHABLE_S)
        self._metrics.peer_failures.labels(reason).inc()
        logger.info("a chunk could not be fetched from peer %s: %s", peer.address, error)
        if now_s < peer.left_alone_until_s:
            self._skip("left_alone", len(peer.waiting))
            for wish in list(peer.waiting.values()):
                self._take(wish)

    def _take(self, wish: Wish) -> None:
        """A wish ends: it is begun, cancelled or dropped."""
        del self._wishes[wish.directory_key]
        del wish.peer.waiting[wish.directory_key]

    def _skip(self, reason: str, chunks: int) -> int:
        """Count chunks that aren't fetched; how many will be is 0."""
        if chunks > 0:
            self._metrics.peer_refused.labels(reason).inc(chunks)
        return 0


def _computing(engine: AttachedEngine) -> Computing:
    rates = engine.load().rates
    assert rates is not None, "an engine's report has its rates"
    return Computing(engine.registration.shape, rates, engine.registration.chunk_tokens)
