"""One drive of the NVMe tier: its chunks in files, behind DRAM, read from a few threads; and its life.

`FileWriter` writes and removes files. Losing the drive costs hit rate: a read that fails is a miss.

A drive that errs again and again, is gone or hangs is *quarantined* by `fail`: nothing is found, asked or written
any more, at once. What its chunks were is in an index that is nobody's then: `take_lost` gives it to whoever withdraws
them, and `reopen` begins anew with an empty one (`quarantine.py` says when). Whatever of the life before ends later
finds its index gone and changes nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nodeagent.errors import ChunkCorrupt, DriveAway, TombstonesUnreadable
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.dram import Withdrawn
from nodeagent.tiers.drive_faults import Fault, fault_of
from nodeagent.tiers.drive_threads import DriveThreads, hanging_after
from nodeagent.tiers.file_store import Store
from nodeagent.tiers.load_cost import LoadCost
from nodeagent.tiers.nvme_index import NvmeEntry, NvmeIndex
from nodeagent.tiers.read_rate import BELIEVED, ReadRate
from nodeagent.tiers.room import NVME, Room
from nodeagent.tiers.self_test import SelfTest
from nodeagent.tiers.tombstone_file import NAME
from nodeagent.tiers.tombstones import Tombstones, load_tombstones
from nodeagent.tiers.write_pause import WRITE_PAUSE_S, WritePause

READ_THREADS = 4
READS_MAX = 132
"""Reads under way and waiting, per drive."""
READ_ERRORS_MAX = 3
"""So many reads in a row that the drive fails are its end, for a while."""
OPEN_WAIT_MAX_S = 5.0
"""How long an agent's start waits for its drives; one that takes longer begins in quarantine."""
CLOSE_WAIT_MAX_S = 5.0
"""How long `close` waits for reads and writes under way: a drive that hangs may never end them."""

logger = logging.getLogger(__name__)


class Drive:
    """One drive's chunks. Open it, or its `store`, before anything else; `close` leaves the store to its caller.

    `on_change` hears newest states, and `withdrawn` waits, as in `DramTier`. `write_pause_s` is how long writing
    stops after an error. `name` is what operators know the drive by. `on_failed`, which may be set, hears of `fail`.
    """

    def __init__(
        self,
        store: Store,
        quota_bytes: int,
        on_change: Callable[[bytes, int], None],
        withdrawn: Withdrawn,
        metrics: AgentMetrics,
        *,
        name: str = "nvme",
        min_free_bytes: int | None = None,
        write_pause_s: float = WRITE_PAUSE_S,
        read_threads: int = READ_THREADS,
        tombstones: Tombstones | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.store = store
        self.tombstones = tombstones if tombstones is not None else Tombstones()
        self.quota_bytes = quota_bytes
        self.is_up = True
        self.failed = asyncio.Event()
        self.failure = ""
        self.on_failed: Callable[[], None] = lambda: None
        self.is_restoring = True
        self._on_change = on_change
        self.index = self._empty_index()
        self._lost: NvmeIndex | None = None
        self._read_errors = 0
        self._accounted_bytes = 0
        self.tested: SelfTest | None = None
        self.rate = ReadRate()
        self._metrics = metrics
        self.pause = WritePause(name, write_pause_s, metrics, clock)
        self.is_closing = False
        self.listed = asyncio.Event()
        self.wake = asyncio.Event()
        self.reads, self.writes, self.listing = (
            DriveThreads(ThreadPoolExecutor(threads, thread_name_prefix=f"warmroute-nvme-{use}"), jobs_max, clock)
            for use, threads, jobs_max in (("read", read_threads, READS_MAX), ("write", 1, 2), ("list", 1, 2))
        )
        self.room = Room(store, self.writes, quota_bytes, min_free_bytes, withdrawn, metrics, clock, name)
        metrics.bytes_limit.labels(NVME).inc(quota_bytes)
        metrics.bytes_used.labels(NVME).inc(0)
        metrics.drive_up.labels(name).set(1)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, with those that aren't read yet or couldn't be removed."""
        return self.index.used_bytes

    @property
    def is_paused(self) -> bool:
        """Whether nothing is written for the moment, because the drive refused."""
        return not self.is_up or self.pause.is_on

    @property
    def has_jobs(self) -> bool:
        """Whether a thread may still use the store, or a slot of the arena."""
        return any(threads.jobs for threads in self._threads)

    def oldest_job_s(self) -> float:
        """For how long the oldest job goes on."""
        return max(threads.oldest_s() for threads in self._threads)

    async def read(self, entry: NvmeEntry, arena: Arena, slot: int) -> bool:
        """Fill a slot with a chunk's verified bytes. `False` is a miss; a bad file goes, and its placement first.

        That is no use yet: who opens a run touches all of it once, where each read would walk up to its root.
        """
        started, read_bytes = time.monotonic(), 0
        self.rate.begin(started)
        try:
            await self.reads.do(self._read_file, entry, arena, slot)
            read_bytes = entry.length
        except DriveAway:
            self._metrics.degraded.labels("nvme_drive_away").inc()
            return False
        except ChunkCorrupt as error:
            self._metrics.checksum_failures.inc()
            logger.error("a chunk on disk is bad and is removed: %s", error)
            self.doom(entry, "corrupt")
            return False
        except FileNotFoundError:
            logger.warning("a chunk's file is gone from disk; somebody else removed it")
            self.doom(entry, "vanished")
            if not self.store.is_there():
                self.fail("its folder is gone")
            return False
        except OSError as error:
            self._note_read_failure(entry, error)
            return False
        finally:
            self.rate.end(time.monotonic(), read_bytes)
        self._read_errors = 0
        self._metrics.read_seconds.labels(NVME).observe(time.monotonic() - started)
        return True

    def doom(self, entry: NvmeEntry, reason: str) -> None:
        """Withdraw a chunk whose file is bad, and have the file removed."""
        if self.index.drop(entry):
            self._metrics.evictions.labels(NVME, reason).inc()
            self.doom_file(entry.name, entry.size_bytes)

    def doom_file(self, name: bytes, size_bytes: int) -> None:
        """Have a file removed that nobody finds; its bytes stay counted until it is gone."""
        if self.is_up:
            self.room.doomed[name] = size_bytes
            self.wake.set()

    def account(self) -> None:
        """Bring the gauge of bytes in use up to date after a change."""
        self._metrics.bytes_used.labels(NVME).inc(self.index.used_bytes - self._accounted_bytes)
        self._accounted_bytes = self.index.used_bytes

    def note_listed(self) -> None:
        """All files that were there before are counted: writing may begin."""
        self.account()
        self.listed.set()

    def status(self) -> dict[str, Any]:
        """What the agent's `/status` shows of it."""
        return {
            "drive": self.name,
            "is_up": self.is_up,
            "failure": None if self.is_up else self.failure,
            "bytes_used": self.used_bytes,
            "bytes_limit": self.quota_bytes,
            "chunks": len(self.index),
            "is_restoring": self.is_restoring,
            "is_write_paused": self.is_paused,
            "is_crowded": self.room.is_crowded,
            "is_direct": self.tested is not None and self.tested.is_direct,
            "direct_refusal": self.tested.direct_refusal if self.tested is not None else None,
            "read_bytes_per_s": round(self.rate.cost.bytes_per_s),
            "read_fixed_s": round(self.rate.cost.fixed_s, 6),
        }

    def fail(self, reason: str) -> None:
        """Put the drive into quarantine: its chunks are found no more, what waits for it is a miss."""
        if not self.is_up:
            return
        self.is_up, self.failure = False, reason
        self._metrics.degraded.labels("nvme_quarantined").inc()
        self._metrics.drive_up.labels(self.name).set(0)
        logger.error(
            "the drive %s is put into quarantine (%s); its %d chunks are withdrawn", self.name, reason, len(self.index)
        )
        self._lost, self.index = self.index, self._empty_index()
        self.listed.clear()
        self.room.clear()
        for threads in self._threads:
            threads.drop_queued()
        self.account()
        self.on_failed()
        self.wake.set()
        self.failed.set()

    def take_lost(self) -> NvmeIndex:
        """What a drive that failed held: what no other drive holds is to be withdrawn."""
        lost, self._lost = self._lost, None
        return lost if lost is not None else self._empty_index()

    async def open(self) -> None:
        """Open the store. A drive that errs or hangs begins in quarantine.

        Raises `TierUnavailable` where the place mustn't be used, or can't hold the quota.
        """
        try:
            async with asyncio.timeout(OPEN_WAIT_MAX_S):
                self.tested = await self.listing.do(self.store.open)
                space = await self.listing.do(self.store.space)
        except TimeoutError:
            self.fail("it hangs")
        except (OSError, DriveAway) as error:
            self.fail(f"it can't be opened: {error}")
        else:
            self.rate = ReadRate(_believed_of(self.tested))
            self.room.check_fits(self.name, space)

    async def reopen(self) -> None:
        """Leave quarantine with an empty index. Raises `TierUnavailable`, `OSError` or `DriveAway`: not yet.

        Nothing may be under way: a thread that still used the store would use other files' descriptors.
        """
        assert not self.has_jobs, "the drive is left alone until its threads are back"
        self.tested = await self.listing.do(_reopen, self.store)
        self._read_errors = 0
        self.is_up, self.is_restoring = True, True
        self.failed.clear()
        self._metrics.drive_up.labels(self.name).set(1)

    async def read_tombstones(self) -> None:
        """Learn what was forgotten, before anything is indexed. Raises `OSError`, `DriveAway` or `AgentError`."""
        data = await self.listing.do(self.store.read_tombstones)
        try:
            self.tombstones.merge(load_tombstones(data) if data is not None else ())
        except TombstonesUnreadable as error:
            raise TombstonesUnreadable(f"what was forgotten can't be read from its {NAME}: {error}") from error

    async def close(self, running: asyncio.Task[None]) -> bool:
        """End the loop (`running`), which finishes the file in hand, then the threads, within `CLOSE_WAIT_MAX_S`.

        Returns `False` where jobs hang: they may still use the store, and slots of the arena, so both must stay.
        """
        self.is_closing = True
        self.listed.set()
        self.wake.set()
        deadline = time.monotonic() + CLOSE_WAIT_MAX_S
        done, _ = await asyncio.wait([running], timeout=CLOSE_WAIT_MAX_S)
        if not done:
            running.cancel()
            await asyncio.wait([running])
        under_way = set()
        for threads in self._threads:
            threads.shutdown()
            under_way |= threads.jobs
        hanging = await asyncio.to_thread(hanging_after, under_way, max(0.0, deadline - time.monotonic()))
        if hanging:
            logger.warning("the drive doesn't end %d reads or writes; the agent ends without them", len(hanging))
        return not hanging

    def _note_read_failure(self, entry: NvmeEntry, error: OSError) -> None:
        """A chunk whose file can't be read is removed; the drive's errors are counted. Not where it's our own fault."""
        self._metrics.degraded.labels("nvme_read_failed").inc()
        fault = fault_of(error)
        if fault is Fault.PROCESS:
            logger.error("a chunk on disk couldn't be read, and stays: %s", error)
            return
        logger.error("a chunk on disk can't be read and is removed: %s", error)
        self.doom(entry, "unreadable")
        self._read_errors += 1
        if fault is Fault.GONE or self._read_errors >= READ_ERRORS_MAX:
            self.fail(f"it can't be read: {error}")

    def _read_file(self, entry: NvmeEntry, arena: Arena, slot: int) -> None:
        with arena.view(slot, entry.length) as view:
            header = self.store.read_into(entry.label.storage_key, view)
        if header.checksum != entry.checksum:
            raise ChunkCorrupt("a file holds other bytes than were indexed")

    @property
    def _threads(self) -> tuple[DriveThreads, DriveThreads, DriveThreads]:
        return self.reads, self.writes, self.listing

    def _empty_index(self) -> NvmeIndex:
        return NvmeIndex(self._on_change)


def _believed_of(tested: SelfTest) -> LoadCost:
    """What reads from a drive cost, by its self-test, until there were any."""
    fixed_s = BELIEVED.fixed_s if tested.read_fixed_s is None else tested.read_fixed_s
    return LoadCost(fixed_s, tested.read_bytes_per_s or BELIEVED.bytes_per_s)


def _reopen(store: Store) -> SelfTest:
    store.close()
    return store.open()
