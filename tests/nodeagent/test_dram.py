"""The DRAM tier works ahead: chunks are withdrawn before their slots are free, and no put ever waits for that."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import xxhash

from nodeagent.errors import MemoryShort, TierUnavailable
from nodeagent.messages import PutOutcome
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers import dram
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.dram import FREE_SLOTS_FRACTION, DramTier
from tests.nodeagent.lone_drive import soon
from tests.nodeagent.running import CHUNK_BYTES, WAIT_S, label, open_fds, payload, storage_key

SLOTS = 2 * FREE_SLOTS_FRACTION


class Withdrawals:
    """A directory that hears of withdrawals when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.let = asyncio.Event()

    async def __call__(self, keys) -> None:
        self.asked.extend(keys)
        await self.let.wait()


@asynccontextmanager
async def tier_with(withdrawn, changes, metrics=None, slots=SLOTS):
    async with asyncio.TaskGroup() as group:
        tier = DramTier(4_096 + slots * CHUNK_BYTES, changes.__setitem__, withdrawn, group, metrics or AgentMetrics())
        loop = group.create_task(tier.keep_free())
        try:
            yield tier
        finally:
            loop.cancel()
            await asyncio.wait([loop])
            await tier.close()


async def put(tier, name, holder="p") -> PutOutcome:
    hierarchy = await tier.ensure(CHUNK_BYTES)
    data = payload(name)
    granted = hierarchy.reserve(label(name), CHUNK_BYTES, xxhash.xxh3_128_digest(data), holder)
    tier.account()
    if granted.reservation is None:
        return granted.outcome
    with hierarchy.arena.view(granted.reservation.slot, CHUNK_BYTES) as slot:
        slot[:] = data
    return await tier.commit(holder, granted.reservation.number)


async def test_a_chunk_is_withdrawn_before_its_slot_is_free_and_puts_do_not_wait():
    withdrawals, changes = Withdrawals(), {}
    async with tier_with(withdrawals, changes) as tier:
        for number in range(SLOTS):
            assert await put(tier, f"{number}") is PutOutcome.STORED
        hierarchy = tier.hierarchy
        first = storage_key("0")
        assert first[:16] in withdrawals.asked
        assert changes[first[:16]] == 0
        assert hierarchy.contains_run([first]) == 0, "nobody finds it any more"
        assert len(hierarchy) + hierarchy.arena.free_slots < SLOTS, "but its slot isn't free yet"
        for number in range(SLOTS, SLOTS + 10):
            assert await put(tier, f"{number}") is PutOutcome.STORED
        withdrawals.let.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert hierarchy.arena.free_slots >= SLOTS // FREE_SLOTS_FRACTION
        assert len(hierarchy) + hierarchy.arena.free_slots == SLOTS


async def test_the_quota_holds_and_evictions_are_counted():
    async def at_once(keys) -> None:
        return

    metrics, changes = AgentMetrics(), {}
    async with tier_with(at_once, changes, metrics) as tier:
        for number in range(3 * SLOTS):
            assert await put(tier, f"{number}") is PutOutcome.STORED
            assert tier.used_bytes <= SLOTS * CHUNK_BYTES
        stored = {key for key, mask in changes.items() if mask}
        assert stored == {storage_key(f"{number}")[:16] for number in range(3 * SLOTS - len(stored), 3 * SLOTS)}
        evicted = metrics.registry.get_sample_value("warmroute_evictions_total", {"tier": "dram", "reason": "quota"})
        assert evicted >= SLOTS
        used = metrics.registry.get_sample_value("warmroute_tier_bytes_used", {"tier": "dram"})
        assert used == tier.used_bytes


async def test_several_engines_that_come_at_once_share_one_arena():
    async with tier_with(Withdrawals(), {}) as tier:
        made = await asyncio.gather(*(tier.ensure(CHUNK_BYTES) for _ in range(5)))
        assert len({id(each) for each in made}) == 1


async def test_larger_chunks_than_the_first_engines_are_refused_and_smaller_ones_fit():
    async with tier_with(Withdrawals(), {}) as tier:
        await tier.ensure(CHUNK_BYTES)
        await tier.ensure(CHUNK_BYTES - 5_000)
        with pytest.raises(TierUnavailable, match="came first"):
            await tier.ensure(CHUNK_BYTES + 1)


async def test_a_refused_size_may_be_followed_by_one_that_fits():
    async with tier_with(Withdrawals(), {}) as tier:
        with pytest.raises(TierUnavailable, match="holds no slot"):
            await tier.ensure(10 * SLOTS * CHUNK_BYTES)
        assert "holds no slot" in tier.memory_status()["refusal"]
        await tier.ensure(CHUNK_BYTES)
        assert tier.hierarchy.arena.slots == SLOTS


async def test_a_commit_that_nobody_waits_for_any_more_still_ends():
    async with tier_with(Withdrawals(), {}) as tier:
        hierarchy = await tier.ensure(CHUNK_BYTES)
        data = payload("a")
        granted = hierarchy.reserve(label("a"), CHUNK_BYTES, xxhash.xxh3_128_digest(data), "p")
        with hierarchy.arena.view(granted.reservation.slot, CHUNK_BYTES) as slot:
            slot[:] = data
        waiting = asyncio.create_task(tier.commit("p", granted.reservation.number))
        await asyncio.sleep(0)
        waiting.cancel()
        while hierarchy.open_reservations:
            await asyncio.sleep(0)
        assert hierarchy.contains_run([storage_key("a")]) == 1


async def test_a_commit_of_nothing_is_refused():
    async with tier_with(Withdrawals(), {}) as tier:
        assert await tier.commit("p", 1) is PutOutcome.REFUSED
        await tier.ensure(CHUNK_BYTES)
        assert await tier.commit("p", 1) is PutOutcome.REFUSED


class SlowArenas:
    """Arenas that are made when the test lets them."""

    def __init__(self, monkeypatch) -> None:
        self.made: list[Arena] = []
        self.has_begun, self.let = threading.Event(), threading.Event()
        monkeypatch.setattr(dram, "Arena", self)

    def __call__(self, *arguments, **options) -> Arena:
        self.has_begun.set()
        assert self.let.wait(WAIT_S)
        self.made.append(Arena(*arguments, **options))
        return self.made[-1]


async def test_an_arena_whose_asker_has_left_is_made_once_for_the_next(monkeypatch):
    arenas = SlowArenas(monkeypatch)
    async with tier_with(Withdrawals(), {}) as tier:
        first = asyncio.create_task(tier.ensure(CHUNK_BYTES))
        await asyncio.to_thread(arenas.has_begun.wait, WAIT_S)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(tier.ensure(CHUNK_BYTES))
        await asyncio.sleep(0)
        arenas.let.set()
        hierarchy = await second
        assert arenas.made == [hierarchy.arena]


async def test_an_arena_that_is_being_made_at_the_end_is_given_back(monkeypatch):
    arenas, before = SlowArenas(monkeypatch), open_fds()
    async with tier_with(Withdrawals(), {}) as tier:
        asking = asyncio.create_task(tier.ensure(CHUNK_BYTES))
        await asyncio.to_thread(arenas.has_begun.wait, WAIT_S)
        asyncio.get_running_loop().call_later(0, arenas.let.set)
    await asyncio.wait([asking])
    assert asking.cancelled()
    assert len(arenas.made) == 1
    assert open_fds() == before


async def test_a_chunk_that_many_readers_doubt_is_checked_once_for_all_and_again_later(monkeypatch):
    checked, digest = [], dram._digest_of

    def noting(arena, slot, length):
        checked.append(slot)
        return digest(arena, slot, length)

    async def at_once(keys) -> None:
        return

    async with tier_with(at_once, {}) as tier:
        assert await put(tier, "a") is PutOutcome.STORED
        monkeypatch.setattr(dram, "_digest_of", noting)
        entry = tier.hierarchy.find(storage_key("a"))
        for times in (1, 2):
            for _ in range(100):
                tier.recheck(entry)
            await soon(lambda: not tier._rechecking)
            assert len(checked) == times
        with tier.hierarchy.arena.view(entry.slot, CHUNK_BYTES) as slot:
            slot[0] ^= 1
        tier.recheck(entry)
        await soon(lambda: not tier._rechecking)
        assert not entry.is_indexed


async def test_without_a_thread_the_arena_is_made_later_and_a_chunk_is_checked_all_the_same(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    async def at_once(keys) -> None:
        return

    made = []

    def making(*arguments, **options):
        made.append(Arena(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(dram, "Arena", making)
    monkeypatch.setattr(dram, "MEMORY_WAIT_S", 0.0)
    async with tier_with(at_once, {}) as tier:
        with monkeypatch.context() as refusing:
            refusing.setattr(threading.Thread, "start", refuse)
            with pytest.raises(MemoryShort, match="no thread"):
                await tier.ensure(CHUNK_BYTES)
        await tier.ensure(CHUNK_BYTES)
        assert len(made) == 1, "and none of the attempt that was refused"
        tier._threads = ThreadPoolExecutor(1)
        with monkeypatch.context() as refusing:
            refusing.setattr(threading.Thread, "start", refuse)
            assert await put(tier, "a") is PutOutcome.STORED
