"""Puts, reads, evictions, forgets, drives that come and go, restarts and time, in any order, against a plain model.

What was forgotten is never found before its term is over, whatever happens; everything else stays.
"""

import asyncio
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from directory.identity import Scope
from nodeagent.labels import ChunkLabel
from nodeagent.messages import PutOutcome
from nodeagent.tiers.tombstones import Tombstones
from tests.nodeagent.forgetful_host import TERM_S, data_of, forgetful_host, soon
from tests.nodeagent.running import storage_key

IDENTITIES = {"a": b"1" * 32, "b": b"1" * 32, "c": b"2" * 32, "d": b"2" * 32}
SALTS = {"a": None, "b": "s", "c": "s", "d": None}
PARENTS = {"a0": None, "a1": "a0", "a2": "a1", "a3": "a1", "b0": None, "b1": "b0", "c0": None, "c1": "c0", "d0": None}
"""Chains by letter; `a3` and `a2` both follow `a1`."""
DEPTHS = {"a3": 2}
NAMES = sorted(PARENTS)
DRIVES = 2


def identity_of(name):
    return IDENTITIES[name[0]]


def tag_of(name):
    return Scope(salt=SALTS[name[0]]).salt_tag


def label_of(name):
    parent, key = PARENTS[name], storage_key(name)
    return ChunkLabel(key, key[:16], parent and storage_key(parent), DEPTHS.get(name, int(name[1])), tag_of(name))


def follows(name, named):
    """Whether a chunk is one of those named, or comes after one."""
    while name is not None:
        if name in named:
            return True
        name = PARENTS[name]
    return False


class ForgettingMachine(RuleBasedStateMachine):
    """`there` must be found, while no drive is away, but for what is `maybe_gone`. `forgotten` says until when each
    chunk mustn't be, but for what is `loose`: when it was forgotten, nothing that was here told what it follows.
    """

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.offset_s = 0.0
        self.there: set[str] = set()
        self.maybe_gone: set[str] = set()
        self.forgotten: dict[str, float] = {}
        self.direct: dict[str, float] = {}
        self.loose: set[str] = set()
        self.away: set[int] = set()
        self.references: dict[int, tuple[str, int, int]] = {}
        self.run(self.start())

    def run(self, coroutine):
        return self.runner.run(coroutine)

    def now(self):
        return self.real_now() + self.offset_s

    real_now = staticmethod(Tombstones().now)

    async def start(self):
        self.stack = AsyncExitStack()
        self.host = await self.stack.enter_async_context(
            forgetful_host(self.folder, drives=DRIVES, now=self.now, are_drives_back=lambda: not self.away)
        )

    def teardown(self):
        self.away.clear()
        self.run(self.stack.aclose())
        self.runner.close()
        shutil.rmtree(self.folder)

    def is_over(self, until_s):
        return until_s <= self.now()

    @staticmethod
    def line(name):
        """A chunk and those before it."""
        while name is not None:
            yield name
            name = PARENTS[name]

    def drive_of(self, name):
        return next(
            (number for number, drive in enumerate(self.host.nvme.drives) if storage_key(name) in drive.index), None
        )

    @rule(name=st.sampled_from(NAMES))
    def put(self, name):
        outcome = self.run(self.host.put(name, label_of(name), identity_of(name)))
        if not self.is_over(self.direct.get(name, 0)):
            assert outcome is PutOutcome.FORGOTTEN
        elif all(self.is_over(self.forgotten.get(each, 0)) for each in self.line(name)):
            assert outcome in (PutOutcome.STORED, PutOutcome.HAVE)
        if outcome is PutOutcome.FORGOTTEN:
            return
        self.there.add(name)
        if all(self.is_over(self.forgotten.get(each, 0)) for each in self.line(name)):
            self.maybe_gone.discard(name)
            self.loose.discard(name)
        else:  # it follows what was forgotten when nothing here told so: that may be found out
            self.maybe_gone.add(name)
            self.loose.add(name)

    @rule(name=st.sampled_from(NAMES))
    def evict(self, name):
        """From DRAM; the file stays, if there is one in reach."""
        self.run(self.evicted(name))
        if self.drive_of(name) is None:
            self.maybe_gone.add(name)

    async def evicted(self, name):
        self.host.evict(storage_key(name))

    @rule(name=st.sampled_from(NAMES))
    def open(self, name):
        self.run(self.opened(name))

    async def opened(self, name):
        """By a reader that keeps it: its slot is the reader's, whatever is forgotten meanwhile."""
        for each in self.host.dram.hierarchy.open_run([storage_key(name)], "reader"):
            assert name in self.there | self.loose, "what was forgotten is served"
            self.references[each.reference] = (name, each.slot, each.generation)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def close(self, data):
        number = data.draw(st.sampled_from(sorted(self.references)))
        del self.references[number]
        self.run(self.closed(number))

    async def closed(self, number):
        assert len(self.host.dram.hierarchy.close("reader", [number])) == 1

    @rule(named=st.sets(st.sampled_from(NAMES), min_size=1, max_size=2))
    def forget_keys(self, named):
        keys = frozenset(storage_key(name)[:16] for name in named)
        self.forget(named, {name for name in NAMES if follows(name, named)}, directory_keys=keys)

    @rule(name=st.sampled_from(NAMES), others=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    def forget_what_is_read(self, name, others):
        self.put(name)
        self.open(name)
        self.forget_keys({name})
        for other in others:
            self.put(other)

    @rule(letter=st.sampled_from("ac"))
    def forget_identity(self, letter):
        identity = IDENTITIES[letter]
        named = {name for name in NAMES if identity_of(name) == identity}
        self.forget(named, named, identities=frozenset([identity]))

    @rule(is_narrowed=st.booleans())
    def forget_salt(self, is_narrowed):
        identities = frozenset([b"2" * 32]) if is_narrowed else frozenset()
        named = {
            name for name in NAMES if SALTS[name[0]] == "s" and (not is_narrowed or identity_of(name) in identities)
        }
        self.forget(named, named, salt_tag=Scope(salt="s").salt_tag, identities=identities)

    def forget(self, direct, named, **asked):
        until_s, before = self.now() + TERM_S, self.run(self.held())
        receipt = self.run(self.host.forget(**asked))
        assert receipt.is_confirmed
        assert len(receipt.remains.drives_away) == len(self.away)
        after = self.run(self.held())
        assert before - named - self.loose <= after <= before, "nothing else is"
        for name in named:
            above = set(self.line(PARENTS[name]))
            if name not in direct and not above <= before:
                self.loose.add(name)
            self.forgotten[name] = until_s
        for name in direct:
            self.direct[name] = until_s
            self.loose.discard(name)
        assert after & named <= self.loose
        self.there -= named - self.loose
        self.maybe_gone |= named & self.loose

    @precondition(lambda self: not self.away)
    @rule(number=st.integers(0, DRIVES - 1))
    def lose_a_drive(self, number):
        self.away.add(number)
        self.run(self.failed(number))

    async def failed(self, number):
        self.host.nvme.drives[number].fail("told to")
        await asyncio.sleep(0)

    @precondition(lambda self: self.away)
    @rule()
    def have_the_drive_back(self):
        self.away.clear()
        self.run(self.back())

    async def back(self):
        await soon(lambda: all(drive.is_up for drive in self.host.nvme.drives))
        await self.host.restored()

    @rule()
    def restart(self):
        on_disk = {name for name in NAMES if self.drive_of(name) is not None}
        self.away.clear()
        self.references.clear()
        self.run(self.stack.aclose())
        self.run(self.start())
        self.maybe_gone |= self.there - on_disk

    @rule()
    def wait_until_it_is_over(self):
        self.offset_s += TERM_S + 1

    async def held(self):
        return {name for name in NAMES if self.host.is_held(storage_key(name))}

    @invariant()
    def what_was_forgotten_is_not_found_and_what_was_not_is(self):
        held = self.run(self.held())
        assert held <= self.there | self.loose, "it came back"
        if not self.away:
            assert self.there - self.maybe_gone <= held, "it went"

    @invariant()
    def bytes_are_right(self):
        self.run(self.looked_at())

    async def looked_at(self):
        hierarchy = self.host.dram.hierarchy
        for name in NAMES:
            entry = hierarchy.find(storage_key(name))
            if entry is not None:
                with hierarchy.arena.view(entry.slot, entry.length) as view:
                    assert view == data_of(name)
        for name, slot, generation in self.references.values():
            assert hierarchy.arena._shared_generations[slot] == generation, "a reader's slot was given away"
            with hierarchy.arena.view(slot, len(data_of(name))) as view:
                assert view == data_of(name)


TestForgetting = ForgettingMachine.TestCase
TestForgetting.settings = settings(
    max_examples=8, stateful_step_count=15, deadline=None, phases=(Phase.reuse, Phase.generate)
)
"""Not made smaller where it fails: each try is a host with threads and files."""
