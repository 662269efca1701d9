"""Another process of the engine, another of the agent: what is claimed of either."""

from dataclasses import replace

import pytest

from nodeagent.engines.vllm.events import AllBlocksCleared
from nodeagent.engines.vllm.saved_table import SavedTable, dump_table, load_table
from nodeagent.engines.vllm.subscriber import SubscriberLimits
from tests.nodeagent.engines.vllm.following import BRIEF, FLEET, chunk, following, gone, held, in_step
from tests.nodeagent.engines.vllm.publishing_engine import PublishingEngine, publishing, until
from tests.nodeagent.engines.vllm.recorded import stored


async def test_an_engine_that_runs_already_is_told_of_at_once_and_exactly() -> None:
    async with publishing() as engine:
        for number in range(50):
            engine.publish(chunk(number))
        engine.publish(*(gone(number) for number in range(40)))
        async with following(engine) as (subscriber, listener):
            await in_step(engine, subscriber)
            assert listener.claimed == held(*range(40, 50))
            assert (listener.calls, listener.unknown_because) == (1, [])


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


async def test_a_reset_told_from_outside_is_not_waited_for() -> None:
    async with publishing() as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1))
        await until(lambda: listener.claimed == held(1))
        subscriber.cleared()
        assert (listener.claimed, subscriber.is_known) == (set(), True)
        engine.publish(AllBlocksCleared(), chunk(2))
        await until(lambda: listener.claimed == held(2))


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
            assert (listener.claimed, subscriber.is_known) == (set(), False)
            assert subscriber.dump(b"life") == dump_table(start, b"life"), (
                "kept as it was, for the next start to confirm"
            )


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


async def test_without_a_replay_a_saved_table_is_dropped() -> None:
    async with publishing() as engine:
        engine.publish(chunk(1))
        start = await saved_after(engine)
        async with following(engine, start, replay_endpoint=None) as (_, listener):
            await engine.listened_to()
            engine.publish(chunk(2))
            await until(lambda: listener.claimed == held(2))
            assert listener.unknown_because[0] == "no_replay"
