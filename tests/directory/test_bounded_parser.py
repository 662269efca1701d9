"""Replies that announce or bring more than fits are refused while they are read; all others are as they were."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse

from directory import bounded_parser
from directory.bounded_parser import BoundedParser
from directory.errors import DirectoryError
from directory.redis_directory import RedisDirectory
from tests.directory.fleet_samples import key

MOST = b"*999999\r\n"


async def replies(data: bytes, count: int, at_once: int = 1 << 20) -> list[object]:
    """The first replies in `data`, each of a call of its own; it comes in pieces of `at_once` bytes."""
    parser = BoundedParser(socket_read_size=at_once)
    stream = asyncio.StreamReader()
    stream.feed_data(data)
    stream.feed_eof()
    parser.on_connect(SimpleNamespace(_reader=stream, encoder=SimpleNamespace(decode_responses=False)))
    found = []
    for _ in range(count):
        parser.begin()
        found.append(await parser.read_response())
    return found


@pytest.mark.parametrize("at_once", [1 << 20, 8, 1])
@pytest.mark.parametrize(
    "reply",
    [
        b"*1000000\r\n",
        b"*2147483647\r\n",
        b"%1000000\r\n",
        b"~1000000\r\n",
        b">1000000\r\n",
        b"+OK\r\n*1000000\r\n",
        b"*2\r\n$0\r\n\r\n*1000000\r\n",
        b"*2\r\n$70\r\n" + b"x" * 70 + b"\r\n*1000000\r\n",
    ],
    ids=["list", "most", "map", "set", "push", "second reply", "nested", "after a text"],
)
async def test_a_list_too_long_is_refused_however_it_comes(reply: bytes, at_once: int) -> None:
    with pytest.raises(InvalidResponse, match="announces"):
        await replies(reply, 2, at_once)


async def test_a_list_that_is_not_too_long_is_waited_for() -> None:
    with pytest.raises(RedisConnectionError):
        await replies(MOST, 1)


@pytest.mark.parametrize("head", [b"$2147483647\r\n", b"*9999\r\n"])
async def test_a_reply_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(bounded_parser, "REPLY_BYTES_MAX", 5000)
    with pytest.raises(InvalidResponse, match="longer than 5000"):
        await replies(head + b"$-1\r\n" * 2000, 1, 64)


async def test_each_call_has_the_bound_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_parser, "REPLY_BYTES_MAX", 200)
    assert await replies((b"$100\r\n" + b"x" * 100 + b"\r\n") * 9, 9, 64) == [b"x" * 100] * 9


@given(st.lists(st.none() | st.binary(max_size=40), max_size=20), st.integers(1, 70))
def test_records_are_as_they_were_sent(records: list[bytes | None], at_once: int) -> None:
    texts = [b"$-1\r\n" if each is None else b"$%d\r\n%s\r\n" % (len(each), each) for each in records]
    reply = b"*%d\r\n%s" % (len(records), b"".join(texts))
    assert asyncio.run(replies(reply * 2, 2, at_once)) == [records, records]


async def test_a_server_that_announces_too_much_costs_its_call_only() -> None:
    answers = [b"*2147483647\r\n", b"*1\r\n$2\r\nok\r\n"]

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"MGET" not in (asked := await reader.read(65_536)) and asked:
            writer.write(b"+OK\r\n" * asked.count(b"CLIENT\r\n"))
        if asked:
            writer.write(answers.pop(0))
            await reader.read()
        writer.close()

    async with await asyncio.start_server(attend, "127.0.0.1", 0) as server:
        directory = RedisDirectory.connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            with pytest.raises(DirectoryError, match="announces"):
                await directory.lookup([key(1)], 5.0)
            assert (await directory.lookup([key(1)], 5.0)).records == (b"ok",)
        finally:
            await directory.aclose()
