"""The DRAM tier: makes the arena when the first engine says how large a chunk is, checks bytes, keeps slots free."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

from nodeagent.errors import DriveAway, MemoryShort, TierUnavailable
from nodeagent.label_book import LabelBook
from nodeagent.labels import ChunkLabel
from nodeagent.messages import PutOutcome
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.arena_memory import ArenaWish, slot_bytes_for
from nodeagent.tiers.chunk_file import UNKNOWN_IDENTITY
from nodeagent.tiers.drive_threads import DriveThreads
from nodeagent.tiers.eviction import POLICIES
from nodeagent.tiers.hierarchy import Entry, Hierarchy, Reservation
from nodeagent.tiers.tombstones import Tombstones

FREE_SLOTS_FRACTION = 50
"""One slot in so many is kept free in advance; an arena with fewer slots evicts on demand only."""
VICTIMS_PER_STEP_MAX = 64
CHECK_THREADS = 2
CLEANED_PER_STEP_MAX = 8
"""Slots that are zeroed in one go of a thread, between which it may check what engines put."""
CLEANINGS_MAX = 4
STALE_FRACTION = 16
"""One free slot in so many is taken to be zeroed at a time: as many fewer are free meanwhile."""
ZEROS_BYTES = 1 << 20
MEMORY_WAIT_S = 10.0
"""How long memory is waited for that others hold: engines let go of an earlier agent's arena within less."""
MEMORY_ASK_S = 0.2

logger = logging.getLogger(__name__)

Withdrawn = Callable[[Sequence[bytes]], Awaitable[None]]


class DramTier:
    """One host's DRAM, shared by its engines.

    `on_change` hears newest states (see `Hierarchy`). `withdrawn` waits until the directory has heard that keys are
    gone, within a bound of its own; only the work-ahead eviction calls it. `group` holds the checks under way: one
    that has begun ends properly, whatever becomes of the connection that asked for it. `on_stored`, which may be set,
    hears the storage key of each chunk that a put has stored. `labels` are those that arrived apart from their chunks.
    `wish` is the kind of memory wanted; `verify_reads` is what clients are told (see `ArenaOffer`).
    What `tombstones` forget isn't let in.
    """

    def __init__(
        self,
        quota_bytes: int,
        on_change: Callable[[bytes, int], None],
        withdrawn: Withdrawn,
        group: asyncio.TaskGroup,
        metrics: AgentMetrics,
        policy: str = "lru",
        *,
        wish: ArenaWish | None = None,
        verify_reads: bool = True,
        tombstones: Tombstones | None = None,
    ) -> None:
        self.tombstones = tombstones if tombstones is not None else Tombstones()
        self.quota_bytes = quota_bytes
        self.hierarchy: Hierarchy | None = None
        self.labels = LabelBook()
        self.verify_reads = verify_reads
        self._wish = wish or ArenaWish()
        self._on_change = on_change
        self._withdrawn = withdrawn
        self._group = group
        self._metrics = metrics
        self._policy = policy
        self.on_stored: Callable[[bytes], None] = lambda _: None
        self._making: asyncio.Task[TierUnavailable | None] | None = None
        self._refusal = ""
        self._unclaimed: Arena | None = None
        self._attempt: object = None
        self._rechecking: set[int] = set()
        self._free_low = asyncio.Event()
        self._is_unclean = asyncio.Event()
        self._threads = ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="warmroute-check")
        self._cleaning = DriveThreads(self._threads, CLEANINGS_MAX)
        metrics.bytes_limit.labels("dram").set(quota_bytes)
        metrics.bytes_used.labels("dram").set(0)

    @property
    def used_bytes(self) -> int:
        """Bytes in slots that are taken."""
        return 0 if self.hierarchy is None else self.hierarchy.arena.used_bytes

    def memory_status(self) -> dict[str, Any]:
        """What `/status` says of the memory: wished and had, or why there is none though an engine has come."""
        wished = {"numa_node": self._wish.numa_node, "verify_reads": self.verify_reads}
        had = self.hierarchy.arena.pages if self.hierarchy is not None else {}
        return {**wished, **had, "refusal": self._refusal or None}

    async def ensure(self, chunk_bytes: int) -> Hierarchy:
        """The tier for chunks of `chunk_bytes`, made now if there is none.

        Raises `TierUnavailable` where the memory can't be had, or where the slots are smaller than the chunks: an
        earlier engine of this host has smaller ones. Memory that others hold is waited for, up to `MEMORY_WAIT_S`;
        then it is `MemoryShort`.
        """
        while self.hierarchy is None:
            is_ours = self._making is None
            if self._making is None:
                self._making = self._group.create_task(self._make(slot_bytes_for(chunk_bytes)))
            # Whoever asked first may leave meanwhile: the memory is made once, for all.
            refusal = await asyncio.shield(self._making)
            if refusal is not None and (is_ours or isinstance(refusal, MemoryShort)):
                raise refusal
        if chunk_bytes > self.hierarchy.arena.slot_bytes:
            raise TierUnavailable(
                f"chunks of {chunk_bytes:,} bytes don't fit this host's slots of {self.hierarchy.arena.slot_bytes:,} "
                "bytes, sized for the engine that came first; run engines of one model and layout on a host"
            )
        return self.hierarchy

    def learn(self, label: ChunkLabel) -> None:
        """A label has become known. Where it is forgotten, so is what follows, be its own chunk here or not."""
        self.tombstones.meet(label, UNKNOWN_IDENTITY)
        if self.hierarchy is not None:
            self.hierarchy.learn(label)

    def account(self) -> None:
        """Bring the gauge of bytes in use, and the work-ahead eviction, up to date after a change."""
        if self.hierarchy is None:
            return
        arena = self.hierarchy.arena
        self._metrics.bytes_used.labels("dram").set(arena.used_bytes)
        if arena.free_slots < arena.slots // FREE_SLOTS_FRACTION:
            self._free_low.set()
        if arena.has_forgotten:
            self._is_unclean.set()

    async def commit(self, holder: Hashable, number: int) -> PutOutcome:
        """Check a filled slot's own bytes, off the event loop, then index and announce the chunk."""
        hierarchy = self.hierarchy
        reservation = hierarchy.begin_commit(holder, number) if hierarchy is not None else None
        if hierarchy is None or reservation is None:
            return PutOutcome.REFUSED
        return await asyncio.shield(self._group.create_task(self._finish(hierarchy, reservation)))

    def recheck(self, entry: Entry) -> None:
        """A reader found a chunk wrong: look at its slot, and drop the chunk if its bytes are bad.

        Many may say so of one chunk at a time, and be wrong themselves: it is looked at once for all.
        """
        hierarchy = self.hierarchy
        if hierarchy is not None and entry.is_indexed and entry.slot not in self._rechecking:
            self._rechecking.add(entry.slot)
            self._group.create_task(self._recheck(hierarchy, entry))

    async def keep_free(self) -> None:
        """Keep a few slots free, until cancelled: withdraw the oldest chunks, wait a moment, then free their slots.

        A put that finds no slot evicts without waiting: this loop makes that rare.
        """
        while True:
            await self._free_low.wait()
            self._free_low.clear()
            hierarchy = self.hierarchy
            if hierarchy is None:
                continue
            wanted = hierarchy.arena.slots // FREE_SLOTS_FRACTION - hierarchy.arena.free_slots
            victims = hierarchy.take_victims(min(max(wanted, 0), VICTIMS_PER_STEP_MAX))
            if not victims:
                continue
            try:
                await self._withdrawn([key for each in victims if (key := each.label.directory_key) is not None])
            finally:
                hierarchy.free(victims)
            self._metrics.evictions.labels("dram", "quota").inc(len(victims))
            self.account()

    async def keep_clean(self) -> None:
        """Zero the slots of forgotten chunks as they are given back, until cancelled."""
        while True:
            await self._is_unclean.wait()
            self._is_unclean.clear()
            if self.hierarchy is not None:
                await self._clean(self.hierarchy.arena, self.hierarchy.arena.take_forgotten)

    async def clean(self) -> None:
        """Zero the slots of forgotten chunks, and all free slots: those of chunks that were evicted before, too."""
        if self.hierarchy is not None:
            arena = self.hierarchy.arena
            await self._clean(arena, arena.take_forgotten)
            await self._clean(arena, lambda slots: arena.take_stale(max(slots, arena.free_slots // STALE_FRACTION)))

    async def close(self) -> None:
        """Wait for checks under way, then give the memory back."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])
        await asyncio.to_thread(self._threads.shutdown)
        if self._unclaimed is not None:
            self._unclaimed.close()
            self._unclaimed = None
        if self.hierarchy is not None:
            self.hierarchy.arena.close()
            self.hierarchy = None

    async def _clean(self, arena: Arena, take: Callable[[int], list[int]]) -> None:
        while slots := take(CLEANED_PER_STEP_MAX):
            for start in range(0, len(slots), CLEANED_PER_STEP_MAX):
                some = slots[start : start + CLEANED_PER_STEP_MAX]
                try:
                    await self._cleaning.do(_zero, arena, some)
                except DriveAway:
                    # The machine gives no thread: as with checks, everybody waits for this one.
                    _zero(arena, some)
                for slot in some:
                    arena.free_cleaned(slot)
            self.account()

    async def _make(self, slot_bytes: int) -> TierUnavailable | None:
        """Make the tier, or say why not: a task of the group mustn't raise what isn't a fault."""
        try:
            await self._make_arena(slot_bytes)
        except TierUnavailable as refusal:
            self._refusal = str(refusal)
            return refusal
        finally:
            self._making = None
        arena, self._unclaimed = self._unclaimed, None
        assert arena is not None, "it was made, or refused"
        self._refusal = ""
        pages = arena.pages
        logger.info(
            "the dram tier has %d slots of %d bytes in pages of %s, %d bytes of it in huge ones",
            arena.slots,
            slot_bytes,
            pages["pages"],
            pages["huge_bytes"],
        )
        self.hierarchy = Hierarchy(arena, POLICIES[self._policy](), self._on_change, time.monotonic, self.tombstones)
        return None

    async def _make_arena(self, slot_bytes: int) -> None:
        """An agent that follows another finds its memory with the engines still, and asks again for a while."""
        loop, deadline, is_waiting = asyncio.get_running_loop(), time.monotonic() + MEMORY_WAIT_S, False
        while True:
            may_wait = time.monotonic() < deadline
            try:
                attempt = self._attempt = object()
                try:
                    made = loop.run_in_executor(self._threads, self._try_arena, attempt, slot_bytes, may_wait)
                except RuntimeError as error:
                    self._attempt = None  # it may be queued all the same
                    raise MemoryShort(f"no thread can be had that makes the dram tier: {error}") from error
                return await made
            except MemoryShort as error:
                if not may_wait:
                    raise
                if not is_waiting:
                    logger.warning(
                        "waiting up to %s s for memory, and serving without meanwhile: %s", MEMORY_WAIT_S, error
                    )
                is_waiting = True
                await asyncio.sleep(MEMORY_ASK_S)

    def _try_arena(self, attempt: object, slot_bytes: int, may_wait: bool) -> None:
        if attempt is not self._attempt:
            return
        # Kept here, so that it isn't lost where nobody waits for the thread any more.
        self._unclaimed = Arena(self.quota_bytes, slot_bytes, self._wish, may_wait=may_wait)

    async def _finish(self, hierarchy: Hierarchy, reservation: Reservation) -> PutOutcome:
        checksum = await self._digest(hierarchy.arena, reservation.slot, reservation.length)
        # The label may have become known while the bytes were on their way.
        reservation.label = self.labels.complete(reservation.label)
        outcome = hierarchy.finish_commit(reservation, checksum)
        if outcome is PutOutcome.CORRUPT:
            self._metrics.checksum_failures.inc()
            logger.warning("a put was refused: its slot doesn't hold the bytes that were promised")
        if outcome is PutOutcome.STORED:
            self._metrics.write_bytes.labels("dram").inc(reservation.length)
            self.on_stored(reservation.label.storage_key)
        self.account()
        return outcome

    async def _recheck(self, hierarchy: Hierarchy, entry: Entry) -> None:
        # The check holds the chunk as a reader does: its slot can't be reused while it is looked at.
        opened = hierarchy.open_run([entry.label.storage_key], self) if entry.is_indexed else []
        try:
            checksum = await self._digest(hierarchy.arena, entry.slot, entry.length) if opened else entry.checksum
        finally:
            hierarchy.close(self, [each.reference for each in opened])
            self._rechecking.discard(entry.slot)
        if checksum != entry.checksum:
            self._metrics.checksum_failures.inc()
            self._metrics.evictions.labels("dram", "corrupt").inc()
            logger.error("a stored chunk's bytes have changed; it is dropped and withdrawn")
            hierarchy.drop(entry)
            self.account()

    async def _digest(self, arena: Arena, slot: int, length: int) -> bytes:
        try:
            digest = asyncio.get_running_loop().run_in_executor(self._threads, _digest_of, arena, slot, length)
        except RuntimeError:
            # The machine gives no thread: everybody waits for this one, rather than that the chunk is lost.
            return _digest_of(arena, slot, length)
        return await digest


def _zero(arena: Arena, slots: Sequence[int]) -> None:
    zeros = bytes(ZEROS_BYTES)
    for slot in slots:
        with arena.view(slot, arena.slot_bytes) as view:
            for start in range(0, len(view), ZEROS_BYTES):
                with view[start : start + ZEROS_BYTES] as part:
                    part[:] = zeros[: len(part)]


def _digest_of(arena: Arena, slot: int, length: int) -> bytes:
    with arena.view(slot, length) as view:
        return xxhash.xxh3_128_digest(view)
