"""A server that answers with anything at all: every call ends in time, with the directory's own errors only."""

import asyncio
import contextlib
import re
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from directory.costs import ModelShape
from directory.errors import DirectoryError
from directory.identity import Identity
from directory.interface import Batch
from directory.members import EngineRegistration, Load, Member
from directory.placements import partition_of
from directory.redis_directory import RedisDirectory

EXAMPLES = 80
KEY = b"k" * 16
LIFE = b"l" * 8
COMMAND = re.compile(rb"\*[0-9]+\r\n\$[0-9]+\r\n[A-Z_]+\r\n")
ENGINE = EngineRegistration(
    "e", "h", "http://e:1", ("m",), Identity("m", "w", "t", "f", "l"), ModelShape(1e6, 2, 8, 32), 16, 128
)


class StrangeServer:
    """Answers each command with `reply`, and one that asks where the servers are with `where`."""

    def __init__(self) -> None:
        self.reply = b""
        self.where = b""
        self.tasks: set[asyncio.Task[None]] = set()

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while asked := await reader.read(65_536):
                is_search = b"CLUSTER\r\n" in asked or b"SENTINEL\r\n" in asked
                commands = max(1, len(COMMAND.findall(asked)))
                writer.write((self.where if is_search else self.reply) * commands)
                await writer.drain()
        writer.transport.abort()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def server(runner: asyncio.Runner) -> Iterator[tuple[StrangeServer, int]]:
    strange = StrangeServer()

    async def begin() -> asyncio.Server:
        return await asyncio.start_server(strange.attend, "127.0.0.1", 0)

    async def end() -> None:
        listening.close()
        for task in list(strange.tasks):
            task.cancel()
        await asyncio.gather(*strange.tasks, return_exceptions=True)
        await listening.wait_closed()

    listening = runner.run(begin())
    yield strange, listening.sockets[0].getsockname()[1]
    runner.run(end())


simple = st.one_of(
    st.just(b"$-1\r\n"),
    st.just(b"*-1\r\n"),
    st.integers(-(2**63), 2**63 - 1).map(lambda number: b":%d\r\n" % number),
    st.binary(max_size=40).map(lambda data: b"$%d\r\n%s\r\n" % (len(data), data)),
    st.sampled_from(
        [b"+OK\r\n", b"+\xff\xfe\r\n", b"-ERR no\r\n", b"-\xff\r\n", b"-LOADING x\r\n", b"-MOVED 1 x:1\r\n"]
    ),
)
replies = st.recursive(
    simple,
    lambda inner: st.lists(inner, max_size=5).map(lambda each: b"*%d\r\n%s" % (len(each), b"".join(each))),
    max_leaves=12,
)
GARBAGE = st.binary(min_size=1, max_size=60).map(lambda data: b"!" + data + b"\r\n\r\n")


SINGLE, SENTINEL, CLUSTER = "redis://127.0.0.1:{}", "redis-sentinel://127.0.0.1:{}/m", "redis-cluster://127.0.0.1:{}"
parts = st.one_of(
    simple, st.sampled_from([b"$9\r\n127.0.0.1\r\n", b"$1\r\n?\r\n", b"$0\r\n\r\n", b":1\r\n", b":99999\r\n"])
)
masters = st.lists(parts, min_size=1, max_size=3).map(lambda each: b"*%d\r\n%s" % (len(each), b"".join(each)))
ranges = st.lists(parts | masters, min_size=2, max_size=4).map(
    lambda each: b"*1\r\n*%d\r\n:0\r\n:16383\r\n%s" % (len(each) + 1, b"".join(each[1:]))
)
redirects = st.tuples(
    st.sampled_from([b"MOVED", b"ASK"]),
    st.sampled_from([b"", b" 3560", b" x", b" -1", b" 99999"]),
    st.sampled_from(
        [b"", b" 127.0.0.1:1", b" :@", b" 127.0.0.1", b" 127.0.0.1:99999", b" ?:1", b" [::1]:1", b" a b:1"]
    ),
).map(lambda each: b"-" + b"".join(each) + b"\r\n")
ONE_OWNER = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:@PORT\r\n"


async def asked_of_each(directory: RedisDirectory) -> None:
    """What `warmroute directory stats` asks of each server."""
    for node in await directory.nodes():
        assert node.name
        await node.execute("DBSIZE")


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(b"HTTP/1.1 400 Bad Request\r\n\r\n")
@example(b"+OK\r\n")
@example(b"*1\r\n$9\r\n12345678\x07\r\n")
@example(b"*2\r\n:0\r\n*1\r\n*5\r\n$8\r\nllllllll\r\n:1\r\n:2\r\n$1\r\nx\r\n:0\r\n")
@given(replies | GARBAGE | redirects)
def test_any_reply_is_an_answer_or_a_directory_error(
    runner: asyncio.Runner, server: tuple[StrangeServer, int], reply: bytes
) -> None:
    ask_everything(runner, server, SINGLE, reply)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(b"*2\r\n:1\r\n:2\r\n")
@example(b"*2\r\n$-1\r\n$4\r\n6379\r\n")
@example(b"*2\r\n$9\r\n127.0.0.1\r\n$-1\r\n")
@example(b"*2\r\n$9\r\n127.0.0.1\r\n:99999\r\n")
@given(masters | replies | GARBAGE)
def test_any_word_of_a_sentinel_is_a_master_or_a_directory_error(
    runner: asyncio.Runner, server: tuple[StrangeServer, int], where: bytes
) -> None:
    ask_everything(runner, server, SENTINEL, b":1\r\n", where)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(b"*1\r\n*3\r\n:0\r\n:16383\r\n*0\r\n")
@example(b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n:5\r\n:1\r\n")
@example(b"*1\r\n*3\r\n$1\r\nx\r\n:16383\r\n*2\r\n$1\r\nx\r\n:1\r\n")
@given(ranges | replies | GARBAGE | redirects)
def test_any_division_of_a_cluster_is_one_or_a_directory_error(
    runner: asyncio.Runner, server: tuple[StrangeServer, int], where: bytes
) -> None:
    ask_everything(runner, server, CLUSTER, b":1\r\n", where)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(b"-MOVED 3560 127.0.0.1:99999\r\n")
@given(redirects | replies)
def test_wherever_a_member_sends_a_caller_is_an_answer_or_a_directory_error(
    runner: asyncio.Runner, server: tuple[StrangeServer, int], reply: bytes
) -> None:
    ask_everything(runner, server, CLUSTER, reply, ONE_OWNER)


def ask_everything(
    runner: asyncio.Runner, server: tuple[StrangeServer, int], url: str, reply: bytes, where: bytes | None = None
) -> None:
    async def check() -> None:
        strange, port = server
        strange.reply = reply
        strange.where = reply if where is None else where.replace(b"@PORT", str(port).encode())
        directory = RedisDirectory.connect(url.format(port))
        batch = Batch(LIFE, partition_of(KEY), 1, ((KEY, 1),), 60.0)
        gone = Batch(LIFE, partition_of(KEY), 1, ((KEY, 0),), 60.0)
        calls = [
            lambda: directory.lookup([KEY], 1.0),
            lambda: directory.lookup([KEY] * 300, 1.0),
            lambda: directory.members(),
            lambda: directory.register(LIFE, ENGINE, Load()),
            lambda: directory.renew(LIFE, Load()),
            lambda: directory.retire(LIFE),
            lambda: directory.place(batch),
            lambda: directory.withdraw(gone),
            lambda: asked_of_each(directory),
            lambda: directory.refreshed([Member(LIFE, ENGINE, Load(), 1.0)]),
        ]
        try:
            for number, call in enumerate(calls):
                try:
                    found = await asyncio.wait_for(call(), 20)
                except DirectoryError:
                    continue
                if number < 2:
                    assert all(record is None or isinstance(record, bytes) for record in found.records)
                    assert len(found.records) == (1, 300)[number]
                if number in (6, 7):
                    assert isinstance(found, int)
        finally:
            await directory.aclose()

    runner.run(check())
