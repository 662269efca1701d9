"""Routing: the score in seconds, near ties, spills, and what happens without a directory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.costs import Rates, prefill_s
from directory.placements import PrefixMatch
from directory.tiers import Tier
from gateway.routing.query import Candidate, RoutingQuery, Score
from gateway.routing.router import route
from gateway.routing.seconds import PRICE_MAX, price, score_all
from tests.gateway.samples import RATES, SHAPE

CHUNK = 256


def candidate(engine: str, tiers: tuple[Tier | None, ...] = (), **other: object) -> Candidate:
    return replace(Candidate(engine, SHAPE, RATES, CHUNK, PrefixMatch(tiers)), **other)  # type: ignore[arg-type]


def query(*candidates: Candidate, tokens: int = 2600, affinity: bytes = b"key", known: bool = True) -> RoutingQuery:
    return RoutingQuery(tokens, affinity, candidates, "" if known else "directory-unavailable")


def test_the_engine_that_holds_the_prefix_is_chosen() -> None:
    decision = route(query(candidate("a"), candidate("b", (Tier.DRAM,) * 9), candidate("c", (Tier.DRAM,) * 2)))
    assert decision.ranked[0].engine == "b"
    assert decision.reason == "prefix"
    assert decision.ranked[0].matched_tokens == 9 * CHUNK
    assert decision.ranked[0].tier_tokens == {Tier.DRAM: 9 * CHUNK}


def test_a_hot_prefix_leaves_its_holder_when_waiting_costs_more_than_recomputing() -> None:
    recompute_s = prefill_s(SHAPE, RATES, 2600)
    held = candidate("a", (Tier.GPU,) * 9, wait_s=recompute_s * 3, prefills=1)
    decision = route(query(held, candidate("b")))
    assert decision.ranked[0].engine == "b"
    assert decision.reason == "spill"


def test_among_near_ties_the_longest_prefix_leads() -> None:
    fast = Rates(1e15)
    decision = route(query(candidate("a", rates=fast), candidate("b", (Tier.GPU,) * 9, rates=fast)))
    assert decision.ranked[0].engine == "b"


def test_near_ties_are_decided_alike_by_every_gateway_and_spread_over_engines() -> None:
    names = [f"e{number}" for number in range(4)]
    chosen: Counter[str] = Counter()
    for number in range(400):
        affinity = number.to_bytes(4, "little")
        forwards = route(query(*map(candidate, names), affinity=affinity)).ranked[0].engine
        backwards = route(query(*map(candidate, reversed(names)), affinity=affinity)).ranked[0].engine
        assert forwards == backwards
        chosen[forwards] += 1
    assert min(chosen[name] for name in names) > 60


def test_one_token_is_always_computed() -> None:
    scores = score_all(query(candidate("a", (Tier.GPU,) * 10), tokens=10 * CHUNK))
    assert scores[0].matched_tokens == 9 * CHUNK


def test_a_slow_tier_is_left_where_recomputing_is_cheaper() -> None:
    slow = Rates(flops=1e15, bytes_per_s={Tier.NVME: 1e6})
    scores = score_all(query(candidate("a", (Tier.NVME,) * 9, rates=slow)))
    assert scores[0].matched_tokens == 0
    assert scores[0].load_s == 0.0


def test_an_unknown_chunk_inside_a_run_counts_for_less_than_a_known_one() -> None:
    known = candidate("a", (Tier.DRAM,) * 9)
    holey = candidate("b", (Tier.DRAM, None, None, *(Tier.DRAM,) * 6))
    nothing = candidate("c")
    scores = score_all(query(known, holey, nothing))
    assert scores[0].score_s < scores[1].score_s < scores[2].score_s


HOLEY_RUNS = st.lists(st.sampled_from([Tier.GPU, Tier.DRAM, Tier.NVME, None]), min_size=1, max_size=20)
SOME_RATES = st.builds(
    lambda flops, dram, nvme, fixed_s: Rates(flops, {Tier.DRAM: dram, Tier.NVME: nvme}, {Tier.NVME: fixed_s}),
    st.sampled_from([1e11, 1e13, 4e14]),
    st.sampled_from([1e8, 2e10]),
    st.sampled_from([1e7, 5e8, 7e9]),
    st.sampled_from([0, 0.002, 0.1]),
)


@given(run=HOLEY_RUNS, rates=SOME_RATES, tokens=st.integers(1, 20 * CHUNK))
def test_an_unknown_chunk_is_worth_something_between_a_missing_one_and_one_that_is_held(
    run: list[Tier | None], rates: Rates, tokens: int
) -> None:
    def scored(tiers: Sequence[Tier | None]) -> Score:
        return score_all(query(candidate("a", tuple(tiers), rates=rates), tokens=tokens))[0]

    usable = run[: (tokens - 1) // CHUNK]
    first = usable.index(None) if None in usable else len(usable)
    last = max((place for place, tier in enumerate(usable) if tier is not None), default=-1)
    held = [next((tier for tier in usable[place:] if tier is not None), None) for place in range(last + 1)]
    found, missing = scored(run), scored(usable[:first])
    assert found.score_s <= missing.score_s * (1 + 1e-9)
    assert found.score_s >= scored(held).score_s * (1 - 1e-9)
    chunks = found.matched_tokens // CHUNK
    assert chunks <= last + 1
    assert not chunks or usable[chunks - 1] is not None, "the unknown doesn't lengthen what will be loaded"
    assert sum(found.tier_tokens.values()) == found.matched_tokens


def test_an_engine_without_rates_is_neutral() -> None:
    decision = route(query(candidate("a", rates=None), candidate("b")))
    assert decision.ranked[0].prefill_s == decision.ranked[1].prefill_s


@pytest.mark.parametrize(
    ("prefills", "use", "expected"), [(0, 0.0, 1.0), (1, 0.0, 2.0), (2, 0.5, 4.0), (0, 1.0, 3.0), (99, 0.0, PRICE_MAX)]
)
def test_an_engine_s_time_costs_more_the_more_want_it(prefills: int, use: float, expected: float) -> None:
    assert price(candidate("a", prefills=prefills, use=use)) == expected


def test_without_the_directory_a_prefix_stays_with_its_engine_until_that_is_overloaded() -> None:
    names = [f"e{number}" for number in range(4)]
    free = route(query(*map(candidate, names), known=False))
    assert free.reason == "directory-unavailable"
    home = free.ranked[0].engine
    busy = [candidate(name, running=1) for name in names]
    assert route(query(*busy, known=False)).ranked[0].engine == home
    overloaded = [candidate(name, running=9 if name == home else 1) for name in names]
    assert route(query(*overloaded, known=False)).ranked[0].engine != home


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_the_bound_never_pushes_a_prefix_away_from_an_idle_fleet(engines: int) -> None:
    candidates = [candidate(f"e{number}") for number in range(engines)]
    first = route(query(*candidates, known=False)).ranked[0].engine
    assert first == route(query(*reversed(candidates), known=False)).ranked[0].engine


tiers = st.lists(st.sampled_from([Tier.GPU, Tier.DRAM, Tier.NVME, None]), max_size=12)
fleets = st.lists(st.tuples(tiers, st.floats(0, 100), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6)


@given(fleets, st.integers(1, 5000), st.booleans())
def test_a_ranking_holds_every_candidate_once_and_its_terms_add_up(
    fleet: list[tuple[list[Tier | None], float, int, int]], tokens: int, known: bool
) -> None:
    candidates = [
        candidate(f"e{number}", tuple(run), wait_s=wait, prefills=prefills, running=running)
        for number, (run, wait, prefills, running) in enumerate(fleet)
    ]
    decision = route(query(*candidates, tokens=tokens, known=known))
    assert sorted(score.engine for score in decision.ranked) == [each.engine for each in candidates]
    for score in decision.ranked:
        assert score.matched_tokens == sum(score.tier_tokens.values())
        assert score.matched_tokens < max(1, tokens)
        seconds = score.wait_s + score.price * (score.load_s + score.prefill_s)
        assert score.score_s == pytest.approx(seconds + score.replies_s + score.evict_s)
        assert min(score.load_s, score.prefill_s, score.replies_s, score.evict_s) >= 0
