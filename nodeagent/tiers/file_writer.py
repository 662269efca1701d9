"""The hand that writes and removes one drive's files: a loop that takes a file at a time.

Nothing here is on the path of a put or an open. `offer` queues a chunk that is in DRAM; the loop removes bad files,
makes room ahead (`room.py`), writes labels, then chunks, in this order. Because one loop does all of it, no removal
can meet the file that took its place. A write that the drive refuses pauses writing (`write_pause.py`). Where only one
chunk's place is strange (a folder stands there, a link leads to it), that chunk isn't written, and the others are.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container

import xxhash

from nodeagent.errors import BudgetSpent, ChunkConflict, ChunkCorrupt, ChunkForgotten, DriveAway
from nodeagent.labels import ChunkLabel
from nodeagent.messages import PutOutcome
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.chunk_file import FileHeader, file_bytes, name_of
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.drive_faults import Fault, fault_of
from nodeagent.tiers.file_store import Store
from nodeagent.tiers.hierarchy import Entry, Hierarchy
from nodeagent.tiers.nvme_index import NvmeEntry
from nodeagent.tiers.room import LOOK_S, NVME
from nodeagent.tiers.tombstones import Tombstones

WRITES_QUEUED_MAX = 65_536
LABELS_QUEUED_MAX = 65_536

logger = logging.getLogger(__name__)


class FileWriter:
    """Writes one drive's files. `Drive.close` ends its loop. `on_written`, which may be set, hears what was written."""

    def __init__(self, drive: Drive, metrics: AgentMetrics) -> None:
        self.on_written: Callable[[ChunkLabel], None] = lambda _: None
        self._drive = drive
        self._metrics = metrics
        self._labels: dict[bytes, None] = {}
        self._writes: dict[bytes, Hierarchy] = {}
        self._writing: bytes | None = None
        self._written = asyncio.Event()
        drive.on_failed = self._give_up

    @property
    def queued_writes(self) -> int:
        """Chunks that wait to be written."""
        return len(self._writes)

    def meet(self, label: ChunkLabel, length: int, checksum: bytes) -> PutOutcome | None:
        """A put of a key that is on disk: HAVE (and the label may become known) or CONFLICT; `None` where it isn't."""
        known = self._drive.index.get(label.storage_key)
        if known is None:
            return None
        if (known.length, known.checksum) != (length, checksum):
            return PutOutcome.CONFLICT
        self._learn(known, label)
        return PutOutcome.HAVE

    def learn(self, label: ChunkLabel) -> None:
        """A label has become known; the file's header learns it too, in its turn."""
        known = self._drive.index.get(label.storage_key)
        if known is not None:
            self._learn(known, label)

    def offer(self, hierarchy: Hierarchy, key: bytes) -> None:
        """Queue a chunk that is in DRAM to be written. Never waits: what can't be queued is counted."""
        if self._drive.index.get(key) is not None or key in self._writes or key == self._writing:
            return
        if not self._drive.is_up:
            self._refuse("nvme_quarantined")
        elif self._drive.is_paused:
            self._refuse("nvme_paused")
        elif len(self._writes) >= WRITES_QUEUED_MAX:
            self._refuse("nvme_queue_full")
        elif (entry := hierarchy.find(key)) is not None and not self._may_write(entry):
            self._refuse("endurance")
        else:
            self._writes[key] = hierarchy
            self._drive.wake.set()

    def forget(self, keys: Container[bytes]) -> int:
        """Of what waits to be written, or is being written, these chunks come to nothing; returns how many."""
        queued = [key for key in self._writes if key in keys]
        for key in queued:
            del self._writes[key]
            self._refuse("forgotten")
        return len(queued) + (self._writing in keys)

    async def written(self, keys: Container[bytes]) -> None:
        """Wait until none of these is being written. The caller bounds the wait."""
        while self._writing in keys:
            await self._written.wait()

    async def run(self) -> None:
        """Remove and write until `close`."""
        while not self._drive.is_closing:
            try:
                await self._drive.listed.wait()
                if not await self._step():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await self._drive.wake.wait()
                    self._drive.wake.clear()
            except Exception:  # the edge of the loop: one file's fault must not end all writing
                logger.exception("writing to nvme met a fault")
                self._drive.pause.begin()

    async def _step(self) -> bool:
        """Handle one file; returns whether there was one."""
        if not self._drive.is_up:
            return False
        if await self._drive.room.remove_doomed(self._drive.index) or await self._drive.room.work_ahead(
            self._drive.index
        ):
            pass
        elif self._labels:
            key, _ = self._labels.popitem()
            await self._write_label(key)
        elif self._writes:
            self._writing = key = next(iter(self._writes))
            try:
                await self._write(self._writes.pop(key), key)
            finally:
                self._writing = None
                self._written.set()
                self._written = asyncio.Event()
        else:
            return False
        self._drive.account()
        return True

    async def _write(self, hierarchy: Hierarchy, key: bytes) -> None:
        entry = hierarchy.find(key)
        if entry is None:
            self._refuse("nvme_evicted_first")
        elif self._drive.is_paused:
            self._refuse("nvme_paused")
        elif self._drive.index.get(key) is None and not self._may_write(entry):
            # Before room is made: a chunk that may not be written must not cost another one its place.
            self._refuse("endurance")
        elif self._drive.index.get(key) is None:
            # Held as by a reader: the slot isn't reused while its bytes are written.
            hierarchy.hold(entry)
            try:
                if await self._drive.room.make(file_bytes(entry.length), self._drive.index):
                    await self._write_file(hierarchy.arena, entry)
                else:
                    if self._drive.room.is_crowded:
                        self._refuse("nvme_crowded")
                    else:
                        self._refuse("nvme_quota")
            finally:
                hierarchy.let_go(entry)

    async def _write_file(self, arena: Arena, entry: Entry) -> None:
        header = FileHeader(entry.label, entry.identity, entry.length, entry.checksum, entry.written_at_s)
        index = self._drive.index
        try:
            is_new = await self._drive.writes.do(
                _write_slot, self._drive.store, header, arena, entry.slot, self._drive.tombstones
            )
        except DriveAway:
            self._refuse("nvme_quarantined")
            return
        except ChunkForgotten:
            await self._remove_forgotten(header, 0)
            return
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
            self._refuse(self._note_failure(error, file_bytes(entry.length)))
            return
        if is_new:
            self._metrics.write_bytes.labels(NVME).inc(entry.length)
        if index is not self._drive.index:
            return
        self._drive.pause.note_success()
        if self._is_forgotten(entry):
            await self._remove_forgotten(header, file_bytes(entry.length) if is_new else 0)
            return
        written = NvmeEntry(header.label, entry.identity, entry.length, entry.checksum, written_at_s=entry.written_at_s)
        self._drive.room.note_written(written.name, written.size_bytes if is_new else 0, self._drive.index)
        self._drive.index.add(written)
        # Where the label became known during the write, or the file that was there had none.
        self.learn(entry.label)
        self.on_written(entry.label)
        if not is_new:
            self._queue_label(written.label.storage_key)

    async def _write_label(self, key: bytes) -> None:
        entry = self._drive.index.get(key)
        if entry is None or self._drive.is_paused:
            return
        try:
            await self._drive.writes.do(self._drive.store.update_label, entry.label)
        except DriveAway:
            return
        except ChunkCorrupt as error:
            self._metrics.checksum_failures.inc()
            logger.error("a chunk on disk is bad and is removed: %s", error)
            self._drive.doom(entry, "corrupt")
        except FileNotFoundError:
            self._drive.doom(entry, "vanished")
        except BudgetSpent:
            # It is known until the next start.
            self._metrics.degraded.labels("nvme_label_unwritten").inc()
        except OSError as error:
            self._note_failure(error)

    def _is_forgotten(self, entry: Entry) -> bool:
        found = self._drive.tombstones.find(entry.label, entry.identity, entry.written_at_s)
        return entry.is_forgotten or found is not None

    async def _remove_forgotten(self, header: FileHeader, size_bytes: int) -> None:
        """A chunk was forgotten while its file was written: the file goes, and whatever stood there before."""
        name, index = name_of(header.label.storage_key), self._drive.index
        self._refuse("forgotten")
        self._drive.room.note_written(name, size_bytes, index)
        index.used_bytes += size_bytes
        await self._drive.room.remove([(name, size_bytes)], index)

    def _may_write(self, entry: Entry) -> bool:
        return self._drive.store.may_write(file_bytes(entry.length))

    def _learn(self, known: NvmeEntry, label: ChunkLabel) -> None:
        if not label.adds_to(known.label):
            return
        if self._drive.tombstones.meet(label, known.identity, known.written_at_s):
            self._drive.doom(known, "forgotten")
        else:
            self._drive.index.set_label(known, label)
            self._queue_label(label.storage_key)

    def _queue_label(self, key: bytes) -> None:
        """A label that finds no room in the queue is known until the next start."""
        if len(self._labels) < LABELS_QUEUED_MAX:
            self._labels[key] = None
            self._drive.wake.set()

    def _give_up(self) -> None:
        """The drive is in quarantine; its files are listed anew when it is back."""
        for _ in self._writes:
            self._refuse("nvme_quarantined")
        self._writes.clear()
        self._labels.clear()

    def _refuse(self, reason: str) -> None:
        self._metrics.admission_refused.labels(reason).inc()

    def _note_failure(self, error: OSError, size_bytes: int = 0) -> str:
        """A write failed. Returns the reason to count a chunk under."""
        fault = fault_of(error)
        reason = self._drive.pause.note_failure(error, fault)
        if fault is Fault.FULL:
            self._drive.room.note_full(size_bytes)
        if fault is Fault.GONE or not self._drive.store.is_there():
            self._drive.fail(f"it is gone: {error}")
        return reason


def _write_slot(store: Store, header: FileHeader, arena: Arena, slot: int, tombstones: Tombstones) -> bool:
    """Write a file. One that is forgotten meanwhile goes again here: a drive that hung may be nobody's by then."""
    with arena.view(slot, header.length) as view:
        if xxhash.xxh3_128_digest(view) != header.checksum:
            raise ChunkCorrupt("its slot doesn't hold its bytes any more")
        is_new = store.put(header, view)
    if tombstones.find(header.label, header.identity, header.written_at_s) is not None:
        with contextlib.suppress(OSError):
            store.remove(name_of(header.label.storage_key))
        raise ChunkForgotten("a chunk was forgotten while it was written")
    return is_new
