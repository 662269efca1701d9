"""The index in columns against plain dicts and `eviction.Lru`; and what a chunk in it costs."""

import hashlib
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nodeagent.labels import ChunkLabel
from nodeagent.tiers import key_table, nvme_index, sorted_runs
from nodeagent.tiers.chunk_file import FileHeader, file_bytes
from nodeagent.tiers.eviction import Lru
from nodeagent.tiers.found_files import FoundFile, FoundFiles
from nodeagent.tiers.key_table import NO_ROW, KeyTable
from nodeagent.tiers.nvme_index import NvmeEntry, NvmeIndex, order_of_use
from tests.nodeagent.running import storage_key

LENGTH = 5_000
CHUNK_BYTES_MAX = 300
"""What a chunk may cost, in memory."""
CHAINS = 3
DEPTH = 5
NAMES = [(chain, position) for chain in range(CHAINS) for position in range(DEPTH)]
COLLIDING = [bytes([number % 2]) + bytes(7) + bytes([number]) + bytes(23) for number in range(40)]
"""Keys with one of two homes."""
CROWDED = [hashlib.sha256(b"%d" % number).digest() for number in range(100)]
CROWDED += [bytes(3) + key for key in CROWDED]
"""Keys of which half have their first bits in common."""
ROWS = 256


def chunk(chain, position, *, is_labelled=True):
    key = storage_key(f"{chain}-{position}")
    parent = storage_key(f"{chain}-{position - 1}") if position else None
    # Chains 0 and 1 share their labels, as two shards of a chunk do.
    directory_key = hashlib.sha256(f"{max(chain, 1)}-{position}".encode()).digest()[:16]
    return ChunkLabel(key, directory_key if is_labelled else None, parent, position)


def entry(label, identity=b"i" * 32):
    return NvmeEntry(label, identity, LENGTH, label.storage_key[:16])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(COLLIDING)), max_size=200))
def test_a_key_table_is_a_dict_whatever_collides_and_is_removed(steps):
    column = bytearray(b"".join(COLLIDING))
    table, model = KeyTable(column, 32), set()
    for is_added, key in steps:
        row = COLLIDING.index(key)
        if is_added and key not in model:
            table.add(row)
            model.add(key)
        elif not is_added and key in model:
            table.remove(row)
            model.discard(key)
        assert [table.find(each) for each in COLLIDING] == [
            number if each in model else NO_ROW for number, each in enumerate(COLLIDING)
        ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(CROWDED) - 1), max_size=300, unique=True), st.randoms())
def test_a_key_table_whose_tables_are_split_again_and_again_is_a_dict(rows, random):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_table, "PLACES_MAX", 8)
        patch.setattr(key_table, "BITS_MAX", 5)
        column = bytearray(b"".join(key[:32] for key in CROWDED))
        table, held = KeyTable(column, 32), set()
        for row in rows:
            table.add(row)
            held.add(row)
            if random.random() < 0.3:
                gone = random.choice(sorted(held))
                table.remove(gone)
                held.discard(gone)
        copied = table.copy(bytearray(column))
        for row, key in enumerate(CROWDED):
            expected = row if row in held else NO_ROW
            assert table.find(key[:32]) == copied.find(key[:32]) == expected


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "unlabelled", "learn", "touch", "drop", "evict"]), st.sampled_from(NAMES)),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_the_index_orders_as_lru_does_and_announces_what_it_holds(steps):
    announced, policy, model = {}, Lru(), {}
    index = NvmeIndex(announced.__setitem__)
    for what, name in steps:
        label = chunk(*name)
        key = label.storage_key
        if what in ("add", "unlabelled"):
            model[key] = label = chunk(*name, is_labelled=what == "add")
            index.add(entry(label))
            policy.remove(key)
            policy.add(key, label.parent, label.position)
        elif key not in model:
            assert key not in index
            assert index.get(key) is None
        elif what == "learn" and model[key].directory_key is None:
            model[key] = label
            index.set_label(index.get(key), label)
            policy.remove(key)
            policy.add(key, label.parent, label.position)
        elif what == "touch":
            index.touch(key)
            policy.touch(key)
        elif what == "drop":
            assert index.drop(index.get(key))
            policy.remove(key)
            del model[key]
        elif what == "evict":
            (victim,) = index.take_victims(1, 10)
            assert [victim.label.storage_key] == policy.take_victims(1, lambda _: False)
            del model[victim.label.storage_key]
        assert {each.label.storage_key: each.label for each in index.entries()} == model
        assert [each.label.storage_key for each in index.entries()] == list(policy._links)
        labels = {label.directory_key for label in model.values() if label.directory_key is not None}
        assert {directory_key for directory_key, mask in announced.items() if mask} == labels
        assert set(index.directory_keys(0, 1_000)) == labels
        for directory_key in labels:
            holders = {key for key, label in model.items() if label.directory_key == directory_key}
            assert set(index.storage_keys(directory_key)) == holders


def test_what_was_written_anew_is_not_dropped_for_what_was_there_before():
    index = NvmeIndex(lambda key, mask: None)
    index.add(entry(chunk(0, 0)))
    before = index.get(chunk(0, 0).storage_key)
    index.add(entry(chunk(0, 0)))
    assert not index.drop(before)
    assert index.get(chunk(0, 0).storage_key) is not None


def test_a_row_is_used_again_and_knows_its_own_identity():
    index = NvmeIndex(lambda key, mask: None)
    for number in range(ROWS):
        identity = number.to_bytes(32, "little")
        index.add(entry(chunk(0, number), identity))
        assert index.get(chunk(0, number).storage_key) == NvmeEntry(
            chunk(0, number), identity, LENGTH, chunk(0, number).storage_key[:16], number + 1
        )
        if number % 3:
            index.drop(index.get(chunk(0, number).storage_key))
    assert len(index._serials) == ROWS // 3 + 1


def test_what_chunks_share_is_kept_once_and_goes_with_the_last_of_them():
    index = NvmeIndex(lambda key, mask: None)
    tagged = [replace(chunk(0, number), salt_tag=bytes([number % 2]) * 16) for number in range(4)]
    for label in tagged:
        index.add(entry(label))
    assert [index.get(label.storage_key).label for label in tagged] == tagged
    assert len(index._known_origins) == 2
    for label in tagged[::2]:
        index.drop(index.get(label.storage_key))
    assert len(index._known_origins) == 1
    index.add(entry(replace(tagged[0], salt_tag=b"z" * 16)))
    assert index.get(tagged[0].storage_key).label.salt_tag == b"z" * 16
    assert len(index._known_origins._values) == 2


def test_a_tag_that_becomes_known_is_kept_with_its_chunk():
    index = NvmeIndex(lambda key, mask: None)
    index.add(entry(chunk(0, 0)))
    known = index.get(chunk(0, 0).storage_key)
    index.set_label(known, replace(known.label, salt_tag=b"t" * 16))
    assert index.get(chunk(0, 0).storage_key).label.salt_tag == b"t" * 16
    assert index.get(chunk(0, 0).storage_key).identity == known.identity


def test_found_files_go_oldest_first_and_each_once():
    files = FoundFiles()
    for number, modified_s in enumerate([3.0, 1.0, 2.0]):
        files.append(storage_key(f"f{number}"), number + 1, modified_s)
    files.append(storage_key("f0"), 99, 0.5)
    files.sort()
    assert [found.modified_s for found in files] == [3.0, 2.0, 1.0], "a name counts once"
    assert files.total_bytes == 6
    assert files.stretch(1, 1) == [FoundFile(storage_key("f2"), 3, 2.0)]
    assert files.take(storage_key("f1")) == 2
    assert files.take(storage_key("f1")) == 0
    assert files.take_oldest() == (storage_key("f2"), 3)
    assert files.take_oldest() == (storage_key("f0"), 1)
    assert files.take_oldest() is None
    assert files.listed == 0


@given(st.lists(st.integers(0, 5), max_size=60), st.booleans())
def test_sorted_runs_are_what_sorted_gives(ages, reverse):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_runs, "RUN_ROWS", 7)
        found = sorted_runs.sorted_rows(range(len(ages)), ages.__getitem__, reverse=reverse)
    assert list(found) == sorted(range(len(ages)), key=ages.__getitem__, reverse=reverse)


@pytest.mark.parametrize("count", [5_000])
def test_a_chunk_costs_less_than_300_bytes_of_memory(count):
    files = FoundFiles()
    tracemalloc.start()
    try:
        index = NvmeIndex(lambda key, mask: None)
        index.list_files(files)
        for number in range(count):
            key = hashlib.sha256(b"%d" % number).digest()
            parent = hashlib.sha256(b"%d" % (number - 1)).digest()
            label = ChunkLabel(key, key[:16], parent, number)
            index.restore(FileHeader(label, b"i" * 32, LENGTH, key[16:]), float(number))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.used_bytes == count * file_bytes(LENGTH)
    assert used / count < CHUNK_BYTES_MAX


def restored(names):
    """An index as headers that were read left it: in no order that means anything."""
    index = NvmeIndex(lambda key, mask: None)
    index.list_files(FoundFiles())
    for age, name in enumerate(names):
        label = chunk(*name)
        index.restore(FileHeader(label, b"i" * 32, LENGTH, label.storage_key[:16]), float(age % 3))
    return index


@settings(max_examples=200, deadline=None)
@given(
    st.permutations(NAMES),
    st.lists(st.tuples(st.sampled_from(["add", "touch", "drop", "nothing"]), st.sampled_from(NAMES)), max_size=60),
)
def test_no_parent_is_older_than_its_child_whatever_happens_while_a_start_is_put_in_order(names, changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_index, "COPY_STEP_ITEMS", 40)
        index, pending = restored(names[: len(names) - 3]), list(changes)

        def change():
            what, name = pending.pop() if pending else ("nothing", NAMES[0])
            held = index.get(chunk(*name).storage_key)
            if what == "add":
                index.add(entry(chunk(*name)))
            elif what == "touch":
                index.touch(chunk(*name).storage_key)
            elif what == "drop" and held is not None:
                index.drop(held)

        copying = index.account_of_use()
        account = next(copying)
        for _ in copying:
            change()
        ordered = order_of_use(account)
        change()
        for start in range(0, len(ordered.rows), 4):
            index.put_in_order(ordered, start, 4)
            change()
        index.end_restoring()
    seen = [each.label for each in index.entries()]
    place = {label.storage_key: number for number, label in enumerate(seen)}
    assert len(seen) == len(index)
    for label in seen:
        if label.parent in place:
            assert place[label.parent] > place[label.storage_key]
