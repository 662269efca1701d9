"""Notes of which staging file is whose, for the case that an engine and its agent end together.

The agent removes the file of an engine that ends while it is attached. What it can't see end is noted on disk: the
file, and the process that has it. Whoever runs next removes what a note names where that process is gone, the file is
still the very one, and nobody has it mapped: an engine's successor may have taken it over.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from nodeagent.engines.vllm.process_life import process_life
from nodeagent.engines.vllm.staging_file import FOLDER, own_file, remove_staging_file

NOTE_SUFFIX = ".staging"
NOTE_BYTES_MAX = 4_096
NOTES_MAX = 1_024

logger = logging.getLogger(__name__)


class StagingNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A staging file by name, device and inode, and the process (number, and the life that it had) whose it is."""

    path: str
    device: int
    inode: int
    pid: int
    life: bytes


class StagingNotes:
    """Notes in `notes`, one an engine's name. `folder` is where staging files lie. Nothing here raises."""

    def __init__(self, notes: Path, folder: Path = FOLDER) -> None:
        self._notes = notes
        self._folder = folder

    def keep(self, name: str, path: str, pid: int, life: bytes) -> bool:
        """Note the file of the engine whose notes are called `name`; returns whether there is such a file."""
        status = own_file(path, self._folder)
        if status is None:
            return False
        note = self._notes / f"{name}{NOTE_SUFFIX}"
        data = msgspec.json.encode(StagingNote(path, status.st_dev, status.st_ino, pid, life))
        try:
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = note.with_suffix(".staging-tmp")
            temporary.write_bytes(data)
            temporary.replace(note)
        except OSError as error:
            logger.warning("the staging file of an engine can't be noted: %s", error)
        return True

    def drop(self, name: str) -> None:
        """The engine has ended while it was attached: there is nothing left to note."""
        with contextlib.suppress(OSError):
            (self._notes / f"{name}{NOTE_SUFFIX}").unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove the files of engines that are gone, and their notes; returns how many files were removed."""
        removed = 0
        for place, note in self._read():
            if process_life(note.pid) == note.life:
                continue
            status = own_file(note.path, self._folder)
            if status is not None and (status.st_dev, status.st_ino) == (note.device, note.inode):
                if _is_mapped(note.device, note.inode):
                    continue
                removed += remove_staging_file(note.path, self._folder)
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
        return removed

    def _read(self) -> Iterator[tuple[Path, StagingNote]]:
        try:
            places = sorted(self._notes.glob(f"*{NOTE_SUFFIX}"))[:NOTES_MAX]
        except OSError:
            return
        for place in places:
            try:
                with place.open("rb") as file:
                    yield place, msgspec.json.decode(file.read(NOTE_BYTES_MAX), type=StagingNote)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                logger.warning("a note of an engine's staging file can't be read: %s", error)


def _is_mapped(device: int, inode: int) -> bool:
    """Whether a living process of ours has the file mapped. (Format: proc(5), maps: the fields before the name.)"""
    wanted = (b"%02x:%02x" % (os.major(device), os.minor(device)), b"%d" % inode)
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError), maps.open("rb") as lines:
            if any(tuple(line.split(None, 5)[3:5]) == wanted for line in lines):
                return True
    return False
