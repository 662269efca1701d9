"""Lookups: chains per way of naming, deadlines, and a directory that fails."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from directory.chunks import pack_tokens
from directory.errors import DirectoryUnavailable
from directory.identity import UNSCOPED, Scope
from directory.interface import Lookup
from directory.members import Member, draw_incarnation
from directory.placements import Reach, pack_holders
from directory.tiers import Tier
from gateway.fleet import EngineView
from gateway.lookup import CHAINS_MAX, FAILURES_MAX, PAUSE_S, ChunkLookup, chain_chunks, lookup_deadline_s
from tests.gateway.samples import RATES, engine_registration

LIFE = draw_incarnation()
TOKENS = pack_tokens(range(41))


def view(engine: str, **other: object) -> EngineView:
    reach = Reach(engine, frozenset(), frozenset({LIFE}))
    registration = engine_registration(engine, **other)
    return EngineView(engine, "http://e:1", registration.models, registration, "", reach, RATES, "ready")  # type: ignore[arg-type]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedReader:
    """Everything is held in DRAM by `LIFE`, except that lookups fail while `is_down` and positions may be unknown."""

    def __init__(self) -> None:
        self.is_down, self.calls = False, 0
        self.unknown: set[int] = set()

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> Lookup:
        self.calls += 1
        if self.is_down:
            raise DirectoryUnavailable("down on purpose")
        record = pack_holders([(LIFE, int(Tier.DRAM))])
        return Lookup(tuple(None if place in self.unknown else record for place in range(len(keys))))

    async def members(self) -> tuple[Member, ...]:
        return ()


def test_engines_that_name_alike_share_a_chain_and_others_have_their_own() -> None:
    views = [view("a"), view("b"), view("c", chunk_tokens=8), view("d", key_scheme="sglang", page_tokens=2)]
    chains = chain_chunks(views, TOKENS, UNSCOPED)
    assert [[each.engine for each in chain.engines] for chain in chains] == [["a", "b"], ["c"], ["d"]]
    assert [len(chain.keys) for chain in chains] == [10, 5, 10]
    assert chains[0].keys != chains[2].keys


def test_the_chunk_that_must_be_computed_has_no_key() -> None:
    assert len(chain_chunks([view("a")], TOKENS[:-4], UNSCOPED)[0].keys) == 9


def test_a_scope_changes_every_key() -> None:
    plain = chain_chunks([view("a")], TOKENS, UNSCOPED)[0].keys
    salted = chain_chunks([view("a")], TOKENS, Scope(salt="s"))[0].keys
    assert not set(plain) & set(salted)


def test_the_number_of_chains_is_bounded() -> None:
    views = [view(f"e{size}", chunk_tokens=size) for size in range(4, 12)]
    assert len(chain_chunks(views, TOKENS, UNSCOPED)) == CHAINS_MAX


async def test_every_chain_is_joined_with_its_engines() -> None:
    lookup = ChunkLookup(ScriptedReader(), Clock())
    holders = await lookup.find(chain_chunks([view("a"), view("c", chunk_tokens=8)], TOKENS, UNSCOPED), 0.05)
    assert {engine: match.chunks for engine, match in holders.matches.items()} == {"a": 10, "c": 5}


async def test_a_partial_answer_is_used_and_said() -> None:
    reader = ScriptedReader()
    reader.unknown = {2, 9}
    holders = await ChunkLookup(reader, Clock()).find(chain_chunks([view("a")], TOKENS, UNSCOPED), 0.05)
    assert holders.degraded == "partial_directory"
    assert holders.matches["a"].tiers == (Tier.DRAM, Tier.DRAM, None, *[Tier.DRAM] * 6)


async def test_a_failing_directory_is_left_alone_for_a_while_and_then_tried_again() -> None:
    reader, clock = ScriptedReader(), Clock()
    lookup = ChunkLookup(reader, clock)
    chains = chain_chunks([view("a")], TOKENS, UNSCOPED)
    reader.is_down = True
    for _ in range(FAILURES_MAX + 5):
        assert not (await lookup.find(chains, 0.05)).is_known
    assert reader.calls == FAILURES_MAX
    reader.is_down = False
    clock.now += PAUSE_S
    assert (await lookup.find(chains, 0.05)).is_known


@pytest.mark.parametrize(("prefill_s", "deadline_s"), [(0.01, 0.005), (1.0, 0.02), (60.0, 0.05)])
def test_the_deadline_is_a_small_share_of_what_a_hit_could_save(prefill_s: float, deadline_s: float) -> None:
    assert lookup_deadline_s(prefill_s) == pytest.approx(deadline_s)
