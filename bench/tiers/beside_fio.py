"""The tier's store beside `fio`, in turns: whole chunks at several depths, and many small ones one after the other.

Ours is `put` (temporary name, header, payload, rename) and `read_into` (header and checksum verified), from as many
threads as the depth, as a drive's reads are. fio's is what is in `fio.py`: it writes files of its own, and reads ours.
Both pass a whole payload in one call, in the same folder, around the page cache; ours has a header of 4 KiB more in
each, which isn't counted.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import xxhash

from bench.tiers import fio
from bench.tiers.fio import Passed
from bench.tiers.samples import aligned_buffers, cpu_s, header_of, key_of
from nodeagent.tiers.chunk_file import name_of
from nodeagent.tiers.file_store import FolderStore

DEPTHS = (1, 2, 4, 8)
ENGINES = ("psync", "libaio")
FILES = 16
"""A multiple of every depth."""
SMALL_BYTES = 64 << 10
PASSES = {"write": 1, "read": 4}
"""fio's memory is fresh, ours isn't: so often each file is read, that the pages' first touch counts for little."""


class Chunks:
    """`count` chunks of one length in the tier's store. So many `buffers` are written in turn."""

    def __init__(self, folder: Path, length: int, count: int, buffers: int) -> None:
        self._folder, self.store = folder, FolderStore(str(folder))
        self.is_direct = self.store.open().is_direct
        self.length, self.count = length, count
        self._buffers, self._targets = aligned_buffers(buffers, length), aligned_buffers(max(DEPTHS), length)
        digests = [xxhash.xxh3_128_digest(buffer) for buffer in self._buffers]
        self._headers = [header_of(number, length, digests[number % buffers]) for number in range(count)]

    def pass_all(self, what: str, depth: int) -> Passed:
        """Write all of them anew, or read them, from `depth` threads."""
        if what == "write":
            for number in range(self.count):
                self.store.remove(name_of(key_of(number)))
        call = self._put if what == "write" else self._read
        with ThreadPoolExecutor(depth) as threads:
            ready = Barrier(depth + 1)
            shares = [threads.submit(self._share, call, ready, depth, share, PASSES[what]) for share in range(depth)]
            ready.wait()
            began, cpu = time.monotonic(), cpu_s()
            for share in shares:
                share.result()
            return Passed(PASSES[what] * self.count * self.length, time.monotonic() - began, cpu_s() - cpu)

    @property
    def paths(self) -> list[Path]:
        """The files, in the order in which they are read."""
        names = (name_of(key_of(number)).hex() for number in range(self.count))
        return [self._folder / name[:2] / name[2:4] / name for name in names]

    def _share(self, call: Callable[[int, int], None], ready: Barrier, depth: int, share: int, passes: int) -> None:
        ready.wait()
        for _ in range(passes):
            for number in range(share, self.count, depth):
                call(number, share)

    def _put(self, number: int, share: int) -> None:
        assert self.store.put(self._headers[number], self._buffers[number % len(self._buffers)])

    def _read(self, number: int, share: int) -> None:
        self.store.read_into(key_of(number), self._targets[share])


def large(folder: Path, length: int, rounds: int) -> dict[str, Any]:
    """Chunks of `length` bytes at each depth, ours and fio's in turns; medians, with the least and the most."""
    version = fio.require()
    folder.mkdir()
    chunks = Chunks(folder / "store", length, FILES, FILES)
    seen: dict[tuple[str, int, str], list[tuple[Passed, Passed]]] = {}
    for number in range(rounds):
        for depth in DEPTHS:
            for what in ("write", "read"):
                turns = _in_turns(chunks, folder, what, depth, is_ours_first=number % 2 == 0)
                for engine, pair in turns.items():
                    seen.setdefault((what, depth, engine), []).append(pair)
    chunks.store.close()
    rows = [
        {"what": what, "depth": depth, "fio": engine, **_compared(pairs)}
        for (what, depth, engine), pairs in sorted(seen.items())
    ]
    return {"fio": version, "is_direct": chunks.is_direct, "bytes": length, "files": FILES, "rows": rows}


def small(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """Files of 64 KiB one after the other by one thread; fio opens, passes and closes each of its own as well.

    What fio doesn't do: a folder per name, a temporary name and a rename, a header, a checksum. It opens files by their
    path; the tier walks two folders down.
    """
    version = fio.require()
    folder.mkdir()
    chunks = Chunks(folder / "store", SMALL_BYTES, count, 64)
    seen: dict[str, list[tuple[Passed, Passed]]] = {}
    for number in range(rounds):
        for what in ("write", "read"):
            pair = _in_turns(chunks, folder, what, 1, is_ours_first=number % 2 == 0, engines=("psync",))["psync"]
            seen.setdefault(what, []).append(pair)
    chunks.store.close()
    rows = [
        {
            "what": what,
            "chunks_per_s": statistics.median(PASSES[what] * count / ours.took_s for ours, _ in pairs),
            "cpu_us_per_chunk": statistics.median(ours.cpu_s / count / PASSES[what] * 1e6 for ours, _ in pairs),
            "fio_files_per_s": statistics.median(PASSES[what] * count / its.took_s for _, its in pairs),
            "fio_cpu_us_per_file": statistics.median(its.cpu_s / count / PASSES[what] * 1e6 for _, its in pairs),
            **_compared(pairs),
        }
        for what, pairs in seen.items()
    ]
    return {"fio": version, "is_direct": chunks.is_direct, "bytes": SMALL_BYTES, "files": count, "rows": rows}


def _in_turns(
    chunks: Chunks, folder: Path, what: str, depth: int, *, is_ours_first: bool, engines: tuple[str, ...] = ENGINES
) -> dict[str, tuple[Passed, Passed]]:
    """Ours beside each engine of fio's, one right after the other."""
    pairs: dict[str, tuple[Passed, Passed]] = {}
    for engine in engines:

        def its(engine: str = engine) -> Passed:
            if what == "write":
                return fio.write(folder / engine, engine, depth, chunks.length, chunks.count)
            return fio.read(folder / engine, chunks.paths, engine, depth, chunks.length, PASSES[what])

        if is_ours_first:
            ours, theirs = chunks.pass_all(what, depth), its()
        else:
            theirs, ours = its(), chunks.pass_all(what, depth)
        assert theirs.size_bytes == ours.size_bytes, "both moved all of it"
        pairs[engine] = (ours, theirs)
    return pairs


def _compared(pairs: list[tuple[Passed, Passed]]) -> dict[str, float]:
    ratios = [ours.gb_per_s / its.gb_per_s for ours, its in pairs]
    return {
        "gb_per_s": statistics.median(ours.gb_per_s for ours, _ in pairs),
        "fio_gb_per_s": statistics.median(its.gb_per_s for _, its in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "cpu_s_per_gb": statistics.median(ours.cpu_s_per_gb for ours, _ in pairs),
        "fio_cpu_s_per_gb": statistics.median(its.cpu_s_per_gb for _, its in pairs),
    }
