"""Debian's `fio` on files of a chunk's size: what it reads and writes in a second, and the CPU that takes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Passed:
    """Bytes that passed, in how long, with how many CPU seconds (user and kernel)."""

    size_bytes: int
    took_s: float
    cpu_s: float

    @property
    def gb_per_s(self) -> float:
        return self.size_bytes / self.took_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.size_bytes / 1e9)


def require() -> str:
    """What `fio` calls itself; ends the bench where there is none."""
    if shutil.which("fio") is None:
        sys.exit("fio isn't here: apt-get install fio")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def write(folder: Path, engine: str, depth: int, length: int, files: int) -> Passed:
    """Write `files` new files of `length` bytes, a whole file a call.

    `psync` has `depth` jobs of one call at a time; `libaio` has one job with `depth` calls under way. Both around the
    page cache. What is written is made once, before the clock runs (`refill_buffers` is off).
    """
    _make_empty(folder)
    return _run("write", folder, engine, depth, length, files, ["--create_on_open=1", "--fallocate=none"])


def read(folder: Path, paths: Sequence[Path], engine: str, depth: int, length: int, passes: int) -> Passed:
    """Read the first `length` bytes of each of these files in one call, `passes` times; the rest is as in `write`."""
    jobs = depth if engine == "psync" else 1
    _make_empty(folder)
    for number, path in enumerate(paths):
        os.link(path, folder / f"{number % jobs}.{number // jobs}")
    return _run("read", folder, engine, depth, length, len(paths), [f"--loops={passes}", "--readonly"])


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _run(what: str, folder: Path, engine: str, depth: int, length: int, files: int, more: list[str]) -> Passed:
    jobs = depth if engine == "psync" else 1
    assert files % jobs == 0, "each job has as many files"
    command = [
        "fio",
        "--output-format=json",
        "--name=chunks",
        f"--directory={folder}",
        "--filename_format=$jobnum.$filenum",
        f"--rw={what}",
        f"--ioengine={engine}",
        f"--numjobs={jobs}",
        f"--nrfiles={files // jobs}",
        f"--iodepth={1 if engine == 'psync' else depth}",
        f"--openfiles={1 if engine == 'psync' else depth}",
        f"--bs={length}",
        f"--filesize={length}",
        "--direct=1",
        "--thread",
        "--group_reporting",
        "--file_service_type=" + ("sequential" if engine == "psync" else "roundrobin"),
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"fio failed: {(done.stderr.strip() or done.stdout.strip())[:400]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    side = job[what]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Passed(side["io_bytes"], max(side["io_bytes"] / max(side["bw_bytes"], 1), 1e-6), cpu)
