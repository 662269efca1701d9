"""Chunks in the files of one folder. Everything here blocks: the tier calls it from threads of its own.

`Store` is what the tier asks of a place for chunks; direct I/O and several drives are other implementations of it.

Others may put anything into the folder: pipes, links, folders at a chunk's place. Only files are ever opened to the
end, no link below the folder is followed, and all goes through the folder's descriptor: one that is moved or removed
while the agent runs isn't made anew.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from nodeagent.errors import ChunkConflict, ChunkCorrupt, TierUnavailable
from nodeagent.labels import ChunkLabel
from nodeagent.tiers.chunk_file import (
    BLOCK_BYTES,
    HEADER_BYTES,
    FileHeader,
    decode_header,
    encode_header,
    file_bytes,
    name_of,
    padding_bytes,
)

LOCK_NAME = "warmroute.lock"
TEMPORARY = ".tmp"
BAD_NAMES_MAX = 4_096
_FAN = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"[0-9a-f]{64}")
_ZEROS = memoryview(bytes(BLOCK_BYTES))
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ERRORS_OF_ONE_PLACE = frozenset(
    {
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.EEXIST,
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
        errno.ENOTEMPTY,
    }
)
"""What an `OSError` of a store says of one chunk's place alone; every other is the drive's."""
_NOT_A_FILE = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
"""Opening a folder to write, a file that stands for a folder, a link, or a socket."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that was there before: its name (32 bytes), its size, and when it was last written or read."""

    name: bytes
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Listing:
    """What a folder held at the start; `strangers` counts what isn't the tier's or can't be removed: left alone."""

    files: list[FoundFile]
    temporaries_removed: int
    strangers: int


class Store(Protocol):
    """A place for chunks. Methods block, may run in several threads (but one writes), and raise `OSError`."""

    def open(self) -> None:
        """Take possession. Raises `TierUnavailable` where another agent has it, or it can't be used."""
        ...

    def close(self) -> None:
        """Let it go. Nobody uses the store any more."""
        ...

    def may_write(self, size_bytes: int) -> bool:
        """Whether so many bytes may be written now. Never blocks; a write a moment later may still be refused."""
        ...

    def put(self, header: FileHeader, payload: memoryview) -> bool:
        """Store a chunk; `False` where the same bytes are there already. What fails leaves nothing.

        Raises `ChunkConflict` where other bytes are stored under the key, and `BudgetSpent`.
        """
        ...

    def read_into(self, storage_key: bytes, target: memoryview) -> FileHeader:
        """Fill `target`, which has the payload's length, with verified bytes. Raises `ChunkCorrupt`."""
        ...

    def update_label(self, label: ChunkLabel) -> None:
        """Write a chunk's label into its header. Raises `ChunkCorrupt`, and `BudgetSpent`."""
        ...

    def remove(self, name: bytes) -> None:
        """Remove the file of that name; one that is gone already is no error."""
        ...

    def listing(self) -> Listing:
        """What is there, newest first. Leftovers of unfinished puts are removed."""
        ...

    def header(self, name: bytes) -> FileHeader:
        """The header of a file found earlier. Raises `ChunkCorrupt`."""
        ...


class FolderStore:
    """Buffered files in one folder, which one agent has at a time. Its descriptor is held from `open` to `close`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._root_fd = -1
        self._lock_fd = -1
        # Files with a good header and a bad payload: a put must not take them for the same bytes.
        self._bad: set[bytes] = set()

    def open(self) -> None:
        """See `Store`. A link to a folder is followed; the folder must be this user's, and written by nobody else."""
        try:
            # Not its parents: below a drive that isn't mounted, they would be another drive's.
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._path, mode=0o700)
            root = os.open(self._path, os.O_RDONLY | _FOLDER)
        except OSError as error:
            raise TierUnavailable(f"the nvme folder {self._path} can't be used: {error.strerror}") from error
        try:
            self._check_owner(root)
            self._lock_fd = self._lock(root)
        except TierUnavailable:
            os.close(root)
            raise
        self._root_fd = root

    def close(self) -> None:
        """See `Store`."""
        if self._lock_fd >= 0:
            os.close(self._root_fd)
            os.close(self._lock_fd)
            self._root_fd = self._lock_fd = -1

    def may_write(self, size_bytes: int) -> bool:
        """See `Store`. The quota is the tier's; nothing else bounds what is written here."""
        return True

    def put(self, header: FileHeader, payload: memoryview) -> bool:
        """See `Store`. Whatever else stands at the chunk's place is replaced, a folder aside."""
        name = name_of(header.label.storage_key)
        if self._has_same(name, header):
            return False
        place, temporary = name.hex(), name.hex() + TEMPORARY
        with self._fan(name, is_made=True) as folder:
            # A leftover is removed, never opened: it may be a link to elsewhere.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
            try:
                try:
                    parts = [memoryview(encode_header(header)), payload, _ZEROS[: padding_bytes(header.length)]]
                    _write_all(fd, parts)
                finally:
                    os.close(fd)
                os.rename(temporary, place, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
        self._bad.discard(name)
        return True

    def read_into(self, storage_key: bytes, target: memoryview) -> FileHeader:
        """See `Store`. Reading counts as use: the file's time is set, for the next start to know."""
        name = name_of(storage_key)
        with self._opened(name, os.O_RDONLY) as (fd, size):
            if size != file_bytes(target.nbytes):
                raise ChunkCorrupt(f"a file has {size:,} bytes instead of {file_bytes(target.nbytes):,}")
            header = _read_header(fd)
            if header.label.storage_key != storage_key:
                raise ChunkCorrupt("a file holds another chunk than its name says")
            if header.length != target.nbytes:
                raise ChunkCorrupt("a file's payload has another length than its chunk")
            _read_all(fd, target, HEADER_BYTES)
            if xxhash.xxh3_128_digest(target) != header.checksum:
                if len(self._bad) < BAD_NAMES_MAX:
                    self._bad.add(name)
                raise ChunkCorrupt("a file's payload doesn't match its checksum")
            with contextlib.suppress(OSError):
                os.utime(fd)
        return header

    def update_label(self, label: ChunkLabel) -> None:
        """See `Store`. One block is overwritten in place; torn by a power cut, it fails its checksum: a miss."""
        with self._opened(name_of(label.storage_key), os.O_RDWR) as (fd, _):
            header = _read_header(fd)
            if header.label.storage_key != label.storage_key:
                raise ChunkCorrupt("a file holds another chunk than its name says")
            renewed = FileHeader(label, header.identity, header.length, header.checksum)
            os.pwrite(fd, encode_header(renewed), 0)

    def remove(self, name: bytes) -> None:
        """See `Store`. Where the folder on the way is none of ours any more, the file is gone."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._fan(name) as folder:
            os.unlink(name.hex(), dir_fd=folder)
        self._bad.discard(name)

    def listing(self) -> Listing:
        """See `Store`. A folder that can't be read raises: a quota that counts only half is none."""
        files: list[FoundFile] = []
        temporaries, strangers = 0, 0
        with contextlib.closing(self._fans()) as fans:
            for folder in fans:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.name.endswith(TEMPORARY) and _NAME.fullmatch(entry.name[: -len(TEMPORARY)]):
                            is_removed = _remove_leftover(folder, entry.name)
                            temporaries += is_removed
                            strangers += not is_removed
                            continue
                        status = entry.stat(follow_symlinks=False)
                        if not _NAME.fullmatch(entry.name) or not stat.S_ISREG(status.st_mode):
                            strangers += 1
                            continue
                        files.append(FoundFile(bytes.fromhex(entry.name), status.st_size, status.st_mtime))
        files.sort(key=lambda found: found.modified_s, reverse=True)
        return Listing(files, temporaries, strangers)

    def header(self, name: bytes) -> FileHeader:
        """See `Store`."""
        with self._opened(name, os.O_RDONLY) as (fd, size):
            header = _read_header(fd)
            if name_of(header.label.storage_key) != name:
                raise ChunkCorrupt("a file holds another chunk than its name says")
            if size != file_bytes(header.length):
                raise ChunkCorrupt("a file isn't as long as its header says")
            return header

    def _check_owner(self, root: int) -> None:
        status, user = os.fstat(root), os.geteuid()
        if status.st_uid != user or status.st_mode & _OTHERS_WRITE:
            raise TierUnavailable(
                f"the nvme folder {self._path} belongs to user {status.st_uid} and has mode "
                f"{stat.S_IMODE(status.st_mode):o}; it must belong to the agent's user ({user}) and be writable by "
                "nobody else (chmod go-w); or give a new folder below it, and the agent makes it so"
            )

    def _lock(self, root: int) -> int:
        try:
            fd = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | _FILE, 0o600, dir_fd=root)
        except OSError as error:
            raise TierUnavailable(f"the nvme folder {self._path} can't be used: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise TierUnavailable(
                f"the nvme folder {self._path} belongs to another agent that runs now; give each agent its own"
            ) from error
        return fd

    def _place(self, name: bytes) -> str:
        text = name.hex()
        return os.path.join(self._path, text[:2], text[2:4], text)

    def _has_same(self, name: bytes, header: FileHeader) -> bool:
        if name in self._bad:
            return False
        try:
            with self._opened(name, os.O_RDONLY) as (fd, size):
                there = _read_header(fd)
        except (FileNotFoundError, ChunkCorrupt):
            return False
        if size != file_bytes(there.length) or there.label.storage_key != header.label.storage_key:
            return False
        if (there.length, there.checksum) == (header.length, header.checksum):
            return True
        raise ChunkConflict("other bytes are on disk under the chunk's key")

    @contextlib.contextmanager
    def _opened(self, name: bytes, flags: int) -> Iterator[tuple[int, int]]:
        """A chunk's file and its size. Raises `ChunkCorrupt` where something else stands there; never waits for it."""
        strange = "something that isn't a file stands at a chunk's place"
        try:
            with self._fan(name) as folder:
                fd = os.open(name.hex(), flags | _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise ChunkCorrupt(strange) from error
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ChunkCorrupt(strange)
            yield fd, status.st_size
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _fan(self, name: bytes, *, is_made: bool = False) -> Iterator[int]:
        """The folder of a chunk's file, for `dir_fd`. A link on the way is no folder (`ENOTDIR`)."""
        text = name.hex()
        outer = _enter(self._root_fd, text[:2], is_made=is_made)
        try:
            inner = _enter(outer, text[2:4], is_made=is_made)
        finally:
            os.close(outer)
        try:
            yield inner
        finally:
            os.close(inner)

    def _fans(self) -> Generator[int, None, None]:
        """Every folder that may hold chunks' files, one at a time."""
        with contextlib.closing(_folders_in(self._root_fd)) as outers:
            for outer in outers:
                yield from _folders_in(outer)


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


def _remove_leftover(folder: int, name: str) -> bool:
    """Whether it could be removed: one strange entry must not keep the others from being listed."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno in ERRORS_OF_ONE_PLACE:
            return False
        raise
    return True


def _read_header(fd: int) -> FileHeader:
    """Read twice where the first fails: a label may be written at this moment."""
    try:
        return decode_header(os.pread(fd, HEADER_BYTES, 0))
    except ChunkCorrupt:
        return decode_header(os.pread(fd, HEADER_BYTES, 0))


def _read_all(fd: int, target: memoryview, offset: int) -> None:
    done = 0
    while done < target.nbytes:
        count = os.preadv(fd, [target[done:]], offset + done)
        if not count:
            raise ChunkCorrupt("a file ends before its payload does")
        done += count


def _write_all(fd: int, parts: Sequence[memoryview]) -> None:
    left = [part for part in parts if part.nbytes]
    while left:
        count = os.writev(fd, left)
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left:
            left[0] = left[0][count:]
