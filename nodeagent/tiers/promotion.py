"""From NVMe to DRAM: chunks that an open asks for, and chunks that a gateway says will be asked for.

A load takes a slot as a put would, reads and checks the file into it, and indexes the chunk in DRAM; whoever waits for
it holds the chunk from that moment. Two who want one chunk share one load. A load that ends too late for the open that
began it still lands in DRAM.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from directory.tiers import Tier
from nodeagent.labels import ChunkLabel
from nodeagent.messages import PutOutcome
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.admission import Admission
from nodeagent.tiers.dram import DramTier
from nodeagent.tiers.drive import CLOSE_WAIT_MAX_S
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.hierarchy import Entry, Hierarchy, Reservation
from nodeagent.tiers.nvme_index import NvmeEntry

READS_PER_OPEN_MAX = 8
"""Reads of one open that go on side by side, ahead of the chunk that is waited for."""
LOADS_MAX = 256
OPEN_WAIT_MAX_S = 10.0
PREFETCH_QUEUE_MAX = 1_024
PREFETCH_WORKERS = 2
PREFETCH_LOADS_MAX = 16
"""With more loads than this under way, opens are waiting: a prefetch is dropped."""
PREFETCH_ROOM_FRACTION = 4
"""With fewer than one slot in so many to be had (free, or of a chunk that nobody holds), a prefetch is dropped."""
PEER_READS_MAX = 2
"""Reads for other hosts that go on side by side."""
DRAM = Tier.DRAM.label

logger = logging.getLogger(__name__)


class LowerTier(Protocol):
    """What lies behind DRAM, as the door and the HTTP see it."""

    def meet(self, label: ChunkLabel, length: int, checksum: bytes) -> PutOutcome | None:
        """See `NvmeTier.meet`."""
        ...

    def learn(self, label: ChunkLabel) -> None:
        """See `NvmeTier.learn`."""
        ...

    def continues(self, keys: Sequence[bytes]) -> bool:
        """Whether the leading run in DRAM goes on here."""
        ...

    async def open_run(self, keys: Sequence[bytes], wait_s: float) -> "HeldRun":
        """Hold the leading run of `keys` in DRAM, reading what is missing, within `wait_s`."""
        ...

    def note_hit(self, keys: Sequence[bytes]) -> None:
        """These chunks, a run, were opened from DRAM."""
        ...

    def note_stored(self, key: bytes) -> None:
        """This chunk was put into DRAM."""
        ...

    def prefetch(self, directory_keys: Sequence[bytes]) -> int:
        """Read chunks into DRAM soon; returns how many will be tried."""
        ...

    def cancel(self, directory_keys: Sequence[bytes]) -> int:
        """Whoever hinted at these doesn't want them any more; returns how many won't be read. What is begun lands."""
        ...

    def has_label(self, directory_key: bytes) -> bool:
        """Whether a chunk with this label lies here."""
        ...

    async def open_labelled(self, directory_key: bytes, identities: Collection[bytes], wait_s: float) -> "HeldRun":
        """Hold one chunk with this label and of one of these identities in DRAM, for another host.

        It is read only where none of this host's engines waits for a read.
        """
        ...


class HeldRun:
    """The leading `keys` that are in DRAM, held until `let_go`; those in `from_nvme` had to be read."""

    def __init__(self, hierarchy: Hierarchy | None = None) -> None:
        self.keys: list[bytes] = []
        self.from_nvme: set[bytes] = set()
        self._hierarchy = hierarchy
        self._entries: list[Entry] = []
        self._is_open = True

    def hold(self, entry: Entry) -> None:
        """Hold one more chunk; nothing after `let_go`, and nothing of a chunk that is dropped."""
        if self._is_open and self._hierarchy is not None and entry.is_indexed:
            self._hierarchy.hold(entry)
            self._entries.append(entry)

    def let_go(self) -> None:
        """End all holds. Idempotent."""
        self._is_open = False
        while self._entries and self._hierarchy is not None:
            self._hierarchy.let_go(self._entries.pop())


class NoLowerTier:
    """A host without NVMe."""

    def meet(self, label: ChunkLabel, length: int, checksum: bytes) -> PutOutcome | None:
        """Nothing is on disk."""
        return None

    def learn(self, label: ChunkLabel) -> None:
        """Nothing is on disk."""

    def continues(self, keys: Sequence[bytes]) -> bool:
        """Never."""
        return False

    async def open_run(self, keys: Sequence[bytes], wait_s: float) -> HeldRun:
        """Nothing is read."""
        return HeldRun()

    def note_hit(self, keys: Sequence[bytes]) -> None:
        """Nothing is written."""

    def note_stored(self, key: bytes) -> None:
        """Nothing is written."""

    def prefetch(self, directory_keys: Sequence[bytes]) -> int:
        """Nothing is read."""
        return 0

    def cancel(self, directory_keys: Sequence[bytes]) -> int:
        """Nothing was to be read."""
        return 0

    def has_label(self, directory_key: bytes) -> bool:
        """Never."""
        return False

    async def open_labelled(self, directory_key: bytes, identities: Collection[bytes], wait_s: float) -> HeldRun:
        """Nothing is read."""
        return HeldRun()


@dataclass(eq=False, slots=True)
class _Load:
    """A read under way, and who holds the chunk once it is there. The task's result is whether it is."""

    task: asyncio.Task[bool] = field(init=False)
    waiting: list[HeldRun] = field(default_factory=list)


class Promotion:
    """Moves chunks from `nvme` to `dram`. `group` holds the loads; `admission` is the other way."""

    def __init__(
        self, dram: DramTier, nvme: NvmeTier, admission: Admission, group: asyncio.TaskGroup, metrics: AgentMetrics
    ) -> None:
        self._dram = dram
        self._nvme = nvme
        self._admission = admission
        self._group = group
        self._metrics = metrics
        self._loads: dict[bytes, _Load] = {}
        self._hints: dict[bytes, int] = {}
        self._wake = asyncio.Event()
        self._opens = 0
        self._peer_reads = 0
        self._is_closing = False

    @property
    def loads(self) -> int:
        """Reads under way."""
        return len(self._loads)

    def meet(self, label: ChunkLabel, length: int, checksum: bytes) -> PutOutcome | None:
        """See `LowerTier`. A put that is let in takes a slot next."""
        self._admission.note_slot_taken()
        return self._nvme.meet(label, length, checksum)

    def learn(self, label: ChunkLabel) -> None:
        """See `LowerTier`."""
        self._nvme.learn(label)

    def continues(self, keys: Sequence[bytes]) -> bool:
        """See `LowerTier`."""
        hierarchy = self._dram.hierarchy
        if hierarchy is None:
            return False
        run = hierarchy.contains_run(keys)
        return run < len(keys) and (keys[run] in self._loads or self._nvme.holds(keys[run]))

    async def open_run(self, keys: Sequence[bytes], wait_s: float) -> HeldRun:
        """See `LowerTier`. At most `READS_PER_OPEN_MAX` reads of one open go on side by side."""
        self._opens += 1
        try:
            return await self._open(keys, wait_s)
        finally:
            self._opens -= 1

    def note_hit(self, keys: Sequence[bytes]) -> None:
        """See `LowerTier`: what was hit in DRAM may be worth writing, and its copy on disk is worth keeping."""
        hierarchy = self._dram.hierarchy
        if hierarchy is None:
            return
        last = next((key for key in reversed(keys) if self._nvme.holds(key)), None)
        if last is not None:
            self._nvme.touch(last)
        self._admission.note_hit(keys)

    def note_stored(self, key: bytes) -> None:
        """See `LowerTier`."""
        self._admission.note_stored(key)

    def prefetch(self, directory_keys: Sequence[bytes]) -> int:
        """See `LowerTier`. At most half of the slots are asked for at a time: more would evict one another."""
        hierarchy = self._dram.hierarchy
        accepted = 0
        for key in self._wanted(directory_keys):
            if key in self._hints:
                self._hints[key] += 1
            elif hierarchy is None or len(self._hints) >= min(PREFETCH_QUEUE_MAX, hierarchy.arena.slots // 2):
                self._metrics.prefetches_dropped.labels("queue_full" if hierarchy is not None else "no_arena").inc()
            else:
                self._hints[key] = 1
                accepted += 1
        if accepted:
            self._wake.set()
        return accepted

    def cancel(self, directory_keys: Sequence[bytes]) -> int:
        """See `LowerTier`. A chunk that others hinted at as well is still read."""
        cancelled = 0
        for directory_key in directory_keys:
            for key in self._nvme.storage_keys(directory_key):
                if key not in self._hints:
                    continue
                self._hints[key] -= 1
                if not self._hints[key]:
                    del self._hints[key]
                    cancelled += 1
        self._metrics.prefetches_dropped.labels("cancelled").inc(cancelled)
        return cancelled

    def has_label(self, directory_key: bytes) -> bool:
        """See `LowerTier`."""
        return bool(self._nvme.storage_keys(directory_key))

    async def open_labelled(self, directory_key: bytes, identities: Collection[bytes], wait_s: float) -> HeldRun:
        """See `LowerTier`. While an open of this host reads, and beside `PEER_READS_MAX`, nothing is read."""
        entries = (self._nvme.find(key) for key in self._nvme.storage_keys(directory_key))
        entry = next((each for each in entries if each is not None and each.identity in identities), None)
        if entry is None or self._dram.hierarchy is None or self._opens or self._peer_reads >= PEER_READS_MAX:
            return HeldRun()
        self._peer_reads += 1
        try:
            return await self._open([entry.label.storage_key], wait_s)
        finally:
            self._peer_reads -= 1

    async def run(self) -> None:
        """Read what was hinted at, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(PREFETCH_WORKERS):
                group.create_task(self._follow_hints())

    async def close(self) -> None:
        """Begin no more loads, and wait for those under way, at most `CLOSE_WAIT_MAX_S`; `NvmeTier.close` comes next.

        A load that hangs is given up, but its read may still fill its slot: that isn't given back.
        """
        self._is_closing = True
        tasks = [load.task for load in self._loads.values()]
        if not tasks:
            return
        _, hanging = await asyncio.wait(tasks, timeout=CLOSE_WAIT_MAX_S)
        if hanging:
            logger.warning("%d reads from nvme don't end; they are given up", len(hanging))
            for task in hanging:
                task.cancel()
            await asyncio.wait(hanging)

    async def _open(self, keys: Sequence[bytes], wait_s: float) -> HeldRun:
        hierarchy = self._dram.hierarchy
        assert hierarchy is not None, "an open that continues has an arena"
        run = HeldRun(hierarchy)
        try:
            await self._fill(run, keys, hierarchy, time.monotonic() + min(wait_s, OPEN_WAIT_MAX_S))
        except BaseException:
            run.let_go()
            raise
        return run

    async def _fill(self, run: HeldRun, keys: Sequence[bytes], hierarchy: Hierarchy, deadline: float) -> None:
        """Walk the keys with a few reads ahead; the first that isn't there, isn't good or isn't in time ends it.

        A read takes the slot of the oldest chunk that nobody holds; one of this very run only where all is the run's.
        """
        hierarchy.touch_run(keys)
        ahead: Iterator[bytes] = iter(keys)
        pending: deque[tuple[bytes, _Load | None]] = deque()
        is_ended = False
        while True:
            while not is_ended and len(pending) < READS_PER_OPEN_MAX:
                key = next(ahead, None)
                found = hierarchy.find(key) if key is not None else None
                load = self._begin(key, hierarchy) if key is not None and found is None else None
                if key is None or (found is None and load is None):
                    is_ended = True
                    break
                if found is not None:
                    run.hold(found)
                elif load is not None:
                    load.waiting.append(run)
                pending.append((key, load))
            if not pending:
                return
            key, load = pending.popleft()
            if load is not None:
                done, _ = await asyncio.wait([load.task], timeout=max(0.0, deadline - time.monotonic()))
                if not done:
                    self._metrics.deadline_misses.inc()
                    return
                if not load.task.result():
                    return
                run.from_nvme.add(key)
            run.keys.append(key)

    def _begin(self, key: bytes, hierarchy: Hierarchy) -> _Load | None:
        """The load of a chunk, begun now if need be; `None` where there is no file, or no room."""
        load, entry = self._loads.get(key), self._nvme.find(key)
        # A load whose chunk is gone is on a drive in quarantine, and may never end.
        if entry is None or self._is_closing:
            return None
        if load is not None:
            return load
        if len(self._loads) >= LOADS_MAX:
            self._metrics.admission_refused.labels("nvme_reads_full").inc()
            return None
        self._admission.note_slot_taken()
        granted = hierarchy.reserve(entry.label, entry.length, entry.checksum, self, entry.identity)
        if granted.evicted:
            self._metrics.evictions.labels(DRAM, "demand").inc(granted.evicted)
        if granted.reservation is None:
            is_forgotten = granted.outcome is PutOutcome.FORGOTTEN
            reason = granted.outcome.value if is_forgotten else f"promote_{granted.outcome.value}"
            self._metrics.admission_refused.labels(reason).inc()
            return None
        # Wherever they lie, bytes are as old as they are.
        granted.reservation.written_at_s = entry.written_at_s
        load = self._loads[key] = _Load()
        load.task = self._group.create_task(self._read(load, entry, granted.reservation, hierarchy))
        return load

    async def _read(self, load: _Load, entry: NvmeEntry, reservation: Reservation, hierarchy: Hierarchy) -> bool:
        key = entry.label.storage_key
        try:
            if not await self._nvme.read(entry, hierarchy.arena, reservation.slot):
                hierarchy.abort(self, reservation.number)
                return False
            hierarchy.begin_commit(self, reservation.number)
            # The label may have become known while the file was read.
            newest = self._nvme.find(key)
            reservation.label = newest.label if newest is not None else entry.label
            outcome = hierarchy.finish_commit(reservation, entry.checksum)
            if outcome is PutOutcome.FORGOTTEN:
                self._metrics.admission_refused.labels(outcome.value).inc()
                return False
            found = hierarchy.find(key)
            if outcome is PutOutcome.CONFLICT or found is None:
                self._metrics.conflicts.inc()
                return False
            for run in load.waiting:
                run.hold(found)
            return True
        finally:
            del self._loads[key]
            self._dram.account()

    def _wanted(self, directory_keys: Collection[bytes]) -> Iterator[bytes]:
        hierarchy = self._dram.hierarchy
        for directory_key in directory_keys:
            for key in self._nvme.storage_keys(directory_key):
                is_there = hierarchy is not None and hierarchy.find(key) is not None
                if not is_there and key not in self._loads:
                    yield key

    async def _follow_hints(self) -> None:
        while True:
            if not self._hints:
                self._wake.clear()
                await self._wake.wait()
                continue
            key = next(iter(self._hints))
            del self._hints[key]
            hierarchy = self._dram.hierarchy
            if hierarchy is None or hierarchy.find(key) is not None:
                continue
            is_busy = len(self._loads) >= PREFETCH_LOADS_MAX
            load = None if is_busy or is_crowded(hierarchy) else self._begin(key, hierarchy)
            if load is None:
                self._metrics.prefetches_dropped.labels("busy" if is_busy else "no_room").inc()
                continue
            await asyncio.wait([load.task])
            if load.task.result():
                self._metrics.prefetched.inc()


def is_crowded(hierarchy: Hierarchy) -> bool:
    """Whether so many slots are held that those which can be had are left to engines."""
    return hierarchy.takeable_slots * PREFETCH_ROOM_FRACTION < hierarchy.arena.slots


def status_of(nvme: NvmeTier, promotion: Promotion) -> dict[str, Any]:
    """What the agent's `/status` shows of the NVMe tier."""
    return {**nvme.status(), "reads": promotion.loads}
