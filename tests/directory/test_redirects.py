"""Servers of a cluster that send a caller on: in a circle, nowhere, or where it knows more."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from directory.errors import DirectoryError, DirectoryUnavailable
from directory.redis_connections import HOPS_MAX
from directory.redis_directory import RedisDirectory
from directory.redis_topology import PARTITION_SLOTS
from tests.directory.fleet_samples import batch, holders, incarnation, key

A, K1, DEADLINE_S = incarnation(1), key(1), 5.0
SLOT = PARTITION_SLOTS[0]
READ_BYTES_MAX = 65536
RECORD = A + b"\x04"


class FakeNode:
    """Says that it has every slot, under `called`, and answers MGET and FCALL with what it is told to."""

    def __init__(self, called: bytes = b"") -> None:
        self.called = called
        self.answers: dict[bytes, bytes] = {}
        self.asked: Counter[bytes] = Counter()
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> "FakeNode":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        while data := await reader.read(READ_BYTES_MAX):
            for name in re.findall(rb"\*\d+\r\n\$\d+\r\n([A-Z_]+)\r\n", data):
                self.asked[name] += 1
                writer.write(self._slots() if name == b"CLUSTER" else self.answers.get(name, b"+OK\r\n"))
        self._writers.discard(writer)
        writer.close()

    def _slots(self) -> bytes:
        host = b"$%d\r\n%s\r\n" % (len(self.called), self.called)
        return b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n%s:%d\r\n$2\r\nid\r\n" % (host, self.port)


Started = Callable[..., Awaitable[tuple[RedisDirectory, FakeNode]]]


@pytest.fixture
async def started() -> AsyncIterator[Started]:
    """A directory on a cluster of one fake node."""
    async with AsyncExitStack() as stack:

        async def start(called: bytes = b"") -> tuple[RedisDirectory, FakeNode]:
            node = await stack.enter_async_context(FakeNode(called))
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
        with pytest.raises(DirectoryError, match="can't be reached"):
            await call
