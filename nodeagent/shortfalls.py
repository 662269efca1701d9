"""What this machine lacks of what an agent's configuration asks for, told before an engine needs it.

An agent learns from its first engine how large a chunk is, so it asks for memory only then; `--check` runs no agent at
all. Here everything is looked at and nothing made, opened for writing or kept: what is missing now may be there later.
"""

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nodeagent.config import AgentConfig, DriveConfig
from nodeagent.errors import MemoryShort, TierUnavailable
from nodeagent.tiers import arena_memory
from nodeagent.tiers.file_store import Space
from nodeagent.tiers.machine_memory import MachineMemory
from nodeagent.tiers.room import min_free_of


@dataclass(frozen=True, slots=True)
class Shortfall:
    """One sentence that names the field. `is_passing`: others hold it now, perhaps the agent that runs here already."""

    text: str
    is_passing: bool = False


def space_at(folder: str) -> tuple[int, Space]:
    """The file system on which a folder lies, by its device's number, and what it has. Raises `OSError`."""
    status = os.statvfs(folder)
    space = Space(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)
    return os.stat(folder).st_dev, space


def shortfalls(
    config: AgentConfig,
    machine: MachineMemory | None = None,
    space_of: Callable[[str], tuple[int, Space]] = space_at,
) -> list[Shortfall]:
    """Everything that is known to be missing. Waits for drives that hang; raises nothing."""
    return [
        *_of_the_door(config.door),
        *shortfalls_of_memory(config, machine),
        *_of_drives(config, space_of),
        *_of_certificates(config),
    ]


def shortfalls_of_memory(config: AgentConfig, machine: MachineMemory | None = None) -> list[Shortfall]:
    """What is known to be missing for the DRAM tier. Waits for nothing."""
    try:
        arena_memory.check(config.dram.quota_bytes, config.dram.wish, machine or MachineMemory())
    except MemoryShort as error:
        text = f"{error}; or let others give some back: an agent that runs here holds its own"
        return [Shortfall(text, is_passing=True)]
    except TierUnavailable as error:
        return [Shortfall(str(error))]
    return []


def _of_the_door(door: str) -> Iterator[Shortfall]:
    folder = os.path.dirname(os.path.abspath(door))
    if not os.path.isdir(folder):
        yield Shortfall(f"door: there is no folder {folder}; create it, or name another place")


def _of_drives(config: AgentConfig, space_of: Callable[[str], tuple[int, Space]]) -> Iterator[Shortfall]:
    """Folders that can't be used; then, by file system, quotas that it can't hold together."""
    spaces: dict[int, Space] = {}
    drives: dict[int, list[DriveConfig]] = {}
    for drive in config.nvme.drives:
        folder = os.path.abspath(drive.path)
        is_there, parent = os.path.exists(folder), os.path.dirname(folder)
        if is_there and not os.path.isdir(folder):
            yield Shortfall(f"nvme: {folder} is no folder")
        elif not is_there and not os.path.isdir(parent):
            yield Shortfall(f"nvme: the folder {folder} can't be made: {parent} isn't there; mount the drive")
        else:
            try:
                device, space = space_of(folder if is_there else parent)
                spaces[device] = space
                if is_there:
                    yield from _of_ownership(folder)
            except OSError as error:
                yield Shortfall(f"nvme: the folder {folder} can't be looked at: {error.strerror}")
                continue
            drives.setdefault(device, []).append(drive)
    for device, there in drives.items():
        yield from _of_file_system(there, spaces[device], config.nvme.min_free_bytes)


def _of_ownership(folder: str) -> Iterator[Shortfall]:
    status, user = os.stat(folder), os.geteuid()
    if status.st_uid != user or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield Shortfall(
            f"nvme: the folder {folder} must belong to the agent's user (now {user}) and be writable by nobody else; "
            f"it belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}"
        )


def _of_file_system(drives: list[DriveConfig], space: Space, min_free_bytes: int | None) -> Iterator[Shortfall]:
    names, quota = ", ".join(str(drive.path) for drive in drives), sum(drive.quota_bytes for drive in drives)
    min_free = min_free_of(space, min_free_bytes)
    if quota > space.total_bytes - min_free:
        together = " together" if len(drives) > 1 else ""
        yield Shortfall(
            f"nvme: {quota:,} bytes at {names}{together} are more than their file system holds: it has "
            f"{space.total_bytes:,} bytes, of which {min_free:,} stay free (nvme.min_free_gb); give less gb"
        )
    elif space.free_bytes < min_free:
        yield Shortfall(
            f"nvme: nothing is written at {names}: {space.free_bytes:,} bytes of the file system are free, and "
            f"{min_free:,} stay free (nvme.min_free_gb)",
            is_passing=True,
        )


def _of_certificates(config: AgentConfig) -> Iterator[Shortfall]:
    for name, path in config.peers.tls:
        if path is not None and not os.access(path, os.R_OK):
            yield Shortfall(f"peers.tls.{name}: {path} can't be read")
