from hypothesis import given
from hypothesis import strategies as st

from directory.placements import PARTITIONS, partition_of
from nodeagent.inventory import Inventory

KEYS_MAX = 4
KEYS = [bytes([first, second]) for first in (0, 0x17, 0xF0) for second in (1, 2)]


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
