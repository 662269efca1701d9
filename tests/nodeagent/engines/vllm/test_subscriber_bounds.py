"""Replays that don't answer, floods, a directory that takes nothing: what is kept, and what is let go."""

import asyncio

import pytest

from nodeagent.engines.vllm import subscriber as module
from nodeagent.engines.vllm.gpu_table import GpuChanges
from nodeagent.engines.vllm.subscriber import SubscriberLimits
from tests.nodeagent.engines.vllm.following import (
    BRIEF,
    Listener,
    chunk,
    following,
    gone,
    held,
    in_step,
    key,
)
from tests.nodeagent.engines.vllm.publishing_engine import publishing, until
from tests.nodeagent.engines.vllm.recorded import removed
from tests.nodeagent.publishing import Stage


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
    async with publishing() as engine, following(engine, replay_endpoint=None) as (subscriber, listener):
        await engine.listened_to()
        engine.publish(chunk(1))
        await until(lambda: listener.claimed == held(1))
        assert subscriber.is_known
        engine.publish(chunk(2), is_lost=True)
        engine.publish(chunk(3))
        await until(lambda: listener.claimed == held(3))
        assert (subscriber.is_known, listener.unknown_because) == (False, ["no_replay"])


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
