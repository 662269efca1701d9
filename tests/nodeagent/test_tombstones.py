"""What a tombstone meets, for how long, and what is kept of it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.errors import TombstonesFull, TombstonesUnreadable
from nodeagent.labels import ChunkLabel
from nodeagent.tiers import tombstones as module
from nodeagent.tiers.tombstone_file import NAME, StateFolder
from nodeagent.tiers.tombstones import KEEP_S, Tombstone, Tombstones, load_tombstones
from tests.nodeagent.running import storage_key

NOW_S, UNTIL_S = 1_000.0, 4_600.0
ONE, OTHER = b"1" * 32, b"2" * 32
TAG, OTHER_TAG = b"t" * 16, b"u" * 16
KEY = storage_key("a")[:16]

DIGESTS = st.binary(min_size=32, max_size=32).filter(any)
CUTS = st.binary(min_size=16, max_size=16)
TOMBSTONES = st.builds(
    Tombstone,
    CUTS,
    st.floats(0, 1e12),
    st.frozensets(DIGESTS, max_size=3),
    st.none() | CUTS,
    st.frozensets(CUTS, max_size=5),
    st.sets(CUTS, max_size=5),
)


def book(*tombstones, now=NOW_S, **bounds):
    made = Tombstones(lambda: now, **bounds)
    for each in tombstones:
        made.add(each)
    return made


def stone(number=1, until_s=UNTIL_S, **what):
    return Tombstone(bytes([number]) * 16, until_s, **what)


def chunk(name="a", parent=None, tag=None, is_labelled=True):
    key = storage_key(name)
    return ChunkLabel(key, key[:16] if is_labelled else None, storage_key(parent) if parent else None, 0, tag)


@pytest.mark.parametrize(
    ("what", "label", "identity", "is_met"),
    [
        ({"identities": frozenset([ONE])}, chunk(), ONE, True),
        ({"identities": frozenset([ONE])}, chunk(), OTHER, False),
        ({"identities": frozenset([ONE])}, chunk(tag=TAG), ONE, True),
        ({"salt_tag": TAG}, chunk(tag=TAG), ONE, True),
        ({"salt_tag": TAG}, chunk(tag=OTHER_TAG), ONE, False),
        ({"salt_tag": TAG}, chunk(), ONE, False),
        ({"salt_tag": TAG, "identities": frozenset([ONE])}, chunk(tag=TAG), ONE, True),
        ({"salt_tag": TAG, "identities": frozenset([ONE])}, chunk(tag=TAG), OTHER, False),
        ({"salt_tag": TAG, "identities": frozenset([ONE])}, chunk(tag=OTHER_TAG), ONE, False),
        ({"directory_keys": frozenset([KEY])}, chunk(), ONE, True),
        ({"directory_keys": frozenset([KEY])}, chunk(is_labelled=False), ONE, False),
        ({"directory_keys": frozenset([KEY])}, chunk("b"), ONE, False),
        ({"followers": {KEY}}, chunk(is_labelled=False), ONE, True),
        ({"followers": {KEY}}, chunk("b", "a"), ONE, True),
        ({"followers": {KEY}}, chunk("b", "c"), ONE, False),
    ],
)
def test_it_meets_what_it_names_and_what_comes_after(what, label, identity, is_met):
    assert (book(stone(**what)).find(label, identity) is not None) == is_met


def test_it_meets_what_was_written_before_its_end_and_nothing_later():
    made = book(stone(directory_keys=frozenset([KEY])), now=UNTIL_S + 1)
    assert made.find(chunk(), ONE, UNTIL_S - 1) is not None
    assert made.find(chunk(), ONE, UNTIL_S) is None
    early = book(stone(directory_keys=frozenset([KEY])), now=UNTIL_S - 1)
    assert early.find(chunk(), ONE, UNTIL_S + 1) is not None, "nothing was written in the future"
    assert book(stone(directory_keys=frozenset([KEY])), now=UNTIL_S).find(chunk(), ONE) is None
    assert book(stone(directory_keys=frozenset([KEY])), now=UNTIL_S).find(chunk(), ONE, 0.0) is not None


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_that_name_a_chunk_the_later_counts(order):
    stones = {1: stone(1, UNTIL_S, salt_tag=TAG), 2: stone(2, UNTIL_S + 100, identities=frozenset([ONE]))}
    made = book(*(stones[number] for number in order), now=UNTIL_S + 99)
    assert made.find(chunk(tag=TAG), ONE, UNTIL_S + 50) is stones[2]
    assert made.find(chunk(tag=TAG), OTHER, UNTIL_S + 50) is None
    others = {1: frozenset([KEY]), 2: frozenset([KEY, b"k" * 16])}
    keyed = book(
        *(stone(number, UNTIL_S + number, directory_keys=others[number]) for number in order), now=UNTIL_S + 99
    )
    assert keyed.find(chunk(), ONE, UNTIL_S + 1) is not None


def test_what_is_found_to_follow_is_remembered_with_what_follows_it():
    made = book(stone(directory_keys=frozenset([KEY])))
    assert made.find(chunk("c", "b"), ONE) is None
    assert made.follow(made.find(chunk(), ONE), storage_key("b")[:16])
    assert made.find(chunk("c", "b"), ONE) is not None
    assert load_tombstones(made.dump())[0].followers == {storage_key("b")[:16]}


def test_more_keys_than_can_be_remembered_are_refused_and_leave_nothing():
    made = book(stone(directory_keys=frozenset([KEY])), keys_max=2)
    with pytest.raises(TombstonesFull, match="identity or salt"):
        made.add(stone(2, directory_keys=frozenset([b"x" * 16, b"y" * 16])))
    assert (len(made), made.keys) == (1, 1)
    first = made.find(chunk(), ONE)
    assert made.follow(first, b"f" * 16)
    assert not made.follow(first, b"g" * 16)
    made.add(stone(3, identities=frozenset([ONE])))
    made.remove(first)
    assert (len(made), made.keys) == (1, 0)
    assert made.find(chunk(), OTHER) is None


def test_more_forgets_than_can_be_remembered_are_refused(monkeypatch):
    monkeypatch.setattr(module, "TOMBSTONES_MAX", 2)
    made = book(stone(1, salt_tag=TAG), stone(2, salt_tag=OTHER_TAG))
    with pytest.raises(TombstonesFull):
        made.add(stone(3, identities=frozenset([ONE])))


def test_long_after_its_end_it_goes():
    now = [NOW_S]
    made = Tombstones(lambda: now[0])
    made.add(stone(1, directory_keys=frozenset([KEY])))
    now[0] = UNTIL_S + KEEP_S
    made.sweep()
    assert len(made) == 1
    now[0] += 1
    made.sweep()
    assert (len(made), made.keys, made.find(chunk(), ONE, 0.0)) == (0, 0, None)


@given(st.lists(TOMBSTONES, max_size=4, unique_by=(lambda each: each.number, lambda each: each.names)))
def test_a_book_survives_its_bytes(stones):
    made = book(*stones, now=0.0)
    again = Tombstones(lambda: 0.0)
    assert again.merge(load_tombstones(made.dump())) == len(stones)
    fields = [
        {(each.number, each.until_s, *each.names, frozenset(each.followers)) for each in one._all.values()}
        for one in (made, again)
    ]
    assert fields[0] == fields[1]
    assert again.merge(load_tombstones(made.dump())) == 0


def test_two_copies_are_joined():
    one, two = book(stone(1, salt_tag=TAG)), book(stone(2, salt_tag=OTHER_TAG), stone(1, salt_tag=TAG, followers={KEY}))
    assert one.merge(load_tombstones(two.dump())) == 2
    assert one.is_grown
    assert one.find(chunk(is_labelled=False), OTHER) is not None
    assert one.find(chunk("z", tag=OTHER_TAG), OTHER) is not None


def test_what_is_forgotten_again_takes_the_place_of_the_first_and_knows_what_follows_it():
    first = stone(1, UNTIL_S, directory_keys=frozenset([KEY]), followers={b"f" * 16})
    made = book(first, stone(2, salt_tag=TAG), keys_max=3)
    again = stone(3, UNTIL_S + 5, directory_keys=frozenset([KEY]), followers={b"g" * 16})
    assert made.add(again) is first
    assert (len(made), made.keys, again.followers) == (2, 3, {b"f" * 16, b"g" * 16})
    assert made.of_follower(b"f" * 16) is again
    made.remove(again, first)
    assert (len(made), made.keys) == (2, 2)
    assert made.of_follower(b"f" * 16) is made.of_directory_key(KEY) is first
    assert made.of_follower(b"g" * 16) is None


def test_the_same_forgotten_a_hundred_thousand_times_is_remembered_once():
    made = book(keys_max=1)
    for number in range(100_000):
        made.add(Tombstone(number.to_bytes(16, "big"), UNTIL_S + number, directory_keys=frozenset([KEY])))
    assert (len(made), made.keys) == (1, 1)


def test_where_the_clock_was_set_back_the_one_that_ends_later_stays():
    made = book(stone(1, UNTIL_S, salt_tag=TAG))
    assert made.add(stone(2, UNTIL_S - 5, salt_tag=TAG)) is None
    assert made.find(chunk(tag=TAG), ONE).until_s == UNTIL_S


@pytest.mark.parametrize(("mine", "theirs"), [(5.0, 0.0), (0.0, 5.0)], ids=["known", "renewed there"])
def test_a_copy_that_names_the_same_is_joined_with_what_is_known(mine, theirs):
    made = book(stone(1, UNTIL_S + mine, salt_tag=TAG, followers={b"f" * 16}))
    other = book(stone(2, UNTIL_S + theirs, salt_tag=TAG, followers={b"g" * 16}))
    assert made.merge(load_tombstones(other.dump())) == 1
    assert (len(made), made.keys) == (1, 2)
    assert made.of_follower(b"f" * 16) is made.of_follower(b"g" * 16)
    assert made.of_follower(b"f" * 16).until_s == UNTIL_S + 5


def test_a_copy_that_says_more_than_can_be_remembered_is_not_passed_over():
    made = book(stone(1, salt_tag=TAG), keys_max=1)
    other = book(stone(1, salt_tag=TAG, followers={b"f" * 16, b"g" * 16}))
    with pytest.raises(TombstonesFull):
        made.merge(load_tombstones(other.dump()))
    with pytest.raises(TombstonesFull):
        made.merge(load_tombstones(book(stone(2, directory_keys=frozenset([KEY, b"k" * 16]))).dump()))
    assert made.merge(load_tombstones(book(stone(3, NOW_S - KEEP_S - 1, directory_keys=frozenset([KEY]))).dump())) == 0


DATA = book(stone(salt_tag=TAG, identities=frozenset([ONE]), directory_keys=frozenset([KEY]))).dump()


@given(st.integers(0, len(DATA) - 1), st.integers(0, 7))
def test_no_flipped_bit_goes_unseen(place, bit):
    data = bytearray(DATA)
    data[place] ^= 1 << bit
    with pytest.raises(TombstonesUnreadable):
        load_tombstones(bytes(data))


@given(st.integers(0, len(DATA) - 1) | st.binary(max_size=200))
def test_what_is_cut_short_or_garbage_is_unreadable(what):
    with pytest.raises(TombstonesUnreadable):
        load_tombstones(DATA[:what] if isinstance(what, int) else what)


def test_the_state_folder_is_made_when_there_is_something_to_keep(tmp_path, monkeypatch):
    folder = StateFolder(str(tmp_path / "deep" / "state"))
    assert folder.read_tombstones() is None
    assert not (tmp_path / "deep").exists()
    for data in (b"first", b"second and longer", b""):
        folder.write_tombstones(data)
        assert folder.read_tombstones() == data
    assert [path.name for path in (tmp_path / "deep" / "state").iterdir()] == [NAME]
    monkeypatch.setattr("nodeagent.tiers.tombstone_file.BOOK_BYTES_MAX", 3)
    folder.write_tombstones(b"1234")
    with pytest.raises(TombstonesUnreadable, match="more than 3 bytes"):
        folder.read_tombstones()


def test_a_folder_in_its_place_is_an_error_and_leaves_nothing_open(tmp_path):
    (tmp_path / NAME).mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IsADirectoryError):
        StateFolder(str(tmp_path)).read_tombstones()
    assert len(os.listdir("/proc/self/fd")) == before
