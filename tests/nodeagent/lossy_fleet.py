"""A fleet of real publishers around a directory that fails in every way that is known, all of it drawn from one seed.

`Server` is a `MemoryDirectory` in three shards that can be flushed, rolled back, lost and brought back empty; `Wire` is
one writer's way to it: calls are lost, answers are lost, both come late, twice, and in another order. A `Writer` is an
agent reduced to its publisher: it can be killed, restarted, ended, and suspended in the middle of whatever it does.
"""

import asyncio
import contextlib
import copy
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from directory.errors import DirectoryFull, DirectoryUnavailable, RegistrationRefused
from directory.interface import Batch
from directory.members import HostRegistration, Load, Registration, Renewal
from directory.memory import MemoryDirectory
from directory.placements import partition_of, unpack_holders
from nodeagent.inventory import Inventory
from nodeagent.metrics import AgentMetrics
from nodeagent.publisher import Publisher
from nodeagent.registration import Lives

CALL_S = 1.0
LATE_MAX_S = 8.0
"""How long after it was sent a call may still arrive."""
SHARDS = 3
REGISTRATIONS_PARTITION = 0
SNAPSHOT_S = 1.0
SNAPSHOTS = 4
KEYS = [bytes([partition << 4]) + number.to_bytes(15, "big") for partition in (0, 1, 2, 6, 11) for number in range(9)]
PENDING_KEYS_MAX = 96
"""Six keys a lane: of nine that a partition has here, so that lanes do fall behind."""


def now() -> float:
    return asyncio.get_running_loop().time()


class Server:
    def __init__(self) -> None:
        self.directory = MemoryDirectory(now)
        self.down: set[int] = set()
        self.is_full = False
        """Whether it is out of memory: it takes no placements then, and everything else."""
        self._snapshots: deque[dict[str, Any]] = deque(maxlen=SNAPSHOTS)

    def shard_of(self, partition: int) -> int:
        return partition % SHARDS

    def is_down(self, partition: int) -> bool:
        return self.shard_of(partition) in self.down

    async def keep_snapshots(self) -> None:
        while True:
            self._snapshots.append(self._state(self.directory))
            await asyncio.sleep(SNAPSHOT_S)

    def empty(self, shards: set[int]) -> None:
        """What these shards held is gone."""
        self._load(self._state(MemoryDirectory(now)), shards)

    def roll_back(self, shards: set[int], snapshots: int) -> None:
        """These shards are what they were so many snapshots ago: a replica that lagged has taken over."""
        if len(self._snapshots) >= snapshots:
            self._load(self._snapshots[-snapshots], shards)

    def holders(self) -> dict[bytes, dict[bytes, int]]:
        """Key -> incarnation -> mask: every record as it is."""
        return {key: dict(unpack_holders(self.directory._record_bytes(key, now()))) for key in self.directory._records}

    @staticmethod
    def _state(directory: MemoryDirectory) -> dict[str, Any]:
        return {
            "rows": {name: copy.copy(row) for name, row in directory._rows.items()},
            "records": dict(directory._records),
            "attempts": dict(directory._attempts),
        }

    def _load(self, state: dict[str, Any], shards: set[int]) -> None:
        def merged(present: dict[Any, Any], past: dict[Any, Any], partition: Callable[[Any], int]) -> dict[Any, Any]:
            kept = {name: each for name, each in present.items() if self.shard_of(partition(name)) not in shards}
            return kept | {name: each for name, each in past.items() if self.shard_of(partition(name)) in shards}

        directory = self.directory
        directory._records = merged(directory._records, state["records"], partition_of)
        directory._attempts = merged(directory._attempts, state["attempts"], lambda place: place[0])
        if self.shard_of(REGISTRATIONS_PARTITION) in shards:
            directory._rows = {name: copy.copy(row) for name, row in state["rows"].items()}


@dataclass(frozen=True, slots=True)
class Weather:
    """How often what goes wrong, and how late what is late arrives, in seconds after it was sent."""

    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    doubled: float = 0.0
    late_max_s: float = 0.0

    def draw(self, chance: random.Random) -> str:
        faults = {"lost": self.lost, "unanswered": self.unanswered, "late": self.late, "doubled": self.doubled}
        return chance.choices([*faults, ""], [*faults.values(), 1 - sum(faults.values())])[0]


CALM = Weather()
ROUGH = Weather(0.08, 0.08, 0.08, 0.12, late_max_s=LATE_MAX_S)
STORM = Weather(0.12, 0.12, 0.08, 0.08, late_max_s=LATE_MAX_S)


class Wire:
    """One writer's `DirectoryWriter`. While `awake` isn't set, nothing is sent and no answer is read."""

    def __init__(self, server: Server, chance: random.Random, awake: asyncio.Event) -> None:
        self._server = server
        self._chance = chance
        self._awake = awake
        self._late: set[asyncio.Task[None]] = set()
        self.weather = CALM

    async def close(self) -> None:
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    async def place(self, batch: Batch) -> int:
        async def apply() -> int:
            if self._server.is_full:
                raise DirectoryFull("no room")
            return await self._server.directory.place(batch)

        return await self._call(batch.partition, apply)

    async def withdraw(self, batch: Batch) -> int:
        return await self._call(batch.partition, lambda: self._server.directory.withdraw(batch))

    async def register(self, incarnation: bytes, registration: Registration, load: Load) -> None:
        await self._call(
            REGISTRATIONS_PARTITION, lambda: self._server.directory.register(incarnation, registration, load)
        )

    async def renew(self, incarnation: bytes, load: Load) -> Renewal:
        return await self._call(REGISTRATIONS_PARTITION, lambda: self._server.directory.renew(incarnation, load))

    async def retire(self, incarnation: bytes) -> None:
        await self._call(REGISTRATIONS_PARTITION, lambda: self._server.directory.retire(incarnation))

    async def _call(self, partition: int, apply: Callable[[], Awaitable[Any]]) -> Any:
        await self._awake.wait()
        try:
            return await self._deliver(partition, apply)
        finally:
            await self._awake.wait()

    async def _deliver(self, partition: int, apply: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(self._chance.uniform(0.001, 0.02))
        fault = self.weather.draw(self._chance)
        if self._server.is_down(partition) or fault == "lost":
            await asyncio.sleep(self._chance.uniform(0, CALL_S))
            raise DirectoryUnavailable("lost")
        if fault in ("late", "doubled"):
            self._deliver_later(partition, apply)
        if fault == "late":
            await asyncio.sleep(CALL_S)
            raise DirectoryUnavailable("no answer in time")
        answer = await apply()
        if fault == "unanswered":
            await asyncio.sleep(self._chance.uniform(0, CALL_S))
            raise DirectoryUnavailable("no answer")
        return answer

    def _deliver_later(self, partition: int, apply: Callable[[], Awaitable[Any]]) -> None:
        async def deliver(after_s: float) -> None:
            await asyncio.sleep(after_s)
            if not self._server.is_down(partition):
                with contextlib.suppress(RegistrationRefused, DirectoryFull):
                    await apply()

        task = asyncio.create_task(deliver(self._chance.uniform(0, self.weather.late_max_s)))
        self._late.add(task)
        task.add_done_callback(self._late.discard)


class Writer:
    """One host's agent, as far as the directory knows it."""

    def __init__(self, name: str, server: Server, chance: random.Random) -> None:
        self.name = name
        self._server = server
        self._chance = chance
        self._wires: list[Wire] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.start({})

    def start(self, held: dict[bytes, int]) -> None:
        """Begin with what survived; an agent that was killed leaves its lives and its late calls behind."""
        assert not self._tasks
        self._awake = asyncio.Event()
        self._awake.set()
        wire = self.wire = Wire(self._server, self._chance, self._awake)
        self._wires.append(wire)
        metrics = AgentMetrics()
        lives = Lives(wire, HostRegistration(self.name, "http://127.0.0.1:1"), Load, self._sleep, metrics)
        self.publisher = Publisher(
            wire,
            lives,
            Inventory(1_000),
            clock=now,
            sleep=self._sleep,
            metrics=metrics,
            pending_keys_max=PENDING_KEYS_MAX,
            chance=self._chance.random,
        )
        self.publisher.record_all(held)
        self._tasks = [asyncio.create_task(self.publisher.run())]

    @property
    def is_running(self) -> bool:
        return bool(self._tasks)

    @property
    def is_awake(self) -> bool:
        return self._awake.is_set()

    @property
    def held(self) -> dict[bytes, int]:
        """What it holds, least recently used first."""
        inventory = self.publisher.inventory
        return {key: inventory.mask(key) for key in inventory} if self.is_running else {}

    async def kill(self) -> None:
        """As by SIGKILL: nothing is retired, what was sent may still arrive."""
        for task in self._tasks:
            task.cancel()
        self._awake.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def end(self) -> None:
        await self.kill()
        await self.publisher.stop()

    async def close(self) -> None:
        await self.kill()
        for wire in self._wires:
            await wire.close()

    def suspend(self) -> None:
        self._awake.clear()

    def resume(self) -> None:
        self._awake.set()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._awake.wait()
