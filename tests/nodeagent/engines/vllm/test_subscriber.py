import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from directory.chunks import chunk_keys, directory_key, pack_tokens
from nodeagent.engines.vllm import subscriber as module
from nodeagent.engines.vllm.block_tree import Label
from nodeagent.engines.vllm.events import AllBlocksCleared, BlockRemoved, BlockStored
from nodeagent.engines.vllm.gpu_table import GpuChanges, GpuTable
from nodeagent.engines.vllm.saved_table import SavedTable, load_table
from nodeagent.engines.vllm.subscriber import GpuUnknown, KvEventSubscriber, SubscriberLimits, rank_endpoint
from tests.nodeagent.engines.vllm.publishing_engine import PublishingEngine, publishing, until
from tests.nodeagent.engines.vllm.recorded import removed, stored
from tests.nodeagent.test_publisher import Stage

FLEET = b"\x01" * 32
BRIEF = SubscriberLimits(replay_timeout_s=0.05, probe_interval_s=0.05)
QUICK = SubscriberLimits(replay_timeout_s=1.0, probe_interval_s=30.0)


def chunk(number: int) -> BlockStored:
    """A prompt of one chunk: two blocks of two tokens."""
    return stored([b"%d a" % number, b"%d b" % number], [number, 0, 0, 0])


def gone(number: int) -> BlockRemoved:
    return removed(b"%d b" % number)


def key(number: int) -> bytes:
    return directory_key(chunk_keys(FLEET, pack_tokens([number, 0, 0, 0]), 4)[0])


def held(*numbers: int) -> set[bytes]:
    return {key(number) for number in numbers}


def fresh(entries_max: int = 100_000) -> SavedTable:
    return SavedTable(GpuTable(FLEET, 4, {}.get, entries_max), 0, b"")


class Listener:
    """What an agent would announce."""

    def __init__(self) -> None:
        self.claimed: set[bytes] = set()
        self.labels: list[Label] = []
        self.unknown_because: list[str] = []
        self.calls = 0
        self.fault: Exception | None = None

    def changed(self, changes: GpuChanges) -> None:
        self.calls += 1
        assert set(changes.removed) <= self.claimed
        assert not set(changes.stored) & self.claimed
        self.claimed |= set(changes.stored)
        self.claimed -= set(changes.removed)
        self.labels.extend(changes.labels)
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def unknown(self, unknown: GpuUnknown) -> None:
        self.unknown_because.append(unknown.reason)


@asynccontextmanager
async def following(
    engine: PublishingEngine,
    start: SavedTable | None = None,
    limits: SubscriberLimits = QUICK,
    listener: Any = None,
    **source: Any,
) -> AsyncIterator[tuple[KvEventSubscriber, Listener]]:
    listener = listener or Listener()
    subscriber = KvEventSubscriber(
        replace(engine.source, **source), start or fresh(), listener, engine.context, limits=limits
    )
    task = asyncio.create_task(subscriber.run())
    try:
        yield subscriber, listener
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def in_step(engine: PublishingEngine, subscriber: KvEventSubscriber) -> None:
    """Listening, and sure of all that was published."""
    await engine.listened_to()
    await until(lambda: subscriber.is_known and subscriber.next_sequence == engine.next)


async def test_what_is_stored_and_removed_reaches_the_listener() -> None:
    async with publishing() as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1), chunk(2))
        engine.publish(gone(1), chunk(3))
        await until(lambda: listener.claimed == held(2, 3))
        assert [label.directory_key for label in listener.labels] == [key(1), key(2), key(3)]
        assert listener.labels[0] == Label(b"1 b", key(1), None, 0)
        engine.publish(AllBlocksCleared())
        await until(lambda: not listener.claimed)
        assert subscriber.is_known


async def test_an_engine_that_runs_already_is_told_of_at_once_and_exactly() -> None:
    async with publishing() as engine:
        for number in range(50):
            engine.publish(chunk(number))
        engine.publish(*(gone(number) for number in range(40)))
        async with following(engine) as (subscriber, listener):
            await in_step(engine, subscriber)
            assert listener.claimed == held(*range(40, 50))
            assert (listener.calls, listener.unknown_because) == (1, [])


async def test_a_replay_that_does_not_reach_back_leaves_what_was_before_unclaimed() -> None:
    async with publishing(buffer_batches=3) as engine:
        parent = chunk(1)
        engine.publish(parent)
        engine.publish(chunk(2))
        engine.publish(stored([b"c", b"d"], [9, 9, 9, 9], parent=parent.block_hashes[-1]))
        engine.publish(gone(2))
        engine.publish(chunk(3))
        async with following(engine) as (subscriber, listener):
            await engine.listened_to()
            await until(lambda: subscriber.next_sequence == 5)
            engine.publish(chunk(4))
            await until(lambda: listener.claimed == held(3, 4))
            assert listener.unknown_because == ["replay_too_short"]
            assert not subscriber.is_known
            engine.publish(AllBlocksCleared(), chunk(5))
            await until(lambda: subscriber.is_known)
            assert listener.claimed == held(5)


async def test_a_lost_batch_is_replayed_in_its_place() -> None:
    async with publishing() as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        engine.publish(chunk(2), is_lost=True)
        engine.publish(gone(1), chunk(3), is_lost=True)
        engine.publish(gone(2))
        await until(lambda: listener.claimed == held(3))
        assert (subscriber.is_known, listener.unknown_because) == (True, [])


async def test_a_gap_longer_than_the_buffer_drops_every_claim() -> None:
    async with publishing(buffer_batches=2) as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        await until(lambda: listener.claimed == held(1))
        engine.publish(gone(1), is_lost=True)
        engine.publish(chunk(2), is_lost=True)
        engine.publish(chunk(3))
        await until(lambda: listener.claimed == held(2, 3))
        assert listener.unknown_because == ["replay_too_short"]


async def test_a_buffer_that_begins_with_the_next_batch_proves_nothing() -> None:
    """The batch before it isn't there to show that it is the same process."""
    async with publishing(buffer_batches=2) as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        await until(lambda: listener.claimed == held(1))
        engine.publish(chunk(2), is_lost=True)
        engine.publish(chunk(3))
        await until(lambda: listener.claimed == held(2, 3))
        assert listener.unknown_because == ["replay_too_short"]


async def test_batches_that_come_during_a_replay_follow_in_order() -> None:
    async with publishing() as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        await until(lambda: subscriber.next_sequence == 1)

        async def meanwhile() -> None:
            engine.publish(gone(2))
            engine.publish(chunk(3))
            await until(lambda: subscriber.held_batches == 3)

        engine.before_end = meanwhile()
        engine.publish(chunk(2), is_lost=True)
        engine.publish(gone(1))
        await until(lambda: subscriber.next_sequence == 5)
        assert listener.claimed == held(3)
        assert (subscriber.held_batches, listener.unknown_because) == (0, [])


async def test_a_batch_that_comes_while_the_engine_answers_is_no_sign_of_another_process() -> None:
    async with publishing() as engine, following(engine, limits=BRIEF) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        await until(lambda: listener.claimed == held(1))

        async def meanwhile() -> None:
            engine.publish(chunk(2))
            await until(lambda: subscriber.held_batches == 1)

        engine.before_end = meanwhile()
        await until(lambda: listener.claimed == held(1, 2))
        assert (subscriber.counts["restart"], listener.unknown_because) == (0, [])


async def test_replies_that_the_engines_socket_drops_are_asked_for_again() -> None:
    async with publishing() as engine:
        for number in range(20):
            engine.publish(chunk(number))
        engine.drop_replies = {7, 8, 12}
        async with following(engine) as (subscriber, listener):
            await in_step(engine, subscriber)
            assert listener.claimed == held(*range(20))
            assert (engine.requests, listener.unknown_because) == ([0, 0], [])


async def test_an_engine_that_begins_again_is_seen_by_its_numbers() -> None:
    async with publishing() as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        for number in range(5):
            engine.publish(chunk(number))
        await until(lambda: len(listener.claimed) == 5)
        engine.restart()
        await engine.listened_to()
        engine.publish(chunk(7))
        await until(lambda: listener.claimed == held(7))
        assert (subscriber.is_known, listener.unknown_because) == (True, [])
        assert subscriber.counts["restart"] == 1


async def test_another_process_is_seen_though_its_numbers_have_overtaken() -> None:
    async with publishing() as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        engine.publish(chunk(2))
        await until(lambda: listener.claimed == held(1, 2))
        engine.restart()
        for number in range(10, 16):
            engine.publish(chunk(number), is_lost=True)
        await engine.listened_to()
        engine.publish(chunk(16))
        await until(lambda: listener.claimed == held(*range(10, 17)))
        assert (subscriber.is_known, listener.unknown_because) == (True, [])


async def test_a_restart_told_from_outside_empties_the_table_before_the_engine_speaks() -> None:
    async with publishing() as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        engine.publish(chunk(2))
        await until(lambda: listener.claimed == held(1, 2))
        engine.publish(chunk(3))  # of the old process, on its way
        engine.restart()
        subscriber.restarted()
        assert listener.claimed == set()
        await in_step(engine, subscriber)
        engine.publish(chunk(4))
        await until(lambda: listener.claimed == held(4))
        assert (subscriber.next_sequence, listener.unknown_because) == (1, [])


async def test_what_the_old_process_sent_is_passed_over_once_a_restart_is_told() -> None:
    async with publishing() as engine:
        subscriber = KvEventSubscriber(engine.source, fresh(), Listener(), engine.context)
        subscriber.restarted()
        subscriber._receive([b"kv", (57).to_bytes(8, "big"), b"of the old process"])
        assert (subscriber.held_batches, subscriber.next_sequence) == (0, 0)


@pytest.mark.parametrize("is_mute", [False, True], ids=["with a replay", "without an answer"])
async def test_batches_of_two_processes_that_wait_together_are_kept_apart(is_mute: bool) -> None:
    limits = SubscriberLimits(replay_timeout_s=0.5, replay_stalls_max=2)
    async with publishing() as engine, following(engine, limits=limits) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        await until(lambda: listener.claimed == held(1))
        engine.is_replay_mute = True
        engine.publish(gone(1), is_lost=True)
        engine.publish(chunk(2))
        await until(lambda: subscriber.held_batches == 1)
        engine.restart()
        await engine.listened_to()
        engine.publish(chunk(3), is_lost=True)
        engine.is_replay_mute = is_mute
        engine.publish(chunk(4))
        await until(lambda: listener.claimed == (held(4) if is_mute else held(3, 4)))
        assert (subscriber.next_sequence, subscriber.held_batches) == (2, 0)
        assert subscriber.is_known is not is_mute


async def test_messages_that_are_none_are_counted_and_passed_over() -> None:
    async with publishing() as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        for frames in (
            [b"kv"],
            [b"kv", b"short", b""],
            [b"kv", b"\x00" * 8, b"", b""],
            [b"kv-other", b"\x00" * 8, b""],
        ):
            engine.send(frames)
        engine.publish(chunk(1))
        await until(lambda: listener.claimed == held(1))
        assert (subscriber.counts["malformed_message"], subscriber.counts["other_topic"]) == (3, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"raw": b"\xc1"}, "malformed"), ({"rank": 3}, "other_rank")],
    ids=["undecodable", "another rank's"],
)
async def test_a_batch_that_cannot_be_used_drops_the_table_once(options: dict[str, Any], reason: str) -> None:
    async with publishing() as engine, following(engine, rank=0) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        engine.publish(chunk(2), **options)
        engine.publish(chunk(3))
        await until(lambda: listener.claimed == held(3))
        assert listener.unknown_because == [reason]


async def test_a_table_that_is_full_or_cannot_be_kept_is_unknown() -> None:
    async with publishing() as engine, following(engine, fresh(entries_max=10)) as (subscriber, listener):
        await in_step(engine, subscriber)
        for number in range(3):
            engine.publish(chunk(number))
        await until(lambda: subscriber.next_sequence == 3)
        assert (listener.claimed, listener.unknown_because) == (set(), ["table_full"])
        engine.publish(AllBlocksCleared(), replace(chunk(4), group_idx=1, kv_cache_spec_kind="mamba"))
        await until(lambda: len(listener.unknown_because) == 2)
        assert listener.unknown_because[-1] == "approximate"
        assert subscriber.table.approximation == "group 1 is mamba"


async def saved_after(engine: PublishingEngine) -> SavedTable:
    async with following(engine) as (subscriber, _):
        await in_step(engine, subscriber)
        data = subscriber.dump(b"life")
    assert data is not None
    start = load_table(data, life=b"life", fleet_digest=FLEET, chunk_tokens=4, adapters={}.get)
    assert start is not None
    return start


async def test_a_saved_table_goes_on_where_it_ended_and_is_warmed() -> None:
    async with publishing() as engine:
        engine.publish(chunk(1), stored([b"half"], [5, 5]))
        start = await saved_after(engine)
        engine.publish(chunk(2), stored([b"whole"], [6, 6], parent=b"half"))
        async with following(engine, start) as (subscriber, listener):
            await in_step(engine, subscriber)
            assert len(listener.claimed) == 3
            assert listener.claimed > held(1, 2)
            assert (listener.calls, listener.unknown_because) == (1, [])


async def test_a_saved_table_is_not_claimed_before_the_engine_has_confirmed_it() -> None:
    async with publishing() as engine:
        engine.publish(chunk(1))
        start = await saved_after(engine)
        engine.is_replay_mute = True
        async with following(engine, start) as (subscriber, listener):
            await until(lambda: len(engine.requests) > 1)
            await engine.listened_to()
            engine.publish(chunk(2))
            await until(lambda: subscriber.held_batches == 1)
            assert (listener.claimed, subscriber.is_known, subscriber.dump(b"life")) == (set(), False, None)


async def test_a_saved_table_that_nobody_confirms_is_dropped_when_the_engine_speaks() -> None:
    async with publishing() as engine:
        engine.publish(chunk(1))
        start = await saved_after(engine)
        engine.is_replay_mute = True
        async with following(engine, start, replace(BRIEF, probe_interval_s=30.0)) as (subscriber, listener):
            await engine.listened_to()
            await until(lambda: subscriber.counts["replay_timeout"] == BRIEF.replay_stalls_max)
            engine.publish(chunk(2))
            await until(lambda: listener.claimed == held(2))
            assert (listener.unknown_because, subscriber.is_known) == (["no_replay"], False)


async def test_a_saved_table_of_a_process_that_is_gone_is_forgotten() -> None:
    async with publishing() as engine:
        engine.publish(chunk(1))
        start = await saved_after(engine)
        engine.restart()
        async with following(engine, start) as (subscriber, listener):
            await in_step(engine, subscriber)
            assert listener.claimed == set()
            engine.publish(chunk(2))
            await until(lambda: listener.claimed == held(2))
            assert listener.unknown_because == []


async def test_a_saved_table_that_the_replay_does_not_reach_is_dropped() -> None:
    async with publishing(buffer_batches=3) as engine:
        engine.publish(chunk(1))
        start = await saved_after(engine)
        for number in range(2, 7):
            engine.publish(chunk(number))
        async with following(engine, start) as (subscriber, listener):
            await until(lambda: listener.claimed == held(4, 5, 6))
            assert (listener.unknown_because, subscriber.is_known) == (["replay_too_short"], False)


async def test_a_replay_that_never_answers_costs_the_table_only_at_a_gap() -> None:
    async with publishing() as engine, following(engine, limits=BRIEF) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.is_replay_mute = True
        asked = len(engine.requests)
        engine.publish(chunk(1))
        await until(lambda: len(engine.requests) > asked + 3 and listener.claimed == held(1))
        engine.publish(chunk(2))
        await until(lambda: listener.claimed == held(1, 2))
        assert listener.unknown_because == []
        engine.publish(chunk(3), is_lost=True)
        engine.publish(chunk(4))
        await until(lambda: listener.claimed == held(4))
        assert listener.unknown_because == ["no_replay"]


async def test_a_batch_lost_before_a_silence_is_found() -> None:
    async with publishing() as engine, following(engine, limits=BRIEF) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        engine.publish(gone(1), chunk(2), is_lost=True)
        await until(lambda: listener.claimed == held(2))
        assert subscriber.is_known


async def test_without_a_replay_a_first_batch_is_known_and_a_gap_is_not() -> None:
    async with publishing() as engine, following(engine, replay=None) as (subscriber, listener):
        await engine.listened_to()
        engine.publish(chunk(1))
        await until(lambda: listener.claimed == held(1))
        assert subscriber.is_known
        engine.publish(chunk(2), is_lost=True)
        engine.publish(chunk(3))
        await until(lambda: listener.claimed == held(3))
        assert (subscriber.is_known, listener.unknown_because) == (False, ["no_replay"])


async def test_without_a_replay_a_saved_table_is_dropped() -> None:
    async with publishing() as engine:
        engine.publish(chunk(1))
        start = await saved_after(engine)
        async with following(engine, start, replay=None) as (_, listener):
            await engine.listened_to()
            engine.publish(chunk(2))
            await until(lambda: listener.claimed == held(2))
            assert listener.unknown_because[0] == "no_replay"


async def test_a_fault_is_repaired_from_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAULT_PAUSE_S", 0.01)
    async with publishing() as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        listener.fault = RuntimeError("a fault that no docstring names")
        engine.publish(chunk(1))
        await until(lambda: listener.unknown_because == ["fault"])
        assert listener.claimed == set()
        await in_step(engine, subscriber)
        assert listener.claimed == held(1)


class StoppedDirectory(Listener):
    """A publisher whose directory takes nothing: it is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.publisher = Stage(pending_keys_max=100).publisher

    def changed(self, changes: GpuChanges) -> None:
        for stored_key in changes.stored:
            self.publisher.record_in(1, stored_key, 1)
        for removed_key in changes.removed:
            self.publisher.record_in(1, removed_key, 0)


async def test_a_flood_with_the_directory_stopped_is_drained_within_the_bounds() -> None:
    listener, batches = StoppedDirectory(), 4_000
    async with publishing() as engine, following(engine, listener=listener) as (subscriber, _):
        await in_step(engine, subscriber)
        for number in range(batches):
            engine.publish(
                chunk(number), *([gone(number - 50), removed(b"%d a" % (number - 50))] if number >= 50 else [])
            )
            if number % 100 == 0:
                await asyncio.sleep(0)
        await until(lambda: subscriber.next_sequence == batches)
        assert listener.publisher.pending_keys <= 100
        assert len(listener.publisher.inventory) == len(subscriber.table.held) == 50
        assert subscriber.table.entries == 4 * 50
        assert (subscriber.held_batches, subscriber.table.waiting_blocks, listener.unknown_because) == (0, 0, [])


async def test_what_is_held_for_a_replay_that_stalls_is_bounded() -> None:
    limits = SubscriberLimits(replay_timeout_s=30.0, held_batches_max=20)
    async with publishing() as engine, following(engine, limits=limits) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        await until(lambda: listener.claimed == held(1))
        engine.is_replay_mute = True
        engine.publish(gone(1), is_lost=True)
        most = 0
        for number in range(2, 200):
            engine.publish(chunk(number))
            await asyncio.sleep(0)
            most = max(most, subscriber.held_batches)
        await until(lambda: listener.unknown_because == ["flood"])
        await until(lambda: subscriber.next_sequence >= 200 - 20)
        assert most <= 20
        assert key(1) not in listener.claimed


async def test_a_flood_during_a_replay_does_without_the_rest_of_it() -> None:
    limits = SubscriberLimits(replay_timeout_s=5.0, held_batches_max=20)
    async with publishing() as engine, following(engine, limits=limits) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        await until(lambda: listener.claimed == held(1))

        async def meanwhile() -> None:
            for number in range(2, 30):
                engine.publish(chunk(number))
            await until(lambda: listener.unknown_because)

        engine.before_replies = meanwhile()
        engine.publish(gone(1), is_lost=True)
        engine.publish(chunk(40))
        await until(lambda: subscriber.next_sequence == engine.next)
        assert listener.claimed == held(40, *range(2, 30))
        assert (listener.unknown_because, subscriber.counts["restart"]) == (["flood"], 0)


def test_a_ranks_endpoint_is_rank_0s_with_the_rank_added_to_the_port() -> None:
    assert rank_endpoint("tcp://127.0.0.1:5557", 3) == "tcp://127.0.0.1:5560"
    with pytest.raises(ValueError, match="no port"):
        rank_endpoint("ipc://somewhere", 1)
