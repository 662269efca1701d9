"""The order of a client's first words: what is held is said before the tier is there for anybody."""

import socket
import threading
from pathlib import Path

from nodeagent.client import ChunkClient
from nodeagent.messages import (
    LENGTH_BYTES,
    PREAMBLE_BYTES,
    ArenaOffer,
    ClientMessage,
    Holding,
    Message,
    Reserve,
    Welcome,
    body_length,
    decode_client,
    decode_hello,
    frame,
)
from nodeagent.tiers.arena import Arena
from tests.nodeagent.running import WAIT_S, label, make_hello, payload

PAGE = 4096


class ScriptedAgent:
    """Welcomes one client and offers its arena in the same breath, then only listens."""

    def __init__(self, door: Path) -> None:
        self.heard: list[type[Message]] = []
        self.has_heard_reserve = threading.Event()
        self._arena = Arena(16 * PAGE, PAGE)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(door))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._attend)
        self._thread.start()

    def close(self) -> None:
        self._thread.join(WAIT_S)
        self._listener.close()
        self._arena.close()

    def _attend(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as incoming:
            incoming.read(PREAMBLE_BYTES)
            decode_hello(self._body(incoming))
            arena = self._arena
            said = frame(Welcome(b"l" * 8)) + frame(ArenaOffer(arena.header_bytes, arena.slot_bytes, arena.slots))
            socket.send_fds(connection, [said], [arena.read_only_fd, arena.writable_fd])
            while body := self._body(incoming):
                message: ClientMessage = decode_client(body)
                self.heard.append(type(message))
                if isinstance(message, Reserve):
                    self.has_heard_reserve.set()

    def _body(self, incoming: object) -> bytes:
        header = incoming.read(LENGTH_BYTES)  # type: ignore[attr-defined]
        return incoming.read(body_length(header)) if len(header) == LENGTH_BYTES else b""  # type: ignore[attr-defined]


def test_what_is_held_is_said_before_the_first_put_can_be_granted(tmp_path: Path) -> None:
    """Said after a grant, it would take that grant back, and the put would be lost."""
    agent = ScriptedAgent(tmp_path / "door")
    putting: list[threading.Thread] = []
    is_made = threading.Event()

    def inventory() -> list[bytes]:
        # The client's own thread asks for this while it greets: a put of another thread comes in between.
        assert is_made.wait(WAIT_S)
        put = threading.Thread(target=lambda: client.put(label("a"), payload("a"), WAIT_S))
        putting.append(put)
        put.start()
        assert agent.has_heard_reserve.wait(WAIT_S)
        return []

    client = ChunkClient(str(tmp_path / "door"), make_hello(), inventory)
    is_made.set()
    assert agent.has_heard_reserve.wait(WAIT_S)
    client.stop()
    for put in putting:
        put.join(WAIT_S)
    agent.close()
    assert agent.heard.index(Holding) < agent.heard.index(Reserve)
