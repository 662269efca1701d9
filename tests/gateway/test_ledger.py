"""The ledger: seconds and tokens booked per engine, back to zero whatever happens."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ledger import RECENT_ENGINES_MAX, RECENT_S, SERVICE_S_MAX, Booking, Ledger


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_waits_queue_one_behind_the_other() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.book("a", 2.0)
    ledger.book("a", 3.0)
    assert ledger.wait_s("a") == 5.0
    assert ledger.wait_s("b") == 0.0
    clock.now = 1.5
    assert ledger.wait_s("a") == 3.5


def test_a_first_byte_later_than_expected_moves_those_behind() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    first = ledger.book("a", 1.0)
    ledger.book("a", 1.0)
    clock.now = 4.0
    ledger.first_byte(first)
    assert ledger.wait_s("a") == 1.0


def test_a_first_byte_earlier_than_expected_shortens_the_wait() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    first = ledger.book("a", 10.0)
    ledger.book("a", 1.0)
    clock.now = 2.0
    ledger.first_byte(first)
    assert ledger.wait_s("a") == 1.0


def test_prefill_is_released_at_the_first_byte_and_the_request_at_its_end() -> None:
    ledger = Ledger(Clock())
    booking = ledger.book("a", 1.0)
    assert (ledger.prefills("a"), ledger.running("a")) == (1, 1)
    ledger.first_byte(booking)
    assert (ledger.prefills("a"), ledger.running("a")) == (0, 1)
    ledger.release(booking)
    assert (ledger.prefills("a"), ledger.running("a"), ledger.engines()) == (0, 0, ())


def test_a_whole_answers_prefill_is_taken_for_done_after_its_predicted_service() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.book("a", 2.0, is_streamed=False)
    ledger.book("a", 2.0, is_streamed=True)
    assert ledger.prefills("a") == 2
    clock.now = 3.0
    assert ledger.prefills("a") == 1
    clock.now = 4.0
    assert (ledger.prefills("a"), ledger.running("a"), ledger.wait_s("a")) == (1, 2, 0.0)


def test_a_failed_attempt_leaves_nothing_behind_for_the_retry_to_see() -> None:
    ledger = Ledger(Clock())
    ledger.release(ledger.book("a", 5.0))
    assert ledger.wait_s("a") == 0.0


def test_a_head_that_is_overdue_is_expected_to_take_as_long_again() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.book("a", 2.0)
    ledger.book("a", 3.0)
    clock.now = 2.0
    assert ledger.wait_s("a") == 3.0
    clock.now = 2.5
    assert ledger.wait_s("a") == 3.5


def test_an_engine_that_does_not_answer_looks_busier_every_second() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    for _ in range(5):
        ledger.book("hung", 0.1)
        ledger.book("well", 0.1)
    waits = []
    for clock.now in (10.0, 60.0, 600.0):
        ledger.first_byte(ledger.book("well", 0.1))
        waits.append(ledger.wait_s("hung"))
        assert ledger.wait_s("well") < 1.0
    assert waits == sorted(waits)
    assert waits[0] > 9.0


def test_an_engine_that_hangs_looks_busier_every_second_though_its_server_refuses_others() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.book("a", 2.0)
    for second in range(1, 61):
        clock.now = float(second)
        refused = ledger.book("a", 0.5)
        ledger.first_byte(refused, is_computed=False)
        ledger.release(refused)
    assert ledger.wait_s("a") == 58.0


def test_when_the_head_is_refused_the_next_begins_then() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    head = ledger.book("a", 9.0)
    ledger.book("a", 2.0)
    clock.now = 5.0
    ledger.first_byte(head, is_computed=False)
    clock.now = 6.0
    assert ledger.wait_s("a") == 1.0


def test_when_the_head_is_given_up_the_next_begins_then() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    head = ledger.book("a", 10.0)
    clock.now = 1.0
    ledger.book("a", 2.0)
    clock.now = 8.0
    ledger.release(head)
    assert ledger.wait_s("a") == 2.0


def test_when_one_that_waits_is_given_up_the_head_goes_on() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.book("a", 10.0)
    waiting = ledger.book("a", 2.0)
    clock.now = 4.0
    ledger.release(waiting)
    assert ledger.wait_s("a") == 6.0


def test_a_whole_answer_behind_others_work_is_taken_for_done_after_both() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.book("a", 2.0, is_streamed=False, ahead_s=3.0)
    clock.now = 4.9
    assert ledger.prefills("a") == 1
    clock.now = 5.0
    assert ledger.prefills("a") == 0


def test_tokens_are_queued_until_the_first_byte_and_active_until_the_end() -> None:
    ledger = Ledger(Clock())
    one = ledger.book("a", 1.0, new_tokens=300, held_tokens=1000)
    two = ledger.book("a", 1.0, new_tokens=50, held_tokens=50)
    assert (ledger.queued_tokens("a"), ledger.active_tokens("a")) == (350, 1050)
    ledger.first_byte(one)
    assert (ledger.queued_tokens("a"), ledger.active_tokens("a")) == (50, 1050)
    ledger.release(two)
    assert (ledger.queued_tokens("a"), ledger.active_tokens("a")) == (0, 1000)


def test_a_request_that_computes_nothing_is_open_and_no_work() -> None:
    ledger = Ledger(Clock())
    booking = ledger.open("a")
    ledger.first_byte(booking)
    assert (ledger.running("a"), ledger.prefills("a"), ledger.wait_s("a")) == (1, 0, 0.0)
    ledger.release(booking)
    assert ledger.engines() == ()


def test_a_prediction_without_bound_is_booked_within_one() -> None:
    ledger = Ledger(Clock())
    absurd, sane = ledger.book("a", float("inf")), ledger.book("a", 1.0)
    assert ledger.wait_s("a") == SERVICE_S_MAX + 1.0
    ledger.release(absurd)
    assert ledger.wait_s("a") == sane.service_s


def test_what_was_given_lately_outlives_the_request_and_fades() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.release(ledger.book("a", 2.0))
    assert ledger.recent_s("a") == 2.0
    clock.now = RECENT_S
    ledger.release(ledger.book("a", 1.0))
    assert ledger.recent_s("a") == pytest.approx(2.0 / math.e + 1.0)
    assert ledger.recent_s("b") == 0.0


def test_what_is_remembered_of_engines_is_bounded() -> None:
    ledger = Ledger(Clock())
    for number in range(RECENT_ENGINES_MAX + 1):
        ledger.release(ledger.book(f"e{number}", 1.0))
    assert ledger.recent_s("e0") == 0.0
    assert ledger.recent_s("e1") == 1.0


def test_asking_takes_as_many_steps_whatever_is_open() -> None:
    ledger = Ledger(Clock())
    steps = []
    for count in (1, 10, 2000):
        bookings = [ledger.book("a", 0.1, is_streamed=number % 2 == 0) for number in range(count)]
        steps.append(lines_run(lambda: ledger.wait_s("a")))
        for booking in bookings:
            ledger.release(booking)
    assert len(set(steps)) == 1


def lines_run(act: Callable[[], object]) -> int:
    """How many lines of Python an action runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


class PlainQueue:
    """What the ledger's numbers mean, counted anew each time: one engine, everything in the order of booking."""

    def __init__(self) -> None:
        self.open: list[Booking] = []
        self.shown: set[int] = set()
        self.free_at = float("-inf")

    def outstanding(self, now: float) -> list[Booking]:
        while left := [each for each in self.open if id(each) not in self.shown]:
            end = max(self.free_at, left[0].starts_at) + left[0].service_s
            if left[0].is_streamed or end > now:
                return left
            self.shown.add(id(left[0]))
            self.free_at = end
        return []

    def end_prefill(self, booking: Booking, now: float) -> None:
        if booking in self.outstanding(now):
            self.shown.add(id(booking))
            self.free_at = max(self.free_at, now)

    def release(self, booking: Booking, now: float) -> None:
        if self.outstanding(now)[:1] == [booking]:
            self.free_at = max(self.free_at, now)
        self.open = [each for each in self.open if each is not booking]
        if not self.open:
            self.free_at = float("-inf")

    def wait_s(self, now: float) -> float:
        left = self.outstanding(now)
        if not left:
            return 0.0
        elapsed_s = max(0.0, now - max(self.free_at, left[0].starts_at))
        return abs(left[0].service_s - elapsed_s) + sum(each.service_s for each in left[1:])


STEPS = st.lists(
    st.tuples(st.sampled_from(["book", "first", "release", "wait"]), st.integers(0, 9), st.floats(0, 5), st.booleans()),
    max_size=60,
)


@given(STEPS)
def test_any_interleaving_is_accounted_as_if_counted_anew(steps: list[tuple[str, int, float, bool]]) -> None:
    clock, plain = Clock(), PlainQueue()
    ledger = Ledger(clock)
    bookings: list[Booking] = []
    for step, index, seconds, is_streamed in steps:
        chosen = bookings[index % len(bookings)] if bookings else None
        if step == "book":
            bookings.append(ledger.book("a", seconds, is_streamed, index, 2 * index, ahead_s=seconds / 2))
            plain.open.append(bookings[-1])
        elif step == "wait":
            clock.now += seconds
        elif chosen in plain.open and step == "first":
            assert chosen is not None
            ledger.first_byte(chosen)
            plain.end_prefill(chosen, clock.now)
        elif chosen in plain.open:
            assert chosen is not None
            ledger.release(chosen)
            plain.release(chosen, clock.now)
        left = plain.outstanding(clock.now)
        assert ledger.wait_s("a") == pytest.approx(plain.wait_s(clock.now), abs=1e-6)
        assert (ledger.prefills("a"), ledger.running("a")) == (len(left), len(plain.open))
        assert ledger.queued_tokens("a") == sum(each.new_tokens for each in left)
        assert ledger.active_tokens("a") == sum(each.held_tokens for each in plain.open)


steps = st.lists(
    st.tuples(st.sampled_from(["book", "first", "release", "wait"]), st.integers(0, 9), st.floats(0, 5)), max_size=60
)


@given(steps)
def test_any_interleaving_ends_at_zero_and_is_never_negative(steps: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    ledger = Ledger(clock)
    bookings: list[Booking] = []
    released: set[int] = set()
    for step, index, seconds in steps:
        if step == "book":
            bookings.append(ledger.book(f"e{index % 3}", seconds))
        elif step == "wait":
            clock.now += seconds
        elif bookings:
            chosen = index % len(bookings)
            if step == "first":
                ledger.first_byte(bookings[chosen])
            else:
                ledger.release(bookings[chosen])
                released.add(chosen)
        running = sum(ledger.running(f"e{n}") for n in range(3))
        assert running == len(bookings) - len(released)
        assert all(ledger.wait_s(f"e{n}") >= 0 for n in range(3))
        assert all(0 <= ledger.prefills(f"e{n}") <= ledger.running(f"e{n}") for n in range(3))
    for booking in bookings:
        ledger.release(booking)
    assert ledger.engines() == ()
    assert all(ledger.wait_s(f"e{n}") == 0 for n in range(3))
