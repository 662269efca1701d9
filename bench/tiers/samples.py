"""Chunks to write and read, and what this process takes."""

import hashlib
import mmap
import os
import resource
from pathlib import Path

from nodeagent.labels import ChunkLabel
from nodeagent.tiers.chunk_file import UNKNOWN_IDENTITY, FileHeader

CHAIN = 128


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def header_of(number: int, length: int, checksum: bytes) -> FileHeader:
    position = number % CHAIN
    label = ChunkLabel(key_of(number), key_of(number)[:16], key_of(number - 1) if position else None, position)
    return FileHeader(label, UNKNOWN_IDENTITY, length, checksum)


def aligned_buffers(count: int, length: int) -> list[memoryview]:
    """Memory as an arena's slots are: whole pages, all there, and of different content."""
    buffers = [memoryview(mmap.mmap(-1, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE))[:length] for _ in range(count)]
    for number, buffer in enumerate(buffers):
        pattern = os.urandom(min(1 << 20, length))
        for start in range(0, length, len(pattern)):
            buffer[start : start + len(pattern)] = pattern[: length - start]
        buffer[:8] = number.to_bytes(8, "little")
    return buffers


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


async def no_wait(keys: object) -> None:
    return


def cpu_s() -> float:
    """CPU seconds of this process, in user mode and in the kernel."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
