"""Servers of a cluster that send a caller on: in a circle, nowhere, or where it knows more."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from directory import redis_topology
from directory.errors import DirectoryError, DirectoryUnavailable
from directory.redis_connections import HOPS_MAX
from directory.redis_directory import RedisDirectory
from directory.redis_topology import PARTITION_SLOTS
from tests.directory.fake_servers import FakeNode
from tests.directory.fleet_samples import batch, holders, incarnation, key
from tests.directory.stands import until

A, K1, DEADLINE_S = incarnation(1), key(1), 5.0
SLOT = PARTITION_SLOTS[0]
RECORD = A + b"\x04"


Started = Callable[..., Awaitable[tuple[RedisDirectory, FakeNode]]]


@pytest.fixture
async def started() -> AsyncIterator[Started]:
    """A directory on a cluster of one fake node."""
    async with AsyncExitStack() as stack:

        async def start(called: bytes = b"") -> tuple[RedisDirectory, FakeNode]:
            node = FakeNode(called)
            await stack.enter_async_context(node)
            directory = RedisDirectory.connect(f"redis-cluster://127.0.0.1:{node.port}")
            stack.push_async_callback(directory.aclose)
            return directory, node

        yield start


def sends_on(kind: bytes, port: int, host: bytes = b"127.0.0.1") -> bytes:
    return b"-%s %d %s:%d\r\n" % (kind, SLOT, host, port)


@pytest.mark.parametrize("kind", [b"MOVED", b"ASK"])
async def test_redirects_in_a_circle_end(started: Started, kind: bytes) -> None:
    directory, node = await started()
    node.answers = {b"MGET": sends_on(kind, node.port), b"FCALL": sends_on(kind, node.port)}
    with pytest.raises(DirectoryUnavailable, match="moving"):
        await directory.lookup([K1], DEADLINE_S)
    assert node.asked[b"MGET"] == 1 + HOPS_MAX
    with pytest.raises(DirectoryUnavailable, match="moving"):
        await directory.place(batch(A, 0, {K1: 1}))
    assert node.asked[b"FCALL"] == 2


async def test_a_slot_that_stays_between_two_servers_is_asked_key_by_key_and_not_for_ever(started: Started) -> None:
    directory, node = await started()
    node.answers = {b"MGET": b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n"}
    with pytest.raises(DirectoryUnavailable, match="moving"):
        await directory.lookup([K1, key(2)], DEADLINE_S)
    assert node.asked[b"MGET"] == 1 + 2 * HOPS_MAX


async def test_a_server_that_leaves_its_own_name_out_is_where_it_was_reached(started: Started) -> None:
    directory, node = await started()
    target, there = await started()
    there.answers = {b"MGET": b"*1\r\n$9\r\n%s\r\n" % RECORD}
    node.answers = {b"MGET": sends_on(b"MOVED", there.port, host=b"")}
    for _ in range(3):
        assert holders((await directory.lookup([K1], DEADLINE_S)).records[0]) == {A: 4}
    assert there.asked[b"MGET"] == 3
    assert target is not directory


async def test_a_slot_that_has_moved_is_asked_for_at_its_new_place(started: Started) -> None:
    directory, node = await started()
    _, there = await started()
    there.answers = {b"FCALL": b":-1\r\n"}
    node.answers = {b"FCALL": sends_on(b"MOVED", there.port)}
    assert await directory.place(batch(A, 0, {K1: 1})) == -1
    assert (node.asked[b"FCALL"], there.asked[b"FCALL"]) == (1, 1)
    assert there.asked[b"ASKING"] == 0


@pytest.mark.parametrize("name", [b"?", b"a/b", b"a@b"])
async def test_a_server_whose_name_cannot_be_one_is_not_guessed_at(started: Started, name: bytes) -> None:
    directory, _ = await started(called=name)
    for call in (directory.lookup([K1], DEADLINE_S), directory.members(), directory.place(batch(A, 0, {K1: 1}))):
        with pytest.raises(DirectoryError, match="name one that can't be reached"):
            await call


@pytest.mark.parametrize(
    "strange",
    [b"+OK\r\n", b":7\r\n", b"*1\r\n:7\r\n", b"*1\r\n*3\r\n:0\r\n:9\r\n*0\r\n", b"*1\r\n*2\r\n:0\r\n:9\r\n"],
)
async def test_nonsense_about_the_slots_is_shown(started: Started, strange: bytes) -> None:
    directory, node = await started()
    node.answers = {b"CLUSTER": strange}
    for call in (directory.nodes(), directory.members(), directory.place(batch(A, 0, {K1: 1}))):
        with pytest.raises(DirectoryError, match=f"127.0.0.1:{node.port} answers CLUSTER SLOTS with"):
            await call


async def test_a_silent_server_is_heard_again_though_no_search_asks_it(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, node = await started()
    _, silent = await started()
    node.names = [node, silent]
    one_value = b"*1\r\n$9\r\n%s\r\n" % RECORD
    node.answers, silent.answers, silent.hangs = {b"MGET": one_value}, {b"MGET": one_value}, True
    of_both = [key(1, partition=0), key(1, partition=15)]
    monkeypatch.setattr(redis_topology, "_shuffled", lambda known: [each for each in known if each.port == node.port])

    async def is_given_up() -> bool:
        with pytest.raises(DirectoryUnavailable) as refusal:
            await directory.lookup(of_both[1:], DEADLINE_S)
        return "fallen silent" in str(refusal.value)

    async def is_heard() -> bool:
        return not (await directory.lookup(of_both, DEADLINE_S)).is_partial

    await until(is_given_up)
    silent.hangs = False
    await until(is_heard)
