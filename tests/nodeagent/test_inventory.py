import hashlib
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.placements import PARTITIONS, partition_of
from nodeagent import inventory as inventory_module
from nodeagent.inventory import Inventory, Walk

KEYS_MAX = 4
KEYS = [bytes([first, second]) + bytes(DIRECTORY_KEY_BYTES - 2) for first in (0, 0x17, 0xF0) for second in (1, 2)]
ONE_PARTITION = [bytes([number]) + bytes(DIRECTORY_KEY_BYTES - 1) for number in range(6)]
KEY_BYTES_MAX = 64
"""What an announced key may cost, in memory."""


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 3))))
def test_it_equals_a_plain_list_in_order_of_use(states):
    inventory, plain = Inventory(KEYS_MAX), []
    for key, mask in states:
        before = dict(plain).get(key, 0)
        is_refused = mask and not before and len(plain) == KEYS_MAX
        assert inventory.set(key, mask) == (mask != before and not is_refused)
        if not is_refused:
            plain = [each for each in plain if each[0] != key] + ([(key, mask)] if mask else [])
        for partition in range(PARTITIONS):
            kept = [key for key, _ in reversed(plain) if partition_of(key) == partition]
            assert inventory.newest_first(partition) == kept
            assert inventory.keys_in(partition) == len(kept)
        assert {key: inventory.mask(key) for key in inventory} == dict(plain)
        assert [inventory.held_in(tier) for tier in (1, 2)] == [
            sum(bool(mask & tier) for _, mask in plain) for tier in (1, 2)
        ]
        assert len(inventory) == len(plain) <= KEYS_MAX


WALKING = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from(ONE_PARTITION), st.integers(0, 2)),
        st.tuples(st.just("begin"), st.none(), st.none()),
        st.tuples(st.just("take"), st.none(), st.integers(1, 3)),
        st.tuples(st.just("lose"), st.none(), st.integers(1, 3)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(WALKING)
def test_a_walk_says_every_key_that_nobody_changes_and_none_that_was_said(steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inventory_module, "WALK_NUMBERS", 4)
        inventory, walk, again, unsaid = Inventory(100), Walk(), [], []
        for what, key, number in steps:
            if what == "set":
                unsaid = [each for each in unsaid if each != key or inventory.mask(key) == number]
                inventory.set(key, number)
            elif what == "begin":
                walk, again, unsaid = inventory.begin_walk(0), [], inventory.newest_first(0)
            else:
                taken = walk.take(number)
                assert taken == (again + unsaid)[:number], "the most recently used first"
                again, unsaid = again[number:], unsaid[max(0, number - len(again)) :]
                if what == "lose":
                    walk.give_back(taken)
                    again = taken + again
            assert len(walk) == len(again + unsaid)
        assert walk.take(100) == again + unsaid
        assert not walk


def test_what_was_given_back_is_said_first_by_the_walk_that_took_it_and_an_older_walk_says_nothing():
    inventory = Inventory(100)
    for key in ONE_PARTITION:
        inventory.set(key, 1)
    earlier = inventory.begin_walk(0)
    assert earlier.take(2) == ONE_PARTITION[:-3:-1]
    walk = inventory.begin_walk(0)
    assert not earlier
    walk.give_back([b"a", b"b"])
    assert walk.take(3) == [b"a", b"b", ONE_PARTITION[-1]]


@pytest.mark.parametrize("count", [20_000])
def test_an_announced_key_costs_little_memory(count):
    tracemalloc.start()
    try:
        inventory = Inventory(count)
        for number in range(count):
            inventory.set(hashlib.sha256(b"%d" % number).digest()[:DIRECTORY_KEY_BYTES], 4)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(inventory) == count
    assert used / count < KEY_BYTES_MAX
