"""A host with several drives whose every step a test takes: jobs, time, faults, drives that go and come back.

Chunks are two trees, so that prefixes fork; and of each chunk two engines may compute other bytes, so that two variants
of it can be put under one key.
"""

import asyncio
import errno
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from directory.tiers import Tier
from nodeagent.labels import ChunkLabel
from nodeagent.messages import PutOutcome
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.admission import Admission
from nodeagent.tiers.chunk_file import file_bytes, name_of
from nodeagent.tiers.dram import DramTier
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.found_files import no_step
from nodeagent.tiers.machine_memory import PAGE_BYTES
from nodeagent.tiers.promotion import Promotion
from nodeagent.tiers.quarantine import keep
from nodeagent.tiers.write_policy import WRITE_POLICIES, Pins
from tests.nodeagent.running import label, payload, storage_key
from tests.nodeagent.tiers_by_hand import ByHand

LENGTH = PAGE_BYTES
FILE_BYTES = file_bytes(LENGTH)
DRIVES = 3
SLOTS = 4
FILES = 3
"""Of each drive."""
TURNS = 25
RESTS_MAX = 200
WRITE_PAUSE_S = 10.0

PARENTS = {
    "a0": None,
    "a1": "a0",
    "a2": "a1",
    "a3": "a2",
    "a4": "a3",
    "b2": "a1",
    "b3": "b2",
    "c0": None,
    "c1": "c0",
    "c2": "c1",
}
"""Two trees; the first forks behind `a1`."""
NAMES = list(PARENTS)
BY_KEY = {storage_key(name): name for name in NAMES}
BY_NAME = {name_of(storage_key(name)).hex(): name for name in NAMES}


def chunk(name: str) -> ChunkLabel:
    return label(name, PARENTS[name], int(name[1:]))


def bytes_of(name: str, variant: int) -> bytes:
    return bytes(payload(f"{name}, variant {variant}", LENGTH))


def checksum_of(name: str, variant: int) -> bytes:
    return xxhash.xxh3_128_digest(bytes_of(name, variant))


class DriveThatFails(FolderStore):
    """A folder that errs, or is away, while told to."""

    read_error = 0
    write_error = 0
    is_away = False
    stuck: frozenset[bytes] = frozenset()

    def open(self):
        self._go(0)
        return super().open()

    def is_there(self):
        return not self.is_away and super().is_there()

    def read_into(self, key, target):
        self._go(self.read_error)
        return super().read_into(key, target)

    def header(self, name):
        self._go(0)
        return super().header(name)

    def listing(self, on_step=no_step):
        self._go(0)
        return super().listing(on_step)

    def put(self, header, data):
        self._go(self.write_error)
        return super().put(header, data)

    def update_label(self, label):
        self._go(self.write_error)
        super().update_label(label)

    def remove(self, name):
        self._go(errno.EACCES if name in self.stuck else 0)
        super().remove(name)

    def _go(self, error):
        if self.is_away or error:
            raise OSError(errno.ENODEV if self.is_away else error, "told to")


@dataclass(frozen=True, slots=True)
class Held:
    """What a client was given: a reference's slot, and the bytes that it saw there."""

    holder: str
    name: str
    slot: int
    generation: int
    data: bytes


class Host:
    """DRAM and three drives. `stored` is the model: which variants of a chunk a put has stored, ever."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.stores = [DriveThatFails(str(self.folder / f"drive-{number}")) for number in range(DRIVES)]
        self.write = "through"
        self.stored: dict[str, set[int]] = {name: set() for name in NAMES}
        self.now = 0.0
        self.rotten: set[tuple[int, int]] = set()
        self.runner = asyncio.Runner()
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
        """An agent's start: whatever is on the drives, DRAM is empty, and nobody holds anything."""
        self.announced: dict[Tier, dict[bytes, int]] = {Tier.DRAM: {}, Tier.NVME: {}}
        self.references: dict[int, Held] = {}
        self.reservations: dict[int, tuple[str, str, int]] = {}
        self.opens: list[tuple[str, list[str], asyncio.Task]] = []
        self.rotten.clear()
        self.metrics = AgentMetrics()
        self.readers, self.writers = ByHand(), ByHand()
        group = self.group = await asyncio.TaskGroup().__aenter__()
        self.dram = DramTier(
            PAGE_BYTES * (SLOTS + 1), partial(self.heard, Tier.DRAM), self.withdrawn, group, self.metrics
        )
        self.dram._threads = ByHand(is_inline=True)
        self.hierarchy = await self.dram.ensure(LENGTH)
        self.hierarchy._clock = self.clock
        self._watch_victims()
        self.nvme = NvmeTier(partial(self.heard, Tier.NVME))
        for number, store in enumerate(self.stores):
            await self._add_drive(number, store)
        self.admission = Admission(WRITE_POLICIES[self.write](), Pins(), self.dram, self.nvme)
        self.promotion = Promotion(self.dram, self.nvme, self.admission, group, self.metrics)
        self.dram.on_stored = self.promotion.note_stored
        self.writing = [group.create_task(writer.run()) for writer in self.nvme.writers]
        self.steady = [
            group.create_task(
                keep(drive, self.nvme.withdraw, self.metrics, sleep=lambda _: asyncio.sleep(0), clock=self.clock)
            )
            for drive in self.drives
        ]
        self.steady.append(group.create_task(self.promotion.run()))
        await self.rest()

    async def stop(self) -> None:
        """As the agent ends: the doors first, then what moves, then the tiers."""
        for _, _, task in self.opens:
            task.cancel()
        self.opens.clear()
        for task in self.steady:
            task.cancel()
        await self.turn()
        self.set_inline(True)
        await self.promotion.close()
        assert await self.nvme.close(self.writing)
        await self.dram.close()
        for store in self.stores:
            store.close()
        await self.group.__aexit__(None, None, None)
        assert len(asyncio.all_tasks()) == 1, "no task is left"

    @property
    def drives(self) -> list[Drive]:
        return self.nvme.drives

    @property
    def quarantines(self) -> float:
        """How often a drive was given up in this life."""
        value = self.metrics.registry.get_sample_value("warmroute_degraded_total", {"reason": "nvme_quarantined"})
        return value or 0

    def clock(self) -> float:
        return self.now

    def heard(self, tier: Tier, key: bytes, mask: int) -> None:
        assert mask in (0, int(tier))
        self.announced[tier][key] = mask

    async def withdrawn(self, keys) -> None:
        return

    def announced_in(self, tier: Tier) -> set[bytes]:
        return {key for key, mask in self.announced[tier].items() if mask}

    def files(self, number: int) -> list[Path]:
        """Everything that takes room on a drive, finished or not."""
        return [
            path for path in (self.folder / f"drive-{number}").rglob("*") if path.is_file() and len(path.name) >= 64
        ]

    def whole_files(self) -> list[tuple[int, str]]:
        """The chunks that have a file of their full length, by drive."""
        return [
            (number, BY_NAME[path.name])
            for number in range(DRIVES)
            for path in sorted(self.files(number))
            if path.name in BY_NAME and path.stat().st_size == FILE_BYTES
        ]

    def place(self, number: int, name: str) -> Path:
        return Path(self.stores[number]._place(name_of(storage_key(name))))

    async def turn(self) -> None:
        """Let all tasks go on as far as they can without a job's end."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.take_answers()

    def set_inline(self, is_inline: bool) -> None:
        for threads in (self.readers, self.writers):
            threads.is_inline = is_inline
            threads.do_all()

    async def rest(self) -> None:
        """Let all that is under way end, but for drives that are away."""
        self.set_inline(True)
        for _ in range(RESTS_MAX):
            waiting = [
                drive
                for drive, store in zip(self.drives, self.stores, strict=True)
                if (drive.room.doomed or drive.is_restoring or not drive.is_up) and not store.is_away
            ]
            if not (self.opens or self.promotion.loads or self.promotion._hints or self.nvme.queued_writes or waiting):
                break
            await self.turn()
        else:
            drives = [(each.is_up, each.is_restoring, len(each.room.doomed), each.failure) for each in self.drives]
            loads, writes = self.promotion.loads, self.nvme.queued_writes
            raise AssertionError(f"something under way never ends: {self.opens} {loads} {writes} {drives}")
        await self.turn()
        await self.turn()
        self.set_inline(False)

    async def reserve(self, name: str, variant: int, holder: str, *, is_labelled: bool = True) -> PutOutcome:
        """A put up to its grant, as a session answers it; a slot that is granted is filled."""
        whole = chunk(name) if is_labelled else ChunkLabel(storage_key(name), None, None, 0)
        checksum = checksum_of(name, variant)
        on_disk = self.promotion.meet(whole, LENGTH, checksum)
        if on_disk is PutOutcome.CONFLICT:
            return on_disk
        granted = self.hierarchy.reserve(whole, LENGTH, checksum, holder)
        if granted.outcome is PutOutcome.BUSY and on_disk is PutOutcome.HAVE:
            return on_disk
        if granted.reservation is not None:
            self.reservations[granted.reservation.number] = (holder, name, variant)
            with self.hierarchy.arena.view(granted.reservation.slot, LENGTH) as view:
                view[:] = bytes_of(name, variant)
        return granted.outcome

    async def commit(self, number: int, *, is_spoilt: bool) -> PutOutcome:
        holder, name, variant = self.reservations.pop(number)
        if is_spoilt:
            self.flip(self.hierarchy._holds[holder].reservations[number].slot)
        outcome = await self.dram.commit(holder, number)
        if outcome is PutOutcome.STORED:
            self.stored[name].add(variant)
        await self.turn()
        return outcome

    def begin_open(self, names: list[str], holder: str, wait_s: float) -> None:
        self.opens.append((holder, names, self.group.create_task(self._open(names, holder, wait_s))))

    def take_answers(self) -> None:
        """As a client: look at the bytes, keep what is good, report what isn't."""
        for each in [each for each in self.opens if each[2].done()]:
            self.opens.remove(each)
            holder, names, task = each
            for name, opened in zip(names, task.result(), strict=False):
                self._take(holder, name, opened)

    def close_reference(self, number: int) -> None:
        assert len(self.hierarchy.close(self.references.pop(number).holder, [number])) == 1

    async def die(self, holder: str) -> None:
        """A client's process ends, whatever it had asked for."""
        for each in [each for each in self.opens if each[0] == holder]:
            each[2].cancel()
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
            self.flip(entry.slot)

    def flip(self, slot: int) -> None:
        with self.hierarchy.arena.view(slot, LENGTH) as view:
            view[11] ^= 1

    async def _add_drive(self, number: int, store: DriveThatFails) -> None:
        drive = Drive(
            store,
            FILES * FILE_BYTES,
            self.nvme.note_change,
            partial(self._check_victims, number),
            self.metrics,
            name=f"drive-{number}",
            min_free_bytes=0,
            write_pause_s=WRITE_PAUSE_S,
            clock=self.clock,
        )
        drive.listing.executor = ByHand(is_inline=True)
        drive.reads.executor, drive.writes.executor = self.readers, self.writers
        self.nvme.add(drive, FileWriter(drive, self.metrics))
        await drive.open()

    async def _open(self, names: list[str], holder: str, wait_s: float):
        """As a session answers an open."""
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
        return opened

    def _take(self, holder: str, name: str, opened) -> None:
        with self.hierarchy.arena.view(opened.slot, opened.length) as view:
            data = bytes(view)
        assert self.hierarchy.arena._shared_generations[opened.slot] == opened.generation
        if xxhash.xxh3_128_digest(data) == opened.checksum:
            assert data in {bytes_of(name, variant) for variant in self.stored[name]}, (
                "bytes that nobody put are served"
            )
            self.references[opened.reference] = Held(holder, name, opened.slot, opened.generation, data)
        else:
            assert (opened.slot, opened.generation) in self.rotten
            for held in self.hierarchy.close(holder, [opened.reference]):
                self.dram.recheck(held.entry)

    def _watch_victims(self) -> None:
        """What DRAM evicts leaves no child behind, but one that is held."""
        policy, entries = self.hierarchy._policy, self.hierarchy._entries
        take = policy.take_victims

        def taken(count, is_held):
            victims = take(count, is_held)
            left = [entry for key, entry in entries.items() if key not in victims]
            for key in victims:
                children = [entry for entry in left if is_child(entry.label, entries[key].label)]
                assert all(entry.references for entry in children), "a parent goes before a child that nobody holds"
            return victims

        policy.take_victims = taken

    async def _check_victims(self, number: int, keys) -> None:
        """What a drive evicts leaves no child behind on it; and it is withdrawn before its file goes."""
        drive = self.drives[number]
        victims = [chunk(name) for name in NAMES if storage_key(name)[:16] in keys]
        if not drive.is_restoring:
            left = [entry.label for entry in drive.index.entries()]
            assert not [label for label in left for victim in victims if is_child(label, victim)]
        for victim in victims:
            if not self.nvme.holds(victim.storage_key):
                assert not self.announced[Tier.NVME].get(victim.directory_key), "withdrawn before the file goes"


def is_child(label: ChunkLabel, of: ChunkLabel) -> bool:
    """Whether the places of both are known, and one is below the other."""
    return label.parent == of.storage_key and label.position == of.position + 1
