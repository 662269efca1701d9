"""Agents without tiers and doors: the real publishers and lives of a host with one engine."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import Self

from directory.costs import ModelShape, Rates
from directory.identity import Identity
from directory.members import EngineRegistration, HostRegistration, Load, Registration
from directory.redis_directory import RedisDirectory
from directory.tiers import Tier
from nodeagent.inventory import Inventory
from nodeagent.metrics import AgentMetrics
from nodeagent.publisher import Publisher
from nodeagent.registration import Lives
from tests.directory_servers.corpus import passing_key
from tests.gateway.samples import MODEL

CHUNK_TOKENS = 256
KEYS_MAX = 200_000
ON_HOST = int(Tier.DRAM | Tier.NVME)
SHAPE = ModelShape(8e9, 32, 4096, 131072)
ENGINE_LOAD = Load(rates=Rates(4e14, {Tier.DRAM: 2e10, Tier.NVME: 7e9}))
PASSING_KEYS = 256
PASSING_PAUSE_S = 0.2
PASSING_AT_ONCE = 2


def engine_registration(
    name: str, url: str = "http://127.0.0.1:1", tokenizer_files: Mapping[str, str] | None = None
) -> EngineRegistration:
    return EngineRegistration(
        engine=f"engine-{name}",
        host=f"host-{name}",
        url=url,
        models=(MODEL,),
        identity=Identity("tiny", "a" * 64, "b" * 64, "bf16", "test-v1"),
        shape=SHAPE,
        chunk_tokens=CHUNK_TOKENS,
        context_tokens=2**20,
        tokenizer_files=tokenizer_files or {},
    )


class Agent:
    """Use as `async with`: it begins its lives, and is killed at the end: nothing is retired.

    `host` announces `dram` and `nvme`, `engine` announces `gpu`; `record` into them before or meanwhile.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        host: HostRegistration | None = None,
        engine: EngineRegistration | None = None,
    ) -> None:
        self.name = name
        self.directory = RedisDirectory.connect(url)
        self.metrics = AgentMetrics()
        self.host = self._publisher(host or HostRegistration(f"host-{name}", "http://127.0.0.1:1"), Load())
        self.engine = self._publisher(engine or engine_registration(name), ENGINE_LOAD)
        self._task: asyncio.Task[None] | None = None

    @property
    def publishers(self) -> tuple[Publisher, Publisher]:
        return self.host, self.engine

    @property
    def is_settled(self) -> bool:
        return self.host.is_settled and self.engine.is_settled

    def masks(self) -> dict[bytes, dict[bytes, int]]:
        """Life -> directory key -> tiers, as its inventories are; only where it is settled."""
        assert self.is_settled
        found = {}
        for publisher in self.publishers:
            (life,) = publisher.lives.incarnations
            found[life] = {key: publisher.inventory.mask(key) for key in publisher.inventory}
        return found

    def hold(self, keys: Iterable[bytes]) -> None:
        """Every key in `dram` and `nvme`, every fourth in `gpu` as well."""
        for number, key in enumerate(keys):
            self.host.record(key, ON_HOST)
            if number % 4 == 0:
                self.engine.record(key, int(Tier.GPU))

    def walk(self) -> None:
        """Begin new lives, as the calendar would."""
        for publisher in self.publishers:
            publisher.doubt("calendar")

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def walks(self) -> Mapping[str, float]:
        """Walks done, by reason."""
        samples = (sample for family in self.metrics.registry.collect() for sample in family.samples)
        return {each.labels["reason"]: each.value for each in samples if each.name == "warmroute_walks_total"}

    async def churn(self, number: int, at_once: int = PASSING_AT_ONCE) -> None:
        """Let keys come and go until cancelled: the writes of an agent at work, or with many `at_once` a flood."""
        count = 0
        while True:
            for _ in range(at_once):
                key = passing_key(number, count % PASSING_KEYS)
                self.host.record(key, 0 if self.host.inventory.mask(key) else ON_HOST)
                count += 1
            await asyncio.sleep(PASSING_PAUSE_S)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """End at once. Nothing is said to anybody."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self.directory.aclose()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for publisher in self.publishers:
                group.create_task(publisher.run())

    def _publisher(self, registration: Registration, load: Load) -> Publisher:
        def reported() -> Load:
            return replace(load, is_directory_full=publisher.refusals.is_full)

        lives = Lives(self.directory, registration, reported, asyncio.sleep, self.metrics)
        publisher = Publisher(
            self.directory,
            lives,
            Inventory(KEYS_MAX),
            clock=time.monotonic,
            sleep=asyncio.sleep,
            metrics=self.metrics,
        )
        return publisher


@contextlib.asynccontextmanager
async def working_agents(url: str, holdings: Iterable[Iterable[bytes]]) -> AsyncIterator[list[Agent]]:
    """An agent for each holding, all in this process; they settle in the background."""
    async with contextlib.AsyncExitStack() as stack:
        agents = []
        for number, keys in enumerate(holdings):
            agent = await stack.enter_async_context(Agent(url, str(number)))
            agent.hold(keys)
            agents.append(agent)
        yield agents


@contextlib.asynccontextmanager
async def churning(agents: Iterable[Agent]) -> AsyncIterator[None]:
    """Let each agent's passing keys come and go for as long as the block lasts."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(agent.churn(number)) for number, agent in enumerate(agents)]
        yield
        for task in tasks:
            task.cancel()
