"""A process is known by its pidfd: its end is told once, and another with its number is another process."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from nodeagent.errors import HelloRefused
from nodeagent.processes import ProcessWatch
from tests.nodeagent.running import WAIT_S, open_fds

CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"


class Peers:
    """A listener, and processes that connect to it."""

    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen()
        self.listener.settimeout(WAIT_S)
        self.path = path
        self.running: list[subprocess.Popen] = []
        self.connections: list[socket.socket] = []

    def connect(self) -> tuple[subprocess.Popen, socket.socket]:
        process = subprocess.Popen([sys.executable, "-c", CONNECT, self.path], stdin=subprocess.PIPE)
        self.running.append(process)
        connection, _ = self.listener.accept()
        self.connections.append(connection)
        return process, connection

    def close(self) -> None:
        for each in self.running:
            each.kill()
            each.communicate()
        for each in self.connections:
            each.close()
        self.listener.close()


@pytest.fixture
def peers(tmp_path):
    made = Peers(str(tmp_path / "peers.sock"))
    yield made
    made.close()


async def gone(told, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(told) < count:
            await asyncio.sleep(0.005)


async def test_the_end_of_a_process_is_told_once_though_its_connection_is_open(peers):
    told = []
    watch = ProcessWatch(told.append)
    process, connection = peers.connect()
    peer = watch.peer_of(connection)
    assert watch.peer_of(connection) is peer
    assert (peer.pid, peer.is_gone) == (process.pid, False)
    process.kill()
    await gone(told, 1)
    assert told == [peer]
    assert peer.is_gone
    watch.close()


async def test_a_connection_from_a_number_whose_process_has_ended_is_another_process(peers):
    told = []
    watch = ProcessWatch(told.append)
    process, connection = peers.connect()
    first = watch.peer_of(connection)
    process.kill()
    # Not reaped: the number is still taken, and the loop has had no turn to hear of the end.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - the loop must have no turn
    second = watch.peer_of(connection)
    assert second is not first
    assert told == [first]
    await gone(told, 2)
    assert told == [first, second]
    watch.close()


async def test_another_users_process_is_refused(peers, monkeypatch):
    watch = ProcessWatch(lambda process: None)
    _, connection = peers.connect()
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(HelloRefused, match="one user"):
        watch.peer_of(connection)
    watch.close()


async def test_closing_leaves_no_descriptor(peers):
    _, connection = peers.connect()
    before = open_fds()
    watch = ProcessWatch(lambda process: None)
    watch.peer_of(connection)
    assert open_fds() == before + 1
    watch.close()
    assert open_fds() == before
