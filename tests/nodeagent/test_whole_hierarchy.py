"""DRAM and three drives against a plain model: which bytes were ever put under a key.

Whatever happens in whatever order (puts of two variants, runs, deaths, lost connections, rot, swapped and torn files,
drives that err, fill up, go away and come back, restarts):

- what is served is, to the byte, something that a put has stored under this very key, or it is a miss;
- no quota is exceeded, on any drive, by anything that lies on it;
- every slot has one owner: free, a chunk, a reservation, or a dropped chunk that is still referenced;
- in DRAM and on every drive a parent is never older than its child, but for files that were found and aren't in order
  yet; no tier evicts a parent before a child that nobody holds; and a hit puts its chain right on all drives;
- what the publisher heard is what the tiers hold.

One more thing that can happen is one more `@rule`; what it may change of the model is `host.stored`.
"""

import errno
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from directory.tiers import Tier
from nodeagent.messages import PutOutcome
from nodeagent.tiers.chunk_file import HEADER_BYTES, name_of
from nodeagent.tiers.write_policy import WRITE_POLICIES
from tests.nodeagent.many_drives import (
    BY_KEY,
    DRIVES,
    FILE_BYTES,
    FILES,
    LENGTH,
    NAMES,
    PARENTS,
    SLOTS,
    Host,
    bytes_of,
)
from tests.nodeagent.running import storage_key

LONG_S = 10.0
NO_TIME_S = 1e-9
CHUNKS = st.sampled_from(NAMES)
VARIANTS = st.sampled_from([0, 0, 0, 1])
HOLDERS = st.sampled_from(["p", "q"])
NUMBERS = st.integers(0, DRIVES - 1)
WRITER = 9
JOBS = st.lists(st.integers(0, WRITER), max_size=5)
"""Which of the reads under way ends, or that a writer's job does."""


def flip(place, at):
    data = bytearray(place.read_bytes())
    data[at] ^= 1
    place.write_bytes(data)


def swap(place, other):
    data = place.read_bytes()
    place.write_bytes(other.read_bytes())
    other.write_bytes(data)


def replace_payload(place, payload):
    place.write_bytes(place.read_bytes()[:HEADER_BYTES] + payload)


DAMAGES = {
    "payload": lambda place, other, name: flip(place, HEADER_BYTES + 5),
    "header": lambda place, other, name: flip(place, 60),
    "truncated": lambda place, other, name: place.write_bytes(place.read_bytes()[: FILE_BYTES // 2]),
    "emptied": lambda place, other, name: place.write_bytes(b""),
    "removed": lambda place, other, name: place.unlink(),
    "swapped": lambda place, other, name: swap(place, other),
    "a name without its data": lambda place, other, name: replace_payload(place, bytes(LENGTH)),
    "an old header, new bytes": lambda place, other, name: replace_payload(place, bytes_of(name, 2)),
}


def path_to(name):
    """The chunks from the root to this one."""
    parent = PARENTS[name]
    return [*(path_to(parent) if parent is not None else []), name]


RUNS = st.tuples(st.sampled_from(["a4", "a2", "b3", "c2"]), st.integers(0, 2)).map(
    lambda run: path_to(run[0])[run[1] :]
)


class WholeHierarchy(RuleBasedStateMachine):
    """See the module."""

    @initialize(write=st.sampled_from(sorted(WRITE_POLICIES)), filled=st.booleans())
    def begin(self, write, filled):
        self.host = Host()
        for name in NAMES if filled else ():
            self.puts(name, 0, "p", "commit")
            self.host.run(self.host.rest())
        self.host.write = write
        self.restarts()

    def teardown(self):
        if not hasattr(self, "host"):
            return
        try:
            for number in range(DRIVES):
                self.host.stores[number].is_away = False
            for holder in "pq":
                self.host.run(self.host.die(holder))
            self.comes_to_rest()
            assert not self.host.hierarchy._holds
            assert not self.host.hierarchy._held_entries
        finally:
            self.host.end()

    @rule(
        name=CHUNKS,
        variant=VARIANTS,
        holder=HOLDERS,
        then=st.sampled_from(["commit", "commit", "commit", "spoil", "leave"]),
        is_labelled=st.sampled_from([True, True, True, False]),
    )
    def puts(self, name, variant, holder, then, is_labelled=True):
        host, key = self.host, storage_key(name)
        before = set(host.reservations)
        outcome = host.run(host.reserve(name, variant, holder, is_labelled=is_labelled))
        if outcome is PutOutcome.HAVE:
            assert variant in host.stored[name]
        elif outcome is PutOutcome.CONFLICT:
            assert host.stored[name] - {variant}
        elif outcome is PutOutcome.BUSY:
            assert key in host.hierarchy._puts
        elif outcome is PutOutcome.FULL:
            assert not host.hierarchy.arena.free_slots
            assert all(entry.references for entry in host.hierarchy._entries.values())
        else:
            assert outcome is PutOutcome.GRANTED
            if then != "leave":
                self.commits_one((set(host.reservations) - before).pop(), is_spoilt=then == "spoil")

    @rule(names=RUNS, variant=VARIANTS)
    def puts_a_run(self, names, variant):
        for name in names:
            self.puts(name, variant, "p", "commit")

    @precondition(lambda self: self.host.reservations)
    @rule(data=st.data(), is_spoilt=st.booleans())
    def commits(self, data, is_spoilt):
        self.commits_one(data.draw(st.sampled_from(sorted(self.host.reservations))), is_spoilt=is_spoilt)

    def commits_one(self, number, *, is_spoilt):
        outcome = self.host.run(self.host.commit(number, is_spoilt=is_spoilt))
        goods = (PutOutcome.STORED, PutOutcome.HAVE, PutOutcome.CONFLICT)
        assert outcome in ((PutOutcome.CORRUPT,) if is_spoilt else goods)

    @rule(names=RUNS, holder=HOLDERS, wait_s=st.sampled_from([0.0, NO_TIME_S, LONG_S, LONG_S]), jobs=JOBS)
    def opens(self, names, holder, wait_s, jobs):
        self.host.begin_open(names, holder, wait_s)
        self.work_goes_on(jobs)

    @rule(names=RUNS, holder=HOLDERS)
    def opens_in_peace(self, names, holder):
        """With nothing else under way, no chunk of a run that is in DRAM is missed, and none is made up."""
        host = self.host
        self.comes_to_rest()
        sure = possible = 0
        for name in names:
            entry = host.hierarchy.find(storage_key(name))
            if entry is None or (entry.slot, entry.generation) in host.rotten:
                break
            sure += 1
        while possible < len(names) and (
            host.hierarchy.find(storage_key(names[possible])) is not None
            or host.nvme.holds(storage_key(names[possible]))
        ):
            possible += 1
        before = len(host.references)
        is_whole = all(drive.is_up for drive in host.drives)
        host.begin_open(names, holder, LONG_S)
        host.run(host.rest())
        opened = len(host.references) - before
        assert sure <= opened <= possible
        if opened and is_whole and not host.quarantines:
            check_order_across(host.nvme, storage_key(names[opened - 1]))

    @rule(jobs=JOBS)
    def work_goes_on(self, jobs):
        """Some reads end, in any order, and some files in the writers' hands."""
        host = self.host
        host.run(host.turn())
        for job in jobs:
            threads = host.writers if job == WRITER else host.readers
            if threads.jobs:
                threads.do(job % len(threads.jobs))
                host.run(host.turn())

    @rule(names=st.lists(CHUNKS, max_size=4), jobs=JOBS)
    def is_hinted_at(self, names, jobs):
        self.host.promotion.prefetch([storage_key(name)[:16] for name in names])
        self.work_goes_on(jobs)

    @rule(is_each=st.booleans(), data=st.data())
    def closes(self, is_each, data):
        numbers = sorted(self.host.references)
        for number in numbers if is_each or not numbers else [data.draw(st.sampled_from(numbers))]:
            self.host.close_reference(number)

    @rule(holder=HOLDERS, is_back=st.booleans())
    def loses_its_connection(self, holder, is_back):
        """Its slots stay; and when it is back, it says what it still holds."""
        host = self.host
        host.hierarchy.quarantine(holder)
        if is_back and not [each for each in host.opens if each[0] == holder]:
            references = [number for number, each in host.references.items() if each.holder == holder]
            reservations = [number for number, each in host.reservations.items() if each[0] == holder]
            assert not host.hierarchy.keep_only(holder, references, reservations)

    @rule(holder=HOLDERS)
    def dies(self, holder):
        self.host.run(self.host.die(holder))

    @rule(count=st.integers(1, SLOTS))
    def evicts_ahead_of_need(self, count):
        host = self.host
        victims = host.hierarchy.take_victims(count)
        for victim in victims:
            key = victim.label.directory_key
            assert key is None or not host.announced[Tier.DRAM][key], "withdrawn before the slot goes"
        host.hierarchy.free(victims)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0, 40.0]))
    def time_passes(self, seconds):
        self.host.now += seconds

    @precondition(lambda self: len(self.host.hierarchy))
    @rule(data=st.data())
    def rots_in_dram(self, data):
        self.host.rot(data.draw(st.sampled_from(sorted(BY_KEY[key] for key in self.host.hierarchy._entries))))

    @precondition(lambda self: any(self.host.whole_files()))
    @rule(data=st.data(), how=st.sampled_from(sorted(DAMAGES)))
    def a_file_is_damaged(self, data, how):
        """And somebody wants it soon, who won't find it in DRAM if it can be helped."""
        whole = self.host.whole_files()
        number, name = data.draw(st.sampled_from(whole))
        other = data.draw(st.sampled_from([each for on, each in whole if on == number]))
        DAMAGES[how](self.host.place(number, name), self.host.place(number, other), name)
        self.evicts_ahead_of_need(SLOTS)
        self.opens(path_to(name), "p", LONG_S, [])

    @rule(
        number=NUMBERS,
        read_error=st.sampled_from([0, 0, errno.EIO, errno.EMFILE]),
        write_error=st.sampled_from([0, 0, errno.ENOSPC, errno.EROFS]),
        stuck=st.sets(CHUNKS, max_size=2),
    )
    def a_drive_is_well_or_not(self, number, read_error, write_error, stuck):
        store = self.host.stores[number]
        store.read_error, store.write_error = read_error, write_error
        store.stuck = frozenset(name_of(storage_key(name)) for name in stuck)

    @rule(number=NUMBERS, is_away=st.sampled_from([False, False, True]), is_noticed=st.booleans())
    def a_drive_goes_away_or_comes_back(self, number, is_away, is_noticed):
        self.host.stores[number].is_away = is_away
        if is_away and is_noticed:
            self.host.drives[number].fail("told to")
        self.host.run(self.host.turn())

    @rule()
    def restarts(self):
        self.host.run(self.host.stop())
        for store in self.host.stores:
            # A folder that can't be read when an agent starts is another test's.
            store.read_error = store.read_error if store.read_error != errno.EMFILE else 0
        self.host.run(self.host.start())

    @rule()
    def comes_to_rest(self):
        host = self.host
        for store in host.stores:
            store.read_error = store.read_error if store.read_error != errno.EMFILE else 0
        host.run(host.rest())
        hierarchy = host.hierarchy
        assert not host.promotion.loads
        assert hierarchy.open_references == len(host.references)
        assert hierarchy.open_reservations == len(host.reservations)
        held = Counter(each.slot for each in host.references.values())
        assert all(entry.references == held[entry.slot] for entry in hierarchy._entries.values())
        owned = {entry.slot for entry in hierarchy._entries.values()} | set(held)
        assert hierarchy.arena.free_slots + len(owned) + len(host.reservations) == SLOTS, "every slot has an owner"
        assert host.announced_in(Tier.DRAM) == labels_of(hierarchy._entries.values())
        on_drives = [entry for drive in host.drives for entry in drive.index.entries()]
        assert host.announced_in(Tier.NVME) == labels_of(on_drives), "claims are holdings"
        for number, drive in enumerate(host.drives):
            if drive.is_up:
                known = {entry.name for entry in drive.index.entries()} | set(drive.room.stuck)
                assert {bytes.fromhex(path.name) for path in host.files(number)} <= known, "every file is counted"

    @invariant()
    def no_quota_is_exceeded(self):
        host = self.host
        assert host.dram.used_bytes <= host.dram.quota_bytes
        for number, drive in enumerate(host.drives):
            assert drive.used_bytes <= FILES * FILE_BYTES
            assert sum(path.stat().st_size for path in host.files(number)) <= FILES * FILE_BYTES

    @invariant()
    def a_reference_names_the_bytes_it_was_given_until_it_is_closed(self):
        for each in self.host.references.values():
            arena = self.host.hierarchy.arena
            assert arena._shared_generations[each.slot] == each.generation
            with arena.view(each.slot, LENGTH) as view:
                assert bytes(view) == each.data

    @invariant()
    def no_slot_has_two_owners(self):
        hierarchy = self.host.hierarchy
        slots = [entry.slot for entry in hierarchy._entries.values()]
        slots += [each.slot for holds in hierarchy._holds.values() for each in holds.reservations.values()]
        assert len(slots) == len(set(slots))
        referenced = {each.slot for each in self.host.references.values()}
        assert not (set(slots) | referenced) & set(hierarchy.arena._free)

    @invariant()
    def a_parent_is_never_older_than_its_child(self):
        host = self.host
        in_dram = [host.hierarchy._entries[key].label for key in host.hierarchy._policy.oldest_first()]
        check_order(in_dram)
        for drive in host.drives:
            if not drive.is_restoring:
                check_order(labels_on(drive))

    @invariant()
    def all_that_is_held_is_claimed(self):
        """Labels are claimed from the moment they are held; more may be, until a lost drive's are withdrawn."""
        host = self.host
        assert host.announced_in(Tier.DRAM) == labels_of(host.hierarchy._entries.values())
        on_drives = [entry for drive in host.drives for entry in drive.index.entries()]
        assert host.announced_in(Tier.NVME) >= labels_of(on_drives)


def labels_of(entries):
    return {entry.label.directory_key for entry in entries if entry.label.directory_key is not None}


def check_order(oldest_first):
    """Whoever comes later names no earlier one as its child."""
    seen = {}
    for label in reversed(oldest_first):
        seen[label.storage_key] = label
    newer = set()
    for label in reversed(oldest_first):
        parent = seen.get(label.parent)
        if parent is not None and parent.position == label.position - 1:
            assert label.parent in newer, f"{BY_KEY[label.parent]} is older than its child {BY_KEY[label.storage_key]}"
        newer.add(label.storage_key)


def check_order_across(nvme, key):
    """A chain whose chunks lie on several drives: on none of them is an ancestor older than the chunk."""
    places = [{label.storage_key: place for place, label in enumerate(labels_on(drive))} for drive in nvme.drives]
    below = []
    while (found := nvme.find(key)) is not None:
        for place in places:
            assert key not in place or all(place[each] < place[key] for each in below if each in place)
        below.append(key)
        if found.label.parent is None or found.label.position == 0:
            return
        above = nvme.find(found.label.parent)
        if above is None or above.label.position != found.label.position - 1:
            return
        key = found.label.parent


def labels_on(drive):
    return [entry.label for entry in drive.index.entries()]


TestWholeHierarchy = WholeHierarchy.TestCase
TestWholeHierarchy.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
