"""The matrix says what the table says, of any fleet and any reply."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.placements import NO_MATCH, Reach, ReachTable, pack_holders
from directory.tiers import Tier
from gateway import reach_matrix
from gateway.reach_matrix import ReachMatrix

UNHASHED = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
"""Times a small number: a name whose hash is that number, so that all of these fall into one bucket."""
LIVES = [
    *(random.Random(number).randbytes(8) for number in range(6)),
    *(number.to_bytes(8, "little") for number in range(3)),
    *((UNHASHED * number % (1 << 64)).to_bytes(8, "little") for number in range(1, 5)),
]
LIFE = st.sampled_from(LIVES)
STRANGERS = random.Random(99)
REACHES = st.lists(
    st.builds(
        Reach,
        st.sampled_from([f"engine-{number}" for number in range(6)]),
        st.frozensets(LIFE, max_size=3),
        st.frozensets(LIFE, max_size=3),
    ),
    max_size=6,
)
"""Engines with several lives and shared hosts; now and then two rows of one engine, or a life of both kinds."""
HOLDERS = st.lists(st.tuples(LIFE, st.integers(0, 255)), max_size=8)
"""Masks of tiers that don't exist, lives of nobody known here, and the same life twice."""
RECORD = st.none() | st.builds(lambda holders, torn: pack_holders(holders) + torn, HOLDERS, st.binary(max_size=8))
RECORDS = st.lists(RECORD, max_size=12) | st.lists(RECORD, min_size=1, max_size=3).flatmap(
    lambda few: st.lists(st.sampled_from(few), max_size=40)
)


@contextmanager
def cut_small(holders_max: int = 1 << 14, cells_max: int = 1 << 18) -> Iterator[None]:
    """Nothing is left to the table, and what is read at once is bounded by these."""
    with (
        patch.object(reach_matrix, "PLAIN_HOLDERS_MAX", -1),
        patch.object(reach_matrix, "HOLDERS_MAX", holders_max),
        patch.object(reach_matrix, "CELLS_MAX", cells_max),
    ):
        yield


def assert_alike(reaches: list[Reach], records: list[bytes | None]) -> None:
    expected, found = ReachTable(reaches).match(records), ReachMatrix(reaches).match(records)
    assert found == expected
    assert all(tier is None or isinstance(tier, Tier) for match in found.values() for tier in match.tiers)


@given(reaches=REACHES, records=RECORDS, holders_max=st.integers(1, 40), cells_max=st.integers(1, 200))
def test_the_matrix_says_what_the_table_says(
    reaches: list[Reach], records: list[bytes | None], holders_max: int, cells_max: int
) -> None:
    with cut_small():
        assert_alike(reaches, records)
    with cut_small(holders_max, cells_max):
        assert_alike(reaches, records)


@given(seed=st.integers(0, 1 << 32), chunks=st.integers(1, 60), unknown=st.sampled_from([0.0, 0.2]))
def test_a_fleet_whose_runs_end_everywhere_is_matched_alike(seed: int, chunks: int, unknown: float) -> None:
    chance = random.Random(seed)
    hosts = [frozenset(chance.randbytes(8) for _ in range(chance.choice((1, 1, 2)))) for _ in range(4)]
    reaches = [
        Reach(f"engine-{number}", frozenset(chance.randbytes(8) for _ in range(chance.choice((0, 1, 2)))), host)
        for number, host in enumerate(hosts * 4)
    ]
    lives = [life for reach in reaches for life in reach.own] + [life for host in hosts for life in host]
    records: list[bytes | None] = []
    for _ in range(chunks):
        lives = [life for life in lives if chance.random() < 0.97]
        holders = [(life, chance.choice((1, 2, 4, 6, 7))) for life in chance.sample(lives, len(lives))]
        records.append(None if chance.random() < unknown else pack_holders(holders))
    with cut_small(cells_max=chance.choice((50, 1000, 1 << 18))):
        assert_alike(reaches, records)
    assert_alike(reaches, records)


def test_a_thousand_lives_in_every_order_are_told_apart() -> None:
    chance = random.Random(7)
    lives = [chance.randbytes(8) for _ in range(1000)]
    reaches = [
        Reach(f"engine-{number}", frozenset({lives[number]}), frozenset({lives[500 + number // 8]}))
        for number in range(500)
    ]
    records: list[bytes | None] = [
        pack_holders((life, chance.choice((1, 2, 4, 6))) for life in chance.sample(lives, 1000 - 60 * place))
        for place in range(8)
    ]
    assert_alike(reaches, records)


@pytest.mark.parametrize("table", [ReachTable, ReachMatrix])
def test_nobody_reaches_what_nobody_of_the_fleet_holds(table: type[ReachTable] | type[ReachMatrix]) -> None:
    strangers = [pack_holders((STRANGERS.randbytes(8), 7) for _ in range(40)) for _ in range(9)]
    assert table([Reach("engine", frozenset({LIVES[0]}), frozenset())]).match(strangers) == {}
    assert table([]).match(strangers) == {}


def test_engines_that_reach_alike_share_what_is_said_of_them() -> None:
    reaches = [Reach(f"engine-{number}", frozenset(), frozenset({LIVES[0]})) for number in range(3)]
    with cut_small():
        found = ReachMatrix(reaches).match([pack_holders([(LIVES[0], place % 2 + 2)]) for place in range(9)])
    assert found["engine-0"] is found["engine-1"] is found["engine-2"]
    assert found.get("engine-3", NO_MATCH).chunks == 0


def test_a_matrix_is_built_once_and_asked_often() -> None:
    reaches = [Reach("engine", frozenset({LIVES[0]}), frozenset({LIVES[1]}))]
    table = ReachMatrix(reaches)
    first = [pack_holders([(LIVES[0], 1)])] * 3 + [pack_holders([(LIVES[1], 4)])]
    with cut_small():
        assert table.match(first) == table.match(first) == ReachTable(reaches).match(first)
        assert table.match(first[:1])["engine"].tiers == (Tier.GPU,)


def test_a_life_that_stands_in_a_record_twice_holds_it_in_the_tiers_of_both() -> None:
    reaches = [Reach("engine", frozenset(), frozenset({LIVES[0]}))]
    twice = [pack_holders([(LIVES[0], first), (LIVES[0], 7 - first)]) for first in (1, 2, 3, 4, 5)]
    with cut_small():
        assert_alike(reaches, [*twice])
        assert ReachMatrix(reaches).match(twice)["engine"].tiers == (Tier.DRAM,) * 5


def test_what_a_stranger_holds_serves_no_engine_that_has_fewer_lives_than_others() -> None:
    several, one = Reach("several", frozenset(LIVES[:3]), frozenset()), Reach("one", frozenset(LIVES[:1]), frozenset())
    gone = Reach("gone", frozenset(LIVES[3:4]), frozenset())
    begun = pack_holders([(LIVES[0], 1), (LIVES[3], 1)])
    with cut_small(holders_max=2):
        found = ReachMatrix([several, one, gone]).match(
            [begun, pack_holders([(LIVES[0], 1)]), pack_holders([(LIVES[1], 1), (STRANGERS.randbytes(8), 1)])]
        )
    assert {engine: match.chunks for engine, match in found.items()} == {"several": 3, "one": 2, "gone": 1}
