"""An agent in a thread of its own, for tests that speak to it as engines do; and faster time for its directory."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from directory.interface import DirectoryWriter
from directory.memory import MemoryDirectory
from directory.placements import unpack_holders
from nodeagent.agent import Agent
from nodeagent.client import ChunkClient
from nodeagent.config import GB, AgentConfig
from nodeagent.publisher import WALK_INTERVAL_S
from tests.nodeagent.clients import CHUNK_BYTES, WAIT_S, connected, label, make_hello, payload, storage_key

__all__ = [
    "CHUNK_BYTES",
    "CLIENT",
    "SLOTS",
    "SPEED",
    "WAIT_S",
    "RunningAgent",
    "believed",
    "connected",
    "eventually",
    "fast_clock",
    "fast_sleep",
    "label",
    "make_hello",
    "open_fds",
    "payload",
    "read",
    "running_agent",
    "storage_key",
]

SPEED = 25.0
"""How much faster than the wall the directory's time runs: a term lasts a fifth of a second."""

SLOTS = 8
CLIENT = b"c" * 16

Value = TypeVar("Value")


def fast_clock() -> float:
    return time.monotonic() * SPEED


async def fast_sleep(seconds: float) -> None:
    await asyncio.sleep(seconds / SPEED)


def eventually(is_true: Callable[[], Any], what: str = "the condition", wait_s: float = WAIT_S) -> None:
    """Wait, with a bound, until something is true."""
    pause = threading.Event()
    deadline = time.monotonic() + wait_s
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not come true within {wait_s} s"
        pause.wait(0.01)


class RunningAgent:
    """An `Agent` on a `MemoryDirectory` (or another), in a thread."""

    def __init__(self, config: AgentConfig, directory: DirectoryWriter) -> None:
        self.config = config
        self.directory = directory
        self.agent: Agent
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agent")
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.agent.stop)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        assert self._failure is None

    def call(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    def on_loop(self, function: Callable[[], Value]) -> Value:
        async def call() -> Value:
            return function()

        return self.call(call())

    def status(self) -> dict[str, Any]:
        return self.on_loop(self.agent.status)

    def tier(self) -> dict[str, int]:
        tier: dict[str, int] = self.status()["tiers"]["dram"]
        return tier

    def metric(self, name: str, **labels: str) -> float:
        return self.on_loop(lambda: self.agent._metrics.registry.get_sample_value(name, labels)) or 0.0

    def believed(self, key: bytes) -> int:
        """In which tiers the living hold `key`, according to the directory."""
        return self.call(believed(self.directory, key))

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - the starting thread raises it
            self._failure = error
            self._ready.set()

    async def _main(self) -> None:
        self.agent = Agent(self.config, self.directory, clock=fast_clock, sleep=fast_sleep)
        await self.agent.run(self._ready.set)


async def believed(directory: Any, key: bytes) -> int:
    living = {member.incarnation for member in await directory.members() if member.is_live}
    record = (await directory.lookup([key], 1.0)).records[0]
    mask = 0
    for holder, tiers in unpack_holders(record or b""):
        mask |= tiers if holder in living else 0
    return mask


@contextmanager
def running_agent(
    folder: Path,
    *,
    dram_bytes: int | None = None,
    dram_more: dict[str, Any] | None = None,
    directory: DirectoryWriter | None = None,
    host: str = "host-1",
    nvme_path: str | None = None,
    nvme_bytes: int | None = None,
    nvme_write: str = "hit",
    nvme_more: dict[str, Any] | None = None,
    nvme_paths: Sequence[str | dict[str, Any]] = (),
    port: int = 0,
    agent_url: str | None = None,
    walk_interval_s: float = WALK_INTERVAL_S,
    admin_token: str | None = None,
    peers: dict[str, Any] | None = None,
) -> Iterator[RunningAgent]:
    quota = dram_bytes if dram_bytes is not None else 4_096 + SLOTS * CHUNK_BYTES
    door = str(folder / "door.sock")
    nvme: dict[str, Any] = {}
    if nvme_path is not None:
        nvme = {"path": nvme_path, "gb": (nvme_bytes or 0) / GB, "write": nvme_write, **(nvme_more or {})}
    if nvme_paths:
        gb = (nvme_bytes or 0) / GB
        drives = [{"path": each, "gb": gb} if isinstance(each, str) else each for each in nvme_paths]
        nvme = {"paths": drives, "write": nvme_write, **(nvme_more or {})}
    config = AgentConfig.model_validate(
        {
            "host": host,
            "door": door,
            "listen": {"port": port, "url": agent_url, "admin_token": admin_token},
            "directory": {"url": "redis://unused", "walk_interval_s": walk_interval_s},
            "dram": {"gb": quota / GB, **(dram_more or {})},
            "nvme": nvme,
            "peers": peers or {},
        }
    )
    agent = RunningAgent(config, directory or MemoryDirectory(fast_clock))
    try:
        yield agent
    finally:
        agent.stop()


def read(client: ChunkClient, name: str) -> bytes | None:
    """The bytes of one chunk through the door, or `None` for a miss."""
    chunks = client.open([storage_key(name)], WAIT_S)
    if not chunks:
        return None
    target = bytearray(chunks[0].length)
    try:
        return bytes(target) if client.read_into(chunks[0], memoryview(target)) else None
    finally:
        client.close(chunks)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
