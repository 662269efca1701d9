"""Two agents that exchange chunks, and peers that don't behave: a script that speaks the protocol up to a point."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from nodeagent.client import ChunkClient, PutResult
from nodeagent.hints import PeerHint, read_address
from nodeagent.peers import fetcher, worth
from nodeagent.peers.protocol import (
    HEADER_BYTES,
    PREAMBLE_BYTES,
    PROOF_BYTES,
    Ask,
    Chunk,
    Preambles,
    body_length,
    decode_ask,
    draw_preamble,
    frame,
)
from tests.nodeagent.running import (
    CHUNK_BYTES,
    WAIT_S,
    RunningAgent,
    connected,
    eventually,
    label,
    make_hello,
    payload,
    running_agent,
    storage_key,
)

TOKEN = "t" * 64
SLOTS = 32
TOKENS = 16
DRAM_BYTES = 4_096 + SLOTS * CHUNK_BYTES
SERVING = {"listen": {"port": 0}, "token": TOKEN, "fetch": "off"}
FETCHING = {"token": TOKEN}
RECV_BYTES = 65_536


@dataclass(frozen=True)
class Pair:
    """`far` has chunks, `near` fetches them; each has an engine."""

    far: RunningAgent
    near: RunningAgent
    far_engine: ChunkClient
    near_engine: ChunkClient

    @property
    def address(self) -> str:
        return self.far.agent._peers.address

    def hint(self, *names: str, address: str | None = None) -> int:
        return hint(self.near, address or self.address, *names)


@contextmanager
def pair(
    folder: Path, far: Any = None, near: Any = None, far_hello: Any = None, near_hello: Any = None
) -> Iterator[Pair]:
    """`far` and `near` are what differs in the agents' options."""
    for name in ("far", "near"):
        (folder / name).mkdir()
    options = {"dram_bytes": DRAM_BYTES}
    with (
        running_agent(folder / "far", host="far", **(options | {"peers": SERVING} | (far or {}))) as one,
        running_agent(folder / "near", host="near", **(options | {"peers": FETCHING} | (near or {}))) as other,
        connected(one.config.door, far_hello or make_hello("far-1")) as far_engine,
        connected(other.config.door, near_hello or make_hello("near-1")) as near_engine,
    ):
        yield Pair(one, other, far_engine, near_engine)


@contextmanager
def lone(folder: Path, hello: Any = None, **changes: Any) -> Iterator[tuple[RunningAgent, ChunkClient]]:
    """An agent that fetches, and its engine."""
    with running_agent(folder, **({"dram_bytes": DRAM_BYTES, "peers": FETCHING} | changes)) as agent:
        with connected(agent.config.door, hello) as engine:
            yield agent, engine


def put(engine: ChunkClient, *names: str) -> None:
    for name in names:
        assert engine.put(label(name), payload(name), WAIT_S) is PutResult.STORED


def hint(agent: RunningAgent, address: str, *names: str) -> int:
    """How many chunks will be tried."""
    keys = tuple(storage_key(name)[:16] for name in names)
    return agent.on_loop(lambda: agent.agent._peers.prefetch(PeerHint(read_address(address), keys)))


def fetched(agent: RunningAgent) -> float:
    return agent.metric("warmroute_peer_fetched_chunks_total")


def refused(agent: RunningAgent, reason: str) -> float:
    return agent.metric("warmroute_peer_hints_refused_total", reason=reason)


def failed(agent: RunningAgent, reason: str) -> float:
    return agent.metric("warmroute_peer_failures_total", reason=reason)


def is_at_rest(agent: RunningAgent) -> bool:
    """Whether nothing is held, reserved or under way, and all slots that hold no chunk are free."""
    status = agent.status()
    tier, peers = status["tiers"]["dram"], status["peers"]
    free = agent.on_loop(lambda: agent.agent._tier.hierarchy.arena.free_slots)
    return (tier["references"], tier["reservations"], peers["fetching"], peers["waiting"]) == (0, 0, 0, 0) and (
        tier["slots"] - free == tier["chunks"]
        and agent.on_loop(lambda: agent.agent._tier.hierarchy.takeable_slots) == tier["slots"]
    )


def at_rest(agent: RunningAgent) -> None:
    eventually(lambda: is_at_rest(agent), "rest")


def forgive(monkeypatch: Any) -> None:
    """Probe a peer at every hint, and never leave it alone."""
    monkeypatch.setattr(worth, "PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr(fetcher, "UNREACHABLE_S", 0.0)
    monkeypatch.setattr(fetcher, "LEFT_ALONE_S", 0.0)
    monkeypatch.setattr("nodeagent.peers.peer.LEFT_ALONE_S", 0.0)


def chunk_of(name: str, ask: Ask, **changes: Any) -> Chunk:
    """The right answer to a question, but for `changes`."""
    fields: dict[str, Any] = {
        "directory_key": ask.directory_key,
        "identity": ask.identities[0],
        "storage_key": storage_key(name),
        "parent": None,
        "position": 0,
        "length": CHUNK_BYTES,
        "checksum": xxhash.xxh3_128_digest(payload(name)),
    }
    return Chunk(**(fields | changes))


class StrangePeer:
    """Listens, greets as an agent does, and then answers each question with `answer(ask)`.

    `end` is what it does after its answer: `close`, `hold` (until the test ends), or `go on`.
    """

    def __init__(self, answer: Callable[[Ask], bytes], *, end: str = "go on", token: str = TOKEN) -> None:
        self._answer, self._end, self._token = answer, end, token.encode()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stopped = threading.Event()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._listen)]
        self.asked = 0
        self.accepted = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "StrangePeer":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        self._listener.close()

    def _listen(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._attend, args=[connection])
            self._threads.append(thread)
            thread.start()

    def _attend(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            greet(connection, self._token)
            while True:
                ask = read_ask(connection)
                self.asked += 1
                connection.sendall(self._answer(ask))
                if self._end == "hold":
                    self._stopped.wait()
                if self._end != "go on":
                    return


def greet(connection: socket.socket, token: bytes) -> None:
    """A server's side of the greeting."""
    preambles = Preambles(read_exactly(connection, PREAMBLE_BYTES), draw_preamble())
    connection.sendall(preambles.server)
    assert len(read_exactly(connection, PROOF_BYTES)) == PROOF_BYTES
    connection.sendall(preambles.proof(token, b"server"))


def be_let_in(address: str, token: str = TOKEN) -> socket.socket:
    """A client's side of the greeting: a connection on which questions may be asked."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    ours = draw_preamble()
    connection.sendall(ours)
    preambles = Preambles(ours, read_exactly(connection, PREAMBLE_BYTES))
    connection.sendall(preambles.proof(token.encode(), b"client"))
    assert preambles.is_proof(token.encode(), b"server", read_exactly(connection, PROOF_BYTES))
    return connection


def read_ask(connection: socket.socket) -> Ask:
    header = read_exactly(connection, HEADER_BYTES)
    return decode_ask(header, read_exactly(connection, body_length(header)))


def read_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(min(length - len(data), RECV_BYTES))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def good(name: str) -> Callable[[Ask], bytes]:
    return lambda ask: frame(chunk_of(name, ask)) + bytes(payload(name))
