"""The folder that holds chunks' files, two levels down, and that one agent has at a time.

Others may put anything into it. So no link below it is followed, and all goes through its descriptor, which is held
from `open` to `close`: one that is moved or removed while the agent runs isn't made anew. Everything here blocks.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Generator, Iterator

from nodeagent.errors import TierUnavailable

LOCK_NAME = "warmroute.lock"
NAME_BYTES_MAX = 32
FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC
_FAN = re.compile(r"[0-9a-f]{2}")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_REFUSING = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EISDIR}
)
"""What an `OSError` says of the path that was given; every other is the drive's."""


class ChunkFolder:
    """One folder, its lock, and the way to a chunk's place in it. Raises `OSError` where the drive is at fault."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1
        self._lock_fd = -1
        self._name: bytes | None = None

    def open(self) -> None:
        """Take possession. A link to a folder is followed; it must be this user's, and written by nobody else.

        Opened again, it must be the very folder that was open before, and isn't made: where a drive isn't mounted
        any more, or another is, what stands at the path belongs to somebody else's disk.

        Raises `TierUnavailable` where another agent has it, or it can't be used.
        """
        is_again = self._name is not None
        with self._refusals():
            # Not its parents: below a drive that isn't mounted, they would be another drive's.
            if not is_again:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.path, mode=0o700)
            fd = os.open(self.path, os.O_RDONLY | _FOLDER)
        try:
            self._check_owner(fd)
            lock_fd = self._lock(fd, is_made=not is_again)
        except (TierUnavailable, OSError):
            os.close(fd)
            raise
        name = _read_name(fd, lock_fd, is_given=not is_again)
        if is_again and name != self._name:
            os.close(lock_fd)
            os.close(fd)
            raise TierUnavailable(
                f"another folder stands at {self.path} than when the agent started; it is used after a restart"
            )
        self.fd, self._lock_fd, self._name = fd, lock_fd, name

    def close(self) -> None:
        """Let it go. Nobody uses it any more."""
        if self._lock_fd >= 0:
            os.close(self.fd)
            os.close(self._lock_fd)
            self.fd = self._lock_fd = -1

    @contextlib.contextmanager
    def fan(self, name: bytes, *, is_made: bool = False) -> Iterator[int]:
        """The folder of a chunk's file, for `dir_fd`. A link on the way is no folder (`ENOTDIR`)."""
        text = name.hex()
        outer = _enter(self.fd, text[:2], is_made=is_made)
        try:
            inner = _enter(outer, text[2:4], is_made=is_made)
        finally:
            os.close(outer)
        try:
            yield inner
        finally:
            os.close(inner)

    def sync(self, name: bytes) -> None:
        """Have the drive keep the name of a chunk's file, and the folders on the way."""
        text = name.hex()
        for way in (os.path.join(text[:2], text[2:4]), text[:2], "."):
            fd = os.open(way, os.O_RDONLY | os.O_NOFOLLOW | _FOLDER, dir_fd=self.fd)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def fans(self) -> Generator[int, None, None]:
        """Every folder that may hold chunks' files, one at a time."""
        with contextlib.closing(_folders_in(self.fd)) as outers:
            for outer in outers:
                yield from _folders_in(outer)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _REFUSING:
                raise
            parent = os.path.dirname(os.path.abspath(self.path))
            is_parent_there = error.errno != errno.ENOENT or os.path.isdir(parent)
            hint = "" if is_parent_there else f"; {parent} isn't there: mount the drive, or make that folder"
            raise TierUnavailable(f"the nvme folder {self.path} can't be used: {error.strerror}{hint}") from error

    def _check_owner(self, fd: int) -> None:
        status, user = os.fstat(fd), os.geteuid()
        if status.st_uid != user or status.st_mode & _OTHERS_WRITE:
            raise TierUnavailable(
                f"the nvme folder {self.path} belongs to user {status.st_uid} and has mode "
                f"{stat.S_IMODE(status.st_mode):o}; it must belong to the agent's user ({user}) and be writable by "
                "nobody else (chmod go-w); or give a new folder below it, and the agent makes it so"
            )

    def _lock(self, folder: int, *, is_made: bool) -> int:
        # Not to be written: a file system with files open for writing can't be made read-only.
        flags = os.O_RDONLY | FILE_FLAGS | (os.O_CREAT if is_made else 0)
        with self._refusals():
            fd = os.open(LOCK_NAME, flags, 0o600, dir_fd=folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise TierUnavailable(
                f"the nvme folder {self.path} belongs to another agent that runs now; give each agent its own"
            ) from error
        return fd


def _read_name(folder: int, lock_fd: int, *, is_given: bool) -> bytes:
    """The folder's own name, in its lock's file; given at the first opening, if there is room for it."""
    with contextlib.suppress(OSError):
        name = os.pread(lock_fd, NAME_BYTES_MAX, 0)
        if not name and is_given:
            name = secrets.token_hex(NAME_BYTES_MAX // 2).encode()
            fd = os.open(LOCK_NAME, os.O_WRONLY | FILE_FLAGS, dir_fd=folder)
            try:
                os.pwrite(fd, name, 0)
            finally:
                os.close(fd)
        return name
    return b""


def _enter(parent: int, name: str, *, is_made: bool) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW | _FOLDER
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not is_made:
            raise
    os.mkdir(name, mode=0o700, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


def _folders_in(parent: int) -> Generator[int, None, None]:
    with os.scandir(parent) as entries:
        names = [each.name for each in entries if _FAN.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
    for name in names:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | _FOLDER, dir_fd=parent)
        try:
            yield fd
        finally:
            os.close(fd)
