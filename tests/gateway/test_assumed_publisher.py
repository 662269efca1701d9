"""What one gateway assumes of engines without an agent is known to the others, and is repaired by beginning anew."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import redis
from aiohttp import web

from directory.errors import DirectoryUnavailable
from directory.interface import Batch
from directory.members import GatewayRegistration, Load, draw_incarnation
from directory.memory import MemoryDirectory
from directory.placements import Reach, partition_of, unpack_holders
from directory.redis_directory import RedisDirectory
from gateway import assumed_publisher
from gateway.assumed_publisher import LIFE_S, RENEW_S, RETRY_S, TERM_S, AssumedPublisher
from gateway.config import EngineConfig, RoutingConfig
from gateway.encoding.model_files import ModelFiles
from gateway.fleet import EngineView, FleetTable
from gateway.openai_schema import COMPLETIONS
from gateway.routing.assumed import AssumedPlacements
from tests.directory.stands import running_valkey
from tests.gateway.assembly import TestGateway, gateway_for
from tests.gateway.mock_engine import MockEngine, completion_body, prompt_tokens
from tests.gateway.samples import MODEL

KEYS = tuple(bytes([number * 16 % 256, number]) * 8 for number in range(200))
FILES = ModelFiles("reference", (("tokenizer.json", "a" * 64),))
GATEWAY = GatewayRegistration("g", "http://g:1")
URL = "http://e:1"


class Directory(MemoryDirectory):
    """Loses answers and placements on demand."""

    loses_answer = loses_writes = False

    async def place(self, batch: Batch) -> int:
        if self.loses_writes:
            self.loses_writes = False
            self._attempts.clear()
            self._records.clear()
        held = await super().place(batch)
        if self.loses_answer:
            self.loses_answer = False
            raise DirectoryUnavailable("the answer was lost")
        return held


class Stand:
    """A publisher of what is assumed of the engine `e`, and the directory as others read it."""

    def __init__(self, directory: RedisDirectory | None = None) -> None:
        self.now = 0.0
        self.memory = Directory(lambda: self.now)
        self.directory = directory or self.memory
        self.assumed = AssumedPlacements(1000.0)
        reach = Reach("e", frozenset(), frozenset())
        self.table = FleetTable({"e": EngineView("e", URL, (MODEL,), None, "", reach, None, "ready")}, {})
        self.publisher = AssumedPublisher(self.directory, GATEWAY, self.assumed, lambda: self.table, lambda: self.now)

    def compute(self, *keys: bytes, capacity: int = 1000) -> None:
        self.assumed.note_computed("e", keys, capacity, self.now)

    async def believed(self) -> set[bytes]:
        """The keys that live incarnations hold for `e`, as a reader would find them."""
        members = await self.directory.members()
        live = {each.incarnation for each in members if each.is_live and _is_of_engine(each.registration)}
        found = await self.directory.lookup(KEYS, 1.0)
        return {
            key
            for key, record in zip(KEYS, found.records, strict=True)
            if any(life in live for life, _ in unpack_holders(record or b""))
        }

    async def lives(self) -> int:
        return sum(each.is_live for each in await self.directory.members())


def _is_of_engine(registration: object) -> bool:
    return registration == GatewayRegistration("g", "http://g:1", "e", URL)


async def test_what_comes_and_goes_is_told_over_all_partitions() -> None:
    stand = Stand()
    stand.compute(*KEYS)
    await stand.publisher.tell()
    assert await stand.believed() == set(KEYS)
    assert len({partition_of(key) for key in KEYS}) == 16
    stand.compute(*KEYS[:1], capacity=50)
    await stand.publisher.tell()
    assert await stand.believed() == set(stand.assumed.held("e"))
    assert len(await stand.believed()) == 50
    assert await stand.lives() == 1


async def test_a_life_is_renewed_and_begun_anew_before_it_is_forgotten() -> None:
    stand = Stand()
    stand.compute(*KEYS[:5])
    while stand.now < 900.0:
        await stand.publisher.tell()
        assert await stand.believed() == set(KEYS[:5])
        found = await stand.directory.lookup(KEYS[:5], 1.0)
        assert {len(unpack_holders(record or b"")) for record in found.records} == {1}, "the life before is replaced"
        assert await stand.lives() == 1
        stand.now += 2.0
    assert len(stand.publisher.own_lives) == 3
    assert stand.now > 2 * LIFE_S


async def test_a_lost_answer_and_lost_writes_are_repaired_under_a_new_life() -> None:
    stand = Stand()
    stand.compute(*KEYS[:20])
    await stand.publisher.tell()
    stand.memory.loses_answer = True
    stand.compute(*KEYS[20:30])
    await stand.publisher.tell()
    stand.now += RETRY_S - 1
    await stand.publisher.tell()
    assert len(stand.publisher.own_lives) == 1, "a directory that fails is left alone for a while"
    stand.now += 1
    await stand.publisher.tell()
    assert await stand.believed() == set(KEYS[:30])
    stand.memory.loses_writes = True
    stand.compute(*KEYS[30:31])
    await stand.publisher.tell()
    await stand.publisher.tell()
    assert await stand.believed() == set(KEYS[:31])
    assert await stand.lives() == 1


async def test_what_waits_for_a_directory_that_is_away_is_bounded_and_what_is_held_is_told_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assumed_publisher, "PENDING_MAX", 40)
    stand = Stand()
    stand.compute(*KEYS[:10], capacity=10)
    await stand.publisher.tell()
    for number, key in enumerate(KEYS[10:]):  # nothing is told meanwhile
        stand.compute(key, capacity=10)
        stand.now += 0.1
        assert len(stand.publisher._told["e"].pending) <= 50, number
    assert await stand.believed() == set(KEYS[:10]) or stand.now > TERM_S
    await stand.publisher.tell()
    assert await stand.believed() == set(KEYS[-10:])
    assert await stand.lives() == 1


async def test_what_is_not_assumed_any_more_is_retired_and_nobody_else_is_told_of() -> None:
    stand = Stand()
    stand.compute(*KEYS[:5])
    stand.assumed.note_computed("unknown", KEYS[:5], 1000, 0.0)
    await stand.publisher.tell()
    assert len(stand.publisher.own_lives) == 1
    stand.now = 1001.0
    await stand.publisher.tell()
    assert await stand.lives() == 0
    stand.compute(*KEYS[:5])
    await stand.publisher.tell()
    assert await stand.believed() == set(KEYS[:5])


async def test_a_server_that_was_flushed_is_told_everything_again() -> None:
    with running_valkey() as server, redis.Redis(port=server.port, protocol=2) as raw:
        directory = RedisDirectory.connect(f"redis://127.0.0.1:{server.port}")
        try:
            stand = Stand(directory)
            stand.compute(*KEYS)
            await stand.publisher.tell()
            assert await stand.believed() == set(KEYS)
            raw.flushall()
            stand.now += RENEW_S
            await stand.publisher.tell()
            await stand.publisher.tell()
            assert await stand.believed() == set(KEYS)
            stand.assumed.keep(set())
            await stand.publisher.tell()
            assert await stand.believed() == set()
        finally:
            await directory.aclose()


async def answer_without_details(engine: MockEngine, request: web.Request, fields: dict[str, Any]) -> web.Response:
    return web.json_response(completion_body(engine, tokens=prompt_tokens(fields)) | {"usage": None})


async def served(client: httpx.AsyncClient, gateway: TestGateway, prompt: str) -> tuple[str, int, str]:
    headers = {"x-warmroute-explain": "1"}
    answer = await client.post(gateway.url + COMPLETIONS, json={"model": MODEL, "prompt": prompt}, headers=headers)
    assert answer.status_code == 200, answer.text
    said = answer.headers
    return said["x-warmroute-engine"], int(said["x-warmroute-matched-tokens"]), said["x-warmroute-reason"]


@asynccontextmanager
async def gateways_of(
    engines: list[MockEngine], directory: MemoryDirectory, count: int, clock: Callable[[], float]
) -> AsyncIterator[list[TestGateway]]:
    static = [EngineConfig(url=each.url, name=each.name) for each in engines]
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                gateway_for(
                    [],
                    static=static,
                    static_files=FILES,
                    writer=directory,
                    reader=directory,
                    routing=RoutingConfig(assumed_s=100.0),
                    clock=clock,
                )
            )
            for _ in range(count)
        ]


async def test_gateways_share_what_they_assume() -> None:
    directory = MemoryDirectory(time.monotonic)
    a, b = (MockEngine(name, answer_without_details) for name in "ab")
    async with a, b, httpx.AsyncClient(trust_env=False) as client:
        async with gateways_of([a, b], directory, 2, time.monotonic) as (one, other):
            for number in range(6):
                document = f"{number}. " + "The tide runs twice a day. " * 50
                held = len(document) // 256 * 256
                home, matched, _ = await served(client, one, document + "?")
                assert matched == 0
                await one.assumer.tell()
                await other.fleet.refresh()
                assert await served(client, other, document + "!") == (home, held, "prefix")
            await one.fleet.refresh()
            assert other.fleet.table.engines[home].reach.own
            assert one.fleet.table.engines[home].reach.own == frozenset(), "what it assumes itself it needn't ask for"
            assert other.loads.gateways == (), "lives that assume report no load"


async def test_a_gateway_that_is_gone_is_not_believed() -> None:
    directory = MemoryDirectory(time.monotonic)
    life = draw_incarnation()
    async with MockEngine("a") as a, gateways_of([a], directory, 1, time.monotonic) as (gateway,):
        row = GatewayRegistration("gone", "http://g:1", "a", a.url)
        await directory.register(life, row, Load())
        await gateway.fleet.refresh()
        assert gateway.fleet.table.engines["a"].reach.own == {life}
        await directory.retire(life)
        await gateway.fleet.refresh()
        assert gateway.fleet.table.engines["a"].reach.own == frozenset()
        elsewhere = GatewayRegistration("other", "http://g:1", "a", "http://elsewhere:1")
        await directory.register(draw_incarnation(), elsewhere, Load())
        await gateway.fleet.refresh()
        assert gateway.fleet.table.engines["a"].reach.own == frozenset(), "another engine of that name"
