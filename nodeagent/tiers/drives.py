"""The NVMe tier of a host: its drives as one. Every chunk has a drive of its own; what is found elsewhere is used too.

A new chunk goes to the drive that weighted rendezvous hashing chooses (highest random weight, by quota): adding or
removing a drive moves the share of that drive only, and needs no table. A drive that is in quarantine or refuses to
be written is passed over, so the next in a chunk's own order has it meanwhile. Finding asks all drives: they are few,
and it costs a look into a table each.

A drive's index keeps parents newer than their children as far as it sees them, and a chain's next chunk lies elsewhere.
So the deepest chunks that were written or read of each chain are remembered, and touched with all their ancestors, on
all drives, once nothing more of it is under way: one walk a chain, not one a chunk.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from directory.tiers import Tier
from nodeagent.labels import ChunkLabel
from nodeagent.messages import PutOutcome
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.hierarchy import Hierarchy
from nodeagent.tiers.load_cost import LoadCost
from nodeagent.tiers.nvme_index import NvmeEntry
from nodeagent.tiers.read_rate import ReadRate

DRIVES_MAX = 64
TIPS_MAX = 64
"""So many chains are remembered to be touched; one more, and all are touched now."""


def cost(key: bytes, name: str, weight: float) -> float:
    """The lowest of these names a chunk's drive: -ln(u) / weight, u uniform in (0, 1) by key and name.

    Weighted rendezvous hashing: Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", 2005.
    """
    drawn = xxhash.xxh3_64_intdigest(key, seed=xxhash.xxh3_64_intdigest(name.encode()))
    return -math.log((drawn + 0.5) / 2**64) / weight


class NvmeTier:
    """One host's chunks on disk. Drives are added before anything is asked; `on_change` is as in `Hierarchy`."""

    def __init__(self, on_change: Callable[[bytes, int], None]) -> None:
        self.drives: list[Drive] = []
        self.writers: list[FileWriter] = []
        self._on_change = on_change
        self._rate: ReadRate | None = None
        self._reads = 0
        self._tips: dict[bytes, None] = {}

    def __len__(self) -> int:
        return sum(len(drive.index) for drive in self.drives)

    @property
    def quota_bytes(self) -> int:
        """The quotas of all drives."""
        return sum(drive.quota_bytes for drive in self.drives)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files on drives that are in use."""
        return sum(drive.used_bytes for drive in self.drives)

    @property
    def queued_writes(self) -> int:
        """Chunks that wait to be written."""
        return sum(writer.queued_writes for writer in self.writers)

    @property
    def read_cost(self) -> LoadCost:
        """What a run of chunks from the drives together costs, verified (see `ReadRate`)."""
        return self._measured().cost

    def add(self, drive: Drive, writer: FileWriter) -> None:
        """One drive more, made with `note_change` as its `on_change`, and its writer."""
        assert len(self.drives) < DRIVES_MAX, "drives are few"
        self.drives.append(drive)
        self.writers.append(writer)
        writer.on_written = self.note_use

    def note_change(self, directory_key: bytes, mask: int) -> None:
        """A drive has a chunk, or hasn't any more: what is so of all of them together is passed on."""
        self._on_change(directory_key, mask or self._mask_of(directory_key))

    def withdraw(self, directory_keys: Sequence[bytes]) -> None:
        """A drive has lost these: what no other drive holds is reported gone."""
        for key in directory_keys:
            self.note_change(key, 0)

    def find(self, key: bytes) -> NvmeEntry | None:
        """The chunk under this storage key, if a file is known to hold it."""
        drive = self._holder(key)
        return drive.index.get(key) if drive is not None else None

    def holds(self, key: bytes) -> bool:
        """Whether a file is known to hold the chunk under this storage key."""
        return self._holder(key) is not None

    def storage_keys(self, directory_key: bytes) -> Sequence[bytes]:
        """The storage keys of the chunks with this label."""
        found = [key for drive in self.drives for key in drive.index.storage_keys(directory_key)]
        return list(dict.fromkeys(found))

    def touch(self, key: bytes) -> None:
        """A chunk was used, and with it its ancestors: each drive's own part of the chain."""
        below, position = None, None
        while (drive := self._holder(key)) is not None:
            label = drive.index.label(key)
            if position is not None and label.position != position - 1:
                return
            # A drive's index walks up its own part by itself.
            if drive is not below:
                drive.index.touch(key)
            if label.parent is None:
                return
            key, position, below = label.parent, label.position, drive

    def note_use(self, label: ChunkLabel) -> None:
        """A chunk was written or read, or its place has become known: its ancestors are touched soon, on all drives."""
        if len(self.drives) < 2:
            return
        if label.parent is not None:
            self._tips.pop(label.parent, None)
        self._tips[label.storage_key] = None
        self._settle()

    def meet(self, label: ChunkLabel, length: int, checksum: bytes) -> PutOutcome | None:
        """A put of a key that is on disk: HAVE (and the label may become known) or CONFLICT; `None` where it isn't."""
        for writer in self.writers:
            outcome = writer.meet(label, length, checksum)
            if outcome is not None:
                return outcome
        return None

    def learn(self, label: ChunkLabel) -> None:
        """A label has become known; the file's header learns it too, in its turn."""
        for writer in self.writers:
            writer.learn(label)
        if self.holds(label.storage_key):
            self.note_use(label)

    def offer(self, hierarchy: Hierarchy, key: bytes) -> None:
        """Queue a chunk that is in DRAM to be written to its drive. Never waits: what can't be queued is counted."""
        if not self.holds(key):
            self.writers[self.choose(key)].offer(hierarchy, key)

    def choose(self, key: bytes) -> int:
        """The number of the drive that a new chunk is written to."""
        numbers = range(len(self.drives))
        if len(numbers) == 1:
            return 0
        able = [number for number in numbers if not self.drives[number].is_paused] or numbers
        return min(able, key=lambda number: cost(key, self.drives[number].name, self.drives[number].quota_bytes))

    async def read(self, entry: NvmeEntry, arena: Arena, slot: int) -> bool:
        """Fill a slot with a chunk's verified bytes; `False` is a miss. See `Drive.read`."""
        rate, is_read = self._measured(), False
        rate.begin(time.monotonic())
        self._reads += 1
        try:
            drive = self._holder(entry.label.storage_key)
            is_read = drive is not None and await drive.read(entry, arena, slot)
            return is_read
        finally:
            self._reads -= 1
            if is_read:
                self.note_use(entry.label)
            self._settle()
            rate.end(time.monotonic(), entry.length if is_read else 0)

    def status(self) -> dict[str, Any]:
        """What the agent's `/status` shows of it."""
        return {
            "bytes_used": self.used_bytes,
            "bytes_limit": self.quota_bytes,
            "chunks": len(self),
            "is_restoring": any(drive.is_restoring for drive in self.drives),
            "unread_files": sum(drive.index.listed_files for drive in self.drives),
            "is_write_paused": any(drive.is_paused for drive in self.drives),
            "queued_writes": self.queued_writes,
            "drives": [drive.status() for drive in self.drives],
        }

    async def close(self, running: Sequence[asyncio.Task[None]]) -> bool:
        """End all drives' loops, `running` in their order; `False` where one hangs. See `Drive.close`."""
        pairs = zip(self.drives, running, strict=True)
        return all(await asyncio.gather(*(drive.close(task) for drive, task in pairs)))

    def _settle(self) -> None:
        """Touch what was used, once reads and writes rest; or before too much of it is remembered."""
        if len(self._tips) <= TIPS_MAX and (self._reads or self.queued_writes):
            return
        tips, self._tips = self._tips, {}
        for key in tips:
            self.touch(key)

    def _measured(self) -> ReadRate:
        """Begins with what the drives' self-tests showed."""
        if self._rate is None:
            costs = [drive.rate.cost for drive in self.drives]
            believed = LoadCost(max(each.fixed_s for each in costs), sum(each.bytes_per_s for each in costs))
            self._rate = ReadRate(believed)
        return self._rate

    def _holder(self, key: bytes) -> Drive | None:
        """The drive that a chunk is read from."""
        return next((drive for drive in self.drives if key in drive.index), None)

    def _mask_of(self, directory_key: bytes) -> int:
        return int(Tier.NVME) if any(drive.index.has_label(directory_key) for drive in self.drives) else 0
