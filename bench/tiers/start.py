"""An agent's start on a folder of many files: listing, reading headers at a bounded rate, putting in order.

Files hold a header and one block, and are made by processes of their own, in the order of their names.
"""

import asyncio
import gc
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import xxhash

from bench.tiers.samples import header_of, key_of, no_wait, resident_bytes
from nodeagent.agent import SWITCH_INTERVAL_S
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.chunk_file import encode_header, file_bytes, name_of
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.restore import restore
from warmroute.free_ports import free_ports

SMALL_BYTES = 4_096
FAN = 256
POLL_S = 0.02
AGENT_WAIT_S = 3_600.0


def check_room(folder: Path, files: int) -> None:
    """Ends the bench where the file system can't hold so many files, or so many bytes."""
    space = os.statvfs(folder)
    wanted = files * file_bytes(SMALL_BYTES) * 11 // 10
    free = space.f_bavail * space.f_frsize
    inodes = files + FAN * FAN + FAN
    if wanted > free or inodes > space.f_favail:
        sys.exit(
            f"{files:,} files need {wanted:,} bytes and {inodes:,} inodes below {folder}; "
            f"it has {free:,} and {space.f_favail:,}"
        )


def make_files(folder: Path, count: int) -> float:
    """Files of the tier's format, by plain calls: what is measured is the start."""
    began, shares = time.monotonic(), os.cpu_count() or 1
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)
    with ProcessPoolExecutor(shares) as processes:
        list(processes.map(partial(_make_share, folder, count, shares), range(shares)))
    return time.monotonic() - began


def _make_share(folder: Path, count: int, shares: int, share: int) -> None:
    """The files whose names begin with this share's bytes."""
    data = bytes(SMALL_BYTES)
    checksum, place = xxhash.xxh3_128_digest(data), ""
    named = ((name_of(key_of(number)), number) for number in range(count))
    for name, number in sorted(each for each in named if each[0][0] % shares == share):
        text = name.hex()
        if place != text[:4]:
            place = text[:4]
            below = folder / text[:2] / text[2:4]
            below.mkdir(parents=True, exist_ok=True)
        fd = os.open(below / text, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, encode_header(header_of(number, SMALL_BYTES, checksum)) + data)
        os.close(fd)


async def start(folder: Path, rate: float) -> dict[str, Any]:
    """An agent's start on a folder, by its own parts; the worst pause of the event loop meanwhile."""
    metrics, changes = AgentMetrics(), [0]

    def count(key: bytes, mask: int) -> None:
        changes[0] += 1

    drive = Drive(FolderStore(str(folder)), 1 << 40, count, no_wait, metrics, min_free_bytes=0)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    began = time.monotonic()
    await asyncio.to_thread(drive.store.open)
    opened_s = time.monotonic() - began
    gc.collect()
    before = resident_bytes()
    marks: dict[str, float] = {}
    pauses = [0.0]

    async def watch() -> None:
        while True:
            at = time.monotonic()
            await asyncio.sleep(0.001)
            pauses.append(time.monotonic() - at - 0.001)
            if drive.listed.is_set() and "listed_s" not in marks:
                marks["listed_s"] = time.monotonic() - began
                marks["listed_bytes"] = resident_bytes() - before

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        cpu = time.process_time()
        await restore(drive, metrics, files_per_s=rate)
        marks["indexed_s"] = time.monotonic() - began
        marks["cpu_s"] = time.process_time() - cpu
        watching.cancel()
    chunks = len(drive.index)
    gc.collect()
    await drive.close(asyncio.create_task(no_wait(None)))
    drive.store.close()
    return {
        "chunks": chunks,
        "opened_s": opened_s,
        **marks,
        "files_per_s": chunks / (marks["indexed_s"] - marks["listed_s"]),
        "bytes_per_chunk": (resident_bytes() - before) / chunks,
        "announcements": changes[0],
        "worst_pause_s": max(pauses),
        "p99_pause_s": statistics.quantiles(pauses, n=100)[98] if len(pauses) > 1 else 0.0,
    }


def agent_start(folder: Path, files: int) -> dict[str, float]:
    """The same with a real agent's process: when it is ready, has listed and has indexed, and how late it answers."""
    port = next(free_ports())
    quota_gb = (2 * files * file_bytes(SMALL_BYTES) + (1 << 30)) / 1e9
    command = [sys.executable, "-m", "warmroute.cli", "agent", "--host", "bench", "--redis", "redis://127.0.0.1:1"]
    command += ["--door", str(folder.parent / "door.sock"), "--port", str(port), "--dram-gb", "0.1"]
    command += ["--nvme", str(folder), "--nvme-gb", f"{quota_gb:.3f}", "--log-level", "error"]
    began = time.monotonic()
    with subprocess.Popen(command) as process:
        try:
            return _watch_start(process, f"http://127.0.0.1:{port}", began)
        finally:
            process.terminate()


def _watch_start(process: subprocess.Popen[bytes], url: str, began: float) -> dict[str, float]:
    marks: dict[str, float] = {}
    answers_s: list[float] = []
    while "indexed_s" not in marks:
        if process.poll() is not None or time.monotonic() - began > AGENT_WAIT_S:
            sys.exit("the agent didn't come to the end of its start; its last words are above")
        asked = time.monotonic()
        try:
            with urllib.request.urlopen(f"{url}/status", timeout=POLL_S * 500) as answer:
                nvme = orjson.loads(answer.read())["tiers"]["nvme"]
        except urllib.error.URLError:
            time.sleep(POLL_S)
            continue
        now = time.monotonic()
        marks.setdefault("ready_s", now - began)
        answers_s.append(now - asked)
        if nvme["bytes_used"]:
            marks.setdefault("listed_s", now - began)
        if not nvme["is_restoring"]:
            marks["indexed_s"] = now - began
        time.sleep(POLL_S)
    return {
        **marks,
        "chunks": nvme["chunks"],
        "resident_bytes": resident_bytes(process.pid),
        "status_s_median": statistics.median(answers_s),
        "status_s_p99": statistics.quantiles(answers_s, n=100)[98] if len(answers_s) > 1 else answers_s[0],
        "status_s_worst": max(answers_s),
    }
