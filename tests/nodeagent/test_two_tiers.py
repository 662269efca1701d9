"""Both tiers together against a plain model: whatever happens in whatever order, bytes are right or a miss."""

import asyncio
import errno
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from directory.tiers import Tier
from nodeagent.messages import PutOutcome
from nodeagent.tiers.chunk_file import HEADER_BYTES, name_of
from nodeagent.tiers.promotion import PREFETCH_WORKERS
from nodeagent.tiers.write_policy import WRITE_POLICIES
from tests.nodeagent.running import storage_key
from tests.nodeagent.tiers_by_hand import FILE_BYTES, FILES, LONG_S, NO_TIME_S, SLOTS, Host, checksum_of, chunk

CHUNKS = 9
ALL = [f"c{number}" for number in range(CHUNKS)]
NAMES = st.sampled_from(ALL)
RUNS = st.tuples(st.integers(0, 2), st.integers(1, CHUNKS)).map(lambda run: ALL[run[0] : run[0] + run[1]])
WRITER = 9
JOBS = st.lists(st.integers(0, WRITER), max_size=6)
"""Which of the reads under way ends, or that the writer's job does."""
HOLDERS = st.sampled_from(["p", "q"])


class TwoTiers(RuleBasedStateMachine):
    """Puts, runs, hints, deaths, restarts, damaged files, a failing drive. The model is what each name stands for."""

    @initialize(write=st.sampled_from(sorted(WRITE_POLICIES)), is_cold=st.booleans())
    def begin(self, write, is_cold):
        """The disk is full at first, and DRAM is, or is empty as after a restart."""
        self.host = Host(write="through")
        self.damaged = set()
        for name in ALL[:FILES]:
            self.puts(name, "p", "commit")
            self.host.run(self.host.rest())
        if is_cold:
            self.restarts()
        self.host.write_by(write)

    def teardown(self):
        if not hasattr(self, "host"):
            return
        try:
            for number in list(self.host.references):
                self.host.close_reference(number)
            self.host.run(self.host.die("p"))
            self.host.run(self.host.die("q"))
            self.comes_to_rest()
            assert not self.host.hierarchy._held_entries
            assert not self.host.hierarchy._holds
        finally:
            self.host.end()

    @rule(name=NAMES, holder=HOLDERS, then=st.sampled_from(["commit", "commit", "spoil", "leave"]))
    def puts(self, name, holder, then):
        host = self.host
        before = set(host.reservations)
        outcome = host.run(host.reserve(name, holder, checksum_of(name)))
        assert outcome in (PutOutcome.GRANTED, PutOutcome.HAVE, PutOutcome.BUSY, PutOutcome.FULL)
        if outcome is PutOutcome.FULL:
            assert not host.hierarchy.arena.free_slots
            assert all(entry.references for entry in host.hierarchy._entries.values())
        if outcome is PutOutcome.GRANTED and then != "leave":
            self.commits_one((set(host.reservations) - before).pop(), is_spoilt=then == "spoil")
            assert (host.hierarchy.find(storage_key(name)) is not None) == (then == "commit")

    @precondition(lambda self: self.host.reservations)
    @rule(data=st.data(), is_spoilt=st.booleans())
    def commits(self, data, is_spoilt):
        self.commits_one(data.draw(st.sampled_from(sorted(self.host.reservations))), is_spoilt=is_spoilt)

    def commits_one(self, number, *, is_spoilt):
        outcome = self.host.run(self.host.commit(number, is_spoilt=is_spoilt))
        assert outcome in ((PutOutcome.CORRUPT,) if is_spoilt else (PutOutcome.STORED, PutOutcome.HAVE))

    @rule(names=st.lists(NAMES, min_size=1, max_size=CHUNKS, unique=True).map(sorted))
    def puts_many(self, names):
        for name in names:
            self.puts(name, "p", "commit")

    @rule(name=NAMES)
    def puts_other_bytes(self, name):
        host = self.host
        key = storage_key(name)
        if host.hierarchy.find(key) is not None or host.drive.index.get(key) is not None:
            assert host.run(host.reserve(name, "p", b"other bytes, yes")) is PutOutcome.CONFLICT

    @rule(names=RUNS, holder=HOLDERS, wait_s=st.sampled_from([0.0, NO_TIME_S, LONG_S, LONG_S]), jobs=JOBS)
    def opens(self, names, holder, wait_s, jobs):
        self.host.begin_open(names, holder, wait_s)
        self.work_goes_on(jobs)

    @rule(jobs=JOBS)
    def work_goes_on(self, jobs):
        """Some reads end, in any order, and the file in the writer's hand."""
        host = self.host
        host.run(host.turn())
        for job in jobs:
            threads = host.writer if job == WRITER else host.readers
            if threads.jobs:
                threads.do(job % len(threads.jobs) if job != WRITER else 0)
                host.run(host.turn())

    @rule(names=RUNS, holder=HOLDERS)
    def opens_in_peace(self, names, holder):
        """With nothing else under way, as much of a run is served as its chunks and the free slots allow."""
        host = self.host
        self.comes_to_rest()
        in_dram = [name for name in names if host.hierarchy.find(storage_key(name)) is not None]
        on_disk = [name for name in names if host.is_good_on_disk(name) and not host.store.read_error]
        held = Counter(served.name for served in host.references.values())
        rotten = [
            name
            for name in in_dram
            if (found := host.hierarchy.find(storage_key(name))) and (found.slot, found.generation) in host.rotten
        ]
        being_put = {name for _, name in host.reservations.values()}
        free = SLOTS - len({served.slot for served in host.references.values()}) - len(host.reservations)
        sure = possible = 0
        while possible < len(names) and (names[possible] in in_dram or names[possible] in on_disk):
            possible += 1
        for name in names:
            free -= not held[name]
            if name in rotten or name in being_put or free < 0 or not (held[name] or name in on_disk):
                break
            sure += 1
        before, quarantines = len(host.references), host.quarantines
        host.begin_open(names, holder, LONG_S)
        host.run(host.rest())
        opened = len(host.references) - before
        assert sure <= opened <= possible
        is_kept = host.quarantines == quarantines and names[possible:] and names[possible] not in being_put
        if opened == possible and is_kept and host.hierarchy.arena.free_slots:
            assert host.drive.index.get(storage_key(names[possible])) is None, "a file that failed isn't offered again"

    @rule(is_each=st.booleans(), data=st.data())
    def closes(self, is_each, data):
        numbers = sorted(self.host.references)
        for number in numbers if is_each or not numbers else [data.draw(st.sampled_from(numbers))]:
            self.host.close_reference(number)

    @rule(holder=HOLDERS)
    def dies(self, holder):
        self.host.run(self.host.die(holder))

    @rule(names=st.lists(NAMES, max_size=4), jobs=JOBS)
    def is_hinted_at(self, names, jobs):
        accepted = self.host.promotion.prefetch([b"unknown to all.."] + [chunk(name).directory_key for name in names])
        assert accepted <= SLOTS // 2
        self.work_goes_on(jobs)

    @rule(name=NAMES, how=st.sampled_from(["payload", "header", "truncated", "removed", "in dram"]))
    def is_damaged(self, name, how):
        """One chunk's file, or its slot."""
        place = self.host.place(name)
        if how == "in dram":
            self.host.rot(name)
        elif place.exists():
            data = bytearray(place.read_bytes())
            if how == "removed":
                place.unlink()
            elif how == "truncated":
                place.write_bytes(data[: len(data) // 2])
            elif len(data) > HEADER_BYTES:
                data[HEADER_BYTES + 5 if how == "payload" else 60] ^= 1
                place.write_bytes(data)
            self.damaged.add(name)

    @rule(
        read_error=st.sampled_from([0, 0, errno.EIO]),
        write_error=st.sampled_from([0, 0, errno.ENOSPC]),
        stuck=st.sets(NAMES, max_size=2),
    )
    def the_drive_is_well_or_not(self, read_error, write_error, stuck):
        self.host.store.read_error, self.host.store.write_error = read_error, write_error
        self.host.store.stuck = frozenset(name_of(storage_key(name)) for name in stuck)

    @rule(budget=st.sampled_from(["there", "there", "spent", "spent meanwhile"]))
    def the_drives_budget_is_there_or_spent(self, budget):
        self.host.store.budget = budget

    @rule()
    def restarts(self):
        self.host.run(self.host.stop())
        self.host.run(self.host.start())

    def comes_to_rest(self):
        host = self.host
        host.run(host.rest())
        hierarchy, index = host.hierarchy, host.drive.index
        assert not host.promotion.loads
        refused = host.refused()
        assert host.offered == host.store.stored + sum(refused.values()), "written, or refused for one reason"
        assert hierarchy.open_references == len(host.references)
        assert hierarchy.open_reservations == len(host.reservations)
        held = Counter(served.slot for served in host.references.values())
        assert all(entry.references == held[entry.slot] for entry in hierarchy._entries.values())
        owned = {entry.slot for entry in hierarchy._entries.values()} | set(held)
        assert hierarchy.arena.free_slots + len(owned) + len(host.reservations) == SLOTS, "every slot has an owner"
        stuck = host.drive.room.stuck
        on_disk = {bytes.fromhex(path.name) for path in host.files()}
        indexed = {entry.name for entry in index.entries()}
        assert host.nvme.used_bytes == len(indexed) * FILE_BYTES + sum(stuck.values())
        assert not indexed & set(stuck)
        assert on_disk <= indexed | set(stuck), "every file is accounted for"
        bad = {name for name in ALL if name_of(storage_key(name)) in indexed and not host.is_good_on_disk(name)}
        assert bad <= self.damaged, "what is announced has a good file"
        assert len(host.run(all_tasks())) == 3 + PREFETCH_WORKERS, "no task is left"

    @invariant()
    def neither_quota_is_exceeded(self):
        if hasattr(self, "host"):
            assert self.host.dram.used_bytes <= self.host.dram.quota_bytes
            assert self.host.nvme.used_bytes <= self.host.nvme.quota_bytes
            assert sum(path.stat().st_size for path in self.host.files()) <= FILES * FILE_BYTES

    @invariant()
    def a_reference_names_the_bytes_it_was_given_until_it_is_closed(self):
        for served in self.host.references.values() if hasattr(self, "host") else ():
            arena = self.host.hierarchy.arena
            assert arena._shared_generations[served.slot] == served.generation
            with arena.view(served.slot, FILE_BYTES - HEADER_BYTES) as view:
                assert storage_key(served.name) in bytes(view), "the payload repeats its name's digest"

    @invariant()
    def no_slot_has_two_owners(self):
        if hasattr(self, "host"):
            hierarchy = self.host.hierarchy
            slots = [entry.slot for entry in hierarchy._entries.values()]
            slots += [each.slot for holds in hierarchy._holds.values() for each in holds.reservations.values()]
            assert len(slots) == len(set(slots))
            assert not set(slots) & set(hierarchy.arena._free)

    @invariant()
    def what_the_publisher_heard_is_what_each_tier_holds(self):
        if hasattr(self, "host"):
            hierarchy, index = self.host.hierarchy, self.host.drive.index
            assert self.host.announced_in(Tier.DRAM) == {key[:16] for key in hierarchy._entries}
            assert self.host.announced_in(Tier.NVME) == {entry.label.storage_key[:16] for entry in index.entries()}


async def all_tasks():
    return asyncio.all_tasks() - {asyncio.current_task()}


TestTwoTiers = TwoTiers.TestCase
TestTwoTiers.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture
def host():
    """Chunks `c0` to `c5` are on disk, and DRAM is empty."""
    host = Host(write="through")
    for name in ALL[:FILES]:
        put(host, name)
        host.run(host.rest())
    host.run(host.stop())
    host.run(host.start())
    yield host
    host.end()


def put(host, name):
    assert host.run(host.reserve(name, "p", checksum_of(name))) is PutOutcome.GRANTED
    host.run(host.commit(max(host.reservations), is_spoilt=False))


def served(host):
    return [each.name for each in host.references.values()]


def test_a_runs_own_chunks_in_dram_are_spared_while_its_beginning_is_read(host):
    host.write_by("hit")
    for name in ("c6", "c20", "c30", "c40"):
        put(host, name)
    host.begin_open(["c4", "c5", "c6"], "p", LONG_S)
    host.run(host.rest())
    assert served(host) == ["c4", "c5", "c6"]


def test_what_was_read_is_held_until_its_run_is_complete(host):
    host.begin_open(["c0", "c1"], "p", LONG_S)
    host.run(host.turn())
    host.readers.do(0)
    host.run(host.turn())
    for name in ("c20", "c30", "c40", "c50"):
        put(host, name)
    host.run(host.rest())
    assert served(host) == ["c0", "c1"]


def test_a_file_that_could_not_be_removed_is_replaced_and_then_left(host):
    host.store.stuck = frozenset({name_of(storage_key("c0"))})
    host.place("c0").write_bytes(b"bad")
    host.begin_open(["c0"], "p", LONG_S)
    host.run(host.rest())
    assert (served(host), list(host.drive.room.stuck)) == ([], list(host.store.stuck))
    put(host, "c0")
    host.run(host.rest())
    assert host.is_good_on_disk("c0")
    assert host.nvme.used_bytes == len(host.files()) * FILE_BYTES, "it is counted once"
    host.store.stuck = frozenset()
    for name in ("c6", "c7", "c8"):
        put(host, name)
        host.run(host.rest())
        assert host.is_good_on_disk(name)
    assert host.is_good_on_disk("c0")


def test_a_chunk_that_changed_in_dram_before_it_is_written_is_not(host):
    put(host, "c20")
    put(host, "c30")
    assert len(host.writer.jobs) == 1, "the other waits"
    host.rot("c30")
    host.run(host.rest())
    assert host.is_good_on_disk("c20")
    assert host.drive.index.get(storage_key("c30")) is None
    assert not host.place("c30").exists()


def test_a_chunk_is_on_disk_before_dram_evicts_it_if_the_policy_is_to_demote(host):
    host.write_by("demote")
    names = [f"c{number}" for number in (20, 30, 40, 50, 60, 70)]
    for name in names:
        put(host, name)
        host.run(host.rest())
    in_dram = {name for name in names if host.hierarchy.find(storage_key(name)) is not None}
    assert len(in_dram) == SLOTS
    assert set(names) - in_dram <= {name for name in names if host.is_good_on_disk(name)}
    assert not host.is_good_on_disk(names[-1]), "and not before it is old"
    assert host.refused() == {}


def test_a_pinned_prefix_is_written_though_the_policy_waits_for_a_hit(host):
    host.write_by("hit")
    host.admission.pins.add([chunk("c20").directory_key])
    for name in ("c20", "c21", "c30"):
        put(host, name)
        host.run(host.rest())
    assert [host.is_good_on_disk(name) for name in ("c20", "c21", "c30")] == [True, True, False]


def test_what_was_stored_before_its_prefix_was_pinned_is_written_before_it_is_evicted(host):
    host.write_by("hit")
    for name in ("c20", "c21", "c30"):
        put(host, name)
    host.admission.pins.add([chunk("c20").directory_key])
    for name in ("c40", "c50", "c60", "c70"):
        put(host, name)
        host.run(host.rest())
    assert [host.is_good_on_disk(name) for name in ("c20", "c21", "c30", "c40")] == [True, True, False, False]


@pytest.mark.parametrize("budget", ["spent", "spent meanwhile"])
def test_a_spent_budget_makes_the_drive_read_only_and_costs_no_other_chunk_its_place(host, budget):
    host.store.budget = budget
    before = {name for name in ALL if host.is_good_on_disk(name)}
    put(host, "c20")
    host.run(host.rest())
    assert not host.is_good_on_disk("c20")
    assert host.refused() == {"endurance": 1}
    if budget == "spent":
        assert {name for name in ALL if host.is_good_on_disk(name)} == before
    host.begin_open(["c0"], "p", LONG_S)
    host.run(host.rest())
    assert served(host), "it is read all the while"
    host.store.budget = "there"
    put(host, "c30")
    host.run(host.rest())
    assert host.is_good_on_disk("c30")


def test_a_label_that_finds_no_budget_is_known_until_the_next_start(host):
    key = storage_key("c20")
    assert host.run(host.reserve_unlabelled("c20", "p")) is PutOutcome.GRANTED
    host.run(host.commit(max(host.reservations), is_spoilt=False))
    host.run(host.rest())
    host.store.budget = "spent"
    host.promotion.learn(chunk("c20"))
    host.run(host.rest())
    assert host.nvme.find(key).label == chunk("c20")
    assert host.store.header(name_of(key)).label.directory_key is None
    assert host.metrics.registry.get_sample_value("warmroute_degraded_total", {"reason": "nvme_label_unwritten"}) == 1


def test_a_budget_that_is_spent_while_a_chunk_waits_costs_no_other_chunk_its_place(host):
    host.write_by("hit")
    put(host, "c20")
    before = {name for name in ALL if host.is_good_on_disk(name)}
    host.nvme.offer(host.hierarchy, storage_key("c20"))
    host.store.budget = "spent"
    host.run(host.rest())
    assert host.refused() == {"endurance": 1}
    assert {name for name in ALL if host.is_good_on_disk(name)} == before


def test_an_open_does_not_wait_for_a_read_that_a_drive_in_quarantine_may_never_end(host):
    host.begin_open(["c0"], "p", LONG_S)
    host.run(host.turn())
    job, function, arguments = host.readers.jobs.pop(0)
    assert job.set_running_or_notify_cancel(), "it has begun, and hangs"
    host.run(fail(host.drive))
    host.begin_open(["c0"], "q", LONG_S)
    host.run(host.turn())
    assert [holder for holder, _ in host.opens] == ["p"], "q was told at once that there is nothing"
    assert host.hierarchy.open_reservations == 1, "the slot is kept from others while the read may fill it"
    job.set_result(function(*arguments))
    host.run(host.rest())
    assert served(host) == ["c0"]
    assert host.hierarchy.open_reservations == 0


async def fail(drive):
    drive.fail("told to")
