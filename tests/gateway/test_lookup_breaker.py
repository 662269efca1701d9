"""The breaker around lookups, in virtual time."""

import pytest

from gateway.lookup_breaker import EXCUSES_MAX, FAILURES_MAX, LATE_S, PAUSE_S, LookupBreaker, SentLookup

DEADLINE_S = 0.05


def sent(breaker: LookupBreaker, now: float) -> SentLookup:
    lookup = breaker.send(now)
    assert lookup is not None
    return lookup


def opened(at: float = 0.0) -> LookupBreaker:
    breaker = LookupBreaker()
    for _ in range(FAILURES_MAX):
        breaker.failed(sent(breaker, at), at, DEADLINE_S, is_timeout=True)
    assert breaker.is_open(at)
    return breaker


def test_failures_in_a_row_open_it_and_an_answer_between_them_does_not_let_them_add_up() -> None:
    breaker = LookupBreaker()
    for number in range(10 * FAILURES_MAX):
        if number % FAILURES_MAX == FAILURES_MAX - 1:
            breaker.answered()
        else:
            breaker.failed(sent(breaker, number), number, DEADLINE_S, is_timeout=True)
    assert breaker.pauses == 0


def test_lookups_that_were_under_way_together_fail_as_one() -> None:
    breaker = LookupBreaker()
    together = [sent(breaker, 1.0) for _ in range(64)]
    for lookup in together:
        breaker.failed(lookup, 1.0 + DEADLINE_S, DEADLINE_S, is_timeout=True)
    assert breaker.failures == 1


def test_a_probe_that_fails_opens_it_again_for_as_long() -> None:
    breaker = opened()
    breaker.failed(sent(breaker, PAUSE_S), PAUSE_S + 0.1, DEADLINE_S, is_timeout=False)
    assert breaker.send(2 * PAUSE_S) is None
    assert breaker.send(2 * PAUSE_S + 0.1) is not None
    assert breaker.pauses == 2


def test_an_old_lookups_failure_neither_ends_the_probe_nor_opens_it_again() -> None:
    breaker = LookupBreaker()
    old = sent(breaker, -1.0)
    for _ in range(FAILURES_MAX):
        breaker.failed(sent(breaker, 0.0), 0.0, DEADLINE_S, is_timeout=True)
    probe = sent(breaker, PAUSE_S)
    breaker.failed(old, PAUSE_S, DEADLINE_S, is_timeout=False)
    assert breaker.send(PAUSE_S) is None, "one probe at a time"
    assert breaker.pauses == 1
    breaker.abandoned(probe)
    assert breaker.send(PAUSE_S) is not None


def test_an_old_lookups_answer_closes_it() -> None:
    breaker = opened()
    breaker.answered()
    assert breaker.send(0.0) == SentLookup(0.0, is_probe=False)


@pytest.mark.parametrize("is_timeout", [True, False])
def test_only_a_timeout_is_excused_by_lateness(is_timeout: bool) -> None:
    breaker = LookupBreaker()
    ended_at = DEADLINE_S + LATE_S * 1.5
    assert breaker.failed(sent(breaker, 0.0), ended_at, DEADLINE_S, is_timeout) is is_timeout
    assert breaker.failures == (not is_timeout)


def test_an_excused_probe_leaves_its_turn_to_the_next() -> None:
    breaker = opened()
    late_s = DEADLINE_S + LATE_S * 2
    assert breaker.failed(sent(breaker, PAUSE_S), PAUSE_S + late_s, DEADLINE_S, is_timeout=True)
    assert breaker.send(PAUSE_S + late_s) == SentLookup(PAUSE_S + late_s, is_probe=True)


def test_one_busy_moment_spends_one_excuse_however_many_lookups_met_it() -> None:
    breaker, late_s = LookupBreaker(), DEADLINE_S + LATE_S * 2
    for moment in range(EXCUSES_MAX):
        together = [sent(breaker, moment) for _ in range(20)]
        for lookup in together:
            assert breaker.failed(lookup, moment + late_s, DEADLINE_S, is_timeout=True)
    assert not breaker.failed(sent(breaker, 99), 99 + late_s, DEADLINE_S, is_timeout=True)
