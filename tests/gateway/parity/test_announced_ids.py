"""Chunks that an engine announces under other keys than the gateway's: equal counts, other ids."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import httpx
import pytest

from directory.chunks import chunk_keys, directory_key, pack_tokens
from directory.errors import DirectoryUnavailable
from directory.interface import Batch, Lookup
from directory.members import draw_incarnation
from directory.memory import MemoryDirectory
from directory.placements import partition_of
from directory.tiers import Tier
from gateway.fleet import Fleet
from gateway.health import HealthCheck
from gateway.metrics import GatewayMetrics
from gateway.openai_schema import COMPLETIONS
from gateway.parity import announced_ids as module
from gateway.parity.announced_ids import LOOKS_PER_STEP, SETTLE_S, AnnouncedIds
from gateway.parity.buckets import Buckets, Kind
from tests.gateway.samples import ENGINE_LOAD, HOST_LOAD, IDENTITY, MODEL, engine_registration, host_registration

KIND = Kind(MODEL, COMPLETIONS, has_tools=False, has_reasoning=False)
TERM_S = 60.0
HOST_LIFE, LIFE = draw_incarnation(), draw_incarnation()


class CountedDirectory(MemoryDirectory):
    """Counts lookups; unreachable while `is_down`; positions of partitions in `silent` are unknown."""

    lookups = 0
    is_down = False
    silent: frozenset[int] = frozenset()

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> Lookup:
        self.lookups += 1
        if self.is_down:
            raise DirectoryUnavailable("down on purpose")
        found = await super().lookup(keys, deadline_s)
        pairs = zip(keys, found.records, strict=True)
        return Lookup(tuple(None if partition_of(key) in self.silent else record for key, record in pairs))


@dataclass
class Stand:
    directory: CountedDirectory
    fleet: Fleet
    buckets: Buckets
    metrics: GatewayMetrics
    ids: AnnouncedIds
    now: list[float]
    numbers: dict[bytes, int] = field(default_factory=dict)

    async def announce(self, tokens: bytes, life: bytes = LIFE, tier: Tier = Tier.GPU, first: int = 0) -> None:
        """As an agent does, by the ids in its engine's events."""
        for key in map(directory_key, chunk_keys(IDENTITY.fleet_digest(), tokens, 4)[first:]):
            number = self.numbers[life] = self.numbers.get(life, 0) + 1
            await self.directory.place(Batch(life, partition_of(key), number, ((key, int(tier)),), 600.0))

    def answered(self, tokens: bytes, cached: int | None = None) -> None:
        self.ids.consider(self.fleet.table.engines["a"], KIND, tokens, None, cached)

    async def settle(self) -> None:
        """A step that ends the sampling of this second, and one in which all of it is due."""
        await self.ids.step()
        self.now[0] += SETTLE_S
        await self.ids.step()

    def count(self, result: str) -> float:
        return self.metrics.registry.get_sample_value("warmroute_parity_total", {"kind": "ids", "result": result}) or 0


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    now = [100.0]
    directory = CountedDirectory(lambda: 100.0)
    await directory.register(HOST_LIFE, host_registration(), HOST_LOAD, TERM_S)
    await directory.register(LIFE, engine_registration("a"), replace(ENGINE_LOAD, announced_chunks=7), TERM_S)
    async with httpx.AsyncClient(trust_env=False) as client:
        fleet = Fleet(directory, HealthCheck(client), lambda: 100.0)
        await fleet.refresh()
        buckets, metrics = Buckets(lambda: now[0]), GatewayMetrics()
        ids = AnnouncedIds(directory, fleet, buckets, metrics, lambda: now[0])
        yield Stand(directory, fleet, buckets, metrics, ids, now)


def prompt(number: int, tokens: int = 17) -> bytes:
    return pack_tokens(range(number * 100, number * 100 + tokens))


async def test_equal_counts_with_other_ids_turn_the_bucket_and_right_ones_bring_it_back(stand: Stand) -> None:
    for number in range(5):
        assert stand.buckets.approximate(KIND) == frozenset()
        await stand.announce(prompt(number + 1000))
        stand.answered(prompt(number))
        await stand.settle()
    assert stand.count("mismatch") == 5
    assert stand.buckets.approximate(KIND) == {"a"}
    (row,) = stand.buckets.rows()
    assert (row["reason"], row["ids_looked_for"], row["ids_not_found"]) == ("ids", 5, 5)
    for number in range(5):
        await stand.announce(prompt(number))
        stand.answered(prompt(number))
        await stand.settle()
    assert stand.count("match") == 5
    assert stand.buckets.approximate(KIND) == frozenset()


@pytest.mark.parametrize(
    ("life", "tier", "first"),
    [(LIFE, Tier.GPU, 0), (HOST_LIFE, Tier.DRAM, 0), (LIFE, Tier.GPU, 3)],
    ids=["its own tier", "its host's", "only the last chunk"],
)
async def test_a_chunk_in_any_tier_that_the_engine_reaches_is_enough(
    stand: Stand, life: bytes, tier: Tier, first: int
) -> None:
    await stand.announce(prompt(1), life, tier, first)
    stand.answered(prompt(1))
    await stand.settle()
    assert (stand.count("match"), stand.count("mismatch")) == (1, 0)


async def test_chunks_of_another_engine_prove_nothing(stand: Stand) -> None:
    await stand.announce(prompt(1), draw_incarnation())
    stand.answered(prompt(1))
    await stand.settle()
    assert (stand.count("match"), stand.count("mismatch")) == (0, 1)


async def test_what_came_from_the_cache_is_not_asked_for(stand: Stand) -> None:
    await stand.announce(prompt(1)[:32])
    stand.answered(prompt(1), cached=16)
    await stand.settle()
    assert stand.directory.lookups == 0
    stand.answered(prompt(1), cached=8)
    await stand.settle()
    assert stand.count("mismatch") == 1, "the chunks behind the cached ones were computed, and aren't announced"


async def test_nothing_is_asked_too_early_and_one_prompt_of_a_kind_in_a_step(stand: Stand) -> None:
    for number in range(9):
        stand.answered(prompt(number))
    await stand.ids.step()
    assert stand.directory.lookups == 0
    await stand.settle()
    assert (stand.directory.lookups, stand.count("mismatch")) == (1, 1)


async def test_many_kinds_share_one_lookup_a_step_and_what_is_beyond_its_bound_is_let_go(stand: Stand) -> None:
    view = stand.fleet.table.engines["a"]
    for number in range(3 * LOOKS_PER_STEP):
        stand.ids.consider(view, replace(KIND, model=str(number)), prompt(number), None, None)
    await stand.settle()
    assert (stand.directory.lookups, stand.count("mismatch")) == (1, LOOKS_PER_STEP)


async def test_what_waits_is_bounded(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOKS_WAITING_MAX", 2)
    for number in range(4):
        stand.answered(prompt(number))
        await stand.ids.step()
    await stand.settle()
    assert stand.count("mismatch") == 2


async def test_a_directory_that_does_not_answer_accuses_nobody(stand: Stand) -> None:
    stand.directory.is_down = True
    stand.answered(prompt(1))
    await stand.settle()
    stand.directory.is_down, stand.directory.silent = False, frozenset(range(16))
    stand.answered(prompt(1))
    await stand.settle()
    assert (stand.count("unknown"), stand.count("mismatch")) == (2, 0)


async def test_an_engine_whose_placements_the_directory_has_no_room_for_is_not_judged(stand: Stand) -> None:
    stand.answered(prompt(1))
    await stand.directory.renew(LIFE, replace(ENGINE_LOAD, announced_chunks=7, is_directory_full=True))
    await stand.fleet.refresh()
    await stand.settle()
    assert (stand.directory.lookups, stand.count("mismatch")) == (0, 0)


async def test_engines_that_announce_nothing_or_live_no_more_are_not_judged(stand: Stand) -> None:
    view = stand.fleet.table.engines["a"]
    stand.ids.consider(replace(view, announced_chunks=0), KIND, prompt(1), None, None)
    stand.ids.consider(view, KIND, prompt(1, tokens=4), None, None)
    await stand.settle()
    assert stand.directory.lookups == 0, "neither one without a gpu tier, nor a prompt without a full chunk"
    stand.answered(prompt(1))
    await stand.directory.retire(LIFE)
    await stand.directory.register(
        draw_incarnation(), engine_registration("a"), replace(ENGINE_LOAD, announced_chunks=7), TERM_S
    )
    await stand.fleet.refresh()
    await stand.settle()
    assert stand.directory.lookups == 0
