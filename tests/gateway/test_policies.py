"""The policies: every one ranks all candidates in one total order; each published form at figures by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.placements import NO_MATCH, PrefixMatch
from directory.tiers import Tier
from gateway.routing.approx_tree import ApproxTree
from gateway.routing.overlay import DISTRUST_S, FOLLOWERS_MAX, MISSES_MAX, Overlay
from gateway.routing.policies import POLICIES, TURNS_MAX, RoundRobin, blocks_of_work, product, weighted_sum
from gateway.routing.query import Candidate, RoutingQuery
from tests.gateway.samples import RATES, SHAPE

CHUNK = 256
KEYS = tuple(bytes((number,)) * 16 for number in range(10))


def candidate(engine: str, chunks: int = 0, **other: object) -> Candidate:
    match = PrefixMatch((Tier.GPU,) * chunks)
    return replace(Candidate(engine, SHAPE, RATES, CHUNK, match, kv_tokens_max=10_000), **other)  # type: ignore[arg-type]


def query(*candidates: Candidate, affinity: bytes = b"key", keys: tuple[bytes, ...] = KEYS) -> RoutingQuery:
    return RoutingQuery(2600, affinity, candidates, keys=keys)


@st.composite
def pools(draw: st.DrawFn) -> list[Candidate]:
    few = st.integers(0, 3)
    return [
        candidate(
            f"e{number}",
            draw(few) * 3,
            wait_s=draw(few) / 2,
            prefills=draw(few),
            running=draw(few) * 40,
            queued_tokens=draw(few) * 1000,
            active_tokens=draw(few) * 3000,
        )
        for number in range(draw(st.integers(1, 6)))
    ]


@pytest.mark.parametrize("name", POLICIES)
@given(pool=pools(), affinity=st.binary(max_size=4), order=st.randoms(use_true_random=False))
def test_no_candidate_is_lost_and_the_order_they_come_in_changes_nothing(
    name: str, pool: list[Candidate], affinity: bytes, order: object
) -> None:
    mixed = list(pool)
    order.shuffle(mixed)  # type: ignore[attr-defined]
    ranked = POLICIES[name]().route(query(*pool, affinity=affinity)).ranked
    assert sorted(each.engine for each in ranked) == sorted(each.engine for each in pool)
    assert POLICIES[name]().route(query(*mixed, affinity=affinity)).ranked == ranked


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "round-robin"])
def test_ties_go_by_affinity_alike_and_spread_over_engines(name: str) -> None:
    firsts = set()
    for number in range(40):
        affinity = number.to_bytes(2, "little")
        forwards = query(*(candidate(f"e{each}") for each in range(3)), affinity=affinity)
        backwards = query(*(candidate(f"e{each}") for each in reversed(range(3))), affinity=affinity)
        first = POLICIES[name]().route(forwards).ranked[0].engine
        assert POLICIES[name]().route(backwards).ranked[0].engine == first
        firsts.add(first)
    assert firsts == {"e0", "e1", "e2"}


def test_round_robin_takes_turns() -> None:
    policy = POLICIES["round-robin"]()
    asked = query(*map(candidate, "cab"))
    assert [policy.route(asked).ranked[0].engine for _ in range(5)] == ["a", "b", "c", "a", "b"]


def test_round_robin_takes_turns_among_each_models_engines_whatever_comes_between() -> None:
    policy = POLICIES["round-robin"]()
    one, other, third = query(*map(candidate, "ab")), query(*map(candidate, "xy")), query(candidate("z"))
    firsts = [policy.route(asked).ranked[0].engine for _ in range(4) for asked in (one, other, third)]
    assert "".join(firsts) == "axzbyzaxzbyz"


def test_of_a_retry_the_turn_goes_to_the_next_and_the_memory_of_turns_is_bounded() -> None:
    policy = RoundRobin()
    assert policy.route(query(*map(candidate, "abc"))).ranked[0].engine == "a"
    assert policy.route(query(*map(candidate, "bc"))).ranked[0].engine == "b"
    assert policy.route(query(*map(candidate, "abc"))).ranked[0].engine == "c"
    for number in range(TURNS_MAX + 10):
        policy.route(query(candidate(f"e{number}")))
    assert len(policy._last) == TURNS_MAX


def test_nothing_is_expected_for_a_while_of_an_engine_that_never_has_cached_what_it_just_computed() -> None:
    overlay = Overlay()

    def answered(now: float, cached_tokens: int) -> int:
        """Send a prompt that is computed at once; how many chunks of it were on their way."""
        run = overlay.extend("a", NO_MATCH, KEYS, now).chunks
        sent = overlay.expect("a", KEYS, now + 5.0, now)
        overlay.settle(sent, now + 5.0)
        overlay.note_cached(sent, cached_tokens, now)
        return run

    assert answered(0.0, 0) == 0
    assert [answered(1.0 + moment / 10, 0) for moment in range(MISSES_MAX - 1)] == [10] * (MISSES_MAX - 1)
    assert answered(2.0, 16) == 10, "one hit shows that it has a cache"
    assert [answered(3.0 + moment / 10, 0) for moment in range(MISSES_MAX + 1)] == [10] * MISSES_MAX + [0]
    assert answered(5.0 + MISSES_MAX + DISTRUST_S, 0) == 0
    assert answered(6.0 + MISSES_MAX + DISTRUST_S, 0) == 10


def test_siblings_that_are_computed_at_once_are_no_evidence_against_a_cache() -> None:
    overlay = Overlay()
    burst = [overlay.expect("a", KEYS, 9.0, 0.0) for _ in range(6)]
    for each in burst:
        overlay.settle(each, 9.0)
        overlay.note_cached(each, 0, 1.0)
    assert overlay.extend("a", NO_MATCH, KEYS, 1.0).chunks == len(KEYS)


def test_prompts_without_a_whole_chunk_are_not_remembered_behind_one_that_is_long_on_its_way() -> None:
    overlay = Overlay()
    overlay.expect("a", KEYS, 1e9)
    for moment in range(100):
        overlay.expect("a", (), moment + 5.0, float(moment))
    assert len(overlay._engines["a"].prompts) == 1


def test_least_load_is_blind_to_prefixes_and_prefix_to_load() -> None:
    asked = query(candidate("warm", 9, wait_s=50.0), candidate("cold"))
    assert POLICIES["least-load"]().route(asked).ranked[0].engine == "cold"
    assert POLICIES["prefix"]().route(asked).ranked[0].engine == "warm"


def test_sticky_leaves_an_engine_that_carries_more_than_its_bound() -> None:
    policy = POLICIES["sticky"]()
    home = policy.route(query(*map(candidate, "abc"))).ranked[0].engine
    busy = [candidate(name, running=9 if name == home else 0) for name in "abc"]
    assert policy.route(query(*busy)).ranked[0].engine != home


def test_the_weighted_sum_is_three_parts_prefix_two_parts_queue_two_parts_free_kv() -> None:
    costs = weighted_sum(query(candidate("a", 5, prefills=4, active_tokens=5000), candidate("b", prefills=2)))
    assert costs == [pytest.approx((-(3 * 1280 / 2600 + 2 * 0 + 2 * 0.5),)), pytest.approx((-(0 + 2 * 1 + 2 * 1),))]


def test_blocks_of_work_are_those_to_prefill_and_those_in_use() -> None:
    asked = query(candidate("a", 5, queued_tokens=256, active_tokens=512))
    assert blocks_of_work(asked) == [((256 + 2600 - 1280 + 512 + 2600) / 256,)]


def test_the_product_is_new_tokens_by_batch_size() -> None:
    asked = query(candidate("a", 5, queued_tokens=100, running=3), candidate("b"))
    assert product(asked) == [((100 + 2600 - 1280) * 4,), (2600,)]


def test_a_remembered_prefix_leads_until_engines_are_uneven() -> None:
    policy = POLICIES["approx-tree"]()
    home = policy.route(query(candidate("a"), candidate("b"))).ranked[0].engine
    other = "b" if home == "a" else "a"
    assert policy.route(query(candidate("a"), candidate("b"))).ranked[0].engine == home
    new = tuple(bytes((100 + number,)) * 16 for number in range(10))
    assert policy.route(query(candidate("a"), candidate("b"), keys=new)).ranked[0].engine == other  # the smaller tree
    edge = query(candidate(home, running=64), candidate(other))
    uneven = query(candidate(home, running=65), candidate(other))
    assert policy.route(edge).ranked[0].engine == home
    assert policy.route(uneven).ranked[0].engine == other


def test_an_approximate_tree_forgets_leaves_first() -> None:
    tree = ApproxTree(chunks_max=4)
    tree.insert("a", KEYS[:3])
    tree.insert("a", KEYS[5:7])
    assert tree.size("a") == 4
    assert tree.match("a", KEYS) == 2
    assert tree.match("b", KEYS) == 0


def test_chunks_on_their_way_lengthen_a_run_until_they_must_have_been_announced() -> None:
    overlay = Overlay()
    overlay.expect("a", KEYS[:4], until=10.0)
    held = PrefixMatch((Tier.NVME,))
    assert overlay.extend("a", held, KEYS, now=9.0).tiers == (Tier.GPU,) * 4
    assert overlay.extend("a", held, KEYS, now=10.0) is held
    assert overlay.extend("b", held, KEYS, now=9.0) is held


def test_what_is_on_its_way_is_bounded() -> None:
    overlay = Overlay(chunks_max=2)
    overlay.expect("a", KEYS[:3], until=10.0)
    assert overlay.extend("a", PrefixMatch(), KEYS, now=0.0).chunks == 2  # without its first chunks it were nothing
    overlay.expect("a", KEYS[5:7], until=10.0)
    assert overlay.extend("a", PrefixMatch(), KEYS, now=0.0).chunks == 0  # the older prompt went
    assert len(overlay) == 2


def test_a_prompt_that_fails_takes_back_its_own_expectation_only() -> None:
    overlay = Overlay()
    first = overlay.expect("a", KEYS[:4], until=10.0)
    second = overlay.expect("a", KEYS[:2], until=10.0)
    overlay.take_back(first)
    assert overlay.extend("a", PrefixMatch(), KEYS, now=0.0).chunks == 2
    overlay.take_back(second)
    assert overlay.extend("a", PrefixMatch(), KEYS, now=0.0).chunks == 0
    overlay.expect("b", KEYS[:1], until=10.0, now=0.0)
    overlay.expect("a", KEYS[5:6], until=10.0, now=0.0)
    assert len(overlay) == 2, "what was taken back goes"


def test_a_bounded_number_waits_for_a_chunk_and_any_number_may_follow_once_it_is_there() -> None:
    overlay = Overlay()
    waiting = [overlay.expect("a", KEYS[:2], until=10.0) for _ in range(FOLLOWERS_MAX - 1)]
    assert overlay.extend("a", PrefixMatch(), KEYS, now=0.0).chunks == 2
    waiting.append(overlay.expect("a", KEYS[:2], until=10.0))
    assert overlay.extend("a", PrefixMatch(), KEYS, now=0.0).chunks == 0
    held = PrefixMatch((Tier.DRAM,))
    assert overlay.extend("a", held, KEYS, now=0.0) is held
    overlay.settle(waiting[0], until=5.0)
    for _ in range(FOLLOWERS_MAX):
        overlay.expect("a", KEYS[:2], until=10.0)
        assert overlay.extend("a", PrefixMatch(), KEYS, now=0.0).chunks == 2
    overlay.expect("a", KEYS[:2], until=10.0, now=6.0)
    assert overlay.extend("a", PrefixMatch(), KEYS, now=6.0).chunks == 0


def test_what_is_asked_for_again_and_again_and_never_announced_is_believed_once() -> None:
    overlay = Overlay()
    for second in range(12):
        is_believed = overlay.extend("a", PrefixMatch(), KEYS, now=second).chunks > 0
        assert is_believed == (second % 5 > 0)
        overlay.settle(overlay.expect("a", KEYS, until=second + 5.0, now=second), until=second + 5.0)


def test_nothing_is_on_its_way_to_an_engine_that_is_gone() -> None:
    overlay = Overlay()
    overlay.expect("a", KEYS, until=10.0)
    overlay.expect("b", KEYS, until=10.0)
    overlay.keep({"b", "c"})
    assert overlay.extend("a", PrefixMatch(), KEYS, now=0.0).chunks == 0
    assert len(overlay) == len(KEYS)


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
"""A prompt: which of two chunks follows, from the first on."""
BURSTS = st.lists(st.tuples(PATHS, st.sampled_from(["wait", "settle", "take back"]), st.integers(1, 9)), max_size=7)


@given(BURSTS, PATHS, st.integers(0, 9))
def test_what_is_on_its_way_is_what_any_living_prompt_brings(
    burst: list[tuple[list[int], str, int]], asked: list[int], now: int
) -> None:
    def keys(path: list[int]) -> tuple[bytes, ...]:
        return tuple(bytes(path[:end]) for end in range(1, len(path) + 1))

    overlay = Overlay()
    alive: set[bytes] = set()
    settled: list[tuple[list[int], int]] = []
    for path, fate, until in burst:
        expectation = overlay.expect("a", keys(path), until)
        if fate == "settle":
            overlay.settle(expectation, until)
            until = min(until, max((end for longer, end in settled if longer[: len(path)] == path), default=until))
            settled.append((path, until))
        if fate == "take back":
            overlay.take_back(expectation)
        elif until > now:
            alive |= set(keys(path))
    found = overlay.extend("a", PrefixMatch(), keys(asked), now).chunks
    assert found == next((place for place, key in enumerate(keys(asked)) if key not in alive), len(asked))
