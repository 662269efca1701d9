"""A publisher on a stage: time as an argument, and a directory behind a bad network."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from directory.errors import DirectoryError, DirectoryFull, DirectoryUnavailable
from directory.interface import BATCH_PLACEMENTS_MAX, Batch
from directory.members import HostRegistration, Load
from directory.memory import MemoryDirectory
from directory.placements import partition_of, unpack_holders
from nodeagent.inventory import Inventory
from nodeagent.metrics import AgentMetrics
from nodeagent.pacing import NEW_LIFE_MIN_S
from nodeagent.publisher import Publisher
from nodeagent.registration import Lives
from tests.nodeagent.faketime import FakeTime
from tests.nodeagent.running import believed

DRAM = 2
PASSER_BY = b"passerby"
CALL_S = 1.0
"""How long a call waits for an answer."""


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()[:16]


def keys_of(partition: int, count: int) -> list[bytes]:
    """So many keys of one partition, digests as all keys are: a table finds others only slowly."""
    return [bytes([partition << 4 | each[0] & 15]) + each[1:] for each in map(key, range(count))]


class FaultyDirectory:
    """A `MemoryDirectory` behind a bad network: what is due in `faults` happens to the next write."""

    def __init__(self, time: FakeTime) -> None:
        self._time = time
        self.behind = MemoryDirectory(time.clock)
        self.faults: list[str] = []
        self.is_down = False
        self.is_full = False
        """Whether it takes no placements."""
        self.has_no_room_for_functions = False
        """Whether it refuses removals as well: full, and without its functions."""
        self.writes = 0
        self.is_mute = False
        """Whether registrations are taken without an answer."""
        self.down: set[int] = set()
        """Partitions whose shard doesn't answer."""
        self.hanging: set[int] = set()
        """Partitions whose shard takes every call and never answers."""
        self.refusing: dict[int, str] = {}
        """Partitions whose shard refuses every batch, and why."""
        self.delay_s = 0.0
        self.in_flight: list[Batch] = []
        self.most_in_flight = 0
        self.collisions = 0
        """Batches sent while another of the same partition and incarnation was under way."""
        self.tried: list[tuple[float, Batch]] = []
        self.lives_begun: list[bytes] = []
        self.late: list[Batch] = []
        self.sent: list[Batch] = []

    def flush(self) -> None:
        self.behind = MemoryDirectory(self._time.clock)

    def empty(self, partition: int) -> None:
        """The partition's shard has come back without what it held."""
        behind = self.behind
        behind._attempts = {place: each for place, each in behind._attempts.items() if place[0] != partition}
        behind._records = {key: each for key, each in behind._records.items() if partition_of(key) != partition}

    async def deliver_late(self) -> None:
        late, self.late = self.late, []
        for batch in late:
            await self.behind.place(batch)

    async def place(self, batch):
        return await self._write(batch, self.behind.place)

    async def withdraw(self, batch):
        return await self._write(batch, self.behind.withdraw)

    async def _write(self, batch, apply):
        self.tried.append((self._time.now, batch))
        lanes = [(each.partition, each.incarnation) for each in self.in_flight]
        self.collisions += (batch.partition, batch.incarnation) in lanes
        self.in_flight.append(batch)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        try:
            await (self._time.sleep(self.delay_s) if self.delay_s else asyncio.sleep(0))
            return await self._deliver(batch, apply)
        finally:
            self.in_flight.remove(batch)

    async def _deliver(self, batch, apply):
        if batch.partition in self.hanging:
            await self._time.sleep(CALL_S)
            raise DirectoryUnavailable("no answer")
        if batch.partition in self.refusing:
            raise DirectoryError(self.refusing[batch.partition])
        fault = self.faults.pop(0) if self.faults and batch.states else ""
        if self.is_down or batch.partition in self.down or fault == "lost request":
            raise DirectoryUnavailable("lost")
        if fault == "late request":
            self.late.append(batch)
            raise DirectoryUnavailable("slow")
        if fault == "bug":
            raise RuntimeError("a fault that no docstring names")
        self.writes += 1
        has_placements = any(mask for _, mask in batch.states)
        if self.has_no_room_for_functions or ((self.is_full or fault == "full") and has_placements):
            raise DirectoryFull("full")
        held = await apply(batch)
        self.sent.append(batch)
        if fault == "lost reply":
            raise DirectoryUnavailable("no reply")
        if fault == "duplicate":
            self.late.append(batch)
        return held

    async def register(self, incarnation, *arguments):
        await self._call()
        await self.behind.register(incarnation, *arguments)
        self.lives_begun.append(incarnation)
        if self.is_mute:
            raise DirectoryUnavailable("no answer")

    async def renew(self, *arguments):
        await self._call()
        return await self.behind.renew(*arguments)

    async def retire(self, *arguments):
        await self._call()
        return await self.behind.retire(*arguments)

    async def lookup(self, keys, deadline_s):
        return await self.behind.lookup(keys, deadline_s)

    async def _call(self) -> None:
        await asyncio.sleep(0)
        if self.is_down:
            raise DirectoryUnavailable("down")


class Stage:
    def __init__(self, **options) -> None:
        self.time = FakeTime()
        self.directory = FaultyDirectory(self.time)
        self.metrics = AgentMetrics()
        self._passed = 0
        self.publisher = self.make(**options)

    def make(self, **options) -> Publisher:
        lives = Lives(
            self.directory, HostRegistration("host-1", "http://127.0.0.1:1"), Load, self.time.sleep, self.metrics
        )
        return Publisher(
            self.directory,
            lives,
            Inventory(100_000),
            clock=self.time.clock,
            sleep=self.time.sleep,
            metrics=self.metrics,
            **({"chance": lambda: 0.0} | options),
        )

    async def believed(self, which: int | bytes) -> int:
        return await believed(self.directory.behind, key(which) if isinstance(which, int) else which)

    async def all_believed(self, keys: list[bytes]) -> bool:
        return all([await self.believed(each) == DRAM for each in keys])

    async def has(self, key: bytes, mask: int) -> bool:
        """Whether a life of this writer's holds a key so, whatever others hold."""
        record = dict(unpack_holders(await self.record_of(key)))
        return mask in [record.get(life) for life in self.publisher.lives.incarnations]

    async def all_have(self, keys: list[bytes], mask: int) -> bool:
        return all([await self.has(each, mask) for each in keys])

    async def record_of(self, key: bytes) -> bytes:
        return (await self.directory.lookup([key], 1.0)).records[0] or b""

    async def pass_by(self, keys: list[bytes]) -> None:
        """Another writer, whom no fault holds up, writes to the records of these keys of one partition."""
        directory, partition = self.directory.behind, partition_of(keys[0])
        for start in range(0, len(keys), BATCH_PLACEMENTS_MAX):
            self._passed += 1
            states = tuple((each, 1) for each in keys[start : start + BATCH_PLACEMENTS_MAX])
            await directory.place(Batch(PASSER_BY, partition, self._passed, states, 7200.0))

    async def live_count(self) -> int:
        return sum(member.is_live for member in await self.directory.behind.members())

    def walks(self, reason: str) -> float:
        return self.sample("warmroute_walks_total", reason=reason)

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def running(publisher: Publisher) -> AsyncIterator[None]:
    task = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def staged(**options: Any) -> AsyncIterator[Stage]:
    stage = Stage(**options)
    async with running(stage.publisher):
        await stage.time.advance(NEW_LIFE_MIN_S)  # its life has begun, and the next may
        yield stage
