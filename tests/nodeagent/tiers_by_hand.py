"""DRAM and NVMe of one host with all that is between them, and threads whose jobs end when the test says so.

So any order of events can be tried, and the same order again gives the same outcome.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import xxhash

from directory.tiers import Tier
from nodeagent.errors import BudgetSpent, ChunkCorrupt
from nodeagent.labels import ChunkLabel
from nodeagent.messages import PutOutcome
from nodeagent.metrics import WRITE_REFUSALS, AgentMetrics
from nodeagent.tiers.admission import Admission
from nodeagent.tiers.chunk_file import (
    HEADER_BYTES,
    UNKNOWN_IDENTITY,
    FileHeader,
    decode_header,
    encode_header,
    file_bytes,
    name_of,
)
from nodeagent.tiers.dram import DramTier
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.machine_memory import PAGE_BYTES
from nodeagent.tiers.promotion import Promotion
from nodeagent.tiers.quarantine import keep
from nodeagent.tiers.write_policy import WRITE_POLICIES, Pins
from tests.nodeagent.running import label, payload, storage_key

LENGTH = PAGE_BYTES
FILE_BYTES = file_bytes(LENGTH)
SLOTS = 4
FILES = 6
TURNS = 20
"""How often all tasks get their turn: longer than any chain of awaits here."""
RESTS_MAX = 100
LONG_S = 10.0
NO_TIME_S = 1e-9
REFUSALS = frozenset(WRITE_REFUSALS)
"""Why a chunk that was offered to the tier isn't written."""


def chunk(name: str) -> ChunkLabel:
    """Chunks `c0`, `c1`, ... are one chain."""
    position = int(name[1:])
    return label(name, f"c{position - 1}" if position else None, position)


def data_of(name: str) -> bytes:
    return bytes(payload(name, LENGTH))


def checksum_of(name: str) -> bytes:
    return xxhash.xxh3_128_digest(data_of(name))


def is_good_file(name: str, held: bytes) -> bool:
    """Whether this is what the file of this chunk holds, to the byte, whenever the chunk was put."""
    header = FileHeader(chunk(name), UNKNOWN_IDENTITY, LENGTH, checksum_of(name))
    try:
        date = decode_header(held[:HEADER_BYTES]).written_at_s
    except ChunkCorrupt:
        return False
    return date > 0 and held == encode_header(replace(header, written_at_s=date)) + data_of(name)


class ByHand(Executor):
    """Threads that aren't: a job is done when `do` is called, or at once while `is_inline`."""

    def __init__(self, *, is_inline: bool = False) -> None:
        self.is_inline = is_inline
        self.jobs: list[tuple[Future, Callable, tuple]] = []

    def submit(self, function, /, *arguments):
        future = Future()
        self.jobs.append((future, function, arguments))
        if self.is_inline:
            self.do(0)
        return future

    def do(self, index: int) -> None:
        future, function, arguments = self.jobs.pop(index)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - whoever waits for the job is told
                future.set_exception(error)

    def do_all(self) -> None:
        while self.jobs:
            self.do(0)


class FaultyStore(FolderStore):
    """A folder that fails while told to."""

    read_error = 0
    write_error = 0
    stuck: frozenset[bytes] = frozenset()
    budget: str = "there"
    """Or `spent`, or `spent meanwhile`: between a look at it and the write."""
    stored = 0
    """Puts that ended well."""

    def may_write(self, size_bytes):
        return self.budget != "spent"

    def read_into(self, key, target):
        if self.read_error:
            raise OSError(self.read_error, "told to")
        return super().read_into(key, target)

    def put(self, header, data):
        if self.write_error:
            raise OSError(self.write_error, "told to")
        if self.budget != "there":
            raise BudgetSpent("told to")
        is_new = super().put(header, data)
        self.stored += 1
        return is_new

    def update_label(self, label):
        if self.budget != "there":
            raise BudgetSpent("told to")
        super().update_label(label)

    def remove(self, name):
        if name in self.stuck:
            raise PermissionError(13, "told to")
        super().remove(name)


@dataclass(frozen=True, slots=True)
class Served:
    """A reference that a client holds: to which chunk, and where its bytes lie."""

    holder: str
    name: str
    slot: int
    generation: int


class Host:
    """One host, its clients `p` and `q`, and what its publisher has heard. Drive it through `run`."""

    def __init__(self, *, write: str) -> None:
        self.folder = tempfile.mkdtemp()
        self.store = FaultyStore(self.folder)
        self.write = write
        self.runner = asyncio.Runner()
        self.rotten: set[tuple[int, int]] = set()
        self.run(self.start())

    def run(self, coroutine):
        return self.runner.run(coroutine)

    def end(self) -> None:
        try:
            self.run(self.stop())
        finally:
            self.runner.close()
            shutil.rmtree(self.folder)

    async def start(self) -> None:
        self.announced: dict[Tier, dict[bytes, int]] = {Tier.DRAM: {}, Tier.NVME: {}}
        self.references: dict[int, Served] = {}
        self.reservations: dict[int, tuple[str, str]] = {}
        self.opens: list[tuple[str, asyncio.Task]] = []
        self.rotten.clear()
        self.metrics = AgentMetrics()
        self.readers, self.writer = ByHand(), ByHand()
        self.store.open()
        group = self.group = await asyncio.TaskGroup().__aenter__()
        self.dram = DramTier(
            PAGE_BYTES * (SLOTS + 1), partial(self.heard, Tier.DRAM), self.withdrawn, group, self.metrics
        )
        self.dram._threads = ByHand(is_inline=True)
        self.hierarchy = await self.dram.ensure(LENGTH)
        self.nvme = NvmeTier(partial(self.heard, Tier.NVME))
        self.drive = Drive(
            self.store,
            FILES * FILE_BYTES,
            self.nvme.note_change,
            self.withdrawn,
            self.metrics,
            write_pause_s=0.0,
            clock=lambda: 0.0,
        )
        self.drive.listing.executor = ByHand(is_inline=True)
        self.file_writer = FileWriter(self.drive, self.metrics)
        self.nvme.add(self.drive, self.file_writer)
        self.drive.reads.executor, self.drive.writes.executor = self.readers, self.writer
        self.store.stored = self.offered = 0
        self.nvme.offer = self.offer
        self.admission = Admission(WRITE_POLICIES[self.write](), Pins(), self.dram, self.nvme)
        self.promotion = Promotion(self.dram, self.nvme, self.admission, group, self.metrics)
        self.dram.on_stored = self.promotion.note_stored
        self.writing = group.create_task(self.file_writer.run())
        self.hinting = group.create_task(self.promotion.run())
        self.keeping = group.create_task(
            keep(self.drive, self.nvme.withdraw, self.metrics, sleep=lambda _: asyncio.sleep(0), clock=lambda: 0.0)
        )
        await self.rest()

    async def stop(self) -> None:
        """As the agent ends: the doors first, then what moves, then the tiers."""
        for _, task in self.opens:
            task.cancel()
        self.opens.clear()
        self.hinting.cancel()
        self.keeping.cancel()
        await self.turn()
        self.do_jobs(inline=True)
        await self.promotion.close()
        await self.nvme.close([self.writing])
        await self.dram.close()
        self.store.close()
        await self.group.__aexit__(None, None, None)
        assert len(asyncio.all_tasks()) == 1, "no task is left"

    def write_by(self, write: str) -> None:
        """Another write policy, from now on and after restarts."""
        self.write = write
        self.admission.policy = WRITE_POLICIES[write]()

    def offer(self, hierarchy, key) -> None:
        """Count what the tier is asked to write and doesn't have, nor is about to write."""
        known = {*self.file_writer._writes, self.file_writer._writing}
        self.offered += not self.nvme.holds(key) and key not in known
        NvmeTier.offer(self.nvme, hierarchy, key)

    def refused(self) -> dict[str, float]:
        """Chunks offered to the tier that weren't written, by reason."""
        samples = next(iter(self.metrics.admission_refused.collect())).samples
        return {
            sample.labels["reason"]: sample.value
            for sample in samples
            if sample.name.endswith("_total") and sample.labels["reason"] in REFUSALS and sample.value
        }

    def heard(self, tier: Tier, key: bytes, mask: int) -> None:
        assert mask in (0, int(tier))
        self.announced[tier][key] = mask

    async def withdrawn(self, keys) -> None:
        assert not any(self.announced[Tier.NVME].get(key) for key in keys), "withdrawn before their files go"

    def announced_in(self, tier: Tier) -> set[bytes]:
        return {key for key, mask in self.announced[tier].items() if mask}

    def place(self, name: str) -> Path:
        return Path(self.store._place(name_of(storage_key(name))))

    def files(self) -> list[Path]:
        return [Path(top, name) for top, _, names in os.walk(self.folder) for name in names if len(name) == 64]

    def is_good_on_disk(self, name: str) -> bool:
        found = self.nvme.holds(storage_key(name))
        return found and self.place(name).exists() and is_good_file(name, self.place(name).read_bytes())

    async def turn(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.take_answers()

    def do_jobs(self, *, inline: bool) -> None:
        for threads in (self.readers, self.writer):
            threads.is_inline = inline
            threads.do_all()

    @property
    def is_away(self) -> bool:
        """Whether the drive is in quarantine, or its files aren't all known."""
        return not self.drive.is_up or self.drive.is_restoring

    @property
    def quarantines(self) -> float:
        value = self.metrics.registry.get_sample_value("warmroute_degraded_total", {"reason": "nvme_quarantined"})
        return value or 0

    async def rest(self) -> None:
        """Let everything that is under way end."""
        self.do_jobs(inline=True)
        for _ in range(RESTS_MAX):
            if not (
                self.opens or self.promotion.loads or self.promotion._hints or self.nvme.queued_writes or self.is_away
            ):
                break
            await self.turn()
        else:
            raise AssertionError("something under way never ends")
        await self.turn()
        await self.turn()
        self.do_jobs(inline=False)

    async def reserve(self, name: str, holder: str, checksum: bytes) -> PutOutcome:
        """A put up to its grant, as a session answers it; a slot that is granted is filled."""
        on_disk = self.promotion.meet(chunk(name), LENGTH, checksum)
        if on_disk is PutOutcome.CONFLICT:
            return on_disk
        granted = self.hierarchy.reserve(chunk(name), LENGTH, checksum, holder)
        if granted.outcome is PutOutcome.BUSY and on_disk is PutOutcome.HAVE:
            return on_disk
        if granted.reservation is not None:
            self.reservations[granted.reservation.number] = (holder, name)
            with self.hierarchy.arena.view(granted.reservation.slot, LENGTH) as view:
                view[:] = data_of(name)
        return granted.outcome

    async def reserve_unlabelled(self, name: str, holder: str) -> PutOutcome:
        """A put whose label isn't known yet."""
        bare = ChunkLabel(storage_key(name), None, None, 0)
        granted = self.hierarchy.reserve(bare, LENGTH, checksum_of(name), holder)
        if granted.reservation is not None:
            self.reservations[granted.reservation.number] = (holder, name)
            with self.hierarchy.arena.view(granted.reservation.slot, LENGTH) as view:
                view[:] = data_of(name)
        return granted.outcome

    async def commit(self, number: int, *, is_spoilt: bool) -> PutOutcome:
        holder, _ = self.reservations.pop(number)
        if is_spoilt:
            slot = self.hierarchy._holds[holder].reservations[number].slot
            self.flip(slot, 7)
        outcome = await self.dram.commit(holder, number)
        await self.turn()
        return outcome

    def begin_open(self, names: list[str], holder: str, wait_s: float) -> None:
        task = self.group.create_task(self._open(names, holder, wait_s))
        self.opens.append((holder, task))

    async def _open(self, names: list[str], holder: str, wait_s: float):
        """As a session answers an open: its client is alive until the task is cancelled."""
        keys = [storage_key(name) for name in names]
        if wait_s > 0 and self.promotion.continues(keys):
            run = await self.promotion.open_run(keys, wait_s)
            try:
                opened = self.hierarchy.open_run(keys, holder, run.from_nvme)
            finally:
                run.let_go()
        else:
            opened = self.hierarchy.open_run(keys, holder)
        self.promotion.note_hit(keys[: len(opened)])
        return list(zip(names, opened, strict=False))

    def take_answers(self) -> None:
        """As a client: look at the bytes, keep what is good, report what isn't."""
        for holder, task in [each for each in self.opens if each[1].done()]:
            self.opens.remove((holder, task))
            for name, opened in task.result():
                with self.hierarchy.arena.view(opened.slot, opened.length) as view:
                    data = bytes(view)
                assert self.hierarchy.arena._shared_generations[opened.slot] == opened.generation
                if xxhash.xxh3_128_digest(data) == opened.checksum:
                    assert data == data_of(name), "other bytes are served"
                    self.references[opened.reference] = Served(holder, name, opened.slot, opened.generation)
                else:
                    assert (opened.slot, opened.generation) in self.rotten
                    for held in self.hierarchy.close(holder, [opened.reference]):
                        self.dram.recheck(held.entry)

    def close_reference(self, number: int) -> None:
        assert len(self.hierarchy.close(self.references.pop(number).holder, [number])) == 1

    async def die(self, holder: str) -> None:
        for each in [each for each in self.opens if each[0] == holder]:
            each[1].cancel()
            self.opens.remove(each)
        await self.turn()
        self.hierarchy.release_holder(holder)
        self.references = {number: each for number, each in self.references.items() if each.holder != holder}
        self.reservations = {number: each for number, each in self.reservations.items() if each[0] != holder}

    def rot(self, name: str) -> None:
        """A bit of a chunk in DRAM changes that nobody is reading."""
        entry = self.hierarchy.find(storage_key(name))
        if entry is not None and not entry.references and (entry.slot, entry.generation) not in self.rotten:
            self.rotten.add((entry.slot, entry.generation))
            self.flip(entry.slot, 11)

    def flip(self, slot: int, offset: int) -> None:
        with self.hierarchy.arena.view(slot, LENGTH) as view:
            view[offset] ^= 1
