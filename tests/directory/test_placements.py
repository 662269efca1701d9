"""Records and matched prefixes."""

from hypothesis import given
from hypothesis import strategies as st

from directory.placements import Reach, ReachTable, matched_prefixes, pack_holders, unpack_holders
from directory.tiers import Tier, fastest, tier_names
from tests.directory.fleet_samples import incarnation

LIVES = [incarnation(number) for number in range(5)]
HOLDERS = st.dictionaries(st.sampled_from(LIVES), st.integers(1, 15), max_size=5)
FEW_RECORDS = st.lists(st.none() | HOLDERS, min_size=1, max_size=4)
RECORDS = st.lists(st.none() | HOLDERS, max_size=8) | FEW_RECORDS.flatmap(
    lambda few: st.lists(st.sampled_from(few), max_size=40)
)
"""Short ones of anything, and long ones in which the same holders come again, as in a real prompt."""
REACHES = st.lists(
    st.tuples(st.frozensets(st.sampled_from(LIVES), max_size=2), st.frozensets(st.sampled_from(LIVES), max_size=2)),
    max_size=4,
)


def plain_match(records: list[dict[bytes, int] | None], reach: Reach) -> tuple[Tier | None, ...]:
    """The definition, read plainly: the run from 0 of positions not known to be empty, cut after its last held one."""
    run: list[Tier | None] = []
    for record in records:
        if record is None:
            run.append(None)
            continue
        tiers = {Tier.GPU for own in reach.own if record.get(own, 0) & Tier.GPU}
        for tier in (Tier.DRAM, Tier.NVME):
            tiers |= {tier for host in reach.host if record.get(host, 0) & tier}
        if not tiers:
            break
        run.append(min(tiers))
    held = [position for position, tier in enumerate(run) if tier is not None]
    return tuple(run[: held[-1] + 1]) if held else ()


def shuffled(record: dict[bytes, int], place: int) -> bytes:
    """The record in another order at each place, some with a torn end: its order means nothing."""
    pairs = list(record.items())
    turned = place % (len(pairs) or 1)
    return pack_holders(pairs[turned:] + pairs[:turned]) + b"torn" * (place % 2)


@given(pairs=st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.integers(0, 255))), torn=st.binary(max_size=8))
def test_a_record_is_read_as_it_was_packed_and_a_torn_end_is_left_out(
    pairs: list[tuple[bytes, int]], torn: bytes
) -> None:
    assert unpack_holders(pack_holders(pairs)) == pairs
    assert unpack_holders(pack_holders(pairs) + torn) == pairs


@given(records=RECORDS, reaches=REACHES)
def test_matches_are_what_the_definition_says(
    records: list[dict[bytes, int] | None], reaches: list[tuple[frozenset[bytes], frozenset[bytes]]]
) -> None:
    fleet = [Reach(f"engine-{number}", *lives) for number, lives in enumerate(reaches)]
    packed = [None if record is None else shuffled(record, place) for place, record in enumerate(records)]
    found = matched_prefixes(packed, fleet)
    expected = {reach.engine: plain_match(records, reach) for reach in fleet}
    assert {engine: match.tiers for engine, match in found.items()} == {
        engine: tiers for engine, tiers in expected.items() if tiers
    }
    assert all(match.chunks == len(expected[engine]) for engine, match in found.items())


def test_a_table_answers_alike_however_often_it_is_asked() -> None:
    table = ReachTable([REACH])
    assert table.match([HELD, HELD]) == table.match([HELD, HELD]) == matched_prefixes([HELD, HELD], [REACH])
    assert table.match([HELD])["engine"].chunks == 1


def test_a_thousand_holders_are_all_told_apart() -> None:
    lives = [incarnation(number) for number in range(1000)]
    fleet = [Reach(f"engine-{number}", frozenset((life,)), frozenset()) for number, life in enumerate(lives)]
    records = [pack_holders((life, int(Tier.GPU)) for life in lives[place:]) for place in range(0, 1000, 100)]
    found = ReachTable(fleet).match(records)
    assert [found[f"engine-{number}"].chunks for number in range(1000)] == [1 + number // 100 for number in range(1000)]


ENGINE, HOST, STRANGER = LIVES[:3]
REACH = Reach("engine", frozenset((ENGINE,)), frozenset((HOST,)))
HELD = pack_holders([(HOST, Tier.DRAM)])


def match(*records: bytes | None) -> tuple[Tier | None, ...]:
    found = matched_prefixes(records, [REACH])
    return found["engine"].tiers if found else ()


def test_a_hole_ends_the_prefix() -> None:
    assert match(HELD, b"", HELD) == (Tier.DRAM,)
    assert match(b"", HELD) == ()


def test_another_ones_copy_is_a_hole() -> None:
    assert match(HELD, pack_holders([(STRANGER, 7)]), HELD) == (Tier.DRAM,)


def test_the_unknown_neither_ends_a_run_nor_lengthens_it() -> None:
    assert match(None, HELD, None, HELD, None, None) == (None, Tier.DRAM, None, Tier.DRAM)
    assert match(HELD, None, b"", HELD) == (Tier.DRAM,)
    assert match(None, None) == ()


def test_a_chunk_counts_in_the_fastest_tier_of_engine_and_host() -> None:
    both = pack_holders([(HOST, Tier.DRAM | Tier.NVME), (ENGINE, Tier.GPU)])
    assert match(both, HELD, pack_holders([(HOST, Tier.NVME)])) == (Tier.GPU, Tier.DRAM, Tier.NVME)


def test_an_engine_has_no_dram_and_a_host_no_gpu() -> None:
    assert match(pack_holders([(ENGINE, Tier.DRAM | Tier.NVME), (HOST, Tier.GPU)])) == ()


def test_two_lives_of_one_host_are_one_during_a_walk() -> None:
    reach = Reach("engine", frozenset(), frozenset((HOST, STRANGER)))
    walked = [pack_holders([(STRANGER, Tier.NVME)]), HELD]
    assert matched_prefixes(walked, [reach])["engine"].tiers == (Tier.NVME, Tier.DRAM)


@given(mask=st.integers(0, 255))
def test_the_fastest_tier_is_the_lowest_known_bit(mask: int) -> None:
    known = [tier for tier in (Tier.GPU, Tier.DRAM, Tier.NVME, Tier.SHARED) if mask & tier]
    assert fastest(mask) == (known[0] if known else None)
    assert tier_names(mask) == tuple(tier.label for tier in known)
