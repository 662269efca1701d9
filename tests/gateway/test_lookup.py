"""Lookups: chains per way of naming, deadlines, and a directory that fails."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from directory.chunks import pack_tokens
from directory.errors import DirectoryError, DirectoryUnavailable, PartitionUnavailable
from directory.identity import UNSCOPED, Scope
from directory.interface import Lookup
from directory.members import Member
from directory.placements import pack_holders
from directory.schemes import chain_pages
from directory.tiers import Tier
from gateway.fleet import EngineView
from gateway.lookup import (
    CHAINS_MAX,
    GROUPINGS_MAX,
    PARTIAL_SHOWN_S,
    ChunkChain,
    ChunkLookup,
    chain_chunks,
    group_by_naming,
    lookup_deadline_s,
)
from gateway.lookup_breaker import EXCUSES_MAX, FAILURES_MAX, LATE_S, PAUSE_S
from tests.gateway.views import LIFE, view

TOKENS = pack_tokens(range(41))
LOOP_THREAD = threading.main_thread().name


def chains_of(views: Sequence[EngineView], tokens: bytes, scope: Scope) -> list[ChunkChain]:
    return chain_chunks(group_by_naming(views), tokens, scope)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedReader:
    """Everything is held in DRAM by `LIFE`, except that lookups fail while `is_down` and positions may be unknown."""

    def __init__(self) -> None:
        self.is_down, self.calls = False, 0
        self.error: type[DirectoryError] = DirectoryUnavailable
        self.unknown: set[int] = set()
        self.loses_lengths: set[int] = set()
        self.gate: asyncio.Event | None = None

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> Lookup:
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.is_down or len(keys) in self.loses_lengths:
            raise self.error("down on purpose")
        record = pack_holders([(LIFE, int(Tier.DRAM))])
        return Lookup(tuple(None if place in self.unknown else record for place in range(len(keys))))

    async def members(self) -> tuple[Member, ...]:
        return ()


def test_engines_that_name_alike_share_a_chain_and_others_have_their_own() -> None:
    views = [view("a"), view("b"), view("c", chunk_tokens=8), view("d", key_scheme="sglang", page_tokens=2)]
    chains = chains_of(views, TOKENS, UNSCOPED)
    assert [[each.engine for each in chain.group.engines] for chain in chains] == [["a", "b"], ["c"], ["d"]]
    assert [len(chain.keys) for chain in chains] == [10, 5, 10]
    assert chains[0].keys != chains[2].keys


def test_the_chunk_that_must_be_computed_has_no_key() -> None:
    assert len(chains_of([view("a")], TOKENS[:-4], UNSCOPED)[0].keys) == 9


def test_a_scope_changes_every_key() -> None:
    plain = chains_of([view("a")], TOKENS, UNSCOPED)[0].keys
    salted = chains_of([view("a")], TOKENS, Scope(salt="s"))[0].keys
    assert not set(plain) & set(salted)


def test_a_group_whose_keys_cannot_be_computed_costs_its_own_engines_only() -> None:
    well, strange = view("a"), view("b", chunk_tokens=8)
    groups = group_by_naming([strange, well])
    object.__setattr__(groups[0], "chunk_tokens", 4.0)
    (chain,) = chain_chunks(groups, TOKENS, UNSCOPED)
    assert chain.group.engines == (well,)


def test_the_number_of_chains_is_bounded() -> None:
    views = [view(f"e{size}", chunk_tokens=size) for size in range(4, 12)]
    assert len(chains_of(views, TOKENS, UNSCOPED)) == CHAINS_MAX


async def test_chunks_of_many_pages_are_hashed_once_and_many_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def counted(previous: bytes, chunk: memoryview, step: int) -> bytes:
        threads.append(threading.current_thread().name)
        return chain_pages(previous, chunk, step)

    groups = group_by_naming([view("a"), view("b", key_scheme="sglang", chunk_tokens=8, page_tokens=1)])
    longer = TOKENS + pack_tokens(range(8))
    expected, expected_longer = (chain_chunks(groups, tokens, UNSCOPED) for tokens in (TOKENS, longer))
    lookup = ChunkLookup(ScriptedReader(), Clock())
    monkeypatch.setattr("directory.schemes.chain_pages", counted)
    for _ in range(2):
        assert await lookup.chained([(group, TOKENS) for group in groups], UNSCOPED) == expected
    assert threads == [LOOP_THREAD] * 5
    monkeypatch.setattr("gateway.lookup.HASHED_INLINE_PAGES_MAX", 10)
    assert await lookup.chained([(group, longer) for group in groups], UNSCOPED) == expected_longer
    assert len(threads) == 6
    assert threads[-1] != LOOP_THREAD


async def test_every_chain_is_joined_with_its_engines() -> None:
    lookup = ChunkLookup(ScriptedReader(), Clock())
    holders = await lookup.find(chains_of([view("a"), view("c", chunk_tokens=8)], TOKENS, UNSCOPED), 0.05)
    assert {engine: match.chunks for engine, match in holders.matches.items()} == {"a": 10, "c": 5}


async def test_a_partial_answer_is_used_and_said() -> None:
    reader = ScriptedReader()
    reader.unknown = {2, 9}
    holders = await ChunkLookup(reader, Clock()).find(chains_of([view("a")], TOKENS, UNSCOPED), 0.05)
    assert holders.degraded == "partial_directory"
    assert holders.matches["a"].tiers == (Tier.DRAM, Tier.DRAM, None, *[Tier.DRAM] * 6)


async def test_a_failing_directory_is_left_alone_for_a_while_and_then_tried_again() -> None:
    reader, clock = ScriptedReader(), Clock()
    lookup = ChunkLookup(reader, clock)
    chains = chains_of([view("a")], TOKENS, UNSCOPED)
    reader.is_down = True
    for _ in range(FAILURES_MAX + 5):
        assert not (await lookup.find(chains, 0.05)).is_known
    assert reader.calls == FAILURES_MAX
    reader.is_down = False
    clock.now += PAUSE_S
    assert (await lookup.find(chains, 0.05)).is_known


async def test_a_chain_that_fails_alone_does_not_lose_the_others_answers() -> None:
    reader = ScriptedReader()
    reader.loses_lengths = {5}
    lookup = ChunkLookup(reader, Clock())
    chains = chains_of([view("a"), view("c", chunk_tokens=8)], TOKENS, UNSCOPED)
    for _ in range(FAILURES_MAX + 1):
        holders = await lookup.find(chains, 0.05)
        assert (holders.is_known, holders.degraded) == (True, "partial_directory")
        assert {engine: match.chunks for engine, match in holders.matches.items()} == {"a": 10}
        assert set(holders.keys) == {"a", "c"}
    assert lookup.state.startswith("partial since")


async def test_a_partial_answer_is_no_failure() -> None:
    reader = ScriptedReader()
    lookup = ChunkLookup(reader, Clock())
    chains = chains_of([view("a")], TOKENS, UNSCOPED)
    reader.unknown = set(range(10))
    for _ in range(FAILURES_MAX + 1):
        assert (await lookup.find(chains, 0.05)).degraded == "partial_directory"
    assert lookup.pauses == 0


async def test_short_prompts_whose_shard_is_down_are_no_reason_to_pause() -> None:
    reader, clock = ScriptedReader(), Clock()
    reader.is_down, reader.error = True, PartitionUnavailable
    lookup = ChunkLookup(reader, clock)
    for _ in range(2 * FAILURES_MAX):
        found = await lookup.find(chains_of([view("a")], TOKENS, UNSCOPED), 0.05)
        assert (found.matches, found.is_known, found.degraded) == ({}, True, "partial_directory")
    assert lookup.pauses == 0
    assert reader.calls == 2 * FAILURES_MAX


async def test_after_the_pause_one_lookup_probes_and_the_others_go_without() -> None:
    reader, clock, told = ScriptedReader(), Clock(), list[int]()
    lookup = ChunkLookup(reader, clock, lambda: told.append(1))
    chains = chains_of([view("a")], TOKENS, UNSCOPED)
    reader.is_down = True
    for _ in range(FAILURES_MAX):
        await lookup.find(chains, 0.05)
    assert (lookup.pauses, len(told)) == (1, 1)
    clock.now += PAUSE_S
    assert lookup.state.endswith("one is tried at a time")
    reader.is_down, reader.gate, reader.calls = False, asyncio.Event(), 0
    probe = asyncio.create_task(lookup.find(chains, 0.05))
    await asyncio.sleep(0)
    others = [await lookup.find(chains, 0.05) for _ in range(5)]
    assert {each.degraded for each in others} == {"directory_paused"}
    assert reader.calls == 1
    reader.gate.set()
    assert (await probe).is_known
    assert (await lookup.find(chains, 0.05)).is_known
    assert lookup.state == "ok"


async def test_a_probe_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    reader, clock = ScriptedReader(), Clock()
    lookup = ChunkLookup(reader, clock)
    chains = chains_of([view("a")], TOKENS, UNSCOPED)
    reader.is_down = True
    for _ in range(FAILURES_MAX):
        await lookup.find(chains, 0.05)
    clock.now += PAUSE_S
    reader.is_down, reader.gate = False, asyncio.Event()
    probe = asyncio.create_task(lookup.find(chains, 0.05))
    await asyncio.sleep(0)
    probe.cancel()
    await asyncio.wait({probe})
    reader.gate = None
    assert (await lookup.find(chains, 0.05)).is_known


class LateReader(ScriptedReader):
    """Times out, and the event loop wakes the waiter `late_s` after its deadline."""

    def __init__(self, clock: Clock, late_s: float) -> None:
        super().__init__()
        self.clock, self.late_s = clock, late_s

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> Lookup:
        self.clock.now += deadline_s + self.late_s
        raise DirectoryUnavailable("no answer in time")


async def test_a_timeout_that_our_own_lateness_explains_says_nothing_about_the_directory() -> None:
    clock = Clock()
    lookup = ChunkLookup(LateReader(clock, LATE_S * 2), clock)
    chains = chains_of([view("a")], TOKENS, UNSCOPED)
    for _ in range(EXCUSES_MAX):
        assert (await lookup.find(chains, 0.01)).degraded == "gateway_late"
    assert lookup.state == "none yet"
    for _ in range(FAILURES_MAX):
        assert (await lookup.find(chains, 0.01)).degraded == "directory_unavailable"
    assert lookup.pauses == 1, "a directory may be dead while the gateway is busy"


async def test_a_timeout_on_time_counts() -> None:
    clock = Clock()
    lookup = ChunkLookup(LateReader(clock, LATE_S / 2), clock)
    for _ in range(FAILURES_MAX):
        await lookup.find(chains_of([view("a")], TOKENS, UNSCOPED), 0.01)
    assert lookup.pauses == 1


async def test_a_grouping_is_made_once_for_a_table_and_anew_for_the_next() -> None:
    lookup, views = ChunkLookup(ScriptedReader(), Clock()), (view("a"), view("b"))
    groups = lookup.grouped("m", views)
    assert lookup.grouped("m", views) is groups
    (group,) = lookup.grouped("m", (view("a"), view("c")))
    assert [each.engine for each in group.engines] == ["a", "c"]
    for number in range(GROUPINGS_MAX + 1):
        assert lookup.grouped(f"m{number}", views) == lookup.grouped(f"m{number}", views)


@pytest.mark.parametrize(("prefill_s", "deadline_s"), [(0.01, 0.005), (1.0, 0.02), (60.0, 0.05)])
def test_the_deadline_is_a_small_share_of_what_a_hit_could_save(prefill_s: float, deadline_s: float) -> None:
    assert lookup_deadline_s(prefill_s) == pytest.approx(deadline_s)


async def test_a_refusal_is_shown_with_its_reason() -> None:
    reader, clock = ScriptedReader(), Clock()
    lookup = ChunkLookup(reader, clock)
    reader.is_down, reader.error = True, DirectoryError
    await lookup.find(chains_of([view("a")], TOKENS, UNSCOPED), 1.0)
    assert lookup.state.startswith("1 in a row failed: ")
    reader.is_down = False
    await lookup.find(chains_of([view("a")], TOKENS, UNSCOPED), 1.0)
    assert lookup.state == "ok"


async def test_partial_answers_are_shown_until_there_was_none_for_a_while() -> None:
    reader, clock = ScriptedReader(), Clock()
    lookup, chains = ChunkLookup(reader, clock), chains_of([view("a")], TOKENS, UNSCOPED)
    reader.unknown = {0}
    await lookup.find(chains, 1.0)
    clock.now = 4.0
    await lookup.find(chains, 1.0)
    reader.unknown = set()
    await lookup.find(chains, 1.0)
    assert lookup.state == "partial since 4 s ago: a shard doesn't answer"
    clock.now += PARTIAL_SHOWN_S + 0.1
    assert lookup.state == "ok"
