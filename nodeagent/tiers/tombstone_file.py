"""The file that keeps the tombstones, in a folder that is open: replaced as a whole, and on the drive when it is.

Everything here blocks.
"""

import contextlib
import os
import threading

from nodeagent.errors import TombstonesUnreadable
from nodeagent.tiers.tombstones import BOOK_BYTES_MAX

NAME = "warmroute.tombstones"
_TEMPORARY_NAME = NAME + ".tmp"
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_tombstones(folder: int, data: bytes) -> None:
    """Replace the file: after this, or if it is killed meanwhile, one of the two is there whole. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_TEMPORARY_NAME, dir_fd=folder)
    fd = os.open(_TEMPORARY_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder)
    try:
        with memoryview(data) as rest:
            written = 0
            while written < len(data):
                written += os.write(fd, rest[written:])
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(_TEMPORARY_NAME, NAME, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def read_tombstones(folder: int) -> bytes | None:
    """What the file holds; `None` where there is none. Raises `OSError`, and `TombstonesUnreadable` for a giant."""
    try:
        fd = os.open(NAME, os.O_RDONLY | _FLAGS, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        # Where a folder stands there, this refuses the descriptor, and wouldn't close it.
        with open(fd, "rb", closefd=False) as file:
            data = file.read(BOOK_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > BOOK_BYTES_MAX:
        raise TombstonesUnreadable(f"they take more than {BOOK_BYTES_MAX:,} bytes")
    return data


class StateFolder:
    """The agent's own folder, made when there is something to keep."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._writing = threading.Lock()

    def read_tombstones(self) -> bytes | None:
        """See `read_tombstones`."""
        try:
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return read_tombstones(folder)
        finally:
            os.close(folder)

    def write_tombstones(self, data: bytes) -> None:
        """See `write_tombstones`."""
        # One that hung, and that nobody waits for any more, may still be at it.
        with self._writing:
            os.makedirs(self._path, mode=0o700, exist_ok=True)
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                write_tombstones(folder, data)
            finally:
                os.close(folder)
