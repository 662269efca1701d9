"""When differences are too many, and when they are forgotten."""

import random

import pytest

from gateway.parity.tally import CALM_RUN, CHUNK_IDS, TOKEN_COUNTS, Limits, Tally

BOTH = pytest.mark.parametrize("limits", [TOKEN_COUNTS, CHUNK_IDS], ids=["token counts", "ids"])


def after(limits: Limits, *outcomes: tuple[bool, int]) -> Tally:
    tally = Tally(limits)
    for is_same, times in outcomes:
        for _ in range(times):
            tally.add(is_same)
    return tally


@pytest.mark.parametrize("before", [0, 1, 20, 1_000, 100_000])
def test_a_systematic_difference_is_noticed_within_twenty_answers(before: int) -> None:
    tally = after(TOKEN_COUNTS, (True, before))
    assert not tally.is_off
    answers = next(number for number in range(1, 100) if tally.add(False) or tally.is_off)
    assert answers <= 20


@BOTH
@pytest.mark.parametrize("before", [0, 3, 5_000])
def test_one_or_two_odd_answers_turn_nothing(limits: Limits, before: int) -> None:
    assert not after(limits, (True, before), (False, 2)).is_off
    assert not after(limits, (True, before), (False, 2), (True, 5_000), (False, 1)).is_off


def test_one_answer_in_a_thousand_is_borne_and_one_in_thirty_is_not() -> None:
    choose, rare, frequent = random.Random(7), Tally(TOKEN_COUNTS), Tally(TOKEN_COUNTS)
    assert not any(rare.add(choose.random() >= 0.001) or rare.is_off for _ in range(20_000))
    assert any(frequent.add(choose.random() >= 0.033) or frequent.is_off for _ in range(1_000))


def test_half_of_the_looks_for_chunks_may_find_nothing() -> None:
    tally = Tally(CHUNK_IDS)
    for number in range(1_000):
        tally.add(number % 5 < 3)
    assert not tally.is_off
    for _ in range(50):
        tally.add(False)
    assert tally.is_off


@BOTH
def test_a_run_of_equal_ones_takes_it_back_and_one_less_does_not(limits: Limits) -> None:
    assert after(limits, (False, 100), (True, limits.run_needed - 1)).is_off
    assert after(limits, (False, 100), (True, limits.run_needed - 1), (False, 1), (True, limits.run_needed - 1)).is_off
    tally = after(limits, (False, 100), (True, limits.run_needed))
    assert not tally.is_off
    tally.add(False)
    assert not tally.is_off, "the past is forgotten"
    assert (tally.compared, tally.different) == (101 + limits.run_needed, 101)


def test_what_comes_and_goes_must_be_well_for_longer_each_time() -> None:
    tally, runs = Tally(TOKEN_COUNTS), []
    for _ in range(12):
        while not tally.is_off:
            tally.add(False)
        runs.append(next(number for number in range(1, 10_000) if tally.add(True) or not tally.is_off))
    assert runs[:3] == [20, 40, 80]
    assert runs[-1] == TOKEN_COUNTS.run_max


def test_chunks_that_are_often_evicted_do_not_keep_a_bucket_off_for_ever() -> None:
    choose, tally = random.Random(7), Tally(CHUNK_IDS)
    for _ in range(12):  # a burst that evicts nearly all before they are looked for, and an hour after it
        after_burst = [tally.add(False) or tally.is_off for _ in range(60)]
        assert after_burst[-1]
        assert any(tally.add(choose.random() < 0.8) or not tally.is_off for _ in range(3_600))


def test_a_calm_time_makes_up_for_relapses() -> None:
    tally = after(TOKEN_COUNTS, (False, 3), (True, 20), (False, 3), (True, 40), (True, CALM_RUN), (False, 10))
    assert tally.is_off
    assert not after_run(tally, 20).is_off


def after_run(tally: Tally, times: int) -> Tally:
    for _ in range(times):
        tally.add(True)
    return tally
