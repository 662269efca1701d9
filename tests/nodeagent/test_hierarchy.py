"""The index against a plain model: what is found, who holds what, and that no slot has two owners."""

from collections import Counter

import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nodeagent.labels import ChunkLabel
from nodeagent.messages import PutOutcome
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.eviction import Lru
from nodeagent.tiers.hierarchy import RESERVATION_S, Hierarchy
from nodeagent.tiers.machine_memory import PAGE_BYTES
from tests.nodeagent.running import label, storage_key

SLOTS = 4
GOOD, OTHER = b"g" * 16, b"o" * 16


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def changes():
    return {}


@pytest.fixture
def clock():
    return Time()


@pytest.fixture
def hierarchy(changes, clock):
    arena = Arena(PAGE_BYTES * (SLOTS + 1), PAGE_BYTES)
    yield Hierarchy(arena, Lru(), changes.__setitem__, clock)
    arena.close()


def put(hierarchy, chunk, holder="p", checksum=GOOD, length=100):
    granted = hierarchy.reserve(chunk, length, checksum, holder)
    if granted.reservation is None:
        return granted.outcome
    reservation = hierarchy.begin_commit(holder, granted.reservation.number)
    return hierarchy.finish_commit(reservation, checksum)


def test_chunks_of_one_label_are_all_found_by_it_while_they_are_there(hierarchy):
    first, second = label("a"), ChunkLabel(storage_key("b"), storage_key("a")[:16], None, 0)
    put(hierarchy, first)
    put(hierarchy, second)
    assert hierarchy.storage_keys(first.directory_key) == (first.storage_key, second.storage_key)
    hierarchy.drop(hierarchy.find(first.storage_key))
    assert hierarchy.storage_keys(first.directory_key) == (second.storage_key,)
    hierarchy.drop(hierarchy.find(second.storage_key))
    assert hierarchy.storage_keys(first.directory_key) == ()


def test_a_put_is_found_only_after_its_bytes_are_checked(hierarchy, changes):
    granted = hierarchy.reserve(label("a"), 100, GOOD, "p")
    assert hierarchy.contains_run([storage_key("a")]) == 0
    reservation = hierarchy.begin_commit("p", granted.reservation.number)
    assert hierarchy.contains_run([storage_key("a")]) == 0
    assert changes == {}
    assert hierarchy.finish_commit(reservation, GOOD) is PutOutcome.STORED
    assert hierarchy.contains_run([storage_key("a")]) == 1
    assert changes == {storage_key("a")[:16]: 2}


def test_bytes_that_are_not_what_was_promised_leave_nothing(hierarchy, changes):
    granted = hierarchy.reserve(label("a"), 100, GOOD, "p")
    reservation = hierarchy.begin_commit("p", granted.reservation.number)
    assert hierarchy.finish_commit(reservation, OTHER) is PutOutcome.CORRUPT
    assert hierarchy.arena.free_slots == SLOTS
    assert changes == {}
    assert put(hierarchy, label("a")) is PutOutcome.STORED


def test_the_same_bytes_again_are_had_and_others_are_a_conflict(hierarchy):
    assert put(hierarchy, label("a")) is PutOutcome.STORED
    assert put(hierarchy, label("a"), holder="q") is PutOutcome.HAVE
    assert put(hierarchy, label("a"), holder="q", checksum=OTHER) is PutOutcome.CONFLICT
    assert put(hierarchy, label("a"), holder="q", length=99) is PutOutcome.CONFLICT
    assert hierarchy.open_run([storage_key("a")], "p")[0].checksum == GOOD


def test_a_hole_ends_the_run(hierarchy):
    for name in ("a", "c"):
        put(hierarchy, label(name))
    assert len(hierarchy.open_run([storage_key(name) for name in "abc"], "p")) == 1


def test_of_two_puts_under_way_the_second_is_turned_away(hierarchy):
    granted = hierarchy.reserve(label("a"), 100, GOOD, "p")
    assert hierarchy.reserve(label("a"), 100, GOOD, "q").outcome is PutOutcome.BUSY
    hierarchy.abort("p", granted.reservation.number)
    assert hierarchy.reserve(label("a"), 100, GOOD, "q").outcome is PutOutcome.GRANTED


@pytest.mark.parametrize("how", ["time passes", "its connection is lost"])
def test_a_put_that_never_ends_blocks_its_key_for_a_while_and_its_slot_until_the_process_ends(hierarchy, clock, how):
    hierarchy.reserve(label("a"), 100, GOOD, "p")
    if how == "time passes":
        clock.now += RESERVATION_S + 1
    else:
        hierarchy.quarantine("p")
    assert put(hierarchy, label("a"), holder="q") is PutOutcome.STORED
    assert hierarchy.arena.free_slots == SLOTS - 2
    hierarchy.release_holder("p")
    assert hierarchy.arena.free_slots == SLOTS - 1
    assert hierarchy.contains_run([storage_key("a")]) == 1


def test_a_superseded_put_that_is_committed_late_is_had(hierarchy, clock):
    late = hierarchy.reserve(label("a"), 100, GOOD, "p").reservation
    clock.now += RESERVATION_S + 1
    put(hierarchy, label("a"), holder="q")
    assert hierarchy.finish_commit(hierarchy.begin_commit("p", late.number), GOOD) is PutOutcome.HAVE
    assert hierarchy.arena.free_slots == SLOTS - 1


def test_a_process_that_ends_while_its_bytes_are_checked_has_still_put_them(hierarchy):
    number = hierarchy.reserve(label("a"), 100, GOOD, "p").reservation.number
    reservation = hierarchy.begin_commit("p", number)
    hierarchy.release_holder("p")
    assert hierarchy.begin_commit("p", number) is None
    assert hierarchy.finish_commit(reservation, GOOD) is PutOutcome.STORED


def test_a_referenced_chunk_is_not_evicted_and_its_slot_is_not_reused(hierarchy):
    put(hierarchy, label("held"))
    held = hierarchy.open_run([storage_key("held")], "p")[0]
    for number in range(10):
        assert put(hierarchy, label(f"n{number}")) is PutOutcome.STORED
    assert hierarchy.contains_run([storage_key("held")]) == 1
    hierarchy.close("p", [held.reference])
    for number in range(10, 14):
        put(hierarchy, label(f"n{number}"))
    assert hierarchy.contains_run([storage_key("held")]) == 0


def test_when_every_chunk_is_referenced_a_put_is_told_full(hierarchy):
    names = [f"n{number}" for number in range(SLOTS)]
    for name in names:
        put(hierarchy, label(name))
    for name in names:
        hierarchy.open_run([storage_key(name)], "p")
    assert put(hierarchy, label("more")) is PutOutcome.FULL
    hierarchy.release_holder("p")
    assert put(hierarchy, label("more")) is PutOutcome.STORED


def test_a_dropped_chunk_keeps_its_slot_until_its_last_reader_closes(hierarchy, changes):
    put(hierarchy, label("a"))
    opened = hierarchy.open_run([storage_key("a")], "p")
    entry = hierarchy.close("p", [opened[0].reference])[0].entry
    opened = hierarchy.open_run([storage_key("a")], "p")
    hierarchy.drop(entry)
    hierarchy.drop(entry)
    assert changes[storage_key("a")[:16]] == 0
    assert hierarchy.contains_run([storage_key("a")]) == 0
    assert hierarchy.arena.free_slots == SLOTS - 1
    hierarchy.close("p", [opened[0].reference])
    hierarchy.close("p", [opened[0].reference])
    assert hierarchy.arena.free_slots == SLOTS


def test_a_chunk_without_a_label_is_served_and_announced_once_the_label_is_known(hierarchy, changes):
    nameless = ChunkLabel(storage_key("a"), None, None, 0)
    assert put(hierarchy, nameless) is PutOutcome.STORED
    assert hierarchy.contains_run([storage_key("a")]) == 1
    assert changes == {}
    assert put(hierarchy, label("a")) is PutOutcome.HAVE
    assert changes == {storage_key("a")[:16]: 2}


def test_a_directory_key_is_withdrawn_with_its_last_copy(hierarchy, changes):
    shared = b"d" * 16
    for name in ("a", "b"):
        put(hierarchy, ChunkLabel(storage_key(name), shared, None, 0))
    first = hierarchy.take_victims(1)
    assert changes == {shared: 2}
    last = hierarchy.take_victims(1)
    assert changes == {shared: 0}
    hierarchy.free(first + last)


def test_a_victim_is_withdrawn_before_its_slot_is_free(hierarchy, changes):
    put(hierarchy, label("a"))
    free = hierarchy.arena.free_slots
    victims = hierarchy.take_victims(1)
    assert changes[storage_key("a")[:16]] == 0
    assert hierarchy.arena.free_slots == free
    hierarchy.free(victims)
    assert hierarchy.arena.free_slots == free + 1


NAMES = st.sampled_from([f"c{number}" for number in range(7)])
HOLDERS = st.sampled_from(["p", "q"])


class HierarchyAgainstModel(RuleBasedStateMachine):
    """Random use by two processes. The chunks are one chain, so runs and ancestors matter."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Time()
        self.announced: dict[bytes, int] = {}
        self.arena = Arena(PAGE_BYTES * (SLOTS + 1), PAGE_BYTES)
        self.hierarchy = Hierarchy(self.arena, Lru(), self.announced.__setitem__, self.clock)
        self.references: dict[int, tuple[str, bytes, int, int]] = {}
        self.reservations: dict[int, tuple[str, int]] = {}
        self.stored: set[bytes] = set()

    def teardown(self) -> None:
        self.arena.close()

    def chunk(self, name: str) -> ChunkLabel:
        position = int(name[1:])
        return label(name, f"c{position - 1}" if position else None, position)

    @rule(name=NAMES, holder=HOLDERS)
    def reserve(self, name: str, holder: str) -> None:
        held = {key for _, key, _, _ in self.references.values()}
        free, before = self.arena.free_slots, self.stored.copy()
        granted = self.hierarchy.reserve(self.chunk(name), 64, xxhash.xxh3_128_digest(name.encode()), holder)
        self.stored = {key for key in before if self.hierarchy.contains_run([key])}
        assert held & before <= self.stored, "a referenced chunk stays"
        evicted = before - self.stored
        assert len(evicted) == granted.evicted <= 1
        if granted.reservation is not None:
            assert free or evicted
            self.reservations[granted.reservation.number] = (holder, granted.reservation.slot)
        elif granted.outcome is PutOutcome.FULL:
            assert not free
            assert before <= held

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), is_good=st.booleans())
    def commit(self, data: st.DataObject, is_good: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.reservations)))
        holder, _ = self.reservations.pop(number)
        reservation = self.hierarchy.begin_commit(holder, number)
        outcome = self.hierarchy.finish_commit(reservation, reservation.checksum if is_good else OTHER)
        if is_good:
            self.stored.add(reservation.label.storage_key)
            assert outcome in (PutOutcome.STORED, PutOutcome.HAVE)
        else:
            assert outcome is PutOutcome.CORRUPT

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.reservations)))
        holder, _ = self.reservations.pop(number)
        self.hierarchy.abort(holder, number)

    @rule(first=st.integers(0, 6), count=st.integers(1, 7), holder=HOLDERS)
    def open(self, first: int, count: int, holder: str) -> None:
        keys = [storage_key(f"c{number}") for number in range(first, min(first + count, 7))]
        opened = self.hierarchy.open_run(keys, holder)
        expected = 0
        while expected < len(keys) and keys[expected] in self.stored:
            expected += 1
        assert len(opened) == expected
        for key, each in zip(keys, opened, strict=False):
            self.references[each.reference] = (holder, key, each.slot, each.generation)

    @precondition(lambda self: self.references)
    @rule(data=st.data(), is_twice=st.booleans())
    def close(self, data: st.DataObject, is_twice: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.references)))
        holder, _, _, _ = self.references.pop(number)
        assert len(self.hierarchy.close(holder, [number])) == 1
        if is_twice:
            assert self.hierarchy.close(holder, [number]) == []

    @rule(holder=HOLDERS)
    def process_ends(self, holder: str) -> None:
        self.hierarchy.release_holder(holder)
        self.references = {number: each for number, each in self.references.items() if each[0] != holder}
        self.reservations = {number: each for number, each in self.reservations.items() if each[0] != holder}

    @rule(holder=HOLDERS, data=st.data())
    def says_what_it_holds(self, holder: str, data: st.DataObject) -> None:
        mine = sorted(number for number, each in (self.references | self.reservations).items() if each[0] == holder)
        kept = data.draw(st.sets(st.sampled_from(mine))) if mine else set()
        self.hierarchy.keep_only(holder, list(kept), list(kept))
        gone = set(mine) - kept
        self.references = {number: each for number, each in self.references.items() if number not in gone}
        self.reservations = {number: each for number, each in self.reservations.items() if number not in gone}

    @rule(slots=st.integers(1, 3))
    def evict(self, slots: int) -> None:
        victims = self.hierarchy.take_victims(slots)
        gone = {entry.label.storage_key for entry in victims}
        assert not gone & {key for _, key, _, _ in self.references.values()}
        self.stored -= gone
        self.hierarchy.free(victims)

    @rule(holder=HOLDERS)
    def connection_is_lost(self, holder: str) -> None:
        self.hierarchy.quarantine(holder)

    @invariant()
    def no_slot_has_two_owners_and_none_is_lost(self) -> None:
        entries = [entry.slot for entry in self.hierarchy._entries.values()]
        reserved = [slot for _, slot in self.reservations.values()]
        owners = Counter(entries + reserved)
        assert all(count == 1 for count in owners.values())
        assert len(owners) + self.arena.free_slots == SLOTS

    @invariant()
    def a_reference_still_names_the_bytes_it_was_given(self) -> None:
        for _, key, slot, generation in self.references.values():
            assert self.hierarchy._entries[key].slot == slot
            assert self.arena._shared_generations[slot] == generation

    @invariant()
    def what_is_announced_is_what_is_stored(self) -> None:
        assert {key for key, mask in self.announced.items() if mask} == {key[:16] for key in self.stored}
        assert len(self.hierarchy) == len(self.stored)

    @invariant()
    def what_can_be_had_is_free_or_held_by_nobody(self) -> None:
        held = {key for _, key, _, _ in self.references.values()}
        assert self.hierarchy.takeable_slots == self.arena.free_slots + len(set(self.stored) - held)

    @invariant()
    def a_label_leads_to_the_chunks_that_have_it(self) -> None:
        found = {key for label_key in self.announced for key in self.hierarchy.storage_keys(label_key)}
        assert found == set(self.stored)


TestHierarchyAgainstModel = HierarchyAgainstModel.TestCase
TestHierarchyAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
