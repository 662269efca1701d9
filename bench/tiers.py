"""The NVMe tier: how it starts with many files, and how fast chunks pass, beside plain O_DIRECT calls.

    python -m bench.tiers --start --files 1000000 --folder /mnt/drive/bench [--rate 2000] [--json]
    python -m bench.tiers --index --files 1000000 [--json]
    python -m bench.tiers --throughput --folder /mnt/drive/bench [--mib 32] [--rounds 5] [--json]

`--start` makes files of one header and one block in a new folder below the given one (removed in the end), and times
what an agent does at its start: listing, reading headers at a bounded rate, putting in order; with the memory that
each takes, as the process's resident set. `--index` is the index alone, without files. `--throughput` writes and reads
chunks through the tier's store, and the same bytes by bare `pwritev` and `preadv`, in turns, with one to eight threads.
"""

import argparse
import asyncio
import gc
import hashlib
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from directory.tiers import Tier
from nodeagent.agent import SWITCH_INTERVAL_S
from nodeagent.inventory import Inventory
from nodeagent.labels import ChunkLabel
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.chunk_file import UNKNOWN_IDENTITY, FileHeader, encode_header, file_bytes, name_of
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.nvme_index import NvmeIndex, order_of_use
from nodeagent.tiers.restore import restore

CHAIN = 128
SMALL_BYTES = 4_096
DEPTHS = (1, 2, 4, 8)


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def header_of(number: int, length: int, checksum: bytes) -> FileHeader:
    position = number % CHAIN
    label = ChunkLabel(key_of(number), key_of(number)[:16], key_of(number - 1) if position else None, position)
    return FileHeader(label, UNKNOWN_IDENTITY, length, checksum)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def make_files(folder: Path, count: int) -> float:
    """Files of the tier's format, by plain calls: what is measured is the start."""
    began, data = time.monotonic(), bytes(SMALL_BYTES)
    checksum = xxhash.xxh3_128_digest(data)
    for number in range(count):
        text = name_of(key_of(number)).hex()
        place = folder / text[:2] / text[2:4]
        content = encode_header(header_of(number, SMALL_BYTES, checksum)) + data
        try:
            fd = os.open(place / text, os.O_WRONLY | os.O_CREAT, 0o600)
        except FileNotFoundError:
            place.mkdir(parents=True)
            fd = os.open(place / text, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, content)
        os.close(fd)
    return time.monotonic() - began


async def no_wait(keys: object) -> None:
    return


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


def index(count: int) -> dict[str, Any]:
    """What a chunk in the index costs, also with its place in what is announced, and what finding it does."""
    gc.collect()
    before, held = resident_bytes(), NvmeIndex(lambda key, mask: None)
    began = time.process_time()
    for number in range(count):
        held.restore(header_of(number, 32 << 20, key_of(number)[:16]), float(number))
    added_s = time.process_time() - began
    gc.collect()
    took = resident_bytes() - before
    announced = Inventory(count)
    for number in range(count):
        announced.set(key_of(number)[:16], int(Tier.NVME))
    gc.collect()
    took_announced = resident_bytes() - before
    began = time.process_time()
    *_, account = held.account_of_use()
    ordered = order_of_use(account)
    ordered_s = time.process_time() - began
    keys = [key_of(number) for number in range(0, count, max(1, count // 10_000))]
    began = time.process_time()
    found = sum(held.get(key) is not None for key in keys)
    return {
        "chunks": len(ordered.rows),
        "bytes_per_chunk": took / count,
        "bytes_per_announced_chunk": took_announced / count,
        "add_us": added_s / count * 1e6,
        "order_s": ordered_s,
        "get_us": (time.process_time() - began) / found * 1e6,
    }


def timed(depth: int, work: Any, count: int) -> float:
    began = time.monotonic()
    with ThreadPoolExecutor(depth) as threads:
        list(threads.map(work, range(count)))
    return time.monotonic() - began


def throughput(folder: Path, length: int, rounds: int) -> list[dict[str, Any]]:
    """GB/s of the store and of bare calls, in turns; ratios within a turn."""
    store = FolderStore(str(folder / "store"))
    tested = store.open()
    buffers = [memoryview(mmap.mmap(-1, length)) for _ in range(max(DEPTHS))]
    for number, buffer in enumerate(buffers):
        buffer[:] = os.urandom(1 << 20) * (length >> 20)
        buffer[:8] = number.to_bytes(8, "little")
    headers = [header_of(number, length, xxhash.xxh3_128_digest(buffer)) for number, buffer in enumerate(buffers)]
    (folder / "bare").mkdir()

    def bare(number: int, flags: int, call: Any) -> None:
        fd = os.open(folder / "bare" / str(number), flags | os.O_DIRECT, 0o600)
        call(fd, [buffers[number]], 0)
        os.close(fd)

    def remove_all() -> None:
        for number in range(max(DEPTHS)):
            store.remove(name_of(key_of(number)))
            (folder / "bare" / str(number)).unlink(missing_ok=True)

    works = {
        "write": (
            lambda number: store.put(headers[number], buffers[number]),
            lambda number: bare(number, os.O_WRONLY | os.O_CREAT, os.pwritev),
        ),
        "read": (
            lambda number: store.read_into(key_of(number), buffers[number]),
            lambda number: bare(number, os.O_RDONLY, os.preadv),
        ),
    }
    seen: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for depth in DEPTHS:
            remove_all()
            for what, (ours, plain) in works.items():
                pair = (timed(depth, ours, max(DEPTHS)), timed(depth, plain, max(DEPTHS)))
                seen.setdefault((what, depth), []).append(pair)
    remove_all()
    store.close()
    total = max(DEPTHS) * length / 1e9
    return [
        {
            "what": what,
            "threads": depth,
            "is_direct": tested.is_direct,
            "gb_per_s": statistics.median(total / ours for ours, _ in pairs),
            "bare_gb_per_s": statistics.median(total / plain for _, plain in pairs),
            "ratio": statistics.median(plain / ours for ours, plain in pairs),
            "ratio_min": min(plain / ours for ours, plain in pairs),
            "ratio_max": max(plain / ours for ours, plain in pairs),
        }
        for (what, depth), pairs in seen.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--index", action="store_true")
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=2_000.0, help="files a second whose headers are read")
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="bench-tiers-"))
    try:
        if options.start:
            made_s = make_files(folder, options.files)
            result["start"] = {"made_s": made_s} | asyncio.run(start(folder, options.rate))
            result["start"]["file_bytes"] = file_bytes(SMALL_BYTES)
        if options.index:
            result["index"] = index(options.files)
        if options.throughput:
            result["throughput"] = throughput(folder, options.mib << 20, options.rounds)
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in (result.get("start", {}) | result.get("index", {})).items():
        print(f"{name:20} {value:,.3f}")
    for row in result.get("throughput", ()):
        print(
            f"{row['what']:5} {row['threads']} threads: {row['gb_per_s']:.2f} GB/s, "
            f"bare {row['bare_gb_per_s']:.2f} GB/s, "
            f"ratio {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        )


if __name__ == "__main__":
    main()
