"""The order in which chunks go: a plain model, and what must hold whatever happens."""

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.tiers.eviction import Lru

# A small forest: chunk n's parent is n // 2, so that chains are deep and share ancestors; 0 is a root.
NODES = st.integers(0, 15)
OPS = st.lists(st.tuples(st.sampled_from(["add", "touch", "remove", "take"]), NODES, st.sets(NODES)), max_size=60)


def key(node: int) -> bytes:
    return bytes([node])


def parent(node: int) -> int | None:
    return node // 2 if node else None


def depth(node: int) -> int:
    return node.bit_length()


class PlainLru:
    """The rule, in so many words."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def touch(self, node: int | None) -> None:
        while node is not None and node in self.order:
            self.order.remove(node)
            self.order.append(node)
            node = parent(node)

    def add(self, node: int) -> None:
        if node not in self.order:
            self.order.append(node)
        self.touch(node)

    def take(self, count: int, held: set[int]) -> list[int]:
        taken: list[int] = []
        skipped: set[int] = set()
        while self.order and len(taken) < count and self.order[0] not in skipped:
            oldest = self.order[0]
            if oldest in held:
                skipped.add(oldest)
                self.touch(oldest)
            else:
                taken.append(self.order.pop(0))
        unheld = [each for each in self.order if each not in held]
        if count and not taken and unheld:  # only ancestors of held chunks are left: better one of them than nothing
            self.order.remove(unheld[0])
            taken.append(unheld[0])
        return taken


@given(OPS)
def test_lru_equals_the_plain_model_and_a_parent_is_never_older_than_its_child(ops):
    lru, plain = Lru(), PlainLru()
    for op, node, held in ops:
        if op == "add":
            above = parent(node)
            lru.add(key(node), key(above) if above is not None else None, depth(node))
            plain.add(node)
        elif op == "touch":
            lru.touch(key(node))
            plain.touch(node)
        elif op == "remove":
            lru.remove(key(node))
            plain.order = [each for each in plain.order if each != node]
        else:
            count = node % 4
            victims = lru.take_victims(count, lambda each, held=held: each[0] in held)
            assert victims == [key(each) for each in plain.take(count, held)]
            assert not {victim[0] for victim in victims} & held
        order = [each[0] for each in lru.newest_first()]
        assert order == plain.order[::-1]
        for child in order:
            above = parent(child)
            assert above is None or above not in order or order.index(above) < order.index(child)


def test_a_chain_is_eaten_from_its_leaf():
    lru = Lru()
    for position in range(5):
        lru.add(key(position), key(position - 1) if position else None, position)
    assert lru.take_victims(5, lambda _: False) == [key(position) for position in (4, 3, 2, 1, 0)]


def test_when_all_are_held_none_goes():
    lru = Lru()
    for node in range(8):
        lru.add(key(node), None, 0)
    assert lru.take_victims(3, lambda _: True) == []
    assert len(list(lru.newest_first())) == 8


def test_a_claimed_circle_of_parents_ends_the_walk():
    lru = Lru()
    lru.add(b"a", b"b", 1)
    lru.add(b"b", b"a", 2)
    lru.add(b"c", b"c", 0)
    lru.touch(b"a")
    lru.touch(b"b")
    assert sorted(lru.newest_first()) == [b"a", b"b", b"c"]


def test_a_held_leaf_does_not_keep_its_whole_chain():
    policy = Lru()
    for position in range(4):
        policy.add(b"%d" % position, b"%d" % (position - 1) if position else None, position)
    assert policy.take_victims(1, lambda key: key == b"3") == [b"2"], "the deepest that isn't held"
    assert policy.take_victims(1, lambda key: True) == []


def test_what_is_found_from_before_goes_first():
    policy = Lru()
    policy.add(b"new", None, 0)
    policy.add_oldest(b"old", None, 0)
    policy.add_oldest(b"older", None, 0)
    assert list(policy.newest_first()) == [b"new", b"old", b"older"]
