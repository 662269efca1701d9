"""A real local fleet in a process of its own, as a user runs it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.placements import unpack_holders
from directory.tiers import tier_names
from tests.free_port import free_port

MODEL = "smollm2-135m-instruct"
START_BOUND_S = 150.0
DEMO_BOUND_S = 400.0
REFUSED_BOUND_S = 60.0


@dataclass(frozen=True)
class RunningFleet:
    process: subprocess.Popen[str]
    port: int
    temporary: Path
    engines: int = 2

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.port + 1}"

    def fleet(self) -> dict[str, Any]:
        table: dict[str, Any] = httpx.get(f"{self.admin_url}/fleet", trust_env=False).json()
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

    def agent_url(self, host: str) -> str:
        words = command_line(self.parts()[host])
        return f"http://127.0.0.1:{words[words.index('--port') + 1]}"

    def agent_status(self, host: str) -> dict[str, Any]:
        status: dict[str, Any] = httpx.get(f"{self.agent_url(host)}/status", trust_env=False).json()
        return status

    def metric(self, url: str, name: str) -> float:
        """A metric's sum over its labels, or over those that `name` spells out."""
        lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def announced(self) -> Counter[tuple[str, str]]:
        """What the directory's records say of the lives that run now: chunks by (host or engine, tier)."""
        names = {}
        for host in (name for name in self.parts() if name.startswith("host")):
            status = self.agent_status(host)
            names.update(dict.fromkeys(status["incarnations"], host))
            for engine in status["engines"]:
                names.update(dict.fromkeys(engine["incarnations"], engine["engine"]))
        counts: Counter[tuple[str, str]] = Counter()
        with redis.Redis.from_url(directory_url(self.parts()["gateway"])) as server:
            keys = [key for key in server.scan_iter(count=1_000) if len(key.split(b":", 3)[-1]) == DIRECTORY_KEY_BYTES]
            records = server.mget(keys) if keys else []
        for record in records:
            for incarnation, mask in unpack_holders(record or b""):
                if incarnation.hex() in names:
                    counts.update((names[incarnation.hex()], tier) for tier in tier_names(mask))
        return counts

    def held(self) -> Counter[tuple[str, str]]:
        """What agents and engines hold, by their own account."""
        counts: Counter[tuple[str, str]] = Counter()
        for host in (name for name in self.parts() if name.startswith("host")):
            status = self.agent_status(host)
            counts.update({(host, tier): each["chunks"] for tier, each in status["tiers"].items()})
            counts.update({(each["engine"], "gpu"): each["gpu_chunks"] for each in status["engines"]})
        return +counts

    def until_directory_equals_inventories(self) -> None:
        until(lambda: self.announced() == self.held(), 60, "the directory says what the tiers hold")


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    return []


def directory_url(pid: int) -> str:
    """Where a part was told that the directory is: in its environment, out of sight of other users."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next(each.partition("=")[2] for each in variables if each.startswith("WARMROUTE_DIRECTORY__URL="))


def is_alive(pid: int) -> bool:
    return bool(command_line(pid))


def until(holds: Callable[[], bool], bound_s: float, what: str) -> None:
    """Wait for a condition of another process, which nothing here can be told of."""
    deadline = time.monotonic() + bound_s
    pause = __import__("threading").Event()
    while not holds():
        assert time.monotonic() < deadline, f"waited {bound_s:g} s in vain: {what}"
        pause.wait(0.1)


def up(temporary: Path, *options: str, port: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "warmroute.cli", "up", "--port", str(port or free_port()), *options]
    environment = {**os.environ, "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(temporary / "cache")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@contextlib.contextmanager
def running_fleet(temporary: Path, *options: str, engines: int = 2) -> Iterator[RunningFleet]:
    """A fleet that serves; ended with Ctrl-C."""
    port = free_port()
    with up(temporary, "--engines", str(engines), *options, port=port) as process:
        fleet = RunningFleet(process, port, temporary, engines)
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
        return len(rows) == fleet.engines and all(
            row["state"] == "ready" and row["encoding"] == "exact" for row in rows
        )
    return False


def left_behind(temporary: Path) -> list[str]:
    """Sockets, folders and locks in the temporary folder, the files' cache aside."""
    return [path.name for path in temporary.iterdir() if path.name != "cache"]


def play_demo(temporary: Path, *options: str) -> list[dict[str, Any]]:
    """The demo's rows, of a fleet that ended well and left nothing."""
    process = up(temporary, "--demo", "--exit", "--json", *options)
    output, errors = process.communicate(timeout=DEMO_BOUND_S)
    assert process.returncode == 0, errors
    assert left_behind(temporary) == []
    rows: list[dict[str, Any]] = json.loads(output)
    return rows


def refused(temporary: Path, *options: str, port: int | None = None) -> str:
    """The one sentence with which it refuses to start."""
    process = up(temporary, *options, port=port)
    _, errors = process.communicate(timeout=REFUSED_BOUND_S)
    assert process.returncode == 2
    assert errors.startswith("warmroute up: ")
    assert errors.count("\n") == 1, errors
    assert left_behind(temporary) == []
    return errors
