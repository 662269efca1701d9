"""The arithmetic of loading and recomputing."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from directory.costs import (
    TOKENS_MAX,
    HitCut,
    ModelShape,
    Rates,
    best_cut,
    break_even_tokens,
    prefill_s,
    tier_load_s,
)
from directory.tiers import Tier

SHAPES = st.builds(
    ModelShape, st.floats(1e6, 1e12), st.integers(1, 200), st.integers(64, 20_000), st.integers(1_000, 2_000_000)
)
RATES = st.builds(
    Rates,
    st.floats(1e10, 1e16),
    st.dictionaries(st.sampled_from(list(Tier)), st.floats(1e6, 1e12)),
    st.dictionaries(st.sampled_from(list(Tier)), st.floats(0, 1)),
)
HIT_TIERS = st.lists(st.sampled_from((Tier.GPU, Tier.DRAM, Tier.NVME)), max_size=24)
CHUNK = 256


def plain_cut(shape: ModelShape, rates: Rates, tokens: int, tiers: list[Tier], chunks: int) -> HitCut:
    load_s = sum(tier_load_s(shape, rates, tier, tiers[:chunks].count(tier) * CHUNK) for tier in Tier)
    return HitCut(chunks, load_s, prefill_s(shape, rates, tokens, chunks * CHUNK))


@given(shape=SHAPES, rates=RATES, tiers=HIT_TIERS, rest=st.integers(1, 5_000))
def test_no_plain_cut_is_cheaper_than_the_best_one(
    shape: ModelShape, rates: Rates, tiers: list[Tier], rest: int
) -> None:
    tokens = len(tiers) * CHUNK + rest
    best = best_cut(shape, rates, tokens, CHUNK, tiers)
    cuts = [plain_cut(shape, rates, tokens, tiers, chunks) for chunks in range(len(tiers) + 1)]
    assert best.total_s <= min(cut.total_s for cut in cuts) * (1 + 1e-9)
    assert best.total_s == pytest.approx(cuts[best.chunks].total_s)


@given(shape=SHAPES, rates=RATES, tokens=st.integers(1, 10_000), data=st.data())
def test_prefill_shrinks_with_the_hit_and_ends_at_nothing(
    shape: ModelShape, rates: Rates, tokens: int, data: st.DataObject
) -> None:
    hit = data.draw(st.integers(1, tokens))
    assert prefill_s(shape, rates, tokens, hit) < prefill_s(shape, rates, tokens)
    assert prefill_s(shape, rates, tokens, tokens) == 0


@given(shape=SHAPES, rates=RATES)
def test_loading_nothing_costs_nothing(shape: ModelShape, rates: Rates) -> None:
    assert [tier_load_s(shape, rates, tier, 0) for tier in Tier] == [0.0] * len(Tier)


@given(shape=SHAPES, rates=RATES, tier=st.sampled_from(list(Tier)), tokens=st.integers(1, TOKENS_MAX))
def test_from_the_break_even_on_and_only_from_there_loading_is_no_slower(
    shape: ModelShape, rates: Rates, tier: Tier, tokens: int
) -> None:
    even = break_even_tokens(shape, rates, tier)
    computed, loaded = prefill_s(shape, rates, tokens), tier_load_s(shape, rates, tier, tokens)
    assume(abs(loaded - computed) > 1e-9 * computed)  # where they are alike, rounding decides
    assert loaded <= computed if even is not None and tokens >= even else loaded > computed


SHAPE = ModelShape(8e9, 32, 4096, 131072)


def test_a_hopelessly_slow_tier_never_breaks_even_and_gpu_memory_does_at_once() -> None:
    rates = Rates(4e14, {Tier.NVME: 1.0})
    assert break_even_tokens(SHAPE, rates, Tier.NVME) is None
    assert break_even_tokens(SHAPE, rates, Tier.GPU) == 1


def test_gpu_memory_is_used_in_place() -> None:
    assert tier_load_s(SHAPE, Rates(4e14, {Tier.NVME: 7e9}), Tier.GPU, 4096) == 0.0


def test_a_slow_drive_is_left_out_and_the_fast_part_is_kept() -> None:
    rates = Rates(4e14, {Tier.DRAM: 2e10, Tier.NVME: 1e8})
    cut = best_cut(SHAPE, rates, 2049, CHUNK, [Tier.DRAM] * 4 + [Tier.NVME] * 4)
    assert cut.chunks == 4


def test_a_fixed_cost_is_paid_once_for_each_tier() -> None:
    rates = Rates(4e14, {Tier.DRAM: 2e10}, {Tier.DRAM: 0.001})
    tiers = [Tier.DRAM, Tier.GPU, Tier.DRAM, Tier.GPU]
    cut = best_cut(SHAPE, rates, 1025, CHUNK, tiers)
    assert cut.chunks == 4
    assert cut.load_s == pytest.approx(512 * 131072 / 2e10 + 0.001)
