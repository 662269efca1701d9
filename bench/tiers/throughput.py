"""The tier's store beside bare `pwritev` and `preadv` around the page cache, in turns, with one to eight threads."""

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from bench.tiers.samples import aligned_buffers, header_of, key_of
from nodeagent.tiers.chunk_file import name_of
from nodeagent.tiers.file_store import FolderStore

DEPTHS = (1, 2, 4, 8)


def timed(depth: int, work: Any, count: int) -> float:
    began = time.monotonic()
    with ThreadPoolExecutor(depth) as threads:
        list(threads.map(work, range(count)))
    return time.monotonic() - began


def throughput(folder: Path, length: int, rounds: int) -> list[dict[str, Any]]:
    """GB/s of the store and of bare calls, in turns; ratios within a turn."""
    store = FolderStore(str(folder / "store"))
    tested = store.open()
    buffers = aligned_buffers(max(DEPTHS), length)
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
