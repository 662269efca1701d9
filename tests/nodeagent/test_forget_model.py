"""Puts, evictions, forgets, drives that go and come back, restarts and time: in any order, against a plain model.

What was forgotten is never found before its term is over, whatever happens; everything else stays.
"""

import asyncio
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import settings
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
    """`forgotten` says until when each chunk mustn't be found; `there` what must be, unless its drive is away."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.offset_s = 0.0
        self.there: dict[str, int] = {}
        self.forgotten: dict[str, float] = {}
        self.away: set[int] = set()
        self.unsure: set[str] = set()
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

    def is_forgotten(self, name):
        return any(self.forgotten.get(each, 0) > self.now() for each in self.line(name))

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
        if self.is_forgotten(name):
            assert outcome is PutOutcome.FORGOTTEN
        else:
            assert outcome in (PutOutcome.STORED, PutOutcome.HAVE)
            self.there[name] = 1
            self.unsure.discard(name)

    @rule(name=st.sampled_from(NAMES))
    def evict(self, name):
        """From DRAM; the file stays, if there is one in reach."""
        self.run(self.evicted(name))
        if self.drive_of(name) is None:
            self.unsure.add(name)

    async def evicted(self, name):
        self.host.evict(storage_key(name))

    @rule(named=st.sets(st.sampled_from(NAMES), min_size=1, max_size=2))
    def forget_keys(self, named):
        self.forget(lambda name: follows(name, named), directory_keys=frozenset(storage_key(n)[:16] for n in named))

    @rule(letter=st.sampled_from("ac"))
    def forget_identity(self, letter):
        identity = IDENTITIES[letter]
        self.forget(lambda name: identity_of(name) == identity, identities=frozenset([identity]))

    @rule(is_narrowed=st.booleans())
    def forget_salt(self, is_narrowed):
        identities = frozenset([b"2" * 32]) if is_narrowed else frozenset()
        self.forget(
            lambda name: SALTS[name[0]] == "s" and (not is_narrowed or identity_of(name) in identities),
            salt_tag=Scope(salt="s").salt_tag,
            identities=identities,
        )

    def forget(self, is_named, **asked):
        until_s = self.now() + TERM_S
        before = self.run(self.held())
        receipt = self.run(self.host.forget(**asked))
        assert receipt.is_confirmed
        assert len(receipt.remains.drives_away) == len(self.away)
        after = self.run(self.held())
        assert not {name for name in after if is_named(name) and not self.is_broken(name)}
        assert {name for name in before if not is_named(name)} <= after
        for name in filter(is_named, NAMES):
            self.forgotten[name] = until_s
            self.there.pop(name, None)
            if self.away or self.is_broken(name):
                self.unsure.add(name)

    def is_broken(self, name):
        """Whether what a chunk follows may not have been here to tell."""
        return bool(self.away) or any(each in self.unsure or each not in self.ever for each in self.line(name))

    @property
    def ever(self):
        return set(self.there) | set(self.forgotten)

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
        on_disk = {name for name in self.there if self.drive_of(name) is not None}
        self.away.clear()
        self.run(self.stack.aclose())
        self.run(self.start())
        for name in set(self.there) - on_disk:
            self.unsure.add(name)

    @rule()
    def wait_until_it_is_over(self):
        self.offset_s += TERM_S + 1

    async def held(self):
        return {name for name in NAMES if self.host.is_held(storage_key(name))}

    @invariant()
    def what_was_forgotten_is_not_found_and_what_was_not_is(self):
        held = self.run(self.held())
        for name in NAMES:
            if self.forgotten.get(name, 0) > self.now() and not self.is_broken(name):
                assert name not in held, "it came back"
            if name in self.there and not self.away and name not in self.unsure:
                assert name in held, "it went"
        assert not {name for name in held if name in self.forgotten and name not in self.there} - self.unsure

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


TestForgetting = ForgettingMachine.TestCase
TestForgetting.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
