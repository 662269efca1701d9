"""One drive by itself, with chunks in an arena to write to it, on a folder that fails when told."""

import asyncio
import errno
from contextlib import asynccontextmanager

import xxhash

from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.chunk_file import file_bytes
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.eviction import Lru
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.hierarchy import Hierarchy
from nodeagent.tiers.machine_memory import PAGE_BYTES
from nodeagent.tiers.restore import restore
from tests.nodeagent.running import label, payload, storage_key

LENGTH = PAGE_BYTES
FILE_BYTES = file_bytes(LENGTH)
QUOTA_FILES = 4


class FaultyStore(FolderStore):
    """A folder whose writes or removals fail while told to."""

    write_error = 0
    stuck: frozenset[bytes] = frozenset()

    def put(self, header, data):
        if self.write_error:
            raise OSError(self.write_error, "told to")
        return super().put(header, data)

    def remove(self, name):
        if name in self.stuck:
            raise PermissionError(errno.EACCES, "told to")
        super().remove(name)


async def no_wait(keys):
    return


async def soon(is_true):
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def tier_on(store, *, files=QUOTA_FILES, write_pause_s=0.02, slots=16):
    announced, metrics = {}, AgentMetrics()
    arena = Arena(PAGE_BYTES * (slots + 1), PAGE_BYTES)
    hierarchy = Hierarchy(arena, Lru(), lambda key, mask: None, lambda: 0.0)
    tier = Drive(store, files * FILE_BYTES, announced.__setitem__, no_wait, metrics, write_pause_s=write_pause_s)
    tier.announced, tier.hierarchy, tier.metrics = announced, hierarchy, metrics
    tier.writer = FileWriter(tier, metrics)
    store.open()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(tier.writer.run())
        try:
            await restore(tier, metrics)
            yield tier
        finally:
            await tier.close(running)
            arena.close()
            store.close()


def store_in_dram(tier, name):
    data = payload(name, LENGTH)
    granted = tier.hierarchy.reserve(label(name), LENGTH, xxhash.xxh3_128_digest(data), "p")
    if granted.reservation is not None:
        with tier.hierarchy.arena.view(granted.reservation.slot, LENGTH) as slot:
            slot[:] = data
        tier.hierarchy.begin_commit("p", granted.reservation.number)
        tier.hierarchy.finish_commit(granted.reservation, granted.reservation.checksum)


async def write(tier, name):
    store_in_dram(tier, name)
    tier.writer.offer(tier.hierarchy, storage_key(name))
    await soon(lambda: not tier.writer.queued_writes and not tier.hierarchy._held_entries and not tier.room.doomed)


async def read_back(tier, name):
    entry = tier.index.get(storage_key(name))
    slot, _ = tier.hierarchy.arena.take()
    try:
        if entry is None or not await tier.read(entry, tier.hierarchy.arena, slot):
            return None
        with tier.hierarchy.arena.view(slot, LENGTH) as view:
            return bytes(view)
    finally:
        tier.hierarchy.arena.free(slot)


def count(of, name, **labels):
    return of.metrics.registry.get_sample_value(f"warmroute_{name}", labels) or 0
