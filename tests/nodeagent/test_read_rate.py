"""What a drive's reads cost: bytes that came while it was busy, whoever asked for them."""

import pytest

from nodeagent.tiers.load_cost import CLASS_READS_MIN, LoadCost
from nodeagent.tiers.read_rate import BELIEVED, SPAN_MAX_S, ReadRate

NOTHING_FIXED = LoadCost(0.0, 1e6)


def learned(rate: ReadRate) -> float:
    return rate.cost.bytes_per_s


def test_until_a_read_was_seen_a_drive_is_believed_in():
    assert ReadRate().cost == BELIEVED


def test_reads_side_by_side_share_one_span():
    rate = ReadRate(NOTHING_FIXED)
    for span in range(CLASS_READS_MIN):
        for _ in range(4):
            rate.begin(span)
        for number in range(4):
            rate.end(span + 0.1 * (number + 1), 100)
    assert learned(rate) == pytest.approx(400 / 0.4)


def test_the_time_between_spans_does_not_count():
    rate = ReadRate(NOTHING_FIXED)
    for began_s in (0.0, 100.0, 5_000.0):
        rate.begin(began_s)
        rate.end(began_s + 0.25, 250)
    assert learned(rate) == pytest.approx(1_000)


def test_a_read_that_fails_brings_no_bytes_and_costs_its_time():
    rate = ReadRate(NOTHING_FIXED)
    for span in range(CLASS_READS_MIN):
        rate.begin(span)
        rate.begin(span)
        rate.end(span + 0.2, 0)
        rate.end(span + 0.4, 100)
    assert learned(rate) == pytest.approx(250)
    for span in range(10, 20):
        rate.begin(span)
        rate.end(span + 1.0, 0)
    assert learned(rate) == pytest.approx(250), "no bytes: no measurement"


def test_a_drive_that_is_never_idle_is_measured_all_the_same():
    rate = ReadRate(NOTHING_FIXED)
    rate.begin(0.0)
    for number in range(1, 17):
        rate.begin(number * SPAN_MAX_S / 2 - 0.01)
        rate.end(number * SPAN_MAX_S / 2, 1_000)
    assert learned(rate) == pytest.approx(2_000 / SPAN_MAX_S)


def test_a_read_of_no_measurable_time_is_no_measurement():
    rate = ReadRate()
    for _ in range(CLASS_READS_MIN):
        rate.begin(3.0)
        rate.end(3.0, 100)
    assert rate.cost == BELIEVED


def test_short_spans_tell_the_fixed_part_and_long_ones_the_rate():
    rate = ReadRate()
    for chunks in (1, 16) * CLASS_READS_MIN:
        now_s = 10.0 * chunks
        rate.begin(now_s)
        rate.end(now_s + 0.02 + chunks * 0.004, chunks << 25)
    assert rate.cost.fixed_s == pytest.approx(0.02)
    assert learned(rate) == pytest.approx((1 << 25) / 0.004)
