import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engines.reference.gpu_tier import GpuTier

PAYLOAD = np.zeros(1, np.float32)


def insert_chain(tier: GpuTier, chain: list[bytes]) -> tuple[set[bytes], set[bytes]]:
    stored: set[bytes] = set()
    evicted: set[bytes] = set()
    for end in range(1, len(chain) + 1):
        changes = tier.insert(chain[:end], b"d" + chain[end - 1], PAYLOAD)
        stored |= set(changes.stored)
        evicted |= set(changes.evicted)
    return stored, evicted


def test_a_prompt_longer_than_the_tier_keeps_its_beginning() -> None:
    tier = GpuTier(3)
    stored, evicted = insert_chain(tier, [b"a", b"b", b"c", b"d", b"e"])
    assert (stored, evicted) == ({b"da", b"db", b"dc"}, set())
    assert len(tier.leading([b"a", b"b", b"c", b"d"])) == 3


def test_the_least_recently_used_chain_goes_from_its_end() -> None:
    tier = GpuTier(4)
    insert_chain(tier, [b"a", b"b"])
    insert_chain(tier, [b"x", b"y"])
    tier.leading([b"a", b"b"])
    assert set(tier.insert([b"p"], b"dp", PAYLOAD).evicted) == {b"dy"}
    assert tier.inventory() == [b"dx", b"db", b"da", b"dp"]


def test_a_hole_ends_the_run() -> None:
    tier = GpuTier(4)
    insert_chain(tier, [b"a", b"b", b"c"])
    assert tier.leading([b"a", b"other", b"c"]) == [PAYLOAD]
    assert tier.leading([b"other", b"a"]) == []


def test_a_tier_of_no_chunks_holds_nothing_and_says_nothing() -> None:
    tier = GpuTier(0)
    assert insert_chain(tier, [b"a", b"b"]) == (set(), set())
    assert tier.inventory() == []


CHAINS = st.lists(st.tuples(st.text("ab", min_size=1, max_size=5), st.booleans()), max_size=30)


@given(capacity=st.integers(0, 6), events=CHAINS)
def test_prefixes_stay_unbroken_and_reports_add_up(capacity: int, events: list[tuple[str, bool]]) -> None:
    """Chains are paths in a binary tree: a chunk is named by all before it, as chunk keys are."""
    tier, reported = GpuTier(capacity), set()
    for path, is_insertion in events:
        chain = [path[:end].encode() for end in range(1, len(path) + 1)]
        if is_insertion:
            stored, evicted = insert_chain(tier, chain)
            reported = (reported | stored) - evicted
        else:
            tier.leading(chain)
        held = tier.inventory()
        assert len(held) == len(tier) <= capacity
        assert set(held) == reported
        for key in held:
            assert len(key) == 2 or key[:-1] in held, "a chunk is held without its parent"


def test_a_cleared_tier_holds_nothing_and_says_what_went() -> None:
    tier = GpuTier(4)
    for key in (b"a", b"b"):
        tier.insert([key], key * 16, PAYLOAD)
    assert set(tier.clear()) == {b"a" * 16, b"b" * 16}
    assert (len(tier), tier.inventory(), tier.leading([b"a"])) == (0, [], [])
