"""Before a drive is trusted: does it take direct I/O, does it give back what it was given, and how fast.

A file is written, read and compared, first around the page cache, then, where that is refused, through it. What is
refused is logged with its errno. The file has no name of a chunk's, and never stays.
"""

import contextlib
import errno
import fcntl
import logging
import math
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
READS = 3
FREE_FRACTION = 8
"""A test takes at most one part in so many of what is free."""
_NO_DIRECT_IO = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What a drive showed. What reading costs is `None` where it was too full to be asked, or not measurable.

    `read_fixed_s` is what a file's first block takes, `read_bytes_per_s` how fast the rest comes.
    """

    io: FileIo
    is_direct: bool
    read_bytes_per_s: float | None = None
    read_fixed_s: float | None = None
    direct_refusal: str | None = None
    """Why direct I/O isn't used."""


def self_test(folder: int, path: str) -> SelfTest:
    """Try the file system of an open `folder` (named `path` in the log). Raises `OSError` where the drive errs."""
    try:
        return SelfTest(DirectIo(), True, *_try(folder, DirectIo()))
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise
        logger.warning(
            "the nvme folder %s takes no direct I/O (errno %d, %s); the page cache keeps copies of its chunks",
            path,
            error.errno,
            errno.errorcode.get(error.errno or 0, "?"),
        )
        refusal = f"errno {error.errno}, {errno.errorcode.get(error.errno or 0, '?')}"
    return SelfTest(BufferedIo(), False, *_try(folder, BufferedIo()), direct_refusal=refusal)


def _try(folder: int, io: FileIo) -> tuple[float | None, float | None]:
    """Write, read and compare one file; the rate of reading and its fixed part. `None` where the drive is full."""
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
            all_s, first_s, header_read = _read(folder, io, payload)
        except OSError as error:
            if error.errno in _FULL:
                return None, None
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(TEST_NAME, dir_fd=folder)
        if (header_read, xxhash.xxh3_128_digest(payload)) != (header, before):
            raise OSError(errno.EIO, "the drive gave back other bytes than it was given")
        # A first block that took as long as all says nothing of the rest.
        rest_s = max(all_s - first_s, all_s / 2)
        return (size / rest_s, min(first_s, all_s / 2)) if rest_s > 0 else (None, None)


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


def _read(folder: int, io: FileIo, payload: memoryview) -> tuple[float, float, bytes]:
    """Seconds of the whole file and of its first block, the best of a few times each; and the header."""
    fd = os.open(TEST_NAME, os.O_RDONLY | FILE_FLAGS | io.flags, dir_fd=folder)
    try:
        all_s, first_s, header = math.inf, math.inf, b""
        for _ in range(READS):
            started = time.monotonic()
            header = io.read_file(fd, payload)
            read_at = time.monotonic()
            io.read_header(fd)
            all_s, first_s = min(all_s, read_at - started), min(first_s, time.monotonic() - read_at)
        _check_flags(fd, io)
        return all_s, first_s, header
    finally:
        os.close(fd)


def _check_flags(fd: int, io: FileIo) -> None:
    """Blocks larger than ours are refused as other memory is: file by file, not at the opening."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & io.flags != io.flags:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
