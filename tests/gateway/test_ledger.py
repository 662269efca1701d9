"""The ledger: seconds booked per engine, back to zero whatever happens."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway.ledger import Booking, Ledger


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
