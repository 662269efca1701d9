from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from directory.identity import UNSCOPED
from nodeagent.engines.vllm.events import Batch
from nodeagent.engines.vllm.gpu_table import GpuTable
from nodeagent.engines.vllm.saved_table import CHECKSUM_BYTES, MAGIC, SavedTable, dump_table, load_table
from tests.nodeagent.engines.vllm.recorded import stored

FLEET = b"\x01" * 32
KNOWN: dict[str, Any] = {"life": b"life", "fleet_digest": FLEET, "chunk_tokens": 4, "adapters": {}.get}


def saved() -> SavedTable:
    """A chunk and a half, and a block that waits for its parent."""
    table = GpuTable(FLEET, 4, {}.get)
    stray = stored([b"z"], [7, 7], parent=b"unknown")
    table.apply(Batch(events=(stored([b"a", b"b", b"c"], [1, 2, 3, 4, 5, 6]), stray)))
    return SavedTable(table, 12, b"digest 8")


DATA = dump_table(saved(), b"life")


def test_a_table_comes_back_as_it_was() -> None:
    before, after = saved(), load_table(DATA, **KNOWN)
    assert after is not None
    assert (after.next_sequence, after.last_digest) == (12, b"digest 8")
    assert after.table.held == before.table.held
    assert after.table.labels() == before.table.labels()
    assert after.table.groups[0].copies == before.table.groups[0].copies
    assert dump_table(after, b"life") == DATA


def test_a_block_of_a_chunk_that_was_not_full_is_cold_until_it_is_seen_again() -> None:
    tail = Batch(events=(stored([b"d"], [7, 8], parent=b"c"),))
    cold, warm = load_table(DATA, **KNOWN), load_table(DATA, **KNOWN)
    assert cold is not None
    assert warm is not None
    assert not cold.table.apply(tail), "its midstate isn't in the file"
    assert not warm.table.warm(Batch(events=(stored([b"a", b"b", b"c"], [1, 2, 3, 4, 5, 6]),)))
    assert warm.table.apply(tail).stored == saved().table.apply(tail).stored != ()
    assert cold.table.warm(Batch(events=(stored([b"c"], [5, 6], parent=b"b"), *tail.events))).stored


def test_a_table_of_an_earlier_release_has_no_salt_tags_and_is_read() -> None:
    body = msgspec.msgpack.decode(DATA[len(MAGIC) + CHECKSUM_BYTES :])
    before, after = load_table(DATA, **KNOWN), load_table(sealed(body[:TAGS]), **KNOWN)
    assert before is not None
    assert after is not None
    assert [label.salt_tag for label in before.table.labels()] == [UNSCOPED.salt_tag]
    assert [label.salt_tag for label in after.table.labels()] == [None]
    assert after.table.held == before.table.held


def test_what_was_refused_stays_refused() -> None:
    table = GpuTable(FLEET, 4, {}.get)
    table.apply(Batch(events=(stored([1, 2], [1, 2, 3, 4]), stored([1, 2], [5, 6, 7, 8]))))
    loaded = load_table(dump_table(SavedTable(table, 1, b"digest 8"), b"life"), **KNOWN)
    assert loaded is not None
    assert (table.held, loaded.table.held) == (frozenset(), frozenset())


def test_no_token_ids_are_in_the_file() -> None:
    table = GpuTable(FLEET, 4, {}.get)
    table.apply(Batch(events=(stored([b"a", b"b", b"c"], list(range(0x01020304, 0x0102030A))),)))
    data = dump_table(SavedTable(table, 1, b"digest 8"), b"life")
    assert b"\x03\x02\x01" not in data
    assert b"\x01\x02\x03" not in data


@pytest.mark.parametrize(
    "other",
    [{"life": b"next"}, {"fleet_digest": b"\x02" * 32}, {"chunk_tokens": 8}, {"entries_max": 3}],
    ids=lambda other: next(iter(other)),
)
def test_a_table_of_something_else_is_empty(other: dict[str, Any]) -> None:
    assert load_table(DATA, **(KNOWN | other)) is None


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_damaged_byte_is_noticed(place: int, change: int) -> None:
    damaged = bytearray(DATA)
    damaged[place] ^= change
    assert load_table(bytes(damaged), **KNOWN) is None


@given(st.integers(0, len(DATA) - 1) | st.binary(max_size=60))
def test_a_file_cut_short_or_of_anything_is_empty(what: int | bytes) -> None:
    assert load_table(DATA[:what] if isinstance(what, int) else what, **KNOWN) is None


LIFE, NEXT, DIGEST, GROUPS, HASHES, PARENTS, KEYS, REFUSED, TAGS, NUMBERS = 0, 3, 4, 7, 8, 9, 10, 11, 12, 13
UNSOUND: dict[str, Callable[[list[Any]], object]] = {
    "a field more": lambda body: body.append(1),
    "a sequence of none": lambda body: body.__setitem__(NEXT, 0),
    "a short digest": lambda body: body.__setitem__(DIGEST, b"x"),
    "a parent after its child": lambda body: body[PARENTS].__setitem__(0, 1),
    "a hash twice": lambda body: body[HASHES].__setitem__(0, body[HASHES][1]),
    "a key that is short": lambda body: body[KEYS].__setitem__(1, b"short"),
    "a refused block that isn't there": lambda body: body[REFUSED].append(99),
    "a column that is short": lambda body: body[PARENTS].pop(),
    "a count below nothing": lambda body: body[GROUPS][0][4].__setitem__(0, -1),
    "a loose count of none": lambda body: body[GROUPS][0][5][0].__setitem__(1, 0),
    "a tag that is short": lambda body: body[TAGS].__setitem__(0, b"short"),
    "a tag that isn't there": lambda body: body[NUMBERS].__setitem__(0, 7),
    "numbers of tags for some": lambda body: body[NUMBERS].pop(),
    "no groups": lambda body: body[GROUPS].clear(),
    "a block size that doesn't divide": lambda body: body[GROUPS][0].__setitem__(3, 3),
    "a window of nothing": lambda body: body[GROUPS][0].__setitem__(2, 0),
}


@pytest.mark.parametrize("spoil", UNSOUND.values(), ids=UNSOUND.keys())
def test_columns_that_do_not_fit_are_refused_whatever_the_checksum_says(spoil: Callable[[list[Any]], object]) -> None:
    body = msgspec.msgpack.decode(DATA[len(MAGIC) + CHECKSUM_BYTES :])
    assert load_table(sealed(body), **KNOWN) is not None
    spoil(body)
    assert load_table(sealed(body), **KNOWN) is None


def sealed(body: list[Any]) -> bytes:
    encoded = msgspec.msgpack.encode(body)
    return MAGIC + xxhash.xxh3_128_digest(encoded) + encoded
