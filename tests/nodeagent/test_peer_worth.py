"""Whether a fetch is expected to pay, and what is remembered of a peer to say so."""

import asyncio
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nodeagent
from directory.costs import ModelShape, Rates, prefill_s
from directory.tiers import Tier
from nodeagent.hints import PeerAddress
from nodeagent.messages import PutOutcome
from nodeagent.metrics import PEER_FAILURES, PEER_HINT_REFUSALS, AgentMetrics
from nodeagent.peers import wire
from nodeagent.peers.peer import BAD_ANSWERS_MAX, LEFT_ALONE_S, Peer
from nodeagent.peers.peer_rate import SPANS_MAX, PeerRate
from nodeagent.peers.wire import PlainWire
from nodeagent.peers.worth import (
    PROBE_CHUNKS,
    PROBE_INTERVAL_S,
    Computing,
    PeerEstimate,
    Refusal,
    Verdict,
    judge,
    saved_s,
)

SHAPE = ModelShape(8e9, 32, 4_096, 131_072)
ENGINE = Computing(SHAPE, Rates(1e14, {Tier.DRAM: 1e10}, {Tier.DRAM: 0.001}), 256)
CHUNK_BYTES = 256 * SHAPE.kv_bytes_per_token
MEASURED = PeerEstimate(5e9, 0.001, None)
SPEEDS = st.floats(1e3, 1e13)


def test_what_is_saved_is_computing_less_the_load_from_dram():
    computed = prefill_s(SHAPE, ENGINE.rates, 2_560)
    assert saved_s(10, ENGINE) == pytest.approx(computed - 2_560 * SHAPE.kv_bytes_per_token / 1e10 - 0.001)


@pytest.mark.parametrize(
    ("bytes_per_s", "queued", "pays"),
    [(5e9, 0, True), (2e9, 0, True), (8e8, 0, False), (5e9, 1, True), (5e9, 200, False)],
)
def test_a_hint_is_followed_where_bytes_and_round_trip_take_less_than_is_saved(bytes_per_s, queued, pays):
    peer = replace(MEASURED, bytes_per_s=bytes_per_s, probed_at_s=100.0)
    expected = Verdict(10) if pays else Verdict(0, Refusal.SLOWER)
    assert judge(10, queued, CHUNK_BYTES, peer, [ENGINE], 100.0) == expected


def test_the_round_trip_counts():
    assert judge(10, 0, CHUNK_BYTES, replace(MEASURED, first_byte_s=5.0, probed_at_s=0.0), [ENGINE], 0.0).chunks == 0


def test_the_engine_that_computes_fastest_decides():
    fast = replace(ENGINE, rates=replace(ENGINE.rates, flops=1e18))
    peer = replace(MEASURED, probed_at_s=0.0)
    assert judge(10, 0, CHUNK_BYTES, peer, [ENGINE], 0.0).chunks == 10
    assert judge(10, 0, CHUNK_BYTES, peer, [ENGINE, fast], 0.0) == Verdict(0, Refusal.SLOWER)


def test_a_peer_that_is_not_measured_is_probed_with_a_few_chunks_now_and_then():
    unknown = PeerEstimate(None, 0.0, None)
    assert judge(10, 0, CHUNK_BYTES, unknown, [ENGINE], 0.0) == Verdict(PROBE_CHUNKS, Refusal.UNMEASURED, True)
    assert judge(1, 0, CHUNK_BYTES, unknown, [ENGINE], 0.0) == Verdict(1, None, True)
    probed = replace(unknown, probed_at_s=100.0)
    assert judge(10, 0, CHUNK_BYTES, probed, [ENGINE], 100.0 + PROBE_INTERVAL_S / 2) == Verdict(0, Refusal.UNMEASURED)
    assert judge(10, 0, CHUNK_BYTES, probed, [ENGINE], 100.0 + PROBE_INTERVAL_S).is_probe
    assert not judge(10, 1, CHUNK_BYTES, unknown, [ENGINE], 0.0).chunks, "while the probe is under way"


def test_a_slow_peer_is_probed_again_later():
    slow = PeerEstimate(1e6, 0.001, 100.0)
    assert judge(10, 0, CHUNK_BYTES, slow, [ENGINE], 101.0) == Verdict(0, Refusal.SLOWER)
    assert judge(10, 0, CHUNK_BYTES, slow, [ENGINE], 100.0 + PROBE_INTERVAL_S) == Verdict(
        PROBE_CHUNKS, Refusal.SLOWER, True
    )


@given(
    chunks=st.integers(0, 5_000),
    queued=st.integers(0, 1_000),
    bytes_per_s=SPEEDS,
    first_byte_s=st.floats(0, 10),
    flops=st.lists(SPEEDS, max_size=3),
)
def test_what_is_followed_beyond_a_probe_is_expected_to_pay(chunks, queued, bytes_per_s, first_byte_s, flops):
    engines = [replace(ENGINE, rates=replace(ENGINE.rates, flops=each)) for each in flops]
    verdict = judge(chunks, queued, CHUNK_BYTES, PeerEstimate(bytes_per_s, first_byte_s, 0.0), engines, 0.0)
    assert not verdict.is_probe
    assert verdict.chunks in (0, chunks)
    if verdict.chunks:
        fetch_s = first_byte_s + (chunks + queued) * CHUNK_BYTES / bytes_per_s
        assert all(fetch_s < prefill_s(SHAPE, each.rates, chunks * 256) for each in engines)
        assert engines


def test_bad_answers_are_counted_until_the_peer_is_left_alone_and_then_anew():
    peer = Peer(PeerAddress("h", 1))
    for _ in range(2):
        for _ in range(BAD_ANSWERS_MAX - 1):
            peer.note_bad_answer(100.0)
        assert peer.left_alone_until_s <= 100.0
        peer.note_bad_answer(100.0)
        assert peer.left_alone_until_s == 100.0 + LEFT_ALONE_S
        peer.left_alone_until_s = 0.0


def test_a_peer_is_estimated_by_what_was_measured_alone():
    peer = Peer(PeerAddress("h", 1))
    assert peer.estimate() == PeerEstimate(None, 0.0, None)
    peer.rate.begin(0.0)
    peer.rate.end(2.0, 1_000)
    peer.note_first_byte(0.5)
    assert peer.estimate() == PeerEstimate(500.0, 0.5, None)
    peer.note_first_byte(1.0)
    assert peer.first_byte_s == pytest.approx(0.6)


def test_the_middle_of_the_last_spans_is_a_peers_rate_and_chunks_side_by_side_share_one():
    rate = PeerRate()
    for began_s, length_s in ((0.0, 1.0), (10.0, 0.5)):
        rate.begin(began_s)
        rate.begin(began_s)
        rate.end(began_s + length_s / 2, 400)
        rate.end(began_s + length_s, 600)
    rate.begin(20.0)
    rate.end(120.0, 100)
    assert rate.bytes_per_s == pytest.approx(1_000.0)
    for began_s in range(100, 100 + SPANS_MAX):
        rate.begin(began_s)
        rate.end(began_s + 0.1, 1)
    assert rate.bytes_per_s == pytest.approx(10.0)


def test_what_brings_nothing_is_no_measurement():
    rate = PeerRate()
    for ended_s, good_bytes in ((1.0, 0), (0.0, 100)):
        rate.begin(0.0)
        rate.end(ended_s, good_bytes)
    assert rate.bytes_per_s is None


def test_every_reason_that_the_source_gives_is_one_that_begins_at_zero():
    folder = Path(nodeagent.__file__).parent / "peers"
    source = "\n".join(path.read_text() for path in folder.glob("*.py"))
    given = set(re.findall(r'(?:self\._skip|peer_refused\.labels)\(\s*"(\w+)"', source))
    outcomes = {f"put_{each.value}" for each in PutOutcome} - {"put_granted", "put_stored", "put_corrupt"}
    assert given >= {"off", "late", "cancelled"}, "the pattern finds them"
    assert given | outcomes | {each.value for each in Refusal} | {"absent"} == set(PEER_HINT_REFUSALS)
    failures = set(re.findall(r'(?:reason = |peer_failures\.labels\()"(\w+)"', source)) | {"bad_client"}
    assert failures == set(PEER_FAILURES)
    registry = AgentMetrics().registry
    assert all(registry.get_sample_value("warmroute_peer_failures_total", {"reason": each}) == 0 for each in failures)
    for reason in PEER_HINT_REFUSALS:
        assert registry.get_sample_value("warmroute_peer_hints_refused_total", {"reason": reason}) == 0


@pytest.mark.parametrize("does", ["fill", "send"])
async def test_others_get_their_turn_between_two_pieces_though_nothing_has_to_be_waited_for(monkeypatch, does):
    monkeypatch.setattr(wire, "PIECE_BYTES", 512)
    ours, theirs = socket.socketpair()
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with ours, theirs:
        ours.setblocking(False)
        data = bytearray(32 * 512)
        theirs.sendall(data)
        task = asyncio.create_task(others())
        with memoryview(data) as view:
            await getattr(PlainWire(ours), does)(view, 5.0)
        assert turns >= 32
        task.cancel()
        await asyncio.wait([task])
