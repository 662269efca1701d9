"""The budget holds over any 24 hours, whatever the clocks, restarts and crashes do."""

import math
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.tiers.endurance import DAY_S, DRAWS_PER_DAY, DailyBudget, Instant

DAY = 10**9
HOUR_S = 3_600.0


def at(hours, *, boot="b", wall_hours=None):
    return Instant(boot, hours * HOUR_S, (hours if wall_hours is None else wall_hours) * HOUR_S + 20_000 * DAY_S)


def write(budget, size, now):
    """As the store does, without its file."""
    return budget.spend(size, now) or (budget.draw(size, now) and budget.spend(size, now))


def fill(budget, now, size=DAY // 2_000):
    """Write until it is refused; how many bytes that were."""
    written = 0
    while write(budget, size, now):
        written += size
    return written


class Drive:
    """A drive with real time, clocks that show something else, and what was saved last."""

    def __init__(self):
        self.real_s, self.boot, self.booted_s, self.skew_s = 0.0, 0, -5 * DAY_S, 0.0
        self.saved = None
        self.written: list[tuple[float, int]] = []
        self.budget = DailyBudget(DAY, self.now())

    def now(self):
        return Instant(f"boot-{self.boot}", self.real_s - self.booted_s, self.real_s + self.skew_s + 1.7e9)

    def writes(self, size, *, is_saved=True):
        now = self.now()
        if not self.budget.spend(size, now):
            if not self.budget.draw(size, now):
                return
            if not is_saved:
                self.budget.put_back()
                return
            self.saved = self.budget.state(now)
            assert self.budget.spend(size, now)
        self.written.append((self.real_s, size))

    def restarts(self, how):
        if how == "in good order":
            self.budget.put_back()
            self.saved = self.budget.state(self.now())
        if how == "forgets":
            self.saved = None
        if how == "reboots":
            self.boot, self.booted_s = self.boot + 1, self.real_s
        self.budget = DailyBudget(DAY, self.now(), self.saved)


SIZES = st.sampled_from([1, 4_096, DAY // DRAWS_PER_DAY, DAY // 2_000, DAY // 100, DAY // 8, DAY])
STEPS = st.one_of(
    st.tuples(st.just("writes"), SIZES, st.integers(1, 40)),
    st.tuples(st.just("can't save"), SIZES),
    st.tuples(st.just("waits"), st.sampled_from([0.1, 60.0, HOUR_S, 5 * HOUR_S, DAY_S, 3 * DAY_S])),
    st.tuples(st.just("restarts"), st.sampled_from(["in good order", "crashes", "reboots", "forgets"])),
    st.tuples(st.just("wall jumps"), st.sampled_from([-1e9, -HOUR_S, HOUR_S, 30 * DAY_S, 1e9])),
)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEPS, max_size=60))
def test_no_24_hours_see_more_than_the_budget_whatever_restarts_and_the_wall_clock_do(steps):
    drive = Drive()
    for what, *details in steps:
        if what == "writes":
            for _ in range(details[1]):
                drive.writes(details[0])
        elif what == "can't save":
            drive.writes(details[0], is_saved=False)
        elif what == "waits":
            drive.real_s += details[0]
        elif what == "restarts":
            drive.restarts(details[0])
        else:
            drive.skew_s += details[0]
        assert 0 <= drive.budget.available_bytes(drive.now()) <= DAY // 8
    sums = [0, *accumulate(size for _, size in drive.written)]
    for start, (began_s, _) in enumerate(drive.written):
        end = sum(when <= began_s + DAY_S for when, _ in drive.written)
        assert sums[end] - sums[start] <= DAY


def test_a_bucket_whose_past_is_not_known_begins_empty_and_fills():
    budget = DailyBudget(DAY, at(0))
    assert budget.available_bytes(at(0)) == 0
    assert not write(budget, 1, at(0))
    assert fill(budget, at(1)) == pytest.approx(DAY * 7 / 8 / 24, rel=0.05)


def test_what_was_not_written_is_not_saved_up_beyond_a_burst():
    budget = DailyBudget(DAY, at(0))
    assert fill(budget, at(1_000)) == pytest.approx(DAY / 8, rel=0.01)
    assert fill(budget, at(1_000)) == 0


def test_a_day_of_writing_as_much_as_is_allowed_comes_close_to_the_budget():
    budget = DailyBudget(DAY, at(0))
    total = sum(fill(budget, at(100 + quarter / 4)) for quarter in range(24 * 4 + 1))
    assert 0.97 * DAY < total <= DAY


def test_a_restart_in_good_order_loses_nothing_and_one_without_a_word_at_most_a_draw():
    budget = DailyBudget(DAY, at(0))
    assert write(budget, 1_000, at(48))
    crashed = DailyBudget(DAY, at(48), budget.state(at(48)))
    left = budget.available_bytes(at(48))
    budget.put_back()
    assert DailyBudget(DAY, at(48), budget.state(at(48))).available_bytes(at(48)) == left
    assert left - crashed.available_bytes(at(48)) == DAY // DRAWS_PER_DAY - 1_000


@pytest.mark.parametrize(
    ("later", "hours"),
    [
        (at(50), 2),
        (at(50, wall_hours=48 + 1_000), 2),
        (at(50, wall_hours=40), 0),
        (at(1, boot="other", wall_hours=60), 1),
        (at(900, boot="other", wall_hours=49), 1),
        (at(47, wall_hours=60), 0),
    ],
    ids=["both agree", "wall jumps ahead", "wall goes back", "reboot", "another host", "boot clock goes back"],
)
def test_the_shorter_of_two_clocks_says_how_long_a_drive_was_away(later, hours):
    budget = DailyBudget(DAY, at(0))
    fill(budget, at(48))
    again = DailyBudget(DAY, later, budget.state(at(48)))
    expected = budget.available_bytes(at(48)) + hours * DAY * 7 / 8 / 24
    assert again.available_bytes(later) == pytest.approx(expected, abs=2 * DAY / DRAWS_PER_DAY)


@pytest.mark.parametrize(
    "saved",
    [b"", b"{", b"[]", b"\xff", b'{"left_bytes": 1}', b"x" * 10_000, b"null"],
    ids=["empty", "cut", "a list", "no text", "fields missing", "too long", "null"],
)
def test_a_state_that_is_damaged_is_an_empty_bucket(saved):
    budget = DailyBudget(DAY, at(500), saved)
    assert (budget.available_bytes(at(500)), budget.written_today_bytes(at(500))) == (0, 0)


@pytest.mark.parametrize("written", [-1, 10**400], ids=["less than nothing", "more than a float holds"])
def test_a_state_that_claims_what_no_drive_wrote_is_an_empty_bucket(written):
    state = DailyBudget(DAY, at(0)).state(at(0)).replace(b'"day_bytes":0', b'"day_bytes":%d' % written)
    assert b"%d" % written in state
    budget = DailyBudget(DAY, at(0), state)
    assert (budget.available_bytes(at(0)), float(budget.written_today_bytes(at(0)))) == (0, 0.0)


@pytest.mark.parametrize("left", [1e300, -1e300, 10**400], ids=str)
def test_a_state_that_claims_too_much_gives_a_burst_at_most(left):
    state = DailyBudget(DAY, at(0)).state(at(0)).replace(b'"left_bytes":0.0', b'"left_bytes":%d' % left)
    assert 0 <= DailyBudget(DAY, at(0), state).available_bytes(at(0)) <= DAY // 8


def test_there_are_about_as_many_saves_in_a_day_as_draws_however_small_the_chunks():
    budget, draws = DailyBudget(DAY, at(0)), 0
    for minute in range(24 * 60):
        now = at(48 + minute / 60)
        for _ in range(400):
            if not budget.spend(4_096, now):
                if not budget.draw(4_096, now):
                    break
                draws += 1
                budget.spend(4_096, now)
    assert 0.8 * DRAWS_PER_DAY < draws <= DRAWS_PER_DAY


def test_a_chunk_larger_than_a_draw_is_written_when_there_is_room_and_one_larger_than_a_burst_never():
    budget = DailyBudget(DAY, at(0))
    large = DAY // 50
    assert budget.allows(large, at(10))
    assert write(budget, large, at(10))
    assert not budget.allows(DAY // 8, at(1_000))
    assert not write(budget, DAY // 8, at(1_000))


def test_what_was_written_today_begins_anew_at_midnight_and_survives_a_restart():
    budget = DailyBudget(DAY, at(0))
    for _ in range(3):
        write(budget, 1_000, at(20))
    budget.give_back(1_000)
    budget.put_back()
    again = DailyBudget(DAY, at(21), budget.state(at(20)))
    assert again.written_today_bytes(at(21)) == 2_000
    assert write(again, 1_000, at(21))
    crashed = DailyBudget(DAY, at(22), again.state(at(21)))
    assert crashed.written_today_bytes(at(22)) == 2_000 + DAY // DRAWS_PER_DAY, "what was drawn may have been written"
    assert again.written_today_bytes(at(24)) == 0
    write(again, 500, at(25))
    assert again.written_today_bytes(at(25)) == 500
    assert DailyBudget(DAY, at(48), again.state(at(26))).written_today_bytes(at(48)) == 0


def test_a_smaller_rating_takes_effect_at_once():
    budget = DailyBudget(DAY, at(0))
    state = budget.state(at(100))
    small = DailyBudget(DAY // 10, at(100), state)
    assert math.isclose(small.available_bytes(at(100)), DAY / 80, rel_tol=0.01)
