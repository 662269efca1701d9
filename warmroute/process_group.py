"""What a part leaves behind when it ends: other processes of its group, and shared memory that only they mapped.

An engine like vLLM is several processes. When the first is killed the others live on, hold its ports and gigabytes of
memory, and leave files in /dev/shm that nothing will remove. Linux only: all is read from /proc.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LEFT_BEHIND = ("psm_", "sem.mp-", "vllm_offload_")
"""Names of what Python's multiprocessing and vLLM make in /dev/shm."""
TRACKER = b"multiprocessing.resource_tracker"
END_TIMEOUT_S = 10.0
"""After a SIGKILL: as long as the kernel may need to free the memory, on a busy machine."""
TRACKER_TIMEOUT_S = 2.0
"""Python's resource trackers remove shared memory by themselves when the rest of their group is gone."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class GroupRemains:
    """What there was of a group at one moment."""

    group: int
    files: frozenset[Path] = frozenset()


def remains(group: int) -> GroupRemains:
    """Take note of the files that members of a group map, while they can be seen. `group` is its leader's pid."""
    return GroupRemains(group, frozenset(file for pid in members(group) for file in _mapped(pid)))


def members(group: int) -> list[int]:
    """The pids of a group that aren't dead; a dead one that nobody reaped doesn't count."""
    return [pid for pid, of, state in _processes() if of == group and state not in (b"Z", b"X")]


def end_group(seen: GroupRemains) -> Iterator[float]:
    """Kill what is left of a group whose leader is gone, and remove its files; yields the seconds to wait each time.

    Ends when all are gone, at the latest after both timeouts.
    """
    now = remains(seen.group)
    _kill(pid for pid in members(seen.group) if TRACKER not in _command(pid))
    for timeout_s in (TRACKER_TIMEOUT_S, END_TIMEOUT_S):
        deadline = time.monotonic() + timeout_s
        while members(seen.group) and time.monotonic() < deadline:
            yield POLL_S
        _kill(members(seen.group))
    for file in seen.files | now.files:
        with contextlib.suppress(OSError):
            file.unlink()


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes() -> Iterator[tuple[int, int, bytes]]:
    """(pid, group, state) of each process. Source: proc(5), `stat`; the name may hold anything but is in brackets."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                state, _parent, group = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[:3]
                yield int(entry), int(group), state


def _mapped(pid: int) -> Iterator[Path]:
    prefix = f"{SHARED_MEMORY}/"
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            path = line[line.find("/") :] if "/" in line else ""
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and name.startswith(LEFT_BEHIND) and "/" not in name and " " not in name:
                yield Path(path)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
