"""Agents and engines as processes that are there at once: forked from one that has imported everything.

`python -m tests.nodeagent.forks` forks one for each line on its standard input, `agent FOLDER` or `engine DOOR NAME
CHUNK`. Each says `PID` once it is ready.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from directory.memory import MemoryDirectory
from nodeagent.agent import Agent
from nodeagent.client import ChunkClient
from nodeagent.config import GB, AgentConfig
from nodeagent.messages import Reserve
from tests.nodeagent.running import (
    CHUNK_BYTES,
    SLOTS,
    WAIT_S,
    connected,
    eventually,
    label,
    make_hello,
    payload,
    storage_key,
)

ARENA = "warmroute-arena"


class Forks:
    """The process that forks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._pids: list[int] = []

    def start(self, *words: str) -> int:
        """Fork one; returns its pid once it is ready."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        assert pid, "it says why on stderr"
        self._pids.append(pid)
        return pid

    def kill_all(self) -> None:
        """Kill those that are still there, and wait for their end."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(is_there(pid) for pid in self._pids), "the end of all")
        self._pids.clear()


@contextmanager
def forking() -> Iterator[Forks]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.nodeagent.forks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Forks(process)
    finally:
        process.communicate(timeout=WAIT_S)


def is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def arenas_of(pid: int | str = "self") -> set[str]:
    """The inodes of the arenas that a process has mapped or open; empty for one that is gone."""
    found = set()
    with contextlib.suppress(OSError):
        found = {row.split()[4] for row in Path(f"/proc/{pid}/maps").read_text().splitlines() if ARENA in row}
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if ARENA in os.readlink(entry.path):
                    found.add(str(os.stat(entry.path).st_ino))
    return found


def arenas_anywhere() -> set[str]:
    """The inodes of all arenas of this machine that anybody still has."""
    return {inode for pid in os.listdir("/proc") if pid.isdecimal() for inode in arenas_of(pid)}


def serve_agent(folder: str) -> None:
    """An agent with a directory of its own, and a tier on disk where there is a folder for it."""
    nvme = {"path": f"{folder}/nvme", "gb": 0.1, "write": "through", "min_free_gb": 0}
    config = AgentConfig.model_validate(
        {
            "host": "host-1",
            "door": f"{folder}/door.sock",
            "directory": {"url": "redis://unused"},
            "dram": {"gb": (4_096 + SLOTS * CHUNK_BYTES) / GB},
            "nvme": nvme if os.path.isdir(f"{folder}/nvme") else {},
        }
    )

    async def run() -> None:
        agent = Agent(config, MemoryDirectory(time.monotonic))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, agent.stop)
        await agent.run(say_ready)

    asyncio.run(run())


def be_engine(door: str, name: str, chunk: str) -> None:
    """An engine that holds a chunk, has written half of another, and stays so."""
    with connected(door, make_hello(name)) as client:
        held = client.open([storage_key(chunk)], WAIT_S)
        assert held
        write_half(client, name)
        say_ready()
        signal.pause()


def write_half(client: ChunkClient, name: str) -> None:
    attachment = client._attachment
    assert attachment is not None
    mine = label(name)
    granted = attachment.link.request(
        lambda number: Reserve(number, mine.storage_key, mine.directory_key, None, 0, CHUNK_BYTES, b"c" * 16), WAIT_S
    )
    attachment.arena.write(granted.slot, payload(name)[: CHUNK_BYTES // 2])


def say_ready() -> None:
    print(os.getpid(), flush=True)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if not os.fork():
            try:
                {"agent": serve_agent, "engine": be_engine}[line.split()[0]](*line.split()[1:])
            except BaseException:  # noqa: BLE001 - whoever waits for it hears of it
                traceback.print_exc()
                print(0, flush=True)
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
