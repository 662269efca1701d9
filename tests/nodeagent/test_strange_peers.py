"""Peers that lie, hang, die or send garbage cost the hint: never a wrong byte, never a slot."""

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.client import PutResult
from nodeagent.errors import PeerBadBytes, PeerRefused, PeerUnreachable
from nodeagent.peers import connection as connection_module
from nodeagent.peers import server as server_module
from nodeagent.peers.protocol import (
    HEADER_BYTES,
    MAGIC,
    PREAMBLE_BYTES,
    PROOF_BYTES,
    Absent,
    Ask,
    Chunk,
    Preambles,
    body_length,
    check_preamble,
    decode_answer,
    decode_ask,
    draw_preamble,
    frame,
)
from nodeagent.peers.wire import PlainWire
from nodeagent.tiers.chunk_file import UNKNOWN_IDENTITY
from tests.faulty_proxy import Cut, FaultyProxy
from tests.nodeagent.peer_process import PEER_SLOTS
from tests.nodeagent.peering import (
    TOKEN,
    StrangePeer,
    at_rest,
    be_let_in,
    chunk_of,
    failed,
    fetched,
    forgive,
    good,
    greet,
    hint,
    lone,
    pair,
    put,
    read_ask,
    read_exactly,
    refused,
)
from tests.nodeagent.running import (
    CHUNK_BYTES,
    WAIT_S,
    eventually,
    label,
    make_hello,
    payload,
    read,
    storage_key,
)

ANSWER_BYTES = 2 * PREAMBLE_BYTES + CHUNK_BYTES
"""At least what a server sends for one chunk: its preamble, its proof, the label and the payload."""


def hurry(monkeypatch):
    """Nobody waits long for a peer."""
    for name in ("CONNECT_S", "FIRST_BYTE_S", "IDLE_S"):
        monkeypatch.setattr(connection_module, name, 0.1)


@contextmanager
def proxied(two, **changes):
    """A proxy before the far agent."""
    port = int(two.address.rpartition(":")[2])
    proxy = FaultyProxy(port, subject=MAGIC)
    two.far.call(proxy.__aenter__())
    try:
        yield proxy
    finally:
        two.far.call(proxy.__aexit__())


def end_of_hint(agent, address, name):
    """Give a hint, and wait until it has come to its end, whatever that is."""
    assert hint(agent, address, name) == 1
    at_rest(agent)


@pytest.mark.parametrize(("how", "step"), [("close", 100), ("reset", 500)])
def test_a_stream_that_ends_at_any_byte_leaves_nothing_and_the_next_one_brings_the_chunk(
    tmp_path, monkeypatch, how, step
):
    forgive(monkeypatch)
    with pair(tmp_path) as two, proxied(two) as proxy:
        put(two.far_engine, "a")
        cuts = range(0, ANSWER_BYTES, step)
        for number, after_bytes in enumerate(cuts, 1):
            proxy.cuts.append(Cut(how, after_bytes))
            end_of_hint(two.near, f"127.0.0.1:{proxy.port}", "a")
            assert fetched(two.near) == 0
            assert two.near.tier()["chunks"] == 0
            assert failed(two.near, "unreachable") + failed(two.near, "refused") == number
        end_of_hint(two.near, f"127.0.0.1:{proxy.port}", "a")
        assert fetched(two.near) == 1
        assert read(two.near_engine, "a") == payload("a")
        at_rest(two.far)


@pytest.mark.parametrize("after_bytes", [0, 20, 60, 150, ANSWER_BYTES // 2])
def test_a_peer_that_hangs_at_any_point_is_given_up(tmp_path, monkeypatch, after_bytes):
    with pair(tmp_path) as two, proxied(two) as proxy:
        put(two.far_engine, "a")
        proxy.cuts.append(Cut("stall", after_bytes))
        with monkeypatch.context() as hurried:
            hurry(hurried)
            end_of_hint(two.near, f"127.0.0.1:{proxy.port}", "a")
        assert failed(two.near, "unreachable") + failed(two.near, "refused") == 1
        assert two.hint("a") == 1
        eventually(lambda: fetched(two.near) == 1, "the chunk, from where nothing hangs")


def test_a_peer_that_takes_for_ever_over_a_chunk_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "CHUNK_S", 0.3)
    dripping = threading.Event()

    def drip(ask):
        raise AssertionError

    class Dripping(StrangePeer):
        def _attend(self, connection):
            with connection, suppress(OSError, EOFError):
                greet(connection, TOKEN.encode())
                connection.sendall(frame(chunk_of("a", read_ask(connection))))
                for byte in bytes(payload("a")):
                    connection.sendall(bytes([byte]))
                    dripping.set()
                    self._stopped.wait(0.02)

    with Dripping(drip) as peer, lone(tmp_path) as (agent, _):
        end_of_hint(agent, peer.address, "a")
        assert dripping.is_set()
        assert failed(agent, "unreachable") == 1


BAD_ANSWERS = {
    "another key": lambda ask: frame(chunk_of("a", ask, directory_key=b"k" * 16)) + bytes(payload("a")),
    "not here, of another key": lambda ask: frame(Absent(b"k" * 16)),
    "another identity": lambda ask: frame(chunk_of("a", ask, identity=b"i" * 32)) + bytes(payload("a")),
    "no identity": lambda ask: frame(chunk_of("a", ask, identity=UNKNOWN_IDENTITY)) + bytes(payload("a")),
    "its own parent": lambda ask: frame(chunk_of("a", ask, parent=storage_key("a"))) + bytes(payload("a")),
    "other bytes": lambda ask: frame(chunk_of("a", ask)) + bytes(payload("b")),
    "fewer bytes": lambda ask: frame(chunk_of("a", ask, length=CHUNK_BYTES - 1)) + bytes(payload("a")),
    "more bytes than a slot has": lambda ask: frame(chunk_of("a", ask, length=CHUNK_BYTES + 1)) + bytes(payload("a")),
    "endless length": lambda ask: frame(chunk_of("a", ask, length=2**63 - 1)) + bytes(payload("a")),
    "endless frame": lambda ask: b"\xff" * 4_096,
    "empty frame": lambda ask: bytes(4_096),
    "a question": lambda ask: frame(ask),
    "a label's bit": lambda ask: bytes([*frame(chunk_of("a", ask))[:-1], 0x7F]) + bytes(payload("a")),
    "http": lambda ask: b"HTTP/1.1 200 OK\r\n\r\n",
}


class Trickle:
    """A wire by which a byte comes now and then, and never the last."""

    async def send(self, data, idle_s):
        return

    async def fill(self, target, idle_s):
        await asyncio.Event().wait()


async def test_an_answer_that_trickles_for_ever_is_given_up(monkeypatch):
    monkeypatch.setattr(connection_module, "ANSWER_S", 0.01)
    with pytest.raises(PeerUnreachable, match="an answer"):
        await connection_module.PeerConnection(Trickle()).ask(b"k" * 16, [UNKNOWN_IDENTITY])


@pytest.fixture(scope="module")
def one_agent(tmp_path_factory):
    """One agent for many peers: what it counts goes on from test to test."""
    with lone(tmp_path_factory.mktemp("one")) as agent_and_engine:
        yield agent_and_engine


@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_a_bad_answer_is_dropped_and_counted_and_after_three_the_peer_is_left_alone(one_agent, monkeypatch, answer):
    monkeypatch.setattr("nodeagent.peers.worth.PROBE_INTERVAL_S", 0.0)
    agent, engine = one_agent
    bad, left_alone = failed(agent, "bad_bytes"), refused(agent, "left_alone")
    with StrangePeer(answer) as peer:
        for number in range(1, 4):
            end_of_hint(agent, peer.address, "a")
            assert failed(agent, "bad_bytes") == bad + number
        assert hint(agent, peer.address, "a") == 0
        assert refused(agent, "left_alone") == left_alone + 1
        assert peer.asked == peer.accepted == 3
        assert agent.tier()["chunks"] == 0
        assert read(engine, "a") is None


def test_what_waits_for_a_peer_that_is_left_alone_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr("nodeagent.peers.worth.PROBE_CHUNKS", 8)
    monkeypatch.setattr("nodeagent.peers.fetcher.CONNECTIONS_PER_PEER_MAX", 1)
    with StrangePeer(BAD_ANSWERS["http"]) as peer, lone(tmp_path) as (agent, _):
        assert hint(agent, peer.address, *(f"n{number}" for number in range(8))) == 8
        eventually(lambda: refused(agent, "left_alone") == 5, "the drops")
        assert peer.asked == 3
        at_rest(agent)


def test_any_bit_that_turns_on_the_way_costs_the_chunk_or_nothing(tmp_path, monkeypatch):
    """Of what a server says, each byte of the label in turn, and some of the payload."""
    forgive(monkeypatch)
    hurry(monkeypatch)
    spoilt = 0

    def answer(ask):
        data = bytearray(good("a")(ask))
        data[spoilt] ^= 1 << spoilt % 8
        return bytes(data)

    with StrangePeer(answer) as peer, lone(tmp_path) as (agent, engine):
        label_bytes = len(good("a")(Ask(storage_key("a")[:16], [bytes(32)]))) - CHUNK_BYTES
        for spoilt in (*range(0, label_bytes, 3), *range(label_bytes, label_bytes + CHUNK_BYTES, 1_021)):
            end_of_hint(agent, peer.address, "a")
            assert (fetched(agent), agent.tier()["chunks"]) == (0, 0), spoilt
        assert read(engine, "a") is None


def test_nobody_listens_where_the_hint_points(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with lone(tmp_path) as (agent, _):
        end_of_hint(agent, f"127.0.0.1:{port}", "a")
        assert failed(agent, "unreachable") == 1
        assert hint(agent, f"127.0.0.1:{port}", "a") == 0
        assert refused(agent, "left_alone") == 1
        for number, name in enumerate(("a" * 64, "a..b"), 2):
            end_of_hint(agent, f"{name}:1", "a")
            assert failed(agent, "unreachable") == number


LARGE_BYTES = 16 << 20


def test_a_peer_that_is_killed_in_the_middle_of_a_chunk_leaves_nothing(tmp_path, monkeypatch):
    half_way, goes_on = threading.Event(), threading.Event()
    fill = PlainWire.fill

    async def halting(wire, target, idle_s):
        if len(target) < LARGE_BYTES:
            await fill(wire, target, idle_s)
            return
        with target[: LARGE_BYTES // 8] as some, target[LARGE_BYTES // 8 :] as rest:
            await fill(wire, some, idle_s)
            half_way.set()
            await asyncio.to_thread(goes_on.wait, WAIT_S)
            await fill(wire, rest, idle_s)

    monkeypatch.setattr(PlainWire, "fill", halting)
    (tmp_path / "far").mkdir()
    command = [sys.executable, "-m", "tests.nodeagent.peer_process", str(tmp_path / "far"), str(LARGE_BYTES), "a"]
    hello = make_hello("near-1", chunk_bytes=LARGE_BYTES)
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as far,
        lone(tmp_path, hello, dram_bytes=4_096 + PEER_SLOTS * LARGE_BYTES) as (agent, engine),
    ):
        try:
            address = far.stdout.readline().strip()
            assert hint(agent, address, "a") == 1
            assert half_way.wait(WAIT_S)
            assert agent.tier()["reservations"] == 1
        finally:
            far.kill()
        goes_on.set()
        eventually(lambda: failed(agent, "unreachable") == 1, "the failure")
        at_rest(agent)
        assert engine.open([storage_key("a")], WAIT_S) == []


def test_an_agent_that_stops_in_the_middle_of_a_fetch_ends_in_order(tmp_path):
    half = StrangePeer(lambda ask: frame(chunk_of("a", ask)) + bytes(payload("a"))[:1_000], end="hold")
    with half as peer, lone(tmp_path) as (agent, _):
        assert hint(agent, peer.address, "a") == 1
        eventually(lambda: agent.tier()["reservations"] == 1, "the transfer")


def test_a_peer_that_stops_reading_is_not_waited_for_and_the_chunk_is_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "IDLE_S", 0.5)
    large = make_hello("far-1", chunk_bytes=LARGE_BYTES)
    with pair(tmp_path, far={"dram_bytes": 4_096 + PEER_SLOTS * LARGE_BYTES}, far_hello=large) as two:
        assert two.far_engine.put(label("a"), payload("a", LARGE_BYTES), WAIT_S) is PutResult.STORED
        digest = two.far.agent._roster.engines[0].identity_digest
        with be_let_in(two.address) as connection:
            connection.sendall(frame(Ask(storage_key("a")[:16], [digest])))
            entry = two.far.agent._tier.hierarchy.find(storage_key("a"))
            eventually(lambda: entry.references == 1, "the hold")
            at_rest(two.far)
            assert entry.references == 0


GREETINGS = {
    "nothing": b"",
    "no proof": draw_preamble(),
    "a wrong proof": draw_preamble() + b"p" * PROOF_BYTES,
    "another version": MAGIC + b"\x00\x09" + bytes(32),
    "http": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + bytes(40),
    "noise": bytes(range(256)),
}


@pytest.fixture(scope="module")
def one_pair(tmp_path_factory):
    """Two agents for many strangers; the far one has the chunk `a`."""
    with pair(tmp_path_factory.mktemp("pair")) as two:
        put(two.far_engine, "a")
        yield two


def is_served(two):
    """Whether the far agent gives its chunk to who asks as an agent does."""
    digest = two.near.agent._roster.engines[0].identity_digest
    with be_let_in(two.address) as connection:
        connection.sendall(frame(Ask(storage_key("a")[:16], [digest])))
        header = read_exactly(connection, HEADER_BYTES)
        answer = decode_answer(header, read_exactly(connection, body_length(header)))
        return isinstance(answer, Chunk) and read_exactly(connection, answer.length) == payload("a")


@pytest.mark.parametrize("sent", GREETINGS.values(), ids=GREETINGS.keys())
def test_who_does_not_greet_well_learns_nothing_and_is_not_kept(one_pair, monkeypatch, sent):
    two = one_pair
    with monkeypatch.context() as hurried:
        hurried.setattr(server_module, "GREETING_S", 0.3)
        host, _, port = two.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(sent)
            answered = b""
            with suppress(ConnectionResetError):
                while piece := connection.recv(4_096):
                    answered += piece
        assert len(answered) in (0, PREAMBLE_BYTES)
        eventually(lambda: two.far.status()["peers"]["connections"] == 0, "the end")
    assert is_served(two)
    at_rest(two.far)


@pytest.mark.parametrize("sent", [b"\xff" * 64, bytes(64), frame(Absent(b"k" * 16)), b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_question_ends_the_connection_alone(one_pair, sent):
    bad = failed(one_pair.far, "bad_client")
    with be_let_in(one_pair.address) as connection:
        connection.sendall(sent)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        assert failed(one_pair.far, "bad_client") == bad + 1
        assert is_served(one_pair)


def test_a_connection_too_many_is_closed_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 1)
    with pair(tmp_path) as two, be_let_in(two.address) as first:
        host, _, port = two.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as second:
            assert second.recv(1) == b""
        assert failed(two.far, "server_full") == 1
        first.sendall(frame(Ask(b"k" * 16, [bytes(32)])))
        header = read_exactly(first, HEADER_BYTES)
        assert decode_answer(header, read_exactly(first, body_length(header))) == Absent(b"k" * 16)


def test_a_proof_holds_for_one_side_of_one_connection_with_one_token():
    preambles = Preambles(draw_preamble(), draw_preamble())
    proof = preambles.proof(b"token", b"client")
    assert preambles.is_proof(b"token", b"client", proof)
    assert not preambles.is_proof(b"token", b"server", proof)
    assert not preambles.is_proof(b"other", b"client", proof)
    assert not Preambles(preambles.client, draw_preamble()).is_proof(b"token", b"client", proof)
    assert not Preambles(draw_preamble(), preambles.server).is_proof(b"token", b"client", proof)


KEYS, DIGESTS = st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32)
ASKS = st.builds(Ask, KEYS, st.lists(DIGESTS, min_size=1, max_size=64))
COUNTS = st.integers(0, 2**63 - 1)
CHUNKS = st.builds(Chunk, KEYS, DIGESTS, DIGESTS, st.none() | DIGESTS, COUNTS, st.integers(1, 2**63 - 1), KEYS)


@given(message=ASKS | CHUNKS | st.builds(Absent, KEYS))
def test_a_message_is_read_as_it_was_written(message):
    data = frame(message)
    assert body_length(data) == len(data) - HEADER_BYTES
    decode = decode_ask if isinstance(message, Ask) else decode_answer
    assert decode(data[:HEADER_BYTES], data[HEADER_BYTES:]) == message


@settings(max_examples=300)
@given(data=st.binary(max_size=200), message=ASKS | CHUNKS, is_noise=st.booleans(), at=st.integers(0, 2**16))
def test_any_bytes_are_a_message_or_refused_and_nothing_else(data, message, is_noise, at):
    data = data if is_noise else frame(message)
    spoilt = bytearray(data)
    if spoilt:
        spoilt[at % len(spoilt)] ^= 1 + at % 255
    for decode in (decode_ask, decode_answer):
        with suppress(PeerBadBytes):
            body_length(bytes(spoilt))
            read = decode(bytes(spoilt[:HEADER_BYTES]), bytes(spoilt[HEADER_BYTES:]))
            assert read == message, "a checksum was met by chance"
    with suppress(PeerBadBytes, PeerRefused):
        check_preamble(data)
