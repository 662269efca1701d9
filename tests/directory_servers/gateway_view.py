"""What a gateway knows and asks: its real fleet table and its real lookup, without requests and engines."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Self

import httpx

from directory.costs import prefill_s
from directory.redis_directory import RedisDirectory
from gateway.fleet import Fleet
from gateway.health import Health, HealthCheck, Target
from gateway.lookup import ChunkChain, ChunkLookup, Holders, lookup_deadline_s
from tests.directory_servers.agents import CHUNK_TOKENS, ENGINE_LOAD, MODEL, SHAPE

LATE_S = 0.02
"""How much later than its deadline a lookup may return on a busy machine and still count as within it."""
ASK_PAUSE_S = 0.02


class AllWell(HealthCheck):
    """Every engine may serve."""

    async def check(self, targets: Sequence[Target]) -> dict[str, Health]:
        return {target.engine: Health("ready", target.models) for target in targets}


@dataclass(frozen=True, slots=True)
class Asked:
    """One lookup of a prompt: when, how long, and the longest prefix that an engine has, in chunks.

    `reached`: the lives whose placements would have been believed.
    """

    begun_s: float
    took_s: float
    deadline_s: float
    chunks: int
    hit_chunks: int
    degraded: str | None
    reached: frozenset[bytes]

    @property
    def is_in_time(self) -> bool:
        """Whether the directory's answer came within the deadline."""
        return self.degraded is None and self.took_s <= self.deadline_s + LATE_S


def hit_rate(asked: Sequence[Asked]) -> float:
    """Tokens of the prompts that the best engine needn't compute, as a share of all."""
    return sum(each.hit_chunks for each in asked) / sum(each.chunks for each in asked)


class GatewayView:
    """Use as `async with`: it polls the table meanwhile, as every gateway does."""

    def __init__(self, url: str) -> None:
        self.directory = RedisDirectory.connect(url)
        self._client = httpx.AsyncClient(trust_env=False)
        self.fleet = Fleet(self.directory, AllWell(self._client), time.monotonic)
        self.lookup = ChunkLookup(self.directory, time.monotonic)
        self._polling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._polling = asyncio.create_task(self.fleet.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._polling is not None:
            self._polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polling
        await self._client.aclose()
        await self.directory.aclose()

    async def ask(self, keys: Sequence[bytes]) -> Asked:
        """Look up a prompt as `gateway.completion` does. Never raises; a test is told by it if it does."""
        begun_s = time.monotonic()
        views = self.fleet.table.serving(MODEL)
        deadline_s = _deadline_s(len(keys))
        holders = Holders(is_known=False, degraded="directory_unavailable")
        if self.fleet.is_directory_known():
            groups = self.lookup.grouped(MODEL, views)
            holders = await self.lookup.find([ChunkChain(tuple(keys), group) for group in groups], deadline_s)
        best = max((match.chunks for match in holders.matches.values()), default=0)
        reached = frozenset[bytes]().union(*(view.reach.own | view.reach.host for view in views))
        took_s = time.monotonic() - begun_s
        return Asked(begun_s, took_s, deadline_s, len(keys), best, holders.degraded, reached)

    async def ask_all(self, prompts: Sequence[Sequence[bytes]]) -> list[Asked]:
        """Each prompt once, one after the other."""
        return [await self.ask(keys) for keys in prompts]

    @contextlib.asynccontextmanager
    async def asking(self, prompts: Sequence[Sequence[bytes]]) -> AsyncIterator[list[Asked]]:
        """Ask for one prompt after the other, over and over: the list grows. What is raised ends the block."""
        asked: list[Asked] = []

        async def ask_on() -> None:
            while True:
                for keys in prompts:
                    asked.append(await self.ask(keys))
                    await asyncio.sleep(ASK_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(ask_on())
            yield asked
            task.cancel()


async def until(holds: Callable[[], bool], what: str, bound_s: float) -> None:
    """Wait until it is true, at most `bound_s`."""
    ends_at = time.monotonic() + bound_s
    while not holds():
        assert time.monotonic() < ends_at, f"not within {bound_s} s: {what}"
        await asyncio.sleep(0.02)


async def until_rate(asked: Sequence[Asked], window: int, rate: float, bound_s: float) -> float:
    """Wait until `window` lookups in a row, begun since this call, have at least that hit rate, at most `bound_s`.

    Returns how many seconds after this call the first of them began: what was asked from then on was found.
    """
    begun_s, skipped = time.monotonic(), len(asked)
    found = 0.0
    while True:
        newest = asked[skipped:][-window:]
        if len(newest) == window and (found := hit_rate(newest)) >= rate:
            return newest[0].begun_s - begun_s
        assert time.monotonic() - begun_s < bound_s, f"a hit rate of {found:.3f}, not {rate:.3f}, after {bound_s} s"
        await asyncio.sleep(0.02)


def _deadline_s(chunks: int) -> float:
    assert ENGINE_LOAD.rates is not None
    return lookup_deadline_s(prefill_s(SHAPE, ENGINE_LOAD.rates, chunks * CHUNK_TOKENS))
