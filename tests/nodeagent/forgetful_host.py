"""DRAM, drives and what forgets, of one host without an agent around it; with a clock of the test's."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import xxhash

from nodeagent.forget_request import ForgetRequest
from nodeagent.forgetting import Forgetter
from nodeagent.messages import PutOutcome
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.arena import PAGE_BYTES
from nodeagent.tiers.chunk_file import UNKNOWN_IDENTITY, FileHeader, file_bytes
from nodeagent.tiers.dram import DramTier
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.quarantine import keep
from nodeagent.tiers.tombstone_file import StateFolder
from nodeagent.tiers.tombstones import Tombstones
from nodeagent.tombstone_keeper import TombstoneKeeper
from tests.nodeagent.lone_drive import soon
from tests.nodeagent.running import payload

LENGTH = PAGE_BYTES
FILE_BYTES = file_bytes(LENGTH)
TERM_S = 3600.0
HOLDER = "p"


def data_of(name):
    return payload(name, LENGTH)


def header_of(name, label, identity=UNKNOWN_IDENTITY):
    return FileHeader(label, identity, LENGTH, xxhash.xxh3_128_digest(data_of(name)))


def write_file(folder, name, label, identity=UNKNOWN_IDENTITY):
    """A file that was there before."""
    store = FolderStore(str(folder))
    store.open()
    assert store.put(header_of(name, label, identity), data_of(name))
    store.close()


class ForgetfulHost:
    """See `forgetful_host`. Changes of placements are in `announced`, by tier's bit and key."""

    def __init__(self, folder, drives, group, now, make_store):
        self.announced = {}
        self.metrics = AgentMetrics()
        self.group = group
        self.tombstones = Tombstones(now)
        self.dram = DramTier(
            PAGE_BYTES * 33, self._heard(2), self.withdrawn, group, self.metrics, tombstones=self.tombstones
        )
        self.nvme = NvmeTier(self._heard(4))
        for number in range(drives):
            drive = Drive(
                make_store(str(folder / f"drive-{number}")),
                1_000 * FILE_BYTES,
                self.nvme.note_change,
                self.withdrawn,
                self.metrics,
                name=f"drive-{number}",
                tombstones=self.tombstones,
                min_free_bytes=0,
            )
            self.nvme.add(drive, FileWriter(drive, self.metrics))
        self.keeper = TombstoneKeeper(
            self.tombstones, StateFolder(str(folder / "state")), self.nvme.drives, self.metrics
        )
        self.forgetter = Forgetter(
            "host",
            TERM_S,
            self.tombstones,
            self.keeper,
            self.dram,
            self.nvme,
            SimpleNamespace(engines=()),
            self.withdrawn,
            lambda: 0,
            None,
            group,
            self.metrics,
            sleep=lambda _: asyncio.sleep(0.002),
        )

    def _heard(self, tier):
        return lambda key, mask: self.announced.__setitem__((tier, key), bool(mask))

    async def withdrawn(self, keys):
        await asyncio.sleep(0)

    async def put(self, name, label, identity=UNKNOWN_IDENTITY):
        """A put as a client makes it; what became of it."""
        checksum = xxhash.xxh3_128_digest(data_of(name))
        granted = self.dram.hierarchy.reserve(label, LENGTH, checksum, HOLDER, identity)
        if granted.reservation is None:
            return granted.outcome
        with self.dram.hierarchy.arena.view(granted.reservation.slot, LENGTH) as view:
            view[:] = data_of(name)
        outcome = await self.dram.commit(HOLDER, granted.reservation.number)
        if outcome is PutOutcome.STORED:
            self.nvme.offer(self.dram.hierarchy, label.storage_key)
            await self.at_rest()
        return outcome

    async def at_rest(self):
        hierarchy = self.dram.hierarchy

        def is_it():
            read = {each.entry.slot for holds in hierarchy._holds.values() for each in holds.references.values()}
            held = {entry.slot for entry in hierarchy._entries.values() if entry.references}
            return not self.nvme.queued_writes and held <= read

        await soon(is_it)

    def evict(self, key):
        entry = self.dram.hierarchy.find(key)
        if entry is not None:
            self.dram.hierarchy.drop(entry)

    def is_held(self, key):
        return self.dram.hierarchy.find(key) is not None or self.nvme.holds(key)

    async def forget(self, **asked):
        return await self.forgetter.forget(ForgetRequest("keys", **asked))

    async def restored(self):
        def are():
            drives = [drive for drive in self.nvme.drives if drive.is_up]
            return not any(drive.is_restoring for drive in drives) and not self.tombstones.is_grown

        await soon(are)
        async with self.forgetter._turn:
            await asyncio.sleep(0)


@asynccontextmanager
async def forgetful_host(folder, *, drives=1, now=None, are_drives_back=lambda: True, make_store=FolderStore):
    """The host, its drives listed and read. A drive in quarantine comes back when it may."""
    clock = now if now is not None else SimpleNamespace(now=Tombstones().now).now

    async def wait_for_return(_):
        await asyncio.sleep(0.002)
        while not are_drives_back():
            await asyncio.sleep(0.002)

    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        host = ForgetfulHost(folder, drives, group, clock, make_store)
        for drive in host.nvme.drives:
            await drive.open()
        await host.keeper.read()
        await host.dram.ensure(LENGTH)
        writing = [group.create_task(writer.run()) for writer in host.nvme.writers]
        loops = [
            group.create_task(keep(drive, host.nvme.withdraw, host.metrics, sleep=wait_for_return))
            for drive in host.nvme.drives
        ]
        loops += [group.create_task(host.forgetter.run()), group.create_task(host.dram.keep_clean())]
        try:
            await host.restored()
            yield host
        finally:
            for task in loops:
                task.cancel()
            await asyncio.wait(loops)
            assert await host.nvme.close(writing)
            await host.dram.close()
            for drive in host.nvme.drives:
                drive.store.close()
