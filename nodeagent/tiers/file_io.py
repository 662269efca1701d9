"""How the bytes of a chunk's file pass: around the page cache where the file system lets them, or through it.

`DirectIo` moves payloads straight between the drive and the caller's memory, a whole file in one call, so that the
kernel neither copies them nor keeps a second copy of what DRAM holds. Direct I/O wants memory, offsets and lengths in
whole blocks: the header, and a payload's odd tail, pass through two blocks of the thread's own. Memory that the kernel
won't take (no arena's) is served through the page cache, file by file. `BufferedIo` is for file systems without
direct I/O; it asks the kernel to drop what it kept.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from nodeagent.errors import ChunkCorrupt
from nodeagent.tiers.chunk_file import BLOCK_BYTES, HEADER_BYTES, file_bytes


class FileIo(Protocol):
    """Moves whole files of chunks. `flags` are for `os.open`. What it does blocks, without the interpreter's lock."""

    flags: int

    def write_file(self, fd: int, header: bytes, payload: memoryview) -> None:
        """Write a new file: header, payload, and zeros up to a whole block."""
        ...

    def read_file(self, fd: int, target: memoryview) -> bytes:
        """Fill `target` with the payload, as far as it goes; returns the header's bytes. Raises `ChunkCorrupt`."""
        ...

    def read_header(self, fd: int) -> bytes:
        """The bytes in front of the payload, fewer where the file is shorter."""
        ...

    def write_header(self, fd: int, header: bytes) -> None:
        """Overwrite a file's header."""
        ...


class _Scratch(threading.local):
    """Two blocks of memory per thread, aligned to a page: for a header and for a payload's tail."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES))
        self.header, self.tail = memory[:BLOCK_BYTES], memory[BLOCK_BYTES:]


class DirectIo:
    """Around the page cache (`O_DIRECT`)."""

    flags = os.O_DIRECT

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def write_file(self, fd: int, header: bytes, payload: memoryview) -> None:
        """See `FileIo`."""
        scratch, whole = self._scratch, _whole_bytes(payload)
        scratch.header[:] = header
        with payload[:whole] as blocks, payload[whole:] as tail:
            rest = tail.nbytes
            scratch.tail[:rest] = tail
            scratch.tail[rest:] = bytes(BLOCK_BYTES - rest)
            _move_all(_unless_refused(os.pwritev), fd, [scratch.header, blocks, *([scratch.tail] if rest else [])])

    def read_file(self, fd: int, target: memoryview) -> bytes:
        """See `FileIo`."""
        scratch, whole = self._scratch, _whole_bytes(target)
        with target[:whole] as blocks, target[whole:] as tail:
            rest = tail.nbytes
            _move_all(_unless_refused(os.preadv), fd, [scratch.header, blocks, *([scratch.tail] if rest else [])])
            tail[:] = scratch.tail[:rest]
        return bytes(scratch.header)

    def read_header(self, fd: int) -> bytes:
        """See `FileIo`."""
        count = os.preadv(fd, [self._scratch.header], 0)
        return bytes(self._scratch.header[:count])

    def write_header(self, fd: int, header: bytes) -> None:
        """See `FileIo`."""
        self._scratch.header[:] = header
        os.pwritev(fd, [self._scratch.header], 0)


class BufferedIo:
    """Through the page cache, which is told that nothing of it will be needed again soon."""

    flags = 0

    def write_file(self, fd: int, header: bytes, payload: memoryview) -> None:
        """See `FileIo`."""
        padding = memoryview(bytes(file_bytes(payload.nbytes) - HEADER_BYTES - payload.nbytes))
        _move_all(os.pwritev, fd, [memoryview(header), payload, padding])
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_file(self, fd: int, target: memoryview) -> bytes:
        """See `FileIo`."""
        header = bytearray(HEADER_BYTES)
        _move_all(os.preadv, fd, [memoryview(header), target])
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return bytes(header)

    def read_header(self, fd: int) -> bytes:
        """See `FileIo`."""
        return os.pread(fd, HEADER_BYTES, 0)

    def write_header(self, fd: int, header: bytes) -> None:
        """See `FileIo`."""
        os.pwrite(fd, header, 0)


_Move = Callable[[int, Sequence[memoryview], int], int]


def _whole_bytes(payload: memoryview) -> int:
    return payload.nbytes - payload.nbytes % BLOCK_BYTES


def _move_all(move: _Move, fd: int, parts: Sequence[memoryview]) -> None:
    """Read or write from the file's start on until all parts are done, however little comes at a time."""
    offset, end = 0, sum(part.nbytes for part in parts)
    while offset < end:
        # Views are let go one by one: an error's traceback must not keep the arena.
        with contextlib.ExitStack() as views:
            count = move(fd, [views.enter_context(part) for part in _after(parts, offset)], offset)
        if not count:
            raise ChunkCorrupt("a file ends before its payload does")
        offset += count


def _after(parts: Sequence[memoryview], offset: int) -> Iterator[memoryview]:
    """What is left of `parts` when `offset` bytes are done."""
    for part in parts:
        if offset < part.nbytes:
            yield part[offset:]
        offset = max(0, offset - part.nbytes)


def _unless_refused(move: _Move) -> _Move:
    """Where the kernel won't take this memory, or an odd rest after a short call: on through the page cache."""

    def move_either_way(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        try:
            return move(fd, parts, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return move(fd, parts, offset)

    return move_either_way
