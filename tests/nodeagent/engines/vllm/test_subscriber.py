from dataclasses import replace
from typing import Any

import pytest

from directory.identity import UNSCOPED
from nodeagent.engines.vllm.block_tree import Label
from nodeagent.engines.vllm.events import AllBlocksCleared
from tests.nodeagent.engines.vllm.following import BRIEF, chunk, following, fresh, gone, held, in_step, key
from tests.nodeagent.engines.vllm.publishing_engine import publishing, until
from tests.nodeagent.engines.vllm.recorded import stored


async def test_what_is_stored_and_removed_reaches_the_listener() -> None:
    async with publishing() as engine, following(engine) as (subscriber, listener):
        await in_step(engine, subscriber)
        engine.publish(chunk(1), chunk(2))
        engine.publish(gone(1), chunk(3))
        await until(lambda: listener.claimed == held(2, 3))
        assert [label.directory_key for label in listener.labels] == [key(1), key(2), key(3)]
        assert listener.labels[0] == Label(b"1 b", key(1), None, 0, salt_tag=UNSCOPED.salt_tag)
        engine.publish(AllBlocksCleared())
        await until(lambda: not listener.claimed)
        assert subscriber.is_known


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
    async with publishing() as engine, following(engine) as (subscriber, listener):
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
