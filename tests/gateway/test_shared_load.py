"""Several gateways' accounts of an engine are joined as the one queue that they fill."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.members import ENGINES_BOOKED_MAX, TERM_S, decode_load, encode_load
from gateway.ledger import RECENT_S, Booking, Ledger
from gateway.shared_load import OWN_LIVES_MAX, EngineLoad, EngineLoads, published
from tests.gateway.gateway_rows import gateway_row


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Stand:
    """This gateway's ledger and loads, and another's ledger, by one clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.own, self.other = Ledger(self.clock), Ledger(self.clock)
        self.loads = EngineLoads(self.own, self.clock)

    def hear(self) -> None:
        """The other gateway reports, and this one reads it at once."""
        self.loads.take([gateway_row(self.other, self.clock.now, self.clock.now)])

    def wait_s(self) -> float:
        return self.loads.of("a").wait_s


def test_what_others_booked_is_added_to_the_own() -> None:
    stand = Stand()
    stand.own.book("a", 1.0, new_tokens=10, held_tokens=100)
    stand.other.first_byte(stand.other.book("a", 9.0, new_tokens=7, held_tokens=70))
    stand.other.book("a", 2.0, new_tokens=20, held_tokens=200)
    stand.hear()
    assert stand.loads.of("a") == EngineLoad(3.0, 2, 3, 30, 370, recent_s=12.0)
    assert stand.loads.of_own("a") == EngineLoad(1.0, 1, 1, 10, 100, recent_s=1.0)
    assert stand.loads.of_others("a") == EngineLoad(2.0, 1, 2, 20, 270, recent_s=11.0)
    assert stand.loads.ahead_s("a") == 2.0
    assert stand.loads.of("b") == EngineLoad()


def test_the_work_of_all_is_done_a_second_a_second() -> None:
    stand = Stand()
    stand.own.book("a", 1.0)
    stand.clock.now += 0.1
    stand.other.book("a", 2.0)
    stand.hear()
    stand.clock.now += 0.4
    assert stand.wait_s() == pytest.approx(2.5)


def test_others_work_goes_on_between_their_reports() -> None:
    stand = Stand()
    stand.other.book("a", 1.0)
    stand.other.book("a", 1.0)
    stand.hear()
    for passed_s, left_s in ((0.5, 1.5), (1.5, 0.5), (3.0, 0.0)):
        stand.clock.now = 100.0 + passed_s
        assert stand.wait_s() == pytest.approx(left_s)


@pytest.mark.parametrize("is_known_between", [False, True], ids=["booked at once", "after a request without work"])
def test_that_an_engine_was_free_is_remembered_when_it_has_no_own_request_for_a_while(is_known_between: bool) -> None:
    stand = Stand()
    first = stand.own.book("a", 4.0)
    stand.other.book("a", 3.0)
    stand.clock.now += 5.0
    stand.own.first_byte(first)  # the other's begins now
    stand.own.release(first)
    if is_known_between:
        stand.own.release(stand.own.open("a"))
    stand.clock.now += 1.0
    stand.own.book("a", 1.0)
    stand.hear()
    assert stand.wait_s() == pytest.approx(3.0)


def test_the_own_head_is_late_only_when_others_work_before_it_must_be_done() -> None:
    stand = Stand()
    stand.other.book("a", 1.0)
    stand.hear()
    stand.clock.now += 0.1
    stand.own.book("a", 2.0)
    for passed_s, wait_s in ((0.5, 2.5), (1.5, 1.5), (3.0, 0.0), (3.5, 0.5)):
        stand.clock.now = 100.0 + passed_s
        assert stand.wait_s() == pytest.approx(wait_s), passed_s


def test_of_what_two_gateways_booked_in_one_moment_none_is_taken_for_late_while_the_other_may_run() -> None:
    stand = Stand()
    stand.other.book("a", 8.0)
    stand.own.book("a", 1.0)
    stand.hear()
    stand.clock.now += 6.0
    stand.hear()
    assert stand.wait_s() == pytest.approx(3.0)


def test_an_engine_that_another_gateway_finds_hung_looks_busy_here_too() -> None:
    stand = Stand()
    stand.other.book("a", 0.5)
    stand.clock.now += 60.0
    stand.hear()
    assert stand.wait_s() == pytest.approx(59.5)


def test_a_first_byte_that_another_gateway_saw_begins_the_next_one_here() -> None:
    stand = Stand()
    first = stand.other.book("a", 1.0)
    stand.own.book("a", 2.0)
    stand.clock.now += 5.0
    stand.other.first_byte(first)
    stand.hear()
    assert stand.wait_s() == pytest.approx(2.0)


@pytest.mark.parametrize("change", [{"retired": True}, {"remaining_s": 0.0}], ids=["retired", "lapsed"])
def test_a_gateway_that_is_gone_has_no_work_any_more(change: dict[str, object]) -> None:
    stand = Stand()
    stand.other.book("a", 1.0)
    row = gateway_row(stand.other, 100.0, 100.0)
    stand.loads.take([row])
    assert len(stand.loads.gateways) == 1
    stand.loads.take([replace(row, **change)])  # type: ignore[arg-type]
    assert stand.loads.of("a") == EngineLoad()
    assert stand.loads.gateways == ()


def test_without_a_table_for_a_term_the_own_account_counts_alone() -> None:
    stand = Stand()
    stand.other.book("a", 100.0)
    stand.own.book("a", 1.0)
    stand.hear()
    stand.clock.now += TERM_S - 0.1
    assert stand.loads.of("a").running == 2
    stand.clock.now += 0.1
    assert stand.loads.of("a") == stand.loads.of_own("a")
    assert stand.loads.of_others("a") == EngineLoad()


def test_own_lives_are_not_counted_twice() -> None:
    stand = Stand()
    stand.own.book("a", 1.0)
    for life in (b"first---", b"second--"):
        stand.loads.disregard(life)
    stand.loads.take([gateway_row(stand.own, 100.0, 100.0, life) for life in (b"first---", b"second--")])
    assert stand.loads.of("a") == stand.loads.of_own("a")


def test_the_memory_of_own_lives_is_bounded_and_keeps_the_newest() -> None:
    stand = Stand()
    lives = [number.to_bytes(8, "big") for number in range(OWN_LIVES_MAX + 1)]
    for life in lives:
        stand.loads.disregard(life)
    stand.other.book("a", 1.0)
    stand.loads.take([gateway_row(stand.other, 100.0, 100.0, lives[-1])])
    assert stand.loads.gateways == ()
    stand.loads.take([gateway_row(stand.other, 100.0, 100.0, lives[0])])
    assert len(stand.loads.gateways) == 1


def test_a_report_names_the_engines_with_most_work() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    for number in range(ENGINES_BOOKED_MAX + 2):
        ledger.book(f"e{number}", 1.0 + number)
    report = published(ledger, clock.now)
    assert len(report) == ENGINES_BOOKED_MAX
    assert not {"e0", "e1"} & set(report)


def test_an_engine_without_open_requests_is_reported_as_long_as_its_work_is_recent() -> None:
    stand = Stand()
    stand.other.release(stand.other.book("a", 1.0))
    stand.hear()
    assert stand.loads.of("a") == EngineLoad(recent_s=1.0)
    stand.clock.now += 10 * RECENT_S
    assert published(stand.other, stand.clock.now) == {}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["book", "first", "release", "wait"]), st.integers(0, 2), st.integers(0, 9), st.floats(0, 3)
    ),
    max_size=40,
)


@given(STEPS)
def test_accounts_that_are_told_at_once_make_one_ledger(steps: list[tuple[str, int, int, float]]) -> None:
    clock = Clock()
    ledgers, union = [Ledger(clock) for _ in range(3)], Ledger(clock)
    loads = EngineLoads(ledgers[0], clock)
    open_: list[tuple[Ledger, Booking, Booking]] = []
    for step, gateway, index, seconds in steps:
        ledger, booking, same = open_[index % len(open_)] if open_ else (union, None, None)
        if step == "book":
            service_s = 0.05 + seconds
            open_.append((ledgers[gateway], ledgers[gateway].book("a", service_s), union.book("a", service_s)))
        elif step == "wait":
            clock.now += seconds
        elif booking is not None and same is not None:
            ledger.first_byte(booking)
            union.first_byte(same)
            if step == "release":
                ledger.release(booking)
                union.release(same)
                open_.remove((ledger, booking, same))
        loads.take([gateway_row(each, clock.now, clock.now) for each in ledgers[1:]])
        found = loads.of("a")
        assert (found.prefills, found.running) == (union.prefills("a"), union.running("a"))
        account = union.account("a")
        elapsed_s = clock.now - max(account.free_at, account.head_at)
        if elapsed_s <= account.head_s:  # whose head is overdue, nobody knows
            assert found.wait_s == pytest.approx(union.wait_s("a"), abs=0.1)  # reports are in whole milliseconds


@given(STEPS)
def test_a_joined_wait_is_finite_and_never_negative_however_old_the_reports_are(
    steps: list[tuple[str, int, int, float]],
) -> None:
    clock = Clock()
    own, other = Ledger(clock), Ledger(clock)
    loads = EngineLoads(own, clock)
    open_: list[tuple[Ledger, Booking]] = []
    for step, gateway, index, seconds in steps:
        ledger = own if gateway else other
        if step == "book":
            open_.append((ledger, ledger.book("a", seconds, is_streamed=index % 2 == 0, ahead_s=seconds)))
        elif step == "wait":
            clock.now += seconds
            if index % 2:
                reported_at = clock.now - min(seconds, TERM_S / 2)
                loads.take([gateway_row(other, reported_at, clock.now)])
        elif open_ and step == "first":
            chosen, booking = open_[index % len(open_)]
            chosen.first_byte(booking)
        elif open_:
            chosen, booking = open_.pop(index % len(open_))
            chosen.release(booking)
        found = loads.of("a")
        assert 0 <= found.wait_s < 1e6
        assert 0 <= found.prefills <= found.running
        assert found.running >= own.running("a")
    decoded = decode_load(encode_load(gateway_row(other, clock.now, clock.now).load))
    assert decoded.booked.keys() == {*other.engines(), *other.recent_engines()}
