"""Seconds = fixed + bytes / rate, learned from reads of a machine that others use as well."""

import math
import random
import sys

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from directory.members import Load, decode_load, encode_load
from directory.tiers import Tier
from nodeagent.host_rates import BELIEVED_DRAM, DOOR_S, HostRates, time_memory
from nodeagent.tiers.load_cost import (
    AGE_READS_MAX,
    BYTES_PER_S_MAX,
    BYTES_PER_S_MIN,
    BYTES_SHARE_MIN,
    CLASS_READS_MAX,
    CLASS_READS_MIN,
    FIXED_S_MAX,
    LearnedCost,
    LoadCost,
)

MIB = 1 << 20
BELIEVED = LoadCost(0.001, 1e9)
SIZES_MIB = (1, 4, 32, 128)

costs = st.builds(LoadCost, st.floats(0, 0.1), st.floats(1e7, 1e11))
anything = st.one_of(
    st.floats(), st.integers(-(2**70), 2**70), st.floats(1e-9, 10), st.sampled_from([5e-324, 1e-7, sys.float_info.max])
)


def learned(cost: LoadCost, rounds: int, noise: float = 0.0, odd_every: int = 0, seed: int = 0, sizes=SIZES_MIB):
    """After reads that took up to `noise` (a share) longer or shorter, one in so many of them many times as long."""
    chance, learning = random.Random(seed), LearnedCost(BELIEVED)
    for number in range(rounds):
        for size in sizes:
            seconds = cost.seconds(size * MIB) * chance.uniform(1 - noise, 1 + noise)
            is_odd = odd_every and number % odd_every == 0
            learning.note(size * MIB, seconds * (chance.uniform(3, 50) if is_odd else 1))
    return learning


@settings(max_examples=100, deadline=None)
@given(costs)
def test_reads_without_noise_give_both_parts_exactly(cost):
    assume(cost.fixed_s < (1 - BYTES_SHARE_MIN) * cost.seconds(SIZES_MIB[-1] * MIB))
    found = learned(cost, CLASS_READS_MIN).cost
    assert found.bytes_per_s == pytest.approx(cost.bytes_per_s, rel=1e-6)
    assert found.fixed_s == pytest.approx(cost.fixed_s, rel=1e-3, abs=1e-3 * cost.seconds(MIB))


@settings(max_examples=200, deadline=None)
@given(costs, st.integers(0, 2**32))
def test_a_third_of_all_reads_may_be_many_times_as_long_and_loads_are_right_to_two_fifths(cost, seed):
    found = learned(cost, 3 * CLASS_READS_MAX, noise=0.15, odd_every=3, seed=seed).cost
    for size in SIZES_MIB:
        assert found.seconds(size * MIB) == pytest.approx(cost.seconds(size * MIB), rel=0.4)


@settings(max_examples=100, deadline=None)
@given(costs, costs)
def test_after_a_change_the_cost_is_the_new_one_once_half_of_each_class_is_new(before, after):
    assume(after.fixed_s < (1 - BYTES_SHARE_MIN) * after.seconds(SIZES_MIB[-1] * MIB))
    learning = learned(before, CLASS_READS_MAX)
    for _ in range(CLASS_READS_MAX // 2 + 1):
        for size in SIZES_MIB:
            learning.note(size * MIB, after.seconds(size * MIB))
    for size in SIZES_MIB:
        assert learning.cost.seconds(size * MIB) == pytest.approx(after.seconds(size * MIB), rel=1e-3)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(anything, anything), max_size=60))
@example([(1, 1e-7)] * 3 + [(10**15, 1e-7)] * 3)
@example([(1, 3600.0)] * 3 + [(10**15, 1e-7)] * 3)
def test_no_read_whatever_makes_a_cost_that_can_not_be_divided_by(reads):
    learning = LearnedCost(BELIEVED)
    for size, seconds in reads:
        learning.note(size, seconds)
        cost = learning.cost
        assert 0 <= cost.fixed_s <= FIXED_S_MAX
        assert BYTES_PER_S_MIN <= cost.bytes_per_s <= BYTES_PER_S_MAX


def test_one_odd_read_changes_nothing_and_three_count():
    learning = LearnedCost(BELIEVED)
    learning.note(32 * MIB, 10.0)
    assert learning.cost.seconds(32 * MIB) == pytest.approx(BELIEVED.seconds(32 * MIB))
    learning.note(32 * MIB, 10.0)
    learning.note(32 * MIB, 10.0)
    assert learning.cost.seconds(32 * MIB) == pytest.approx(10.0)


def test_where_all_reads_are_of_one_size_the_fixed_part_stays_as_believed():
    found = learned(LoadCost(0.05, 2e8), CLASS_READS_MAX, sizes=(32,)).cost
    assert found.fixed_s == BELIEVED.fixed_s
    assert found.seconds(32 * MIB) == pytest.approx(LoadCost(0.05, 2e8).seconds(32 * MIB))


def test_sizes_that_nobody_reads_any_more_are_forgotten():
    learning = learned(LoadCost(0.0, 1e8), CLASS_READS_MIN, sizes=(1,))
    now = LoadCost(0.0, 1e10)
    for _ in range(AGE_READS_MAX):
        learning.note(128 * MIB, now.seconds(128 * MIB))
    assert learning.cost.seconds(128 * MIB) == pytest.approx(now.seconds(128 * MIB))
    assert learning.cost.seconds(MIB) < LoadCost(0.0, 1e8).seconds(MIB)


def test_an_engine_begins_with_its_hosts_cost_and_learns_its_own():
    host = HostRates(LoadCost(0.0, 1e9), nvme=lambda: LoadCost(0.002, 1e9))
    fast, slow = host.for_engine(), host.for_engine()
    for _ in range(CLASS_READS_MIN):
        fast.note_read(10**9, 0.1)
    for _ in range(CLASS_READS_MIN):
        slow.note_read(10**9, 1.0)
    assert fast.rates(1.0).bytes_per_s == {Tier.DRAM: pytest.approx(1e10), Tier.NVME: pytest.approx(1 / (1e-9 + 1e-10))}
    assert slow.rates(1.0).bytes_per_s[Tier.DRAM] == pytest.approx(1e9)
    late = host.for_engine().rates(1.0).bytes_per_s[Tier.DRAM]
    assert late == host.rates(1.0).bytes_per_s[Tier.DRAM] == pytest.approx(1e10), "the lower middle of both"


def test_an_open_costs_what_the_agent_takes_for_most_of_them():
    host = HostRates(LoadCost(0.0, 1e9), nvme=lambda: LoadCost(0.002, 1e9))
    engine = host.for_engine()
    for seconds in (0.001, 0.001, 9.0):
        engine.note_open(seconds)
    assert engine.rates(1.0).fixed_s == {
        Tier.DRAM: pytest.approx(0.001 + DOOR_S),
        Tier.NVME: pytest.approx(0.003 + DOOR_S),
    }


def test_an_idle_host_publishes_what_its_memory_was_timed_at_once_it_has_an_engine():
    timed = time_memory()
    assert 1e8 < timed.bytes_per_s < 1e12
    host = HostRates(timed)
    assert host.rates(0.0) is None
    rates = host.rates(1e12)
    assert rates.bytes_per_s == {Tier.DRAM: timed.bytes_per_s}
    assert rates.fixed_s == {Tier.DRAM: pytest.approx(BELIEVED_DRAM.fixed_s)}
    assert decode_load(encode_load(Load(rates))).rates == rates


def test_a_hosts_row_can_be_read_whatever_its_engines_say_of_themselves():
    rates = HostRates().rates(math.fsum([sys.float_info.max / 4] * 3))
    assert decode_load(encode_load(Load(rates))).rates == rates
