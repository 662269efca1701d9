"""Chunks in the files of one folder. Everything here blocks: the tier calls it from threads of its own.

`Store` is what the tier asks of a place for chunks. Others may put anything into the folder: pipes, links, folders at
a chunk's place. Only files are ever opened to the end.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import xxhash

from nodeagent.errors import ChunkConflict, ChunkCorrupt
from nodeagent.labels import ChunkLabel
from nodeagent.tiers.chunk_file import FileHeader, decode_header, encode_header, file_bytes, name_of
from nodeagent.tiers.chunk_folder import FILE_FLAGS, ChunkFolder
from nodeagent.tiers.drive_faults import Fault, fault_of
from nodeagent.tiers.file_io import BufferedIo, FileIo
from nodeagent.tiers.found_files import FoundFiles, no_step
from nodeagent.tiers.self_test import SelfTest, self_test
from nodeagent.tiers.tombstone_file import read_tombstones, write_tombstones

FsyncPolicy = Literal["none", "data", "data+dir"]
"""What is on the drive itself when a put returns: nothing surely; the file's bytes; its name as well."""

TEMPORARY = ".tmp"
BAD_NAMES_MAX = 4_096
_NAME = re.compile(r"[0-9a-f]{64}")
_NOT_A_FILE = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL})
"""Opening a folder to write, a file that stands for a folder, a link, a socket, or a pipe around the page cache."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a folder held at the start; `strangers` counts what isn't the tier's or can't be removed: left alone."""

    files: FoundFiles
    temporaries_removed: int
    strangers: int


@dataclass(frozen=True, slots=True)
class Space:
    """A file system's bytes: those that this user may still take, and all there are."""

    free_bytes: int
    total_bytes: int


class Store(Protocol):
    """A place for chunks. Methods block, may run in several threads (but one writes), and raise `OSError`."""

    def open(self) -> SelfTest:
        """Take possession, and try it. Raises `TierUnavailable` where another agent has it, or it can't be used.

        Opened again, it is what was open before, or unavailable.
        """
        ...

    def is_there(self) -> bool:
        """Whether the place itself still exists."""
        ...

    def close(self) -> None:
        """Let it go. Nobody uses the store any more."""
        ...

    def space(self) -> Space:
        """What the place has."""
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

    def listing(self, on_step: Callable[[], None] = no_step) -> Listing:
        """What is there, newest first. Leftovers of unfinished puts are removed.

        That may take minutes: `on_step` is called for each file, so that it isn't taken for a drive that hangs.
        """
        ...

    def header(self, name: bytes) -> FileHeader:
        """The header of a file found earlier. Raises `ChunkCorrupt`."""
        ...

    def read_tombstones(self) -> bytes | None:
        """What was kept here of what is forgotten. Raises `TombstonesUnreadable`."""
        ...

    def write_tombstones(self, data: bytes) -> None:
        """Keep it, on the drive itself when this returns."""
        ...


class FolderStore:
    """Files in one folder, which one agent has at a time, around the page cache where that can be."""

    def __init__(self, path: str, *, fsync: FsyncPolicy = "none") -> None:
        self._folder = ChunkFolder(path)
        self._fsync = fsync
        self._io: FileIo = BufferedIo()
        # Files with a good header and a bad payload: a put must not take them for the same bytes.
        self._bad: set[bytes] = set()

    def open(self) -> SelfTest:
        """See `Store` and `ChunkFolder.open`."""
        self._folder.open()
        try:
            tested = self_test(self._folder.fd, self._folder.path)
        except OSError:
            self._folder.close()
            raise
        self._io = tested.io
        return tested

    def close(self) -> None:
        """See `Store`."""
        self._folder.close()

    def is_there(self) -> bool:
        """See `Store`: a folder that was removed is kept by its descriptor, without a name."""
        try:
            return os.fstat(self._folder.fd).st_nlink > 0
        except OSError:
            return False

    def space(self) -> Space:
        """See `Store`."""
        status = os.fstatvfs(self._folder.fd)
        return Space(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)

    def may_write(self, size_bytes: int) -> bool:
        """See `Store`. The quota is the tier's; nothing else bounds what is written here."""
        return True

    def put(self, header: FileHeader, payload: memoryview) -> bool:
        """See `Store`. Whatever else stands at the chunk's place is replaced, a folder aside."""
        name = name_of(header.label.storage_key)
        if self._has_same(name, header):
            return False
        place, temporary = name.hex(), name.hex() + TEMPORARY
        with self._folder.fan(name, is_made=True) as folder:
            # A leftover is removed, never opened: it may be a link to elsewhere.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS | self._io.flags
            fd = os.open(temporary, flags, 0o600, dir_fd=folder)
            try:
                try:
                    self._io.write_file(fd, encode_header(header), payload)
                    if self._fsync != "none":
                        os.fdatasync(fd)
                finally:
                    os.close(fd)
                os.rename(temporary, place, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
        self._bad.discard(name)
        if self._fsync == "data+dir":
            self._folder.sync(name)
        return True

    def read_into(self, storage_key: bytes, target: memoryview) -> FileHeader:
        """See `Store`. Reading counts as use: the file's time is set, for the next start to know."""
        name = name_of(storage_key)
        with self._opened(name, os.O_RDONLY) as (fd, size):
            if size != file_bytes(target.nbytes):
                raise ChunkCorrupt(f"a file has {size:,} bytes instead of {file_bytes(target.nbytes):,}")
            header = self._decoded(fd, self._io.read_file(fd, target))
            if header.label.storage_key != storage_key:
                raise ChunkCorrupt("a file holds another chunk than its name says")
            if header.length != target.nbytes:
                raise ChunkCorrupt("a file's payload has another length than its chunk")
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
            header = self._read_header(fd)
            if header.label.storage_key != label.storage_key:
                raise ChunkCorrupt("a file holds another chunk than its name says")
            renewed = replace(header, label=label)
            self._io.write_header(fd, encode_header(renewed))

    def remove(self, name: bytes) -> None:
        """See `Store`. Where the folder on the way is none of ours any more, the file is gone."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._folder.fan(name) as folder:
            os.unlink(name.hex(), dir_fd=folder)
        self._bad.discard(name)

    def listing(self, on_step: Callable[[], None] = no_step) -> Listing:
        """See `Store`. A folder that can't be read raises: a quota that counts only half is none."""
        files = FoundFiles()
        temporaries, strangers = 0, 0
        with contextlib.closing(self._folder.fans()) as fans:
            for folder in fans:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        on_step()
                        if entry.name.endswith(TEMPORARY) and _NAME.fullmatch(entry.name[: -len(TEMPORARY)]):
                            is_removed = _remove_leftover(folder, entry.name)
                            temporaries += is_removed
                            strangers += not is_removed
                            continue
                        status = entry.stat(follow_symlinks=False)
                        if not _NAME.fullmatch(entry.name) or not stat.S_ISREG(status.st_mode):
                            strangers += 1
                            continue
                        files.append(bytes.fromhex(entry.name), status.st_size, status.st_mtime)
        files.sort(on_step)
        return Listing(files, temporaries, strangers)

    def header(self, name: bytes) -> FileHeader:
        """See `Store`."""
        with self._opened(name, os.O_RDONLY) as (fd, size):
            header = self._read_header(fd)
            if name_of(header.label.storage_key) != name:
                raise ChunkCorrupt("a file holds another chunk than its name says")
            if size != file_bytes(header.length):
                raise ChunkCorrupt("a file isn't as long as its header says")
            return header

    def read_tombstones(self) -> bytes | None:
        """See `Store`."""
        return read_tombstones(self._folder.fd)

    def write_tombstones(self, data: bytes) -> None:
        """See `Store`."""
        write_tombstones(self._folder.fd, data)

    def _place(self, name: bytes) -> str:
        text = name.hex()
        return os.path.join(self._folder.path, text[:2], text[2:4], text)

    def _has_same(self, name: bytes, header: FileHeader) -> bool:
        if name in self._bad:
            return False
        try:
            with self._opened(name, os.O_RDONLY) as (fd, size):
                there = self._read_header(fd)
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
            with self._folder.fan(name) as folder:
                fd = os.open(name.hex(), flags | FILE_FLAGS | self._io.flags, dir_fd=folder)
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

    def _read_header(self, fd: int) -> FileHeader:
        return self._decoded(fd, self._io.read_header(fd))

    def _decoded(self, fd: int, header: bytes) -> FileHeader:
        """Read again where it is bad: a label may be written at this moment."""
        try:
            return decode_header(header)
        except ChunkCorrupt:
            return decode_header(self._io.read_header(fd))


def _remove_leftover(folder: int, name: str) -> bool:
    """Whether it could be removed: one strange entry must not keep the others from being listed."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        if fault_of(error) is Fault.PLACE:
            return False
        raise
    return True
