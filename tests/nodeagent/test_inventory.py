from hypothesis import given
from hypothesis import strategies as st

from nodeagent.inventory import Inventory

KEYS_MAX = 4


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3))))
def test_it_equals_a_plain_list_in_order_of_use(states):
    inventory, plain = Inventory(KEYS_MAX), []
    for name, mask in states:
        key = name.encode()
        before = dict(plain).get(key, 0)
        is_refused = mask and not before and len(plain) == KEYS_MAX
        assert inventory.set(key, mask) == (mask != before and not is_refused)
        if not is_refused:
            plain = [each for each in plain if each[0] != key] + ([(key, mask)] if mask else [])
        assert inventory.newest_first() == [key for key, _ in reversed(plain)]
        assert [inventory.mask(key) for key in inventory] == [mask for _, mask in plain]
        assert len(inventory) <= KEYS_MAX
