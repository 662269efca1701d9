"""Which chunks are due when, which belong to a pinned prefix, and that none is evicted before it was looked at."""

from collections import OrderedDict
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config import NvmeConfig
from nodeagent.errors import PinsFull
from nodeagent.labels import ChunkLabel
from nodeagent.tiers import write_policy
from nodeagent.tiers.write_policy import AHEAD_MAX, AHEAD_MIN, WRITE_POLICIES, Ageing, Moment, Pins, Reuse
from tests.nodeagent.running import label, storage_key


@pytest.mark.parametrize(
    ("name", "moment"), [("through", Moment.STORED), ("hit", Moment.HIT), ("demote", Moment.AGED)], ids=str
)
def test_a_policy_writes_at_one_moment(name, moment):
    policy = WRITE_POLICIES[name]()
    assert [each for each in Moment if policy.is_due(each, b"a")] == [moment]
    assert policy.moments == {moment}


def test_reuse_writes_what_is_hit_or_stored_again_and_nothing_that_was_asked_for_once():
    policy = WRITE_POLICIES["reuse"]()
    keys = [storage_key(f"n{number}") for number in range(1_000)]
    assert not any(policy.is_due(Moment.STORED, key) for key in keys)
    assert all(policy.is_due(Moment.STORED, key) for key in keys)
    assert policy.is_due(Moment.HIT, storage_key("other"))
    assert not policy.is_due(Moment.AGED, keys[0])
    assert policy.moments == {Moment.STORED, Moment.HIT}


@pytest.mark.parametrize("key", [bytes(32), b"", b"\x01"], ids=["zeros", "empty", "short"])
def test_reuse_forgets_nothing_about_odd_keys(key):
    policy = Reuse(8)
    assert [policy.is_due(Moment.STORED, key) for _ in range(2)] == [False, True]


def test_what_reuse_remembers_fades_and_its_memory_does_not_grow():
    policy = Reuse(64)
    assert not policy.is_due(Moment.STORED, storage_key("old"))
    for number in range(2_000):
        policy.is_due(Moment.STORED, storage_key(f"n{number}"))
        assert policy.is_due(Moment.STORED, storage_key(f"n{number}")), "the newest is always known"
    assert not policy.is_due(Moment.STORED, storage_key("old"))
    assert len(policy._seen) == 64


def test_the_configuration_names_the_policies():
    assert set(get_args(NvmeConfig.model_fields["write"].annotation)) == set(WRITE_POLICIES)


def chain(*names):
    return {
        storage_key(name): label(name, names[position - 1] if position else None, position)
        for position, name in enumerate(names)
    }


def is_covered(pins, labels, name):
    return pins.covers(labels.get(storage_key(name)), labels.get)


def test_a_pin_covers_its_chunk_and_all_that_follow_it_but_nothing_before_or_beside():
    labels = chain("a", "b", "c", "d") | {storage_key("x"): label("x", "a", 1)}
    pins = Pins([storage_key("b")[:16]])
    assert [name for name in "abcdx" if is_covered(pins, labels, name)] == ["b", "c", "d"]
    pins.remove([storage_key("b")[:16], b"never pinned"])
    assert not any(is_covered(pins, labels, name) for name in "abcdx")


def test_a_chunk_whose_pinned_ancestor_is_not_known_to_be_one_is_not_covered():
    pins = Pins([storage_key("a")[:16]])
    labels = chain("a", "b", "c")
    del labels[storage_key("b")]
    assert not is_covered(pins, labels, "c")
    assert not is_covered(pins, labels, "nobody")


def test_the_walk_to_the_root_ends_whatever_was_claimed():
    key, other = storage_key("a"), storage_key("b")
    circle = {key: ChunkLabel(key, None, other, 1), other: ChunkLabel(other, None, key, 1)}
    assert not Pins([b"p" * 16]).covers(circle[key], circle.get)


def test_no_more_keys_are_pinned_than_the_bound_and_then_none_of_a_call(monkeypatch):
    monkeypatch.setattr(write_policy, "PINS_MAX", 3)
    pins = Pins([b"a" * 16, b"b" * 16])
    pins.add([b"a" * 16, b"c" * 16])
    with pytest.raises(PinsFull, match="no more than 3 keys"):
        pins.add([b"a" * 16, b"d" * 16])
    assert (len(pins), b"d" * 16 in pins) == (3, False)


@given(slots=st.integers(3, 600), touches=st.lists(st.integers(0, 2**30), max_size=300))
def test_no_chunk_is_evicted_before_it_was_looked_at(slots, touches):
    """Slots are taken one at a time, oldest first, with others touched in between."""
    ageing, order, seen = Ageing(slots), OrderedDict((key, None) for key in range(slots)), set()
    keys = [b"%d" % each for each in range(slots + 3 * AHEAD_MAX)]
    order = OrderedDict((key, None) for key in keys[:slots])
    for number, new in enumerate(keys[slots:]):
        if ageing.is_time():
            oldest = list(order)[: ageing.ahead]
            aged = ageing.take_aged(oldest)
            assert aged == [key for key in oldest if key in aged], "oldest first"
            seen.update(aged)
        victim, _ = order.popitem(last=False)
        assert victim in seen or number < ageing.ahead // 2, "at first nobody has looked"
        order[new] = None
        if number < len(touches):
            order.move_to_end(list(order)[touches[number] % len(order)])


def test_a_chunk_is_named_once_while_it_stays_old_and_again_when_it_comes_back():
    ageing = Ageing(32)
    assert (ageing.ahead, Ageing(4).ahead, Ageing(1).ahead) == (AHEAD_MIN, 2, 1)
    assert ageing.take_aged([b"a", b"b"]) == [b"a", b"b"]
    assert ageing.take_aged([b"b", b"c"]) == [b"c"]
    assert ageing.take_aged([b"c", b"a"]) == [b"a"]
    assert Ageing(10**6).ahead == AHEAD_MAX
