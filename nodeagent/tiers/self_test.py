"""Before a drive is trusted: does it take direct I/O, does it give back what it was given, and how fast.

A file is written, read and compared, first around the page cache, then, where that is refused, through it. What is
refused is logged with its errno. The file has no name of a chunk's, and never stays.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import time
from dataclasses import dataclass

import xxhash

from nodeagent.tiers.chunk_file import BLOCK_BYTES, HEADER_BYTES
from nodeagent.tiers.chunk_folder import FILE_FLAGS
from nodeagent.tiers.file_io import BufferedIo, DirectIo, FileIo

TEST_NAME = "warmroute.test"
TEST_BYTES = 1 << 20
TEST_BYTES_MIN = BLOCK_BYTES
FREE_FRACTION = 8
"""A test takes at most one part in so many of what is free."""
_NO_DIRECT_IO = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What a drive showed. `read_bytes_per_s` is `None` where it was too full to be asked, or not measurable."""

    io: FileIo
    is_direct: bool
    read_bytes_per_s: float | None = None


def self_test(folder: int, path: str) -> SelfTest:
    """Try the file system of an open `folder` (named `path` in the log). Raises `OSError` where the drive errs."""
    try:
        return SelfTest(DirectIo(), True, _try(folder, DirectIo()))
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise
        logger.warning(
            "the nvme folder %s takes no direct I/O (errno %d, %s); the page cache keeps copies of its chunks",
            path,
            error.errno,
            errno.errorcode.get(error.errno or 0, "?"),
        )
    return SelfTest(BufferedIo(), False, _try(folder, BufferedIo()))


def _try(folder: int, io: FileIo) -> float | None:
    """Write, read and compare one file; the rate of the read. `None` on a file system that is full."""
    space = os.fstatvfs(folder)
    size = min(TEST_BYTES, space.f_bavail * space.f_frsize // FREE_FRACTION // BLOCK_BYTES * BLOCK_BYTES)
    # Odd by a few bytes, as payloads may be.
    size = max(size, TEST_BYTES_MIN) - 24
    with mmap.mmap(-1, TEST_BYTES) as memory, memoryview(memory) as whole, whole[:size] as payload:
        header, pattern = os.urandom(HEADER_BYTES), xxhash.xxh3_128_digest(os.urandom(BLOCK_BYTES))
        payload[: len(pattern)] = payload[-len(pattern) :] = pattern
        before = xxhash.xxh3_128_digest(payload)
        try:
            _write(folder, io, header, payload)
            payload[: len(pattern)] = payload[-len(pattern) :] = bytes(len(pattern))
            seconds, header_read = _read(folder, io, payload)
        except OSError as error:
            if error.errno in _FULL:
                return None
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(TEST_NAME, dir_fd=folder)
        if (header_read, xxhash.xxh3_128_digest(payload)) != (header, before):
            raise OSError(errno.EIO, "the drive gave back other bytes than it was given")
        return size / seconds if seconds > 0 else None


def _write(folder: int, io: FileIo, header: bytes, payload: memoryview) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(TEST_NAME, dir_fd=folder)
    fd = os.open(TEST_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS | io.flags, 0o600, dir_fd=folder)
    try:
        io.write_file(fd, header, payload)
        os.fdatasync(fd)
        _check_flags(fd, io)
    finally:
        os.close(fd)


def _read(folder: int, io: FileIo, payload: memoryview) -> tuple[float, bytes]:
    fd = os.open(TEST_NAME, os.O_RDONLY | FILE_FLAGS | io.flags, dir_fd=folder)
    try:
        started = time.monotonic()
        header = io.read_file(fd, payload)
        seconds = time.monotonic() - started
        _check_flags(fd, io)
        return seconds, header
    finally:
        os.close(fd)


def _check_flags(fd: int, io: FileIo) -> None:
    """Blocks larger than ours are refused as other memory is: file by file, not at the opening."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & io.flags != io.flags:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
