"""The score: a plain reference for every term, what replies and a full GPU add, and what a peer can bring in time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.costs import Rates
from directory.placements import PrefixMatch
from directory.tiers import Tier
from gateway.routing.query import Candidate, PeerExtension, RoutingQuery, Score
from gateway.routing.router import route
from gateway.routing.seconds import PRICE_MAX, REPLY_SHARE, USE_WEIGHT, score_all
from tests.gateway.samples import RATES, SHAPE

CHUNK = 256
CHUNK_S = CHUNK * SHAPE.kv_bytes_per_token / 1e9
"""Seconds a chunk takes from a peer at 1 GB/s."""


def candidate(engine: str, tiers: tuple[Tier | None, ...] = (), **other: object) -> Candidate:
    return replace(Candidate(engine, SHAPE, RATES, CHUNK, PrefixMatch(tiers)), **other)  # type: ignore[arg-type]


def scored(one: Candidate, tokens: int = 2600) -> Score:
    return score_all(RoutingQuery(tokens, b"key", (one,)))[0]


def by_hand(one: Candidate, tokens: int) -> float:
    """The score from its definition, every cut of the hit tried."""
    assert one.rates is not None
    rates, shape = one.rates, one.shape
    run = [tier for tier in one.match.tiers if tier is not None][: (tokens - 1) // CHUNK]
    if one.peer is not None:
        come, at = 0, one.peer.fixed_s + CHUNK_S
        while at <= one.wait_s and len(run) + come < min(one.peer.chunks, (tokens - 1) // CHUNK):
            come, at = come + 1, at + CHUNK_S
        run += [Tier.DRAM] * come
    services = []
    for chunks in range(len(run) + 1):
        hit = chunks * CHUNK
        work = 2 * shape.parameters * (tokens - hit) + 2 * shape.layers * shape.d_model * (tokens**2 - hit**2)
        service = work / rates.flops
        for tier in set(run[:chunks]) & set(rates.bytes_per_s):
            loaded = run[:chunks].count(tier) * CHUNK
            service += loaded * shape.kv_bytes_per_token / rates.bytes_per_s[tier] + rates.fixed_s.get(tier, 0)
        services.append((service, chunks))
    price = min(PRICE_MAX, 1 + one.prefills + USE_WEIGHT * one.use)
    service, chunks = min(services, key=lambda each: (each[0], -each[1]))
    to_hold = tokens - run[:chunks].count(Tier.GPU) * CHUNK
    excess = 0 if one.kv_tokens_max is None else max(0, one.active_tokens + to_hold - one.kv_tokens_max)
    seconds = (one.wait_s + price * service) * (1 + REPLY_SHARE * one.running)
    return seconds + 2 * shape.parameters * excess / rates.flops


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    run = draw(st.lists(st.sampled_from([Tier.GPU, Tier.DRAM, Tier.NVME]), max_size=12))
    few = st.integers(0, 30)
    # A quarter of a chunk off the moments at which a chunk has just come: rounding decides nothing.
    peers = st.builds(PeerExtension, st.just("peer:1"), st.integers(0, 14), st.just(1e9), st.just(CHUNK_S / 4))
    return candidate(
        "a",
        tuple(run),
        wait_s=draw(few) * CHUNK_S / 2,
        prefills=draw(few),
        running=draw(few),
        use=draw(few) / 10,
        active_tokens=draw(few) * 500,
        kv_tokens_max=draw(st.none() | st.integers(1000, 20_000)),
        peer=draw(st.none() | peers),
        rates=Rates(1e11, {Tier.DRAM: 2e10, Tier.NVME: draw(st.sampled_from([1e7, 5e8]))}, {Tier.NVME: 0.002}),
    )


@given(one=candidates(), tokens=st.integers(1, 14 * CHUNK))
def test_a_score_is_what_its_definition_says(one: Candidate, tokens: int) -> None:
    score = scored(one, tokens)
    assert score.score_s == pytest.approx(by_hand(one, tokens))
    assert sum(score.tier_tokens.values()) == score.matched_tokens
    assert score.matched_tokens - score.peer_tokens <= one.match.chunks * CHUNK
    assert bool(score.peer) == bool(score.peer_tokens)


def test_of_two_engines_alike_the_one_with_fewer_replies_is_chosen() -> None:
    talking, quiet = candidate("a", running=20), candidate("b", running=2)
    for affinity in (b"1", b"2", b"3", b"4"):
        assert route(RoutingQuery(2600, affinity, (talking, quiet))).ranked[0].engine == "b"


def test_replies_slow_what_waits_as_well_as_what_comes() -> None:
    alone, beside = candidate("a", wait_s=2.0), candidate("a", wait_s=2.0, running=10)
    assert scored(beside).score_s == pytest.approx(scored(alone).score_s * (1 + 10 * REPLY_SHARE))
    assert scored(beside).replies_s == pytest.approx(scored(alone).score_s * 10 * REPLY_SHARE)


def test_an_engine_pays_for_the_tokens_that_its_gpu_can_t_hold_and_for_no_others() -> None:
    assert scored(candidate("a", active_tokens=7400, kv_tokens_max=10_000)).evict_s == 0.0
    full = scored(candidate("a", active_tokens=8400, kv_tokens_max=10_000))
    assert full.evict_s == pytest.approx(2 * SHAPE.parameters * 1000 / RATES.flops)
    assert scored(candidate("a", active_tokens=10**6)).evict_s == 0.0, "nothing is known of its GPU"


def test_an_engine_pays_nothing_for_holding_what_its_gpu_holds_already() -> None:
    full = candidate("a", (Tier.GPU,) * 3 + (Tier.DRAM,), active_tokens=8400, kv_tokens_max=10_000)
    assert scored(full).evict_s == pytest.approx(2 * SHAPE.parameters * (1000 - 3 * CHUNK) / RATES.flops)


def test_what_a_peer_brings_before_the_wait_is_over_is_counted_and_no_more() -> None:
    peer = PeerExtension("host-b:9", 8, 1e9, 0.005)
    busy = candidate("a", (Tier.DRAM,) * 2, wait_s=0.005 + 3.5 * CHUNK_S, peer=peer)
    score = scored(busy)
    assert (score.peer, score.peer_tokens, score.matched_tokens) == ("host-b:9", 3 * CHUNK, 5 * CHUNK)
    assert score.tier_tokens == {Tier.DRAM: 5 * CHUNK}
    assert score.score_s < scored(replace(busy, peer=None)).score_s
    patient = scored(replace(busy, wait_s=100.0))
    assert patient.matched_tokens == 8 * CHUNK, "no further than the peer reaches"


def test_an_engine_that_is_free_counts_on_no_peer() -> None:
    score = scored(candidate("a", peer=PeerExtension("host-b:9", 8, 1e12)))
    assert (score.peer, score.peer_tokens, score.matched_tokens) == ("", 0, 0)


def test_a_peer_does_not_lengthen_a_run_that_ends_in_the_unknown() -> None:
    peer = PeerExtension("host-b:9", 8, 1e12)
    score = scored(candidate("a", (Tier.DRAM, None, None), wait_s=1.0, peer=peer))
    assert (score.peer_tokens, score.matched_tokens) == (0, CHUNK)
