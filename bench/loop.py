"""For how long each of the agent's operations keeps its event loop, with a full index.

    python -m bench.loop [--chunks 1000000] [--only index,publisher,dram,start] [--json]

Every operation is one step between two awaits; what is shown is the longest of all its steps, in seconds of this
thread's CPU (what the operation itself takes) and of the clock (with the waits for other threads, and for others on a
shared machine). `start` indexes files of a made-up drive as an agent's start does, as fast as it goes, with the
threads that this takes: there the loop is late by what is measured, though no step of its own is that long.
"""

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import generate_latest

from bench.tiers.samples import header_of, key_of, no_wait, resident_bytes
from directory.interface import Batch
from directory.members import TERM_S, HostRegistration, Load, Registration, Renewal
from directory.tiers import Tier
from nodeagent.agent import SWITCH_INTERVAL_S
from nodeagent.inventory import Inventory
from nodeagent.labels import ChunkLabel
from nodeagent.metrics import AgentMetrics
from nodeagent.publisher import Publisher
from nodeagent.registration import Lives
from nodeagent.roster import AttachedEngine
from nodeagent.tiers.chunk_file import FileHeader, file_bytes
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.eviction import Lru
from nodeagent.tiers.file_io import BufferedIo
from nodeagent.tiers.file_store import Listing, Space
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.found_files import FoundFiles, no_step
from nodeagent.tiers.hierarchy import Hierarchy
from nodeagent.tiers.key_table import KeyTable
from nodeagent.tiers.nvme_index import REORDER_STEP_KEYS, NvmeEntry, NvmeIndex, order_of_use
from nodeagent.tiers.quarantine import WITHDRAW_STEP_KEYS
from nodeagent.tiers.restore import restore
from nodeagent.tiers.room import VICTIMS_PER_STEP_MAX
from nodeagent.tiers.self_test import SelfTest

LONG_CHAIN = 4_096
"""Chunks of a prompt of a million tokens."""
LENGTH = 32 << 20
ROUNDS = 200
WATCH_S = 0.001


@dataclass
class Stop:
    """The longest of an operation's steps so far."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    steps: int = 0


class Stops:
    def __init__(self) -> None:
        self.by_name: dict[str, Stop] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        stop = self.by_name.setdefault(name, Stop())
        cpu, wall = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            stop.cpu_s = max(stop.cpu_s, time.thread_time() - cpu)
            stop.wall_s = max(stop.wall_s, time.perf_counter() - wall)
            stop.steps += 1

    def each(self, name: str, work: Callable[[Any], object], arguments: Any) -> None:
        for argument in arguments:
            with self.step(name):
                work(argument)


def measure_index(chunks: int, stops: Stops) -> None:
    """The drive's index: filled, found, touched, emptied."""
    index = NvmeIndex(lambda key, mask: None)
    headers = (header_of(number, LENGTH, key_of(number)[:16]) for number in range(chunks))
    stops.each("index: one header restored", lambda header: index.restore(header, 1.0), headers)
    copying = index.account_of_use()
    account = next(copying)
    is_whole = False
    while not is_whole:
        with stops.step("index: a step of being copied"):
            is_whole = next(copying, None) is None
    ordered = order_of_use(account)
    steps = range(0, chunks, REORDER_STEP_KEYS)
    stops.each(
        "index: a step of putting in order", lambda at: index.put_in_order(ordered, at, REORDER_STEP_KEYS), steps
    )
    for number in range(LONG_CHAIN):
        label = ChunkLabel(key_of(-number - 1), key_of(-number - 1)[:16], key_of(-number) if number else None, number)
        index.add(NvmeEntry(label, bytes(32), LENGTH, bytes(16)))
    stops.each("index: a chain of 4,096 touched", index.touch, [key_of(-LONG_CHAIN)] * 10)
    rows = range(0, index.rows, WITHDRAW_STEP_KEYS)
    stops.each("index: a step of withdrawing a drive", lambda row: index.directory_keys(row, WITHDRAW_STEP_KEYS), rows)
    stops.each(
        "index: 64 victims taken",
        lambda _: index.take_victims(1 << 60, VICTIMS_PER_STEP_MAX),
        range(min(ROUNDS, chunks // VICTIMS_PER_STEP_MAX)),
    )


class NoArena:
    """Slots without memory: only the accounts are measured."""

    def __init__(self, slots: int) -> None:
        self.slots, self.slot_bytes = slots, LENGTH
        self._free = list(range(slots))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self) -> tuple[int, int] | None:
        return (self._free.pop(), 1) if self._free else None

    def free(self, slot: int) -> None:
        self._free.append(slot)


def measure_dram(chunks: int, stops: Stops) -> None:
    """The DRAM tier's accounts, one chunk a slot."""
    arena: Any = NoArena(chunks)
    hierarchy = Hierarchy(arena, Lru(), lambda key, mask: None, time.monotonic)

    def put(header: FileHeader) -> None:
        granted = hierarchy.reserve(header.label, LENGTH, header.checksum, "writer")
        assert granted.reservation is not None
        hierarchy.begin_commit("writer", granted.reservation.number)
        hierarchy.finish_commit(granted.reservation, header.checksum)

    stops.each("dram: one put", put, (header_of(number, LENGTH, bytes(16)) for number in range(chunks)))
    chain = [key_of(number) for number in range(128)]
    for _ in range(ROUNDS):
        with stops.step("dram: a run of 128 opened"):
            opened = hierarchy.open_run(chain, "reader")
        with stops.step("dram: a run of 128 closed"):
            hierarchy.close("reader", [each.reference for each in opened])
    many = [key_of(number) for number in range(min(chunks, 32_768))]
    for key in many:
        hierarchy.open_run([key], "keeper")
    with stops.step("dram: 64 victims taken behind 32,768 that are held"):
        hierarchy.free(hierarchy.take_victims(64))
    with stops.step("dram: 32,768 references kept of a lost connection"):
        hierarchy.keep_only("keeper", [], [])
    for _ in range(ROUNDS):
        with stops.step("dram: 64 victims taken"):
            hierarchy.free(hierarchy.take_victims(64))


class WillingDirectory:
    """Takes everything at once, and keeps nothing: what is measured is the publisher."""

    async def register(
        self, incarnation: bytes, registration: Registration, load: Load, term_s: float = TERM_S
    ) -> None:
        return

    async def renew(self, incarnation: bytes, load: Load, term_s: float = TERM_S) -> Renewal:
        return Renewal(known=True, lapsed_s=0.0)

    async def retire(self, incarnation: bytes) -> None:
        return

    async def place(self, batch: Batch) -> int:
        await asyncio.sleep(0)
        return batch.acknowledged

    withdraw = place


async def measure_publisher(chunks: int, stops: Stops) -> None:
    """What is announced: noted, walked, looked at."""
    metrics, directory = AgentMetrics(), WillingDirectory()
    lives = Lives(directory, HostRegistration("host", "http://127.0.0.1:1"), Load, asyncio.sleep, metrics)
    publisher = Publisher(
        directory, lives, Inventory(2 * chunks), clock=time.monotonic, sleep=asyncio.sleep, metrics=metrics
    )
    note = partial(publisher.record_in, Tier.NVME, mask=int(Tier.NVME))
    stops.each("publisher: one chunk noted", note, (key_of(number)[:16] for number in range(chunks)))
    stops.each("publisher: one chunk used", note, (key_of(number)[:16] for number in range(chunks)))
    gauge = metrics.announced_chunks.labels(Tier.NVME.label)
    gauge.set_function(partial(publisher.announced_in, Tier.NVME))
    stops.each("publisher: announced chunks counted", lambda _: publisher.announced_in(Tier.NVME), range(ROUNDS))
    stops.each("/metrics", lambda _: generate_latest(metrics.registry), range(ROUNDS))
    with watched(stops, "publisher: a walk begins, and its first 2 s") as watching:
        running = asyncio.create_task(publisher.run())
        await asyncio.sleep(2)
        running.cancel()
        watching.cancel()
        await asyncio.wait([running, watching])
    engine = AttachedEngine("e", None, None, 1e9, b"")  # type: ignore[arg-type]
    engine.publisher = publisher
    snapshot = iter(engine.replacing_gpu([key_of(number)[:16] for number in range(0, chunks, 2)]))
    stops.each("publisher: a step of an engine's snapshot", lambda _: next(snapshot, None), range(chunks // 1_024))
    with stops.step("publisher: 1,024 chunks withdrawn"):
        for number in range(1_024):
            publisher.record_in(Tier.NVME, key_of(number)[:16], 0)


@contextmanager
def watched(stops: Stops, name: str) -> Iterator[asyncio.Task[None]]:
    """By how much the loop is late, with all that runs in it and beside it."""
    stop = stops.by_name.setdefault(name, Stop())

    async def watch() -> None:
        while True:
            cpu, wall = time.thread_time(), time.perf_counter()
            await asyncio.sleep(WATCH_S)
            stop.cpu_s = max(stop.cpu_s, time.thread_time() - cpu)
            stop.wall_s = max(stop.wall_s, time.perf_counter() - wall - WATCH_S)
            stop.steps += 1

    yield asyncio.get_running_loop().create_task(watch())


class MadeUpStore:
    """A drive that holds chains of 128 chunks, without a file: headers are what is asked for, at once."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self._names = bytearray()
        self._rows = KeyTable(self._names, 32)

    def open(self) -> SelfTest:
        return SelfTest(BufferedIo(), False, 1e9)

    def space(self) -> Space:
        return Space(1 << 60, 1 << 60)

    def is_there(self) -> bool:
        return True

    def close(self) -> None:
        return

    def listing(self, on_step: Callable[[], None] = no_step) -> Listing:
        files = FoundFiles()
        for number in range(self._chunks):
            entry = header_of(number, LENGTH, bytes(16))
            name = NvmeEntry(entry.label, entry.identity, LENGTH, bytes(16)).name
            self._names += name
            self._rows.add(number)
            files.append(name, file_bytes(LENGTH), float(number % 100_000))
        files.sort(on_step)
        return Listing(files, 0, 0)

    def header(self, name: bytes) -> FileHeader:
        return header_of(self._rows.find(name), LENGTH, bytes(16))


async def measure_start(chunks: int, stops: Stops) -> dict[str, float]:
    """An agent's start on a drive with so many files, and its tier's status and eviction meanwhile."""
    metrics, store = AgentMetrics(), MadeUpStore(chunks)
    tier = NvmeTier(lambda key, mask: None)
    made_up: Any = store
    drive = Drive(made_up, 1 << 60, tier.note_change, no_wait, metrics, min_free_bytes=0)
    tier.add(drive, FileWriter(drive, metrics))
    await drive.open()
    before, began = resident_bytes(), time.monotonic()
    with watched(stops, "start: listing and sorting") as watching:
        restoring = asyncio.create_task(restore(drive, metrics, files_per_s=1e9))
        await drive.listed.wait()
        watching.cancel()
    listed_s = time.monotonic() - began
    with watched(stops, "start: reading headers and putting in order") as watching:
        await restoring
        watching.cancel()
    restored_s = time.monotonic() - began
    stops.each("/status of the nvme tier", lambda _: tier.status(), range(ROUNDS))
    await drive.close(asyncio.create_task(no_wait(None)))
    return {
        "listed_s": listed_s,
        "files_per_s": chunks / (restored_s - listed_s),
        "resident_bytes_per_chunk": (resident_bytes() - before) / chunks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--only", default="index,dram,publisher,start")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stops, figures = Stops(), {}
    for part in options.only.split(","):
        gc.collect()
        if part == "index":
            measure_index(options.chunks, stops)
        elif part == "dram":
            measure_dram(options.chunks, stops)
        elif part == "publisher":
            asyncio.run(measure_publisher(options.chunks, stops))
        elif part == "start":
            figures = asyncio.run(measure_start(options.chunks, stops))
    if options.json:
        print(json.dumps({"stops": {name: vars(stop) for name, stop in stops.by_name.items()}, "start": figures}))
        return
    print(f"{'longest stop, ms':52} {'cpu':>9} {'clock':>9} {'steps':>9}")
    for name, stop in stops.by_name.items():
        print(f"{name:52} {stop.cpu_s * 1e3:9.2f} {stop.wall_s * 1e3:9.2f} {stop.steps:9,}")
    for name, value in figures.items():
        print(f"start: {name:45} {value:,.2f}")


if __name__ == "__main__":
    main()
