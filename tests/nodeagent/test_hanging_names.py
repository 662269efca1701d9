"""A resolver that doesn't answer: peers by address are asked all the same, and the agent ends when it is told to."""

import signal
import socket
import subprocess
import sys
import threading

import pytest

from nodeagent.errors import PeerUnreachable
from nodeagent.hints import PeerAddress
from nodeagent.peers import connection
from nodeagent.peers.connection import LOOKUPS_MAX, Dialer
from tests.nodeagent.lone_drive import soon
from tests.nodeagent.running import WAIT_S, connected

AGENT = """
import socket, sys, threading
from warmroute.cli import main

def hang(*arguments, **named):
    print("hangs", flush=True)
    threading.Event().wait()

socket.getaddrinfo = hang
sys.exit(main(["agent", *sys.argv[1:]]))
"""


def test_an_agent_ends_on_sigterm_while_a_name_is_looked_up(tmp_path):
    door = str(tmp_path / "door.sock")
    options = ["--host", "h", "--door", door, "--redis", "redis://directory.example:6379", "--dram-gb", "0.01"]
    with subprocess.Popen([sys.executable, "-c", AGENT, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "hangs\n"
            with connected(door):
                process.send_signal(signal.SIGTERM)
                assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


async def test_lookups_that_hang_are_bounded_and_cost_no_address(monkeypatch):
    answers = threading.Event()
    ask = socket.getaddrinfo

    def hang(host, *arguments):
        assert answers.wait(WAIT_S)
        return ask("127.0.0.1", *arguments)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(connection, "CONNECT_S", 0.01)
    dialer = Dialer(b"x" * 32)
    for _ in range(LOOKUPS_MAX):
        with pytest.raises(PeerUnreachable, match="within"):
            await dialer.dial(PeerAddress("peer.example", 9))
    with pytest.raises(PeerUnreachable, match="looked up already"):
        await dialer.dial(PeerAddress("peer.example", 9))
    monkeypatch.setattr(connection, "CONNECT_S", WAIT_S)
    with pytest.raises(PeerUnreachable, match="Connect call failed"):
        await dialer.dial(PeerAddress("127.0.0.1", 9))
    answers.set()
    await soon(lambda: not dialer.lookups)
    with pytest.raises(PeerUnreachable, match="Connect call failed"):
        await dialer.dial(PeerAddress("peer.example", 9))
