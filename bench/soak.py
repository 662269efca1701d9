"""The agent's memory over many operations: the real tiers, small slots, chunks of many sizes, keys that never end.

    python -m bench.soak [--operations 1000000] [--folder /mnt/drive/bench] [--json]

Several clients at once put chunks, open and close runs (of which many come back from files), abort, lose connections
and end, while the tiers evict, write and publish to a directory that takes everything. The resident set is shown after
each tenth; a leak shows as a slope. The arena is left out of it, as its pages never change in number.
"""

import argparse
import asyncio
import gc
import json
import logging
import random
import tempfile
import time
from collections import deque
from functools import partial
from typing import Any

import xxhash

from bench.loop import WillingDirectory
from bench.tiers.samples import key_of, no_wait, resident_bytes
from directory.members import HostRegistration, Load
from directory.tiers import Tier
from nodeagent.inventory import Inventory
from nodeagent.labels import ChunkLabel
from nodeagent.metrics import AgentMetrics
from nodeagent.publisher import Publisher
from nodeagent.registration import Lives
from nodeagent.tiers.admission import Admission
from nodeagent.tiers.chunk_file import file_bytes
from nodeagent.tiers.dram import DramTier
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.machine_memory import PAGE_BYTES
from nodeagent.tiers.promotion import Promotion
from nodeagent.tiers.quarantine import keep
from nodeagent.tiers.write_policy import WRITE_POLICIES, Pins

SLOT_BYTES = 16 * PAGE_BYTES
SLOTS = 512
FILES = 2_048
LIVELY_KEYS = 4_096
"""Puts and opens choose among so many keys, which move on: a key comes some times, and never again."""
CHAIN = 64
CLIENTS = 4
HELD_MAX = 16
TENTHS = 10
WAIT_S = 5.0


def label_of(number: int) -> ChunkLabel:
    position = number % CHAIN
    return ChunkLabel(key_of(number), key_of(number)[:16], key_of(number - 1) if position else None, position)


class Host:
    """One host's tiers and publisher, as the agent joins them."""

    def __init__(self, folder: str, group: asyncio.TaskGroup) -> None:
        self.metrics = AgentMetrics()
        registration = HostRegistration("host", "http://127.0.0.1:1")
        directory: Any = WillingDirectory()
        self.publisher = Publisher(
            directory,
            Lives(directory, registration, Load, asyncio.sleep, self.metrics),
            Inventory(1_000_000),
            clock=time.monotonic,
            sleep=asyncio.sleep,
            metrics=self.metrics,
        )
        quota = PAGE_BYTES * (1 + SLOTS // 512) + SLOTS * SLOT_BYTES
        self.dram = DramTier(quota, partial(self.publisher.record_in, Tier.DRAM), no_wait, group, self.metrics)
        self.nvme = NvmeTier(partial(self.publisher.record_in, Tier.NVME))
        self.drive = Drive(
            FolderStore(folder),
            FILES * file_bytes(SLOT_BYTES) // 2,
            self.nvme.note_change,
            no_wait,
            self.metrics,
            min_free_bytes=0,
        )
        self.writer = FileWriter(self.drive, self.metrics)
        self.nvme.add(self.drive, self.writer)
        admission = Admission(WRITE_POLICIES["through"](), Pins(), self.dram, self.nvme)
        self.promotion = Promotion(self.dram, self.nvme, admission, group, self.metrics)
        self.dram.on_stored = self.promotion.note_stored

    async def begin(self, group: asyncio.TaskGroup) -> None:
        await self.drive.open()
        self.hierarchy = await self.dram.ensure(SLOT_BYTES)
        self.writing = group.create_task(self.writer.run())
        endless = (
            self.publisher.run(),
            self.dram.keep_free(),
            self.promotion.run(),
            keep(self.drive, self.nvme.withdraw, self.metrics),
        )
        self.loops = [group.create_task(each) for each in endless]
        await self.drive.listed.wait()

    async def end(self) -> None:
        for loop in self.loops:
            loop.cancel()
        await asyncio.wait(self.loops)
        await self.promotion.close()
        await self.nvme.close([self.writing])
        await self.dram.close()
        self.drive.store.close()


class Client:
    """One client of the host after another: each ends some time, and another comes."""

    def __init__(self, host: Host, seed: int, done: list[int]) -> None:
        self._host = host
        self._chance = random.Random(seed)
        self._done = done
        self._lives = seed
        self._name = ""
        self._held: deque[list[int]] = deque()
        self._bytes = self._chance.randbytes(SLOT_BYTES)
        self.acts = (self._put, self._open, self._open, self._close, self._close, self._abort, self._end)
        self.weights = (40, 25, 5, 20, 5, 4, 1)

    async def run(self, operations: int) -> None:
        self._end_sync()
        for _ in range(operations):
            await self._chance.choices(self.acts, self.weights)[0]()
            self._done[0] += 1
            await asyncio.sleep(0)
        self._end_sync()

    def _number(self) -> int:
        return self._done[0] // 4 + self._chance.randrange(LIVELY_KEYS)

    async def _put(self) -> None:
        hierarchy, label = self._host.hierarchy, label_of(self._number())
        data = self._bytes[: 1 + int.from_bytes(label.storage_key[:4], "little") % SLOT_BYTES]
        checksum = xxhash.xxh3_128_digest(data)
        self._host.promotion.meet(label, len(data), checksum)
        granted = hierarchy.reserve(label, len(data), checksum, self._name)
        if granted.reservation is None:
            return
        is_spoilt = self._chance.random() < 0.01
        with hierarchy.arena.view(granted.reservation.slot, len(data)) as view:
            view[:] = data[::-1] if is_spoilt else data
        await self._host.dram.commit(self._name, granted.reservation.number)

    async def _open(self) -> None:
        first = self._number()
        keys = [key_of(number) for number in range(first, first + self._chance.randint(1, 8))]
        run = await self._host.promotion.open_run(keys, WAIT_S)
        try:
            opened = self._host.hierarchy.open_run(keys, self._name, run.from_nvme)
        finally:
            run.let_go()
        self._host.promotion.note_hit(keys[: len(opened)])
        self._held.append([each.reference for each in opened])
        if len(self._held) > HELD_MAX:
            await self._close()

    async def _close(self) -> None:
        if not self._held:
            return
        closed = self._host.hierarchy.close(self._name, self._held.popleft())
        if closed and self._chance.random() < 0.02:
            self._host.dram.recheck(closed[0].entry)
        self._host.dram.account()

    async def _abort(self) -> None:
        hierarchy, label = self._host.hierarchy, label_of(self._number())
        granted = hierarchy.reserve(label, 100, bytes(16), self._name)
        if granted.reservation is not None:
            hierarchy.abort(self._name, granted.reservation.number)

    async def _end(self) -> None:
        self._end_sync()

    def _end_sync(self) -> None:
        hierarchy = self._host.hierarchy
        hierarchy.quarantine(self._name)
        hierarchy.release_holder(self._name)
        self._held.clear()
        self._lives += CLIENTS
        self._name = f"client-{self._lives}"


async def soak(folder: str, operations: int) -> list[dict[str, float]]:
    """Figures after each tenth."""
    rows = []
    async with asyncio.TaskGroup() as group:
        host = Host(folder, group)
        await host.begin(group)
        done = [0]
        clients = [Client(host, number, done) for number in range(CLIENTS)]
        for _ in range(TENTHS):
            began = time.monotonic()
            each = operations // TENTHS // CLIENTS
            await asyncio.gather(*(client.run(each) for client in clients))
            registry = host.metrics.registry
            rows.append(
                {
                    "operations": done[0],
                    "operations_per_s": each * CLIENTS / (time.monotonic() - began),
                    "rss_mb": (resident_bytes() - SLOTS * SLOT_BYTES) / 1e6,
                    "tracked_objects": len(gc.get_objects()),
                    "announced": len(host.publisher.inventory),
                    "pending": host.publisher.pending_keys,
                    "in_files": len(host.nvme),
                    "evicted": sum(
                        registry.get_sample_value("warmroute_evictions_total", {"tier": tier, "reason": reason}) or 0
                        for tier, reason in (("dram", "quota"), ("dram", "demand"), ("nvme", "quota"))
                    ),
                    "promoted": registry.get_sample_value("warmroute_tier_read_seconds_count", {"tier": "nvme"}) or 0,
                }
            )
            print(" ".join(f"{name} {value:,.1f}" for name, value in rows[-1].items()), flush=True)
        await host.end()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # spoilt puts are refused as they should be
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-soak-") as folder:
        rows = asyncio.run(soak(folder, options.operations))
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
