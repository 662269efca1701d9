"""A real local fleet in a process of its own, as a user runs it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

MODEL = "smollm2-135m-instruct"
START_BOUND_S = 150.0


@dataclass(frozen=True)
class RunningFleet:
    process: subprocess.Popen[str]
    port: int
    temporary: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fleet(self) -> dict[str, Any]:
        table: dict[str, Any] = httpx.get(f"http://127.0.0.1:{self.port + 1}/fleet", trust_env=False).json()
        return table

    def parts(self) -> dict[str, int]:
        """The pid of each child, by a word of its command line that names it."""
        found = {}
        for pid in children(self.process.pid):
            words = command_line(pid)
            for flag in ("--engine", "--host"):
                if flag in words:
                    found[words[words.index(flag) + 1]] = pid
            if "gateway" in words:
                found["gateway"] = pid
            if words and "valkey" in words[0]:
                found["valkey"] = pid
        return found


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    return []


def is_alive(pid: int) -> bool:
    return bool(command_line(pid))


def until(holds: Callable[[], bool], bound_s: float, what: str) -> None:
    """Wait for a condition of another process, which nothing here can be told of."""
    deadline = time.monotonic() + bound_s
    pause = __import__("threading").Event()
    while not holds():
        assert time.monotonic() < deadline, f"waited {bound_s:g} s in vain: {what}"
        pause.wait(0.1)


def free_port() -> int:
    """A port whose successor is free as well."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def up(temporary: Path, *options: str, port: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "warmroute.cli", "up", "--port", str(port or free_port()), *options]
    environment = {**os.environ, "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(temporary / "cache")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@contextlib.contextmanager
def running_fleet(temporary: Path, *options: str) -> Iterator[RunningFleet]:
    """A fleet that serves; ended with Ctrl-C."""
    port = free_port()
    with up(temporary, *options, port=port) as process:
        fleet = RunningFleet(process, port, temporary)
        try:
            until(lambda: is_serving(fleet), START_BOUND_S, "the fleet serves")
            yield fleet
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def is_serving(fleet: RunningFleet) -> bool:
    assert fleet.process.poll() is None, fleet.process.communicate()
    with contextlib.suppress(httpx.HTTPError, KeyError):
        rows = fleet.fleet()["engines"]
        return len(rows) == 2 and all(row["state"] == "ready" and row["encoding"] == "exact" for row in rows)
    return False


def left_behind(temporary: Path) -> list[str]:
    """Sockets, folders and locks in the temporary folder, the files' cache aside."""
    return [path.name for path in temporary.iterdir() if path.name != "cache"]
