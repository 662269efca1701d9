"""Belief in placements, in virtual time: terms that run out, tables that can't be read, many lapses at once."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from directory.members import (
    POLL_INTERVAL_S,
    RENEW_INTERVAL_S,
    TERM_MAX_S,
    TERM_S,
    HostRegistration,
    Load,
    Member,
)
from gateway.belief import Belief
from tests.directory.fleet_samples import incarnation

STEPS_PER_S = 10
HOST = HostRegistration("h", "http://h:1")


def row(life: bytes, remaining_s: float, retired: bool = False) -> Member:
    return Member(life, HOST, Load(), remaining_s, retired)


LIVES = [incarnation(number) for number in range(9)]
A, B, C = LIVES[:3]


def test_what_a_life_has_left_counts_down_between_tables() -> None:
    belief = Belief()
    belief.read([row(A, 0.2), row(B, 5), row(C, 5)], 100)
    assert belief.lives(100.1) == {A, B, C}
    assert belief.changes_at(100.1) == 100.2
    assert belief.lives(100.2) == {B, C}
    assert belief.excused(100.2) == 0


def test_a_life_that_has_more_left_than_any_term_is_dead_and_the_servers_clock_went_back() -> None:
    belief = Belief()
    for now in (100, 100.5, 200):
        belief.read([row(A, 3593), row(B, 5), row(C, TERM_MAX_S)], now)
        assert belief.lives(now + 0.1) == {B, C}


def test_a_table_that_cant_be_read_is_kept_for_one_more_term() -> None:
    belief = Belief()
    belief.read([row(A, 0.2), row(B, 0.8), row(C, 5), row(LIVES[3], 5)], 100)
    belief.miss(100.5)
    belief.miss(101)
    assert belief.lives(104.9) == {B, C, LIVES[3]}, "A's time was over before the directory's trouble was seen"
    assert belief.is_known(104.9)
    assert belief.lives(105) == frozenset()
    assert not belief.is_known(105)


def test_a_table_that_can_be_read_again_ends_what_was_kept() -> None:
    belief = Belief()
    belief.read([row(A, 0.8), row(B, 5), row(C, 5)], 100)
    belief.miss(100.5)
    assert belief.lives(102) == {A, B, C}
    belief.read([row(A, -1.2), row(B, 4), row(C, 4)], 102)
    assert belief.lives(102) == {B, C}


def test_when_more_than_half_lapses_it_is_kept_until_a_term_after_its_lapse() -> None:
    belief = Belief()
    belief.read([row(life, 0.3) for life in LIVES[:5]] + [row(life, 5) for life in LIVES[5:]], 100)
    assert belief.lives(100.4) == set(LIVES), "the countdown alone must not empty the fleet either"
    belief.read([row(life, -0.2) for life in LIVES[:5]] + [row(life, 5) for life in LIVES[5:]], 100.5)
    assert belief.excused(100.5) == 5
    for now in (101, 101.5, 102, 102.5, 103):
        belief.read([row(life, 100.3 - now) for life in LIVES[:5]] + [row(life, 5) for life in LIVES[5:]], now)
    assert belief.lives(105.2) == set(LIVES)
    assert belief.lives(105.3) == set(LIVES[5:])


def test_without_a_table_for_a_term_nobody_is_believed_excused_or_not() -> None:
    belief = Belief()
    belief.read([row(life, 0.4) for life in LIVES], 100)
    assert belief.lives(104.9) == set(LIVES)
    assert belief.changes_at(104.9) == 105
    assert belief.lives(105) == frozenset()


def test_half_is_not_more_than_half() -> None:
    belief = Belief()
    belief.read([row(A, 0.3), row(B, 5)], 100)
    assert belief.lives(100.4) == {B}


def test_lapses_that_come_within_a_renewals_spread_are_taken_together() -> None:
    belief, left_s = Belief(), {life: 0.15 + 0.1 * number for number, life in enumerate(LIVES[:8])}
    belief.read([row(life, left) for life, left in left_s.items()], 100)
    assert belief.lives(100.49) == set(LIVES[4:8]), "half of them isn't more than half"
    belief.read([row(life, left - 0.5) for life, left in left_s.items()], 100.5)
    assert belief.lives(100.5) == set(left_s), "with those that are due before the next table it is"
    belief.read([row(life, left - 1) for life, left in left_s.items()], 101)
    assert belief.lives(101) == set(left_s)


def test_lapses_just_before_the_last_table_count_with_those_after_it() -> None:
    belief = Belief()
    belief.read([row(A, 0.1), row(B, 0.8), row(C, 5), row(LIVES[3], 5)], 100)
    belief.read([row(A, -0.4), row(B, 0.3), row(C, 5), row(LIVES[3], 0.9)], 100.5)
    assert belief.lives(100.5) == {B, C, LIVES[3]}
    belief.read([row(A, -0.9), row(B, -0.2), row(C, 5), row(LIVES[3], 0.4)], 101)
    assert belief.lives(101) == {A, B, C, LIVES[3]}


def test_a_retired_life_is_never_kept() -> None:
    belief = Belief()
    belief.read([row(life, 5) for life in LIVES], 100)
    belief.read([row(life, -0.1, retired=life == A) for life in LIVES], 100.5)
    assert belief.lives(100.5) == set(LIVES) - {A}
    belief.miss(101)
    assert belief.lives(101) == set(LIVES) - {A}


def test_a_gateway_that_starts_while_all_are_lapsed_believes_them_like_the_others_do() -> None:
    belief = Belief()
    belief.read([row(life, -2) for life in LIVES], 100)
    assert belief.lives(102.9) == set(LIVES)
    assert belief.lives(103) == frozenset()


def test_nothing_is_known_before_the_first_table() -> None:
    belief = Belief()
    belief.miss(1)
    assert not belief.is_known(1)
    assert belief.lives(1) == frozenset()


@dataclass
class Server:
    """A table in which each life is renewed every second until its writer dies; steps are tenths of a second."""

    deaths: list[int]

    def renewed_at(self, number: int, step: int) -> int:
        """The last renewal of a life before or at a step."""
        last = min(step, self.deaths[number])
        return last - (last - number) % round(RENEW_INTERVAL_S * STEPS_PER_S)

    def table(self, step: int) -> list[Member]:
        ends = [self.renewed_at(number, step) / STEPS_PER_S + TERM_S for number in range(len(self.deaths))]
        return [row(LIVES[number], end - step / STEPS_PER_S) for number, end in enumerate(ends)]


DEATHS = st.lists(st.integers(10, 180), min_size=1, max_size=len(LIVES))
MISSES = st.sets(st.integers(0, 32), max_size=20)
"""Polls, two a second, that aren't answered."""


@settings(max_examples=50)
@given(deaths=DEATHS, misses=MISSES)
def test_no_decision_uses_a_dead_life_later_than_its_term_plus_one_poll(deaths: list[int], misses: set[int]) -> None:
    server, belief = Server(deaths), Belief()
    is_calm = True
    for step in range(10, 160):
        now = step / STEPS_PER_S
        poll, is_poll = divmod(step, round(POLL_INTERVAL_S * STEPS_PER_S))
        if is_poll == 0 and poll in misses:
            belief.miss(now)
            is_calm = False
        elif is_poll == 0:
            belief.read(server.table(step), now)
            is_calm = True
        believed = belief.lives(now)
        for number, life in enumerate(LIVES[: len(deaths)]):
            ends_at = server.renewed_at(number, step) / STEPS_PER_S + TERM_S
            over_s = now - ends_at
            if life in believed:
                assert over_s <= TERM_S, "in doubt of the directory for one more term, and never longer"
                assert over_s <= POLL_INTERVAL_S or not is_calm or belief.excused(now)
            elif over_s < 0:
                assert not belief.is_known(now) or poll - 1 in misses or poll in misses, "the living are believed"


@settings(max_examples=50)
@given(deaths=DEATHS, misses=MISSES)
def test_between_tables_belief_shrinks_only_and_at_the_moments_it_names(deaths: list[int], misses: set[int]) -> None:
    server, belief = Server(deaths), Belief()
    changes_at, before = 0.0, frozenset[bytes]()
    for step in range(10, 160):
        now = step / STEPS_PER_S
        poll, is_poll = divmod(step, round(POLL_INTERVAL_S * STEPS_PER_S))
        if is_poll == 0 and poll in misses:
            belief.miss(now)
        elif is_poll == 0:
            belief.read(server.table(step), now)
        lives = belief.lives(now)
        assert lives <= before or is_poll == 0
        assert lives == before or now >= changes_at or is_poll == 0
        before, changes_at = lives, belief.changes_at(now)
