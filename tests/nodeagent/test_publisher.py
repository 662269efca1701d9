"""What changes is said to the directory: coalesced, in order, in spite of lost calls, past a shard that is dead."""

import asyncio
from itertools import pairwise

import pytest

from directory.interface import BATCH_PLACEMENTS_MAX
from directory.placements import PARTITIONS
from nodeagent.lane import RETRY_MAX_S
from nodeagent.publisher import READERS_HEAR_S
from tests.nodeagent.publishing import DRAM, key, keys_of, staged

DEAD = 3


async def test_changes_are_coalesced_to_the_newest_state():
    async with staged() as stage:
        stage.directory.is_down = True
        for mask in (DRAM, 0, DRAM, 0, DRAM):
            stage.publisher.record(key(1), mask)
            await stage.time.advance(0.5)
        stage.directory.is_down = False
        await stage.time.advance(3)
        assert [state for batch in stage.directory.sent for state in batch.states].count((key(1), DRAM)) == 1
        assert await stage.believed(1) == DRAM


async def test_a_state_that_is_not_new_is_not_sent():
    async with staged() as stage:
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(1)
        stage.directory.sent.clear()
        stage.publisher.record(key(1), DRAM)
        stage.publisher.record(key(2), 0)
        await stage.time.advance(1)
        assert not any(batch.states for batch in stage.directory.sent)


async def test_batches_are_small_and_of_one_partition():
    async with staged() as stage:
        for number in range(3_000):
            stage.publisher.record(key(number), DRAM)
        await stage.time.advance(5)
        assert stage.publisher.is_settled
        for batch in stage.directory.sent:
            assert len(batch.states) <= BATCH_PLACEMENTS_MAX
            assert {each[0] >> 4 for each, _ in batch.states} == {batch.partition}
        for number in range(3_000):
            assert await stage.believed(number) == DRAM


@pytest.mark.parametrize("fault", ["lost request", "lost reply", "late request", "duplicate"])
async def test_a_batch_whose_fate_is_unknown_goes_out_again_with_the_newest_state(fault):
    async with staged() as stage:
        stage.directory.faults = [fault]
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(0.01)
        stage.publisher.record(key(1), 0)
        await stage.time.advance(5)
        await stage.directory.deliver_late()
        assert await stage.believed(1) == 0
        assert stage.publisher.is_settled


async def test_removals_that_a_full_directory_refuses_are_tried_ever_more_rarely():
    async with staged() as stage:
        for number in range(64):
            stage.publisher.record(key(number), DRAM)
        await stage.time.advance(5)
        stage.directory.has_no_room_for_functions = True
        for number in range(64):
            stage.publisher.record(key(number), 0)
        before = stage.directory.writes
        await stage.time.advance(20)
        assert stage.directory.writes - before < 16 * 20
        stage.directory.has_no_room_for_functions = False
        await stage.time.advance(10)
        assert not any([await stage.believed(number) for number in range(64)])


async def test_a_full_directory_takes_removals_and_later_the_placements():
    async with staged() as stage:
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(1)
        stage.directory.faults = ["full"] * 3
        stage.publisher.record(key(2), DRAM)
        await stage.time.advance(0.2)
        stage.publisher.record(key(1), 0)
        await stage.time.advance(0.2)
        assert await stage.believed(1) == 0
        assert stage.sample("warmroute_degraded_total", reason="directory_full") == 1
        await stage.time.advance(10)
        assert await stage.believed(2) == DRAM
        stage.directory.faults = ["full"]
        stage.publisher.record(key(3), DRAM)
        await stage.time.advance(10)
        assert stage.sample("warmroute_degraded_total", reason="directory_full") == 2, "told once each time"


async def test_an_unforeseen_fault_does_not_end_the_loops(monkeypatch):
    async with staged() as stage:

        async def fault(*_):
            raise RuntimeError("renew")

        monkeypatch.setattr(stage.directory, "renew", fault)
        await stage.time.advance(1)
        monkeypatch.undo()
        stage.directory.faults = ["bug"]
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(READERS_HEAR_S + 5)
        assert stage.walks("fault") == 1
        assert await stage.believed(1) == DRAM


async def test_settled_waits_for_the_acknowledgement():
    async with staged() as stage:
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(1)
        stage.directory.is_down = True
        stage.publisher.record(key(1), 0)
        waiting = asyncio.create_task(stage.publisher.settled([key(1)]))
        await stage.time.advance(1)
        assert not waiting.done()
        stage.directory.is_down = False
        await stage.time.advance(3)
        assert waiting.done()
        await waiting


async def test_removals_go_before_placements():
    async with staged() as stage:
        gone, come = keys_of(1, 200)[:100], keys_of(1, 200)[100:]
        for each in gone:
            stage.publisher.record(each, DRAM)
        await stage.time.advance(1)
        stage.directory.sent.clear()
        for each in come:
            stage.publisher.record(each, DRAM)
        for each in gone:
            stage.publisher.record(each, 0)
        await stage.time.advance(1)
        kinds = [any(mask for _, mask in batch.states) for batch in stage.directory.sent if batch.states]
        assert kinds == [False, False, True, True]
        assert all(len({bool(mask) for _, mask in batch.states}) <= 1 for batch in stage.directory.sent)


async def test_one_batch_of_each_partition_is_in_flight():
    async with staged() as stage:
        stage.directory.delay_s = 0.1
        for _ in range(5):
            for partition in range(PARTITIONS):
                for each in keys_of(partition, 200):
                    stage.publisher.record(each, DRAM - stage.publisher.inventory.mask(each))
            await stage.time.advance(0.25)
        assert stage.directory.most_in_flight == PARTITIONS
        assert stage.directory.collisions == 0


@pytest.mark.parametrize("fault", ["hangs", "is down"])
async def test_a_partition_that_does_not_answer_holds_up_no_other(fault):
    async with staged() as stage:
        (stage.directory.hanging if fault == "hangs" else stage.directory.down).add(DEAD)
        for partition in range(PARTITIONS):
            for each in keys_of(partition, 100):
                stage.publisher.record(each, DRAM)
        await stage.time.advance(0.1)
        for partition in set(range(PARTITIONS)) - {DEAD}:
            assert await stage.all_believed(keys_of(partition, 100))
        await stage.time.advance(2)
        assert stage.sample("warmroute_partitions_failing") == 1
        assert await stage.believed(keys_of(DEAD, 1)[0]) == 0
        stage.directory.hanging.clear()
        stage.directory.down.clear()
        await stage.time.advance(RETRY_MAX_S + 1)
        assert await stage.all_believed(keys_of(DEAD, 100))
        assert stage.sample("warmroute_partitions_failing") == 0
        assert stage.publisher.is_settled
        assert len(stage.directory.lives_begun) == 1


async def test_a_dead_partition_is_asked_ever_more_rarely():
    async with staged() as stage:
        stage.directory.down.add(DEAD)
        began_at = stage.time.now
        stage.publisher.record(keys_of(DEAD, 1)[0], DRAM)
        await stage.time.advance(60)
        tried_at = [at for at, batch in stage.directory.tried if batch.partition == DEAD and at >= began_at]
        pauses = [round(later - earlier, 6) for earlier, later in pairwise(tried_at)]
        assert pauses == sorted(pauses)
        assert pauses[-1] == pytest.approx(RETRY_MAX_S)
        assert len(tried_at) <= 60 / RETRY_MAX_S + 8


async def test_placements_that_find_no_room_are_had_from_the_inventory_without_a_new_life():
    async with staged(pending_keys_max=10 * PARTITIONS) as stage:
        stage.directory.down.add(DEAD)
        keys = keys_of(DEAD, 300)
        for each in keys:
            stage.publisher.record(each, DRAM)
        assert stage.publisher.pending_keys <= 10
        assert stage.publisher.announced_keys == 0
        await stage.time.advance(5)
        assert not stage.publisher.is_settled
        stage.directory.down.clear()
        await stage.time.advance(RETRY_MAX_S + 1)
        assert await stage.all_believed(keys)
        assert stage.publisher.announced_keys == 300
        assert stage.publisher.is_settled
        assert len(stage.directory.lives_begun) == 1


async def test_removals_that_find_no_room_need_a_new_life_once_the_partition_answers():
    async with staged(pending_keys_max=10 * PARTITIONS) as stage:
        keys = keys_of(DEAD, 60)
        for each in keys:
            stage.publisher.record(each, DRAM)
        await stage.time.advance(1)
        stage.directory.down.add(DEAD)
        for each in keys[:40]:
            stage.publisher.record(each, 0)
        assert stage.publisher.pending_keys <= 10
        await stage.time.advance(60)
        assert len(stage.directory.lives_begun) == 1, "as long as nobody can read it, nobody believes it"
        stage.directory.down.clear()
        await stage.time.advance(RETRY_MAX_S + READERS_HEAR_S + 1)
        assert stage.walks("overflow") == 1
        assert [await stage.believed(each) for each in keys] == [0] * 40 + [DRAM] * 20
        assert stage.publisher.is_settled


async def test_a_loss_is_noticed_without_traffic():
    async with staged() as stage:
        for partition in (DEAD, 9):
            for each in keys_of(partition, 10):
                stage.publisher.record(each, DRAM)
        await stage.time.advance(30)
        stage.directory.empty(DEAD)
        await stage.time.advance(PARTITIONS + 1)
        await stage.time.advance(READERS_HEAR_S + 1)
        assert stage.walks("lost_writes") == 1
        assert await stage.all_believed(keys_of(DEAD, 10))


async def test_a_loss_during_an_outage_is_noticed_by_a_writer_with_nothing_to_say():
    async with staged() as stage:
        for each in keys_of(DEAD, 10):
            stage.publisher.record(each, DRAM)
        await stage.time.advance(1)
        stage.directory.down.add(DEAD)
        await stage.time.advance(60)
        stage.directory.empty(DEAD)
        stage.directory.down.clear()
        await stage.time.advance(RETRY_MAX_S + READERS_HEAR_S + 1)
        assert await stage.all_believed(keys_of(DEAD, 10))


async def test_quiet_partitions_are_asked_one_a_second_and_those_never_written_to_not_at_all():
    async with staged() as stage:
        for partition in range(10):
            stage.publisher.record(keys_of(partition, 1)[0], DRAM)
        await stage.time.advance(1)
        began_at = stage.time.now
        await stage.time.advance(4 * PARTITIONS)
        asked = [(at, batch) for at, batch in stage.directory.tried if at > began_at]
        assert all(batch.states == () for _, batch in asked)
        assert {batch.partition for _, batch in asked} == set(range(10))
        assert len({at for at, _ in asked}) == len(asked), "never two at once"
        assert len(asked) <= 4 * 10
