"""Chunks in the files of one folder. Everything here blocks: the tier calls it from threads of its own.

`Store` is what the tier asks of a place for chunks; direct I/O and several drives are other implementations of it.
"""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Sequence
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
_FAN = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"[0-9a-f]{64}")
_ZEROS = memoryview(bytes(BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that was there before: its name (32 bytes), its size, and when it was last written or read."""

    name: bytes
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Listing:
    """What a folder held at the start; `strangers` counts files that aren't the tier's, which are left alone."""

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

    def put(self, header: FileHeader, payload: memoryview) -> bool:
        """Store a chunk; `False` where the same bytes are there already. What fails leaves nothing.

        Raises `ChunkConflict` where other bytes are stored under the key.
        """
        ...

    def read_into(self, storage_key: bytes, target: memoryview) -> FileHeader:
        """Fill `target`, which has the payload's length, with verified bytes. Raises `ChunkCorrupt`."""
        ...

    def update_label(self, label: ChunkLabel) -> None:
        """Write a chunk's label into its header. Raises `ChunkCorrupt`."""
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
    """Buffered files in one folder, which one agent has at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock_fd = -1

    def open(self) -> None:
        """See `Store`."""
        try:
            # Not its parents: below a drive that isn't mounted, they would be another drive's.
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._path, mode=0o700)
            fd = os.open(os.path.join(self._path, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierUnavailable(f"the nvme folder {self._path} can't be used: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise TierUnavailable(
                f"the nvme folder {self._path} belongs to another agent that runs now; give each agent its own"
            ) from error
        self._lock_fd = fd

    def close(self) -> None:
        """See `Store`."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def put(self, header: FileHeader, payload: memoryview) -> bool:
        """See `Store`."""
        place = self._place(name_of(header.label.storage_key))
        if self._has_same(place, header):
            return False
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        temporary = place + TEMPORARY
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                parts = [memoryview(encode_header(header)), payload, _ZEROS[: padding_bytes(header.length)]]
                _write_all(fd, parts)
            finally:
                os.close(fd)
            os.rename(temporary, place)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return True

    def read_into(self, storage_key: bytes, target: memoryview) -> FileHeader:
        """See `Store`. Reading counts as use: the file's time is set, for the next start to know."""
        fd = os.open(self._place(name_of(storage_key)), os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size != file_bytes(target.nbytes):
                raise ChunkCorrupt(f"a file has {size:,} bytes instead of {file_bytes(target.nbytes):,}")
            header = _read_header(fd)
            if header.label.storage_key != storage_key:
                raise ChunkCorrupt("a file holds another chunk than its name says")
            if header.length != target.nbytes:
                raise ChunkCorrupt("a file's payload has another length than its chunk")
            _read_all(fd, target, HEADER_BYTES)
            if xxhash.xxh3_128_digest(target) != header.checksum:
                raise ChunkCorrupt("a file's payload doesn't match its checksum")
            with contextlib.suppress(OSError):
                os.utime(fd)
        finally:
            os.close(fd)
        return header

    def update_label(self, label: ChunkLabel) -> None:
        """See `Store`. One block is overwritten in place; torn by a power cut, it fails its checksum: a miss."""
        fd = os.open(self._place(name_of(label.storage_key)), os.O_RDWR | os.O_CLOEXEC)
        try:
            header = _read_header(fd)
            if header.label.storage_key != label.storage_key:
                raise ChunkCorrupt("a file holds another chunk than its name says")
            renewed = FileHeader(label, header.identity, header.length, header.checksum)
            os.pwrite(fd, encode_header(renewed), 0)
        finally:
            os.close(fd)

    def remove(self, name: bytes) -> None:
        """See `Store`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._place(name))

    def listing(self) -> Listing:
        """See `Store`. A folder that can't be read raises: a quota that counts only half is none."""
        files: list[FoundFile] = []
        temporaries, strangers = 0, 0
        for folder in self._fans(self._path):
            for inner in self._fans(folder):
                with os.scandir(inner) as entries:
                    for entry in entries:
                        if entry.name.endswith(TEMPORARY) and _NAME.fullmatch(entry.name[: -len(TEMPORARY)]):
                            os.unlink(entry.path)
                            temporaries += 1
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
        fd = os.open(self._place(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = _read_header(fd)
            if name_of(header.label.storage_key) != name:
                raise ChunkCorrupt("a file holds another chunk than its name says")
            if os.fstat(fd).st_size != file_bytes(header.length):
                raise ChunkCorrupt("a file isn't as long as its header says")
            return header
        finally:
            os.close(fd)

    def _place(self, name: bytes) -> str:
        text = name.hex()
        return os.path.join(self._path, text[:2], text[2:4], text)

    def _has_same(self, place: str, header: FileHeader) -> bool:
        try:
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            there = _read_header(fd)
            is_whole = os.fstat(fd).st_size == file_bytes(there.length)
        except ChunkCorrupt:
            return False
        finally:
            os.close(fd)
        if not is_whole or there.label.storage_key != header.label.storage_key:
            return False
        if (there.length, there.checksum) == (header.length, header.checksum):
            return True
        raise ChunkConflict("other bytes are on disk under the chunk's key")

    @staticmethod
    def _fans(path: str) -> list[str]:
        with os.scandir(path) as entries:
            return [each.path for each in entries if _FAN.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]


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
