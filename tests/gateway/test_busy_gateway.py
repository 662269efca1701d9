"""A gateway too busy to see answers in time doesn't hold that against the directory."""

import asyncio
import time

from directory.redis_directory import RedisDirectory
from gateway.lookup import ChunkChain, ChunkLookup, group_by_naming
from gateway.lookup_breaker import FAILURES_MAX
from tests.directory.conftest import running_valkey
from tests.directory.wire import StallingWire
from tests.gateway.views import view

DEADLINE_S = 0.02
BUSY_S = 0.1


async def test_a_busy_event_loop_never_pauses_lookups() -> None:
    with running_valkey() as server:
        directory = RedisDirectory.connect(f"redis://127.0.0.1:{server.port}")
        lookup = ChunkLookup(directory, time.monotonic)
        await until_answered(lookup)
        seen = set()
        for _ in range(FAILURES_MAX + 1):
            seen.add(await degraded_while_held(lookup))
            assert (lookup.state, lookup.pauses) == ("ok", 0)
        assert seen <= {None, "gateway_late"}  # an answer that came meanwhile is used, however late it is looked at
        await directory.aclose()


async def test_an_answer_that_a_busy_machine_delays_is_waited_for_once_more() -> None:
    """The wire runs on the same event loop: while that is held, nothing comes from the server either."""
    with running_valkey() as server:
        async with StallingWire(server.port) as wire:
            directory = RedisDirectory.connect(f"redis://127.0.0.1:{wire.port}")
            lookup = ChunkLookup(directory, time.monotonic)
            await until_answered(lookup)
            assert None in [await degraded_while_held(lookup) for _ in range(FAILURES_MAX + 1)]
            await directory.aclose()


async def until_answered(lookup: ChunkLookup) -> None:
    async with asyncio.timeout(20):
        while not (await lookup.find([chain()], 1.0)).is_known:
            pass


async def degraded_while_held(lookup: ChunkLookup) -> str | None:
    """What a lookup lacked during which the event loop was held beyond the deadline."""
    asked = asyncio.create_task(lookup.find([chain()], DEADLINE_S))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(time.sleep, BUSY_S)
    return (await asked).degraded


def chain() -> ChunkChain:
    (group,) = group_by_naming([view("a")])
    return ChunkChain((bytes(range(16)),), group)
