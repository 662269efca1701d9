"""The processes at the door, and the knowledge that one has ended.

A slot that a process can still read or write must not be reused, whatever its connection does. So each process is
watched by a pidfd, which tells of its end exactly once and can't mean another process that took the number later.
"""

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from nodeagent.errors import HelloRefused

PROCESSES_MAX = 1_024
_CREDENTIALS = struct.Struct("3i")


@dataclass(eq=False, slots=True)
class Process:
    """A process that has connected; equal only to itself, so that a reused pid is another process.

    `clients` are those that it has, or had, and the tokens of a chunk of each.
    """

    pid: int
    pidfd: int
    is_gone: bool = False
    clients: dict[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds references and reservations: one client of one process, over all its connections."""

    process: Process
    client: bytes


class ProcessWatch:
    """Knows each process by its pidfd. `on_gone` is called on the event loop once a process has ended."""

    def __init__(self, on_gone: Callable[[Process], None]) -> None:
        self._on_gone = on_gone
        self._processes: dict[int, Process] = {}

    def peer_of(self, connection: socket.socket) -> Process:
        """The process at the other end. Raises `HelloRefused` for another user's, or one that can't be watched.

        Where the peer has ended and its number is taken by another since, that one is watched in its stead: then slots
        are kept longer than they need be, never shorter.
        """
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.geteuid():
            raise HelloRefused(f"the agent runs as user {os.geteuid()}, the engine as {uid}; run both as one user")
        if pid <= 0:
            raise HelloRefused("the engine's process isn't visible to the agent; give both one PID namespace (hostPID)")
        known = self._processes.get(pid)
        if known is not None and _has_ended(known.pidfd):
            self._end(known)
            known = None
        return known or self._watch(pid)

    def close(self) -> None:
        """Stop watching."""
        for process in list(self._processes.values()):
            self._forget(process)

    def _watch(self, pid: int) -> Process:
        if len(self._processes) >= PROCESSES_MAX:
            raise HelloRefused(f"{PROCESSES_MAX} processes are attached already")
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise HelloRefused(f"process {pid} can't be watched: {error}") from error
        process = self._processes[pid] = Process(pid, pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._end, process)
        return process

    def _end(self, process: Process) -> None:
        if process.is_gone:
            return
        process.is_gone = True
        self._forget(process)
        self._on_gone(process)

    def _forget(self, process: Process) -> None:
        if self._processes.get(process.pid) is process:
            del self._processes[process.pid]
        asyncio.get_running_loop().remove_reader(process.pidfd)
        os.close(process.pidfd)


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])
