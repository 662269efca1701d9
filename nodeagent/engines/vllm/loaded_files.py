"""Whether files are still those that this process's engine loaded: nothing of them, or on the way to them, is newer.

Weights are hashed after they were loaded. In between, a link could be turned or a file replaced, and KV of one model
would bear another's name. The kernel sets `ctime` at every change of a file and of what it is called, and nobody
else can: what is older than the process's start was there when the engine read it. Files that were copied, unpacked
or downloaded while the engine started are refused as well, though they may be right; the next start accepts them.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from nodeagent.engines.vllm.content_digest import ContentUnknown

LOCAL_MARGIN_S = 1.0
"""A file's clock stands still for up to a tick of the kernel (10 ms), the boot's is rounded to one."""
REMOTE_MARGIN_S = 300.0
"""A file server keeps its own time."""
LOCAL_FILESYSTEMS = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "tmpfs",
        "ramfs",
        "overlay",
        "squashfs",
        "erofs",
        "iso9660",
    }
)
LINKS_MAX = 40


@dataclass(frozen=True, slots=True)
class Seen:
    """A file, folder or link as it was looked at; equal if nothing happened to it in between."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class LoadedFiles:
    """The files that were there, unchanged, when the process began. `started_at` is in seconds of the wall's clock."""

    def __init__(self, started_at: float, local_devices: frozenset[int] | None = None) -> None:
        self._started_at = started_at
        self._local = _local_devices() if local_devices is None else local_devices

    def seen(self, folder: Path, files: Iterable[Path]) -> tuple[Seen, ...]:
        """Everything on the way to `folder` and to `files`, its own. Raises `ContentUnknown` for what is too new.

        A folder above may have got or lost entries since (such as /tmp), but then its own name must be old.
        """
        passed, reached = self._way(os.path.abspath(folder))
        self._refuse_if_new(reached)
        found = [*passed, reached]
        for file in files:
            if os.path.islink(file):
                passed, status = self._way(os.path.abspath(file))
                found += passed
            else:
                status = self._look(str(file))
            self._refuse_if_new(status)
            found.append(status)
        return tuple(dict.fromkeys(found))

    def _way(self, path: str) -> tuple[list[Seen], Seen]:
        """What is passed from the root to a path, links followed one by one, and what is reached."""
        parts = [part for part in path.split("/") if part]
        here, above = "/", self._look("/")
        passed: list[Seen] = []
        links = 0
        while parts:
            part = parts.pop(0)
            if part == ".":
                continue
            if part == "..":
                here = os.path.dirname(here)
                above = self._look(here)
                continue
            at = os.path.join(here, part)
            status = self._look(at)
            if os.path.islink(at):
                self._refuse_if_new(status)
                passed.append(status)
                links += 1
                if links > LINKS_MAX:
                    raise ContentUnknown(f"{path} has too many links on its way")
                target = os.readlink(at)
                parts = [each for each in target.split("/") if each] + parts
                if target.startswith("/"):
                    here, above = "/", self._look("/")
                continue
            if self._is_new(status) and self._is_new(above):
                # It may have been given this name since: that would have changed the folder above.
                self._refuse(status)
            passed.append(replace(above, size=0, mtime_ns=0, ctime_ns=0))  # its other entries may change at any time
            here, above = at, status
        return passed, above

    def _look(self, path: str) -> Seen:
        try:
            status = os.lstat(path)
        except OSError as error:
            raise ContentUnknown(f"{path} can't be read: {error.strerror}") from error
        return Seen(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def _is_new(self, seen: Seen) -> bool:
        margin_s = LOCAL_MARGIN_S if seen.device in self._local else REMOTE_MARGIN_S
        return seen.ctime_ns >= (self._started_at - margin_s) * 1e9

    def _refuse_if_new(self, seen: Seen) -> None:
        if self._is_new(seen):
            self._refuse(seen)

    def _refuse(self, seen: Seen) -> None:
        wait = "" if seen.device in self._local else f" {REMOTE_MARGIN_S:g} s after its last change"
        raise ContentUnknown(
            f"{seen.path} was changed, moved or downloaded while this engine started, or since: what was loaded can't "
            f"be told any more. Restart the engine{wait}, and leave the model's files alone meanwhile"
        )


def process_started_at() -> float:
    """When this process began, by the wall's clock as it goes now (`proc(5)`: starttime, in ticks since the boot).

    Raises `ContentUnknown` where the kernel doesn't say.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError) as error:
        raise ContentUnknown(f"when this process began can't be told: {error}") from error
    return time.time() - age_s


def _local_devices() -> frozenset[int]:
    """The devices of file systems whose times are this host's (`proc(5)`, mountinfo); what isn't known isn't."""
    devices: set[int] = set()
    remote: set[int] = set()
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        before, _, after = line.partition(" - ")
        major, _, minor = before.split()[2].partition(":")
        kind = after.split()[0] if after else ""
        (devices if kind in LOCAL_FILESYSTEMS else remote).add(os.makedev(int(major), int(minor)))
    return frozenset(devices - remote)
