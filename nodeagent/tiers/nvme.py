"""The NVMe tier: chunks in files, behind DRAM; written and removed by one loop, read from a few threads.

Nothing here is on the path of a put or an open. `offer` queues a chunk that is in DRAM; the loop takes a file at a
time, in this order: bad files are removed, then labels written, then chunks. Because one loop does all three, no
removal can meet the file that took its place. Losing the drive costs hit rate: a read that fails is a miss; a write
that the drive refuses pauses writing for `WRITE_PAUSE_S`. Where only one chunk's place is strange (a folder stands
there, a link leads to it), that chunk isn't written, and the others are.

To make room: (1) files that were found at the start and not read yet, oldest first; (2) the oldest chunks, withdrawn
from the directory before their files go. A file that can't be removed stays counted, and is tried again later.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, TypeVarTuple

import xxhash

from directory.tiers import Tier
from nodeagent.errors import BudgetSpent, ChunkConflict, ChunkCorrupt
from nodeagent.labels import ChunkLabel
from nodeagent.messages import PutOutcome
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.chunk_file import FileHeader, file_bytes
from nodeagent.tiers.dram import Withdrawn
from nodeagent.tiers.eviction import POLICIES
from nodeagent.tiers.file_store import ERRORS_OF_ONE_PLACE, Store
from nodeagent.tiers.hierarchy import Entry, Hierarchy
from nodeagent.tiers.nvme_index import NvmeEntry, NvmeIndex
from nodeagent.tiers.read_rate import ReadRate

READ_THREADS = 4
WRITES_QUEUED_MAX = 65_536
LABELS_QUEUED_MAX = 65_536
WRITE_PAUSE_S = 10.0
CLOSE_WAIT_MAX_S = 5.0
"""How long `close` waits for reads and writes under way: a drive that hangs may never end them."""
VICTIMS_PER_STEP_MAX = 64
ROOM_FRACTION = 100
"""Making room frees one part in so many of the quota, so that it isn't done for every write."""
STUCK_FILES_MAX = 4_096
NVME = Tier.NVME.label

logger = logging.getLogger(__name__)

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class NvmeTier:
    """One host's chunks on disk. `store` is open already; `close` leaves it to its caller.

    `on_change` hears newest states, and `withdrawn` waits, as in `DramTier`. `write_pause_s` is how long writing
    stops after an error.
    """

    def __init__(
        self,
        store: Store,
        quota_bytes: int,
        on_change: Callable[[bytes, int], None],
        withdrawn: Withdrawn,
        metrics: AgentMetrics,
        *,
        policy: str = "lru",
        write_pause_s: float = WRITE_PAUSE_S,
    ) -> None:
        self.store = store
        self.quota_bytes = quota_bytes
        self.index = NvmeIndex(POLICIES[policy](), on_change)
        self.is_restoring = True
        self._rate = ReadRate()
        self._withdrawn = withdrawn
        self._metrics = metrics
        self._write_pause_s = write_pause_s
        self._paused_until = 0.0
        self._is_failing = False
        self._is_strange_told = False
        self._is_closing = False
        self._is_listed = asyncio.Event()
        self._wake = asyncio.Event()
        self._doomed: dict[bytes, int] = {}
        self._stuck: dict[bytes, int] = {}
        self._labels: dict[bytes, None] = {}
        self._writes: dict[bytes, Hierarchy] = {}
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="warmroute-nvme-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="warmroute-nvme-write")
        self._jobs: set[Future[Any]] = set()
        metrics.bytes_limit.labels(NVME).set(quota_bytes)
        metrics.bytes_used.labels(NVME).set(0)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, with those that aren't read yet or couldn't be removed."""
        return self.index.used_bytes

    @property
    def read_bytes_per_s(self) -> float:
        """How fast chunks come from the drive, verified: measured while it was busy (see `ReadRate`)."""
        return self._rate.bytes_per_s

    @property
    def queued_writes(self) -> int:
        """Chunks that wait to be written."""
        return len(self._writes)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is written for the moment, because the drive refused."""
        return time.monotonic() < self._paused_until

    def meet(self, label: ChunkLabel, length: int, checksum: bytes) -> PutOutcome | None:
        """A put of a key that is on disk: HAVE (and the label may become known) or CONFLICT; `None` where it isn't."""
        known = self.index.get(label.storage_key)
        if known is None:
            return None
        if (known.length, known.checksum) != (length, checksum):
            return PutOutcome.CONFLICT
        self._learn(known, label)
        return PutOutcome.HAVE

    def learn(self, label: ChunkLabel) -> None:
        """A label has become known; the file's header learns it too, in its turn."""
        known = self.index.get(label.storage_key)
        if known is not None:
            self._learn(known, label)

    def offer(self, hierarchy: Hierarchy, key: bytes) -> None:
        """Queue a chunk that is in DRAM to be written. Never waits: what can't be queued is counted."""
        if self.index.get(key) is not None or key in self._writes:
            return
        if self.is_paused:
            self._refuse("nvme_paused")
        elif len(self._writes) >= WRITES_QUEUED_MAX:
            self._refuse("nvme_queue_full")
        elif (entry := hierarchy.find(key)) is not None and not self.store.may_write(file_bytes(entry.length)):
            self._refuse("endurance")
        else:
            self._writes[key] = hierarchy
            self._wake.set()

    async def read(self, entry: NvmeEntry, arena: Arena, slot: int) -> bool:
        """Fill a slot with a chunk's verified bytes. `False` is a miss; a bad file goes, and its placement first."""
        started, read_bytes = time.monotonic(), 0
        self._rate.begin(started)
        try:
            await self.in_thread(self._readers, self._read_file, entry, arena, slot)
            read_bytes = entry.length
        except ChunkCorrupt as error:
            self._metrics.checksum_failures.inc()
            logger.error("a chunk on disk is bad and is removed: %s", error)
            self.doom(entry, "corrupt")
            return False
        except FileNotFoundError:
            logger.warning("a chunk's file is gone from disk; somebody else removed it")
            self.doom(entry, "vanished")
            return False
        except OSError as error:
            self._metrics.degraded.labels("nvme_read_failed").inc()
            logger.error("a chunk on disk can't be read and is removed: %s", error)
            self.doom(entry, "unreadable")
            return False
        finally:
            self._rate.end(time.monotonic(), read_bytes)
        self._metrics.read_seconds.labels(NVME).observe(time.monotonic() - started)
        self.index.touch(entry.label.storage_key)
        return True

    def doom(self, entry: NvmeEntry, reason: str) -> None:
        """Withdraw a chunk whose file is bad, and have the file removed."""
        if self.index.drop(entry):
            self._metrics.evictions.labels(NVME, reason).inc()
            self.doom_file(entry.name, entry.size_bytes)

    def doom_file(self, name: bytes, size_bytes: int) -> None:
        """Have a file removed that nobody finds; its bytes stay counted until it is gone."""
        self._doomed[name] = size_bytes
        self._wake.set()

    def account(self) -> None:
        """Bring the gauge of bytes in use up to date after a change."""
        self._metrics.bytes_used.labels(NVME).set(self.index.used_bytes)

    def note_listed(self) -> None:
        """All files that were there before are counted: writing may begin."""
        self.account()
        self._is_listed.set()

    async def run(self) -> None:
        """Remove and write until `close`."""
        await self._is_listed.wait()
        while not self._is_closing:
            try:
                if not await self._step():
                    await self._wake.wait()
                    self._wake.clear()
            except Exception:  # the edge of the loop: one file's fault must not end all writing
                logger.exception("writing to nvme met a fault")
                self._pause()

    async def in_thread(
        self, threads: Executor, function: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Have a job done that touches the store; `close` waits for it, even where nobody else does any more."""
        job = threads.submit(function, *arguments)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await asyncio.wrap_future(job)

    async def close(self, running: asyncio.Task[None]) -> bool:
        """End the loop (`running`), which finishes the file in hand, then the threads, within `CLOSE_WAIT_MAX_S`.

        Returns `False` where jobs hang: they may still use the store, and slots of the arena, so both must stay.
        """
        self._is_closing = True
        self._is_listed.set()
        self._wake.set()
        deadline = time.monotonic() + CLOSE_WAIT_MAX_S
        done, _ = await asyncio.wait([running], timeout=CLOSE_WAIT_MAX_S)
        if not done:
            running.cancel()
            await asyncio.wait([running])
        for threads in (self._readers, self._writer):
            threads.shutdown(wait=False, cancel_futures=True)
        under_way = list(self._jobs)
        hanging = (await asyncio.to_thread(wait, under_way, max(0.0, deadline - time.monotonic()))).not_done
        if hanging:
            logger.warning("the drive doesn't end %d reads or writes; the agent ends without them", len(hanging))
        return not hanging

    async def _step(self) -> bool:
        """Handle one file; returns whether there was one."""
        if self._doomed:
            name, size = self._doomed.popitem()
            await self._remove([(name, size)])
        elif self._labels:
            key, _ = self._labels.popitem()
            await self._write_label(key)
        elif self._writes:
            key = next(iter(self._writes))
            await self._write(self._writes.pop(key), key)
        else:
            return False
        self.account()
        return True

    async def _write(self, hierarchy: Hierarchy, key: bytes) -> None:
        entry = hierarchy.find(key)
        if entry is None:
            self._refuse("nvme_evicted_first")
        elif self.is_paused:
            self._refuse("nvme_paused")
        elif self.index.get(key) is None and not self.store.may_write(file_bytes(entry.length)):
            # Before room is made: a chunk that may not be written must not cost another one its place.
            self._refuse("endurance")
        elif self.index.get(key) is None:
            # Held as by a reader: the slot isn't reused while its bytes are written.
            hierarchy.hold(entry)
            try:
                if await self._make_room(file_bytes(entry.length)):
                    await self._write_file(hierarchy.arena, entry)
                else:
                    self._refuse("nvme_quota")
            finally:
                hierarchy.let_go(entry)

    async def _write_file(self, arena: Arena, entry: Entry) -> None:
        header = FileHeader(entry.label, entry.identity, entry.length, entry.checksum)
        try:
            is_new = await self._in_writer(_write_slot, self.store, header, arena, entry.slot)
        except ChunkConflict:
            self._metrics.conflicts.inc()
            self._refuse("nvme_conflict")
            logger.error("a chunk isn't written: other bytes are on disk under its key; an identity may be incomplete")
            return
        except ChunkCorrupt as error:
            self._metrics.checksum_failures.inc()
            self._refuse("nvme_corrupt")
            logger.error("a chunk isn't written: %s", error)
            return
        except BudgetSpent:
            self._refuse("endurance")
            return
        except OSError as error:
            self._refuse(self._note_failure(error))
            return
        self._note_success()
        if is_new:
            self._metrics.write_bytes.labels(NVME).inc(entry.length)
        written = NvmeEntry(header.label, entry.identity, entry.length, entry.checksum)
        # A file of this name that was still to be removed has been replaced: counted once, and there to stay.
        self.index.used_bytes -= self._stuck.pop(written.name, 0) + self._doomed.pop(written.name, 0)
        self.index.add(written)
        # Where the label became known during the write, or the file that was there had none.
        self._learn(written, entry.label)
        if not is_new:
            self._queue_label(written.label.storage_key)

    async def _write_label(self, key: bytes) -> None:
        entry = self.index.get(key)
        if entry is None or self.is_paused:
            return
        try:
            await self._in_writer(self.store.update_label, entry.label)
        except ChunkCorrupt as error:
            self._metrics.checksum_failures.inc()
            logger.error("a chunk on disk is bad and is removed: %s", error)
            self.doom(entry, "corrupt")
        except FileNotFoundError:
            self.doom(entry, "vanished")
        except BudgetSpent:
            # It is known until the next start.
            self._metrics.degraded.labels("nvme_label_unwritten").inc()
        except OSError as error:
            self._note_failure(error)

    async def _make_room(self, size_bytes: int) -> bool:
        """Evict until a file of this size fits the quota; returns whether it does."""
        if size_bytes > self.quota_bytes:
            return False
        if self.index.used_bytes + size_bytes <= self.quota_bytes:
            return True
        await self._remove(self._take_stuck())
        ahead = self.quota_bytes // ROOM_FRACTION
        while (excess := self.index.used_bytes + size_bytes - self.quota_bytes) > 0:
            files = self._take_listed(excess + ahead)
            if not files:
                victims = self.index.take_victims(excess + ahead, VICTIMS_PER_STEP_MAX)
                await self._withdrawn([key for each in victims if (key := each.label.directory_key) is not None])
                files = [(each.name, each.size_bytes) for each in victims]
            if not files:
                return False
            self._metrics.evictions.labels(NVME, "quota").inc(len(files))
            await self._remove(files)
        return True

    def _take_listed(self, size_bytes: int) -> list[tuple[bytes, int]]:
        files: list[tuple[bytes, int]] = []
        while size_bytes > 0 and len(files) < VICTIMS_PER_STEP_MAX:
            oldest = self.index.take_oldest_listed()
            if oldest is None:
                break
            files.append(oldest)
            size_bytes -= oldest[1]
        return files

    def _take_stuck(self) -> list[tuple[bytes, int]]:
        files = list(self._stuck.items())[:VICTIMS_PER_STEP_MAX]
        for name, _ in files:
            del self._stuck[name]
        return files

    async def _remove(self, files: Sequence[tuple[bytes, int]]) -> None:
        """Remove files nobody finds any more. One that can't be removed stays counted, and doesn't stop the others."""
        if not files:
            return
        errors = await self._in_writer(_remove_each, self.store, [name for name, _ in files])
        for (name, size), error in zip(files, errors, strict=True):
            if error is None:
                self.index.used_bytes -= size
                continue
            if len(self._stuck) < STUCK_FILES_MAX:
                self._stuck[name] = size
            self._metrics.degraded.labels("nvme_unremovable").inc()
            logger.error("a file of the nvme tier can't be removed; its bytes stay counted: %s", error)

    def _learn(self, known: NvmeEntry, label: ChunkLabel) -> None:
        if known.label.directory_key is None and label.directory_key is not None:
            self.index.set_label(known, label)
            self._queue_label(label.storage_key)

    def _queue_label(self, key: bytes) -> None:
        """A label that finds no room in the queue is known until the next start."""
        if len(self._labels) < LABELS_QUEUED_MAX:
            self._labels[key] = None
            self._wake.set()

    def _refuse(self, reason: str) -> None:
        self._metrics.admission_refused.labels(reason).inc()

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + self._write_pause_s

    def _note_failure(self, error: OSError) -> str:
        """Pause writing where the drive is at fault. Returns the reason to count a chunk under."""
        if error.errno in ERRORS_OF_ONE_PLACE:
            if not self._is_strange_told:
                self._is_strange_told = True
                logger.warning("a chunk can't be written, for what stands at its place; others are written: %s", error)
            return "nvme_strange"
        self._pause()
        self._metrics.degraded.labels("nvme_write_failed").inc()
        if not self._is_failing:
            self._is_failing = True
            logger.error("the drive refuses to be written; the nvme tier is read only until it recovers: %s", error)
        return "nvme_error"

    def _note_success(self) -> None:
        self._is_strange_told = False
        if self._is_failing:
            self._is_failing = False
            logger.info("the drive takes writes again")

    def _read_file(self, entry: NvmeEntry, arena: Arena, slot: int) -> None:
        with arena.view(slot, entry.length) as view:
            header = self.store.read_into(entry.label.storage_key, view)
        if header.checksum != entry.checksum:
            raise ChunkCorrupt("a file holds other bytes than were indexed")

    async def _in_writer(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        return await self.in_thread(self._writer, function, *arguments)


def _write_slot(store: Store, header: FileHeader, arena: Arena, slot: int) -> bool:
    with arena.view(slot, header.length) as view:
        if xxhash.xxh3_128_digest(view) != header.checksum:
            raise ChunkCorrupt("its slot doesn't hold its bytes any more")
        return store.put(header, view)


def _remove_each(store: Store, names: Sequence[bytes]) -> list[OSError | None]:
    errors: list[OSError | None] = []
    for name in names:
        try:
            store.remove(name)
            errors.append(None)
        except OSError as error:
            errors.append(error)
    return errors
