"""Real sentinels: the master dies with a tail that nobody else has, and comes back as a replica."""

import asyncio
from collections.abc import Iterator

import pytest

from directory.errors import DirectoryUnavailable
from directory.function_library import load_functions
from directory.interface import LOST
from directory.redis_directory import RedisDirectory
from tests.directory.documented_users import documented_sentinel_user, documented_users
from tests.directory.fleet_samples import HOST, LOAD, batch, holders, incarnation, key
from tests.directory.servers import SentinelGroup
from tests.directory.stands import until

A, B = incarnation(1), incarnation(2)
K1, K2 = key(1), key(2)
DEADLINE_S = 5.0


@pytest.fixture
def group() -> Iterator[SentinelGroup]:
    with SentinelGroup(password="p@ss/word") as group:
        yield group


async def held(directory: RedisDirectory, of: bytes) -> dict[bytes, int]:
    return holders((await directory.lookup([of], DEADLINE_S)).records[0])


async def test_a_failover_that_loses_a_tail_is_told_to_its_writer(group: SentinelGroup) -> None:
    directory = RedisDirectory.connect(group.url)
    await directory.register(A, HOST, LOAD, term_s=3600.0)
    assert await directory.place(batch(A, 0, {K1: 1})) == LOST
    group.wait_until_replicated()
    old, replica = group.master(), group.replica()
    # From here on nothing is replicated: the replica reads from nobody, but lives.
    replica.client().replicaof("127.0.0.1", "1")
    replica.client().config_set("replica-priority", "100")
    assert await directory.place(batch(A, 1, {K2: 1}, acknowledged=0)) == 0
    await directory.register(B, HOST, LOAD)
    old.kill()
    await asyncio.to_thread(group.wait_for_new_master, old)
    attempt = 1

    async def answer() -> int | None:
        nonlocal attempt
        attempt += 1
        try:
            return await directory.place(batch(A, attempt, {K1: 4}, acknowledged=1))
        except DirectoryUnavailable:
            return None

    answers: list[int] = []

    async def is_taken() -> bool:
        answers.extend(each for each in [await answer()] if each is not None)
        return bool(answers)

    await until(is_taken)
    assert answers == [LOST], "it acknowledged 1 and has no such attempt any more"
    assert (await held(directory, K1), await held(directory, K2)) == ({A: 4}, {})
    assert (await directory.renew(A, LOAD)).known
    assert not (await directory.renew(B, LOAD)).known
    old.start()
    assert await directory.place(batch(A, attempt + 1, {K2: 2}, acknowledged=attempt)) == LOST
    assert group.master() is not old
    assert await held(directory, K2) == {A: 2}
    await directory.aclose()


async def test_users_confined_to_the_documented_commands_work_through_sentinels(group: SentinelGroup) -> None:
    first = RedisDirectory.connect(group.url)
    assert [each.became for each in await load_functions(await first.nodes(), False)] == ["loaded"]
    for server in group.servers:
        for rule in documented_users().values():
            server.client().execute_command(*rule)
    for sentinel in group.sentinels:
        sentinel.client().execute_command(*documented_sentinel_user())
    hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in group.sentinels)
    login = "sentinel_username=seeker&sentinel_password=pw"
    agent = RedisDirectory.connect(f"redis-sentinel://agent:pw@{hosts}/wr?{login}")
    gateway = RedisDirectory.connect(f"redis-sentinel://gateway:pw@{hosts}/wr?{login}")
    await agent.register(A, HOST, LOAD)
    assert await agent.place(batch(A, 0, {K1: 1})) == LOST
    assert await held(gateway, K1) == {A: 1}
    assert len(await gateway.members()) == 1
    for each in (first, agent, gateway):
        await each.aclose()
