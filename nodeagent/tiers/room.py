"""Room on one drive: which files go, so that others fit its quota, and the file system keeps what it must.

To make room: (1) files that were found at the start and not read yet, oldest first; (2) the oldest chunks, withdrawn
from the directory before their files go. A file that can't be removed stays counted, and is tried again later.

Work goes ahead of need, between two watermarks one and two parts in `ROOM_FRACTION` below the quota (or what the file
system leaves of it), where those hold a file at all. A drive that says it is full, whatever else the numbers say, is
owed that many bytes.

What is free on the file system is looked at now and then, and reckoned in between. Where others fill it, the tier
gives way, down to its last file.
"""

import logging
import time
from collections.abc import Callable, Sequence

from directory.tiers import Tier
from nodeagent.errors import DriveAway, TierUnavailable
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.dram import Withdrawn
from nodeagent.tiers.drive_threads import DriveThreads
from nodeagent.tiers.file_store import Space, Store
from nodeagent.tiers.nvme_index import NvmeIndex

VICTIMS_PER_STEP_MAX = 64
ROOM_FRACTION = 100
"""Making room frees one part in so many of all there can be, so that it isn't done for every write."""
STUCK_FILES_MAX = 4_096
LOOK_S = 5.0
"""How old a look at the file system's free bytes may be."""
MIN_FREE_FRACTION = 20
"""One part in so many of a file system stays free, where nothing else is said."""
NVME = Tier.NVME.label

logger = logging.getLogger(__name__)


def min_free_of(space: Space, min_free_bytes: int | None) -> int:
    """What must stay free of a file system: as said, or a share of it."""
    return space.total_bytes // MIN_FREE_FRACTION if min_free_bytes is None else min_free_bytes


class Room:
    """The account of one drive's room, and the hand that makes some. Everything takes the drive's index of now.

    `is_crowded` while others fill the file system so far that not one file more fits, whatever is evicted.
    """

    def __init__(
        self,
        store: Store,
        threads: DriveThreads,
        quota_bytes: int,
        min_free_bytes: int | None,
        withdrawn: Withdrawn,
        metrics: AgentMetrics,
        clock: Callable[[], float] = time.monotonic,
        name: str = "nvme",
    ) -> None:
        self._name = name
        self.doomed: dict[bytes, int] = {}
        self.stuck: dict[bytes, int] = {}
        self.owed_bytes = 0
        self.is_crowded = False
        self._store = store
        self._threads = threads
        self._quota_bytes = quota_bytes
        self._min_free_bytes = min_free_bytes
        self._withdrawn = withdrawn
        self._metrics = metrics
        self._clock = clock
        self._spare_bytes: int | None = None
        self._looked_at = 0.0
        self._largest_bytes = 0
        self._lives = 0

    def check_fits(self, name: str, space: Space) -> None:
        """Raises `TierUnavailable` for a quota that the drive's file system could never hold."""
        min_free = min_free_of(space, self._min_free_bytes)
        if self._quota_bytes > space.total_bytes - min_free:
            raise TierUnavailable(
                f"an nvme quota of {self._quota_bytes:,} bytes at {name} is refused: its file system has "
                f"{space.total_bytes:,} bytes, of which {min_free:,} stay free (nvme.min_free_gb); "
                + ("give less gb" if min_free < space.total_bytes else "give less min_free_gb")
            )

    def clear(self) -> None:
        """Forget what was to be done: the drive has failed."""
        self.doomed.clear()
        self.stuck.clear()
        self._lives += 1
        self.is_crowded = False
        self.owed_bytes, self._spare_bytes = 0, None

    def note_written(self, name: bytes, size_bytes: int, index: NvmeIndex) -> None:
        """A file was written; one of its name that was still to be removed has been replaced: counted once."""
        index.used_bytes -= self.stuck.pop(name, 0) + self.doomed.pop(name, 0)
        self._note_spare(-size_bytes)

    def note_full(self, size_bytes: int) -> None:
        """The drive had no room for a file, though it should have had."""
        self.owed_bytes = max(self.owed_bytes, size_bytes)

    async def make(self, size_bytes: int, index: NvmeIndex) -> bool:
        """Evict until a file of this size fits; returns whether it does."""
        if size_bytes > self._quota_bytes:
            return False
        life, fits = self._lives, await self._make(size_bytes, index)
        if life == self._lives:
            self._note_crowded(0 if fits else max(0, self._lacking_bytes(size_bytes)))
        return fits

    async def _make(self, size_bytes: int, index: NvmeIndex) -> bool:
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        await self._look()
        if self._excess_bytes(size_bytes, index) <= 0:
            return True
        life = self._lives
        await self.remove(self._take_stuck(), index)
        while (excess := self._excess_bytes(size_bytes, index)) > 0:
            if not await self._evict(excess + self._step_bytes(index), index):
                # Nothing is left to give; what a full drive is owed shows at the next write.
                self.owed_bytes = 0
                return life == self._lives and self._excess_bytes(size_bytes, index) <= 0
        return life == self._lives

    async def work_ahead(self, index: NvmeIndex) -> bool:
        """Evict down to the lower watermark where the upper one is passed; returns whether something went.

        Where the watermarks hold no file, or no file was written yet, the quota itself is the mark.
        """
        await self._look()
        step = self._step_bytes(index)
        ahead = step if step >= self._largest_bytes > 0 else 0
        excess = self._excess_bytes(ahead, index)
        is_evicted = excess > 0 and await self._evict(excess + ahead, index)
        if not is_evicted:
            self.owed_bytes = 0
        return is_evicted

    async def remove_doomed(self, index: NvmeIndex) -> bool:
        """Remove one file that nobody finds; returns whether there was one."""
        if not self.doomed:
            return False
        await self.remove([self.doomed.popitem()], index)
        return True

    async def remove(self, files: Sequence[tuple[bytes, int]], index: NvmeIndex) -> int:
        """Remove files nobody finds any more. One that can't be removed stays counted, and doesn't stop the others.

        Returns how many are gone.
        """
        life = self._lives
        if not files:
            return 0
        try:
            errors = await self._threads.do(_remove_each, self._store, [name for name, _ in files])
        except DriveAway as away:
            errors = [away] * len(files)
        gone = errors.count(None)
        if life != self._lives:
            return gone
        for (name, size), error in zip(files, errors, strict=True):
            if error is None:
                index.used_bytes -= size
                self._note_spare(size)
                self.owed_bytes = max(0, self.owed_bytes - size)
                continue
            if len(self.stuck) < STUCK_FILES_MAX:
                self.stuck[name] = size
            self._metrics.degraded.labels("nvme_unremovable").inc()
            logger.error("a file of the nvme tier can't be removed; its bytes stay counted: %s", error)
        return gone

    def _note_crowded(self, lacking_bytes: int) -> None:
        is_crowded = lacking_bytes > 0
        if is_crowded and not self.is_crowded:
            logger.warning(
                "nothing is written to %s: others fill its file system, which lacks %d bytes for one file beside what "
                "stays free (nvme.min_free_gb)",
                self._name,
                lacking_bytes,
            )
        elif self.is_crowded and not is_crowded:
            logger.info("there is room on the file system of %s again", self._name)
        self.is_crowded = is_crowded

    def _step_bytes(self, index: NvmeIndex) -> int:
        """What goes ahead of need: a part of what the drive can hold, be it less than the quota."""
        spare = self._spare_bytes if self._spare_bytes is not None else self._quota_bytes
        return min(self._quota_bytes, index.used_bytes + max(0, spare)) // ROOM_FRACTION

    def _excess_bytes(self, size_bytes: int, index: NvmeIndex) -> int:
        """By how much files of `size_bytes` more would be too many."""
        return max(index.used_bytes + size_bytes - self._quota_bytes, self._lacking_bytes(size_bytes))

    def _lacking_bytes(self, size_bytes: int) -> int:
        """The same, for what the file system must keep, and what it is owed."""
        lacking = size_bytes - self._spare_bytes if self._spare_bytes is not None else 0
        return max(lacking, self.owed_bytes)

    def _note_spare(self, size_bytes: int) -> None:
        if self._spare_bytes is not None:
            self._spare_bytes += size_bytes

    async def _look(self) -> None:
        now = self._clock()
        if self._spare_bytes is not None and now - self._looked_at < LOOK_S:
            return
        try:
            space = await self._threads.do(self._store.space)
        except (DriveAway, OSError):
            return
        self._looked_at = now
        self._spare_bytes = space.free_bytes - min_free_of(space, self._min_free_bytes)

    async def _evict(self, size_bytes: int, index: NvmeIndex) -> bool:
        life, files = self._lives, self._take_listed(size_bytes, index)
        if not files:
            victims = index.take_victims(size_bytes, VICTIMS_PER_STEP_MAX)
            await self._withdrawn([key for each in victims if (key := each.label.directory_key) is not None])
            files = [(each.name, each.size_bytes) for each in victims]
        # A drive that failed meanwhile is left as it is.
        if not files or life != self._lives:
            return False
        self._metrics.evictions.labels(NVME, "quota").inc(len(files))
        await self.remove(files, index)
        return True

    def _take_listed(self, size_bytes: int, index: NvmeIndex) -> list[tuple[bytes, int]]:
        files: list[tuple[bytes, int]] = []
        while size_bytes > 0 and len(files) < VICTIMS_PER_STEP_MAX:
            oldest = index.take_oldest_listed()
            if oldest is None:
                break
            files.append(oldest)
            size_bytes -= oldest[1]
        return files

    def _take_stuck(self) -> list[tuple[bytes, int]]:
        files = list(self.stuck.items())[:VICTIMS_PER_STEP_MAX]
        for name, _ in files:
            del self.stuck[name]
        return files


def _remove_each(store: Store, names: Sequence[bytes]) -> list[OSError | DriveAway | None]:
    errors: list[OSError | DriveAway | None] = []
    for name in names:
        try:
            store.remove(name)
            errors.append(None)
        except OSError as error:
            errors.append(error)
    return errors
