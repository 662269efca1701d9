"""A tier of several drives on folders of a test's own, each of which can be told to fail; retries come at once."""

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager

from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.eviction import Lru
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.hierarchy import Hierarchy
from nodeagent.tiers.machine_memory import PAGE_BYTES
from nodeagent.tiers.quarantine import keep
from tests.nodeagent.lone_drive import FILE_BYTES, LENGTH, no_wait, soon, store_in_dram
from tests.nodeagent.running import storage_key

WAIT_S = 20
RETRY_S = 0.005


class SickStore(FolderStore):
    """A folder that fails, or hangs, while told to."""

    def __init__(self, path):
        super().__init__(str(path))
        self.error = 0
        self.answers = threading.Event()
        self.answers.set()

    def open(self):
        self._ail()
        return super().open()

    def read_into(self, key, target):
        self._ail()
        return super().read_into(key, target)

    def _ail(self):
        assert self.answers.wait(WAIT_S)
        if self.error:
            raise OSError(self.error, "told to")


class Drives:
    """The tier, what was announced of it, and DRAM's chunks to write."""

    def __init__(self, stores, files):
        self.stores = stores
        self.announced, self.metrics = {}, AgentMetrics()
        self.nvme = NvmeTier(self.announced.__setitem__)
        for number, store in enumerate(stores):
            drive = Drive(
                store,
                files * FILE_BYTES,
                self.nvme.note_change,
                no_wait,
                self.metrics,
                name=f"drive-{number}",
                write_pause_s=0.02,
            )
            self.nvme.add(drive, FileWriter(drive, self.metrics))
        self.arena = Arena(PAGE_BYTES * 65, PAGE_BYTES)
        self.hierarchy = Hierarchy(self.arena, Lru(), lambda key, mask: None, lambda: 0.0)

    @property
    def drives(self):
        return self.nvme.drives

    def where(self, name):
        """The numbers of the drives that hold a chunk."""
        return [number for number, drive in enumerate(self.drives) if storage_key(name) in drive.index]

    def is_announced(self, name):
        return bool(self.announced.get(storage_key(name)[:16]))

    async def write(self, *names):
        for name in names:
            store_in_dram(self, name)
            self.nvme.offer(self.hierarchy, storage_key(name))
        await soon(lambda: not self.nvme.queued_writes and not self.hierarchy._held_entries)

    async def read(self, name):
        entry = self.nvme.find(storage_key(name))
        slot, _ = self.arena.take()
        try:
            if entry is None or not await self.nvme.read(entry, self.arena, slot):
                return None
            with self.arena.view(slot, LENGTH) as view:
                return bytes(view)
        finally:
            self.arena.free(slot)

    def count(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"warmroute_{name}", labels) or 0


@asynccontextmanager
async def drives_on(stores, *, files=32):
    """All drives open and listed, as far as they can be."""
    drives = Drives(stores, files)
    for drive in drives.drives:
        await drive.open()
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        writing = [group.create_task(writer.run()) for writer in drives.nvme.writers]
        keeping = [
            group.create_task(keep(drive, drives.nvme.withdraw, drives.metrics, sleep=lambda _: asyncio.sleep(RETRY_S)))
            for drive in drives.drives
        ]
        try:
            await soon(lambda: not any(drive.is_restoring for drive in drives.drives if drive.is_up))
            yield drives
        finally:
            for task in keeping:
                task.cancel()
            for store in stores:
                store.answers.set()
            await asyncio.wait(keeping)
            assert await drives.nvme.close(writing)
            drives.arena.close()
            for store in stores:
                store.close()
