"""The fleet's table, taken apart: who is in it by the server's clock, and what no row is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.fleet_table import Row, newer_version, rows_of
from directory.members import REMEMBERED_S
from tests.directory.fleet_samples import incarnation

A, B = incarnation(1), incarnation(2)
NOW_MS = 1_764_500_000_000
REMEMBERED_MS = round(REMEMBERED_S * 1000)


def fields(times: bytes, life: bytes = A) -> dict[bytes, bytes]:
    return {b"r" + life: b"registration", b"l" + life: b"load", b"t" + life: times, b"swept": b"7"}


def test_a_row_counts_by_the_servers_clock() -> None:
    table = fields(b"%d:0" % (NOW_MS + 1500)) | fields(b"%d:%d" % (NOW_MS - 20, NOW_MS - 10), B)
    assert rows_of(table, NOW_MS) == [
        Row(A, b"registration", b"load", 1500, False),
        Row(B, b"registration", b"load", -20, True),
    ]


@pytest.mark.parametrize(
    ("expires_ms", "retired_ms", "remembered"),
    [
        (NOW_MS - REMEMBERED_MS, 0, True),
        (NOW_MS - REMEMBERED_MS - 1, 0, False),
        (NOW_MS + 5000, NOW_MS - REMEMBERED_MS, True),
        (NOW_MS + 5000, NOW_MS - REMEMBERED_MS - 1, False),
        (NOW_MS - REMEMBERED_MS - 1, NOW_MS - REMEMBERED_MS, True),
        (NOW_MS + 10**9, 0, True),
    ],
)
def test_who_ended_long_ago_is_left_out(expires_ms: int, retired_ms: int, remembered: bool) -> None:
    assert bool(rows_of(fields(b"%d:%d" % (expires_ms, retired_ms)), NOW_MS)) is remembered


@pytest.mark.parametrize(
    "times", [b"", b"x", b"1", b"1:", b":1", b"-1:0", b"1e5:0", b"1:2:3", b" 1:0", b"9" * 16 + b":0"]
)
def test_times_that_are_no_two_numbers_are_no_row(times: bytes) -> None:
    assert rows_of(fields(times), NOW_MS) == []


def test_what_a_life_does_not_say_is_empty() -> None:
    assert rows_of({b"t" + A: b"%d:0" % NOW_MS}, NOW_MS) == [Row(A, b"", b"", 0, False)]


@given(st.dictionaries(st.binary(max_size=10), st.binary(max_size=20)), st.integers(0, 2**45))
def test_any_hash_is_a_table(table: dict[bytes, bytes], now_ms: int) -> None:
    assert all(b"t" + row.incarnation in table for row in rows_of(table, now_ms))
    newer_version(table, "v1")


@pytest.mark.parametrize(
    ("versions", "newer"),
    [
        ({}, None),
        ({b"v1": b"5"}, None),
        ({b"v2": b"5"}, "v2"),
        ({b"v1": b"5", b"v2": b"5"}, None),
        ({b"v1": b"5", b"v2": b"6"}, "v2"),
        ({b"v1": b"7", b"v2": b"6"}, None),
        ({b"v2": b"x"}, None),
        ({b"v1": b"5", b"v2": b"6", b"v3": b"7"}, "v3"),
    ],
)
def test_another_version_counts_where_it_registered_last(versions: dict[bytes, bytes], newer: str | None) -> None:
    assert newer_version(versions, "v1") == newer
