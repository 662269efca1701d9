"""The drive's measured rate: bytes that came while it was busy, whoever asked for them."""

import pytest

from nodeagent.tiers.read_rate import BELIEVED_BYTES_PER_S, SPAN_MAX_S, WEIGHT, ReadRate


def test_until_a_read_was_seen_a_drive_is_believed_in():
    assert ReadRate().bytes_per_s == BELIEVED_BYTES_PER_S


def test_the_first_measurement_replaces_the_belief_and_later_ones_are_smoothed():
    rate = ReadRate()
    rate.begin(10.0)
    rate.end(10.5, 100)
    assert rate.bytes_per_s == pytest.approx(200)
    rate.begin(20.0)
    rate.end(20.5, 200)
    assert rate.bytes_per_s == pytest.approx(200 + WEIGHT * (400 - 200))


def test_reads_side_by_side_share_one_span():
    rate = ReadRate()
    for _ in range(4):
        rate.begin(0.0)
    for number in range(4):
        rate.end(0.1 * (number + 1), 100)
    assert rate.bytes_per_s == pytest.approx(400 / 0.4)


def test_the_time_between_spans_does_not_count():
    rate = ReadRate()
    for began_s in (0.0, 100.0, 5_000.0):
        rate.begin(began_s)
        rate.end(began_s + 0.25, 250)
    assert rate.bytes_per_s == pytest.approx(1_000)


def test_a_read_that_fails_brings_no_bytes_and_costs_its_time():
    rate = ReadRate()
    rate.begin(0.0)
    rate.begin(0.0)
    rate.end(0.2, 0)
    rate.end(0.4, 100)
    assert rate.bytes_per_s == pytest.approx(250)
    rate.begin(1.0)
    rate.end(2.0, 0)
    assert rate.bytes_per_s == pytest.approx(250), "no bytes: no measurement"


def test_a_drive_that_is_never_idle_is_measured_all_the_same():
    rate = ReadRate()
    rate.begin(0.0)
    for number in range(1, 9):
        rate.begin(number * SPAN_MAX_S / 2 - 0.01)
        rate.end(number * SPAN_MAX_S / 2, 1_000)
    assert rate.bytes_per_s == pytest.approx(2_000 / SPAN_MAX_S)


def test_a_read_of_no_measurable_time_is_no_measurement():
    rate = ReadRate()
    rate.begin(3.0)
    rate.end(3.0, 100)
    assert rate.bytes_per_s == BELIEVED_BYTES_PER_S
