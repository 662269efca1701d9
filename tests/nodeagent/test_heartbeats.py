"""A partition forgets whom it doesn't hear of, and others then prune: nobody is forgotten who is to be believed."""

import logging

import pytest

from directory.members import REMEMBERED_S
from directory.placements import PARTITIONS, unpack_holders
from nodeagent.lane import QUIET_S, RETRY_MAX_S
from nodeagent.pacing import NEW_LIFE_MIN_S
from nodeagent.publisher import READERS_HEAR_S
from tests.nodeagent.publishing import DRAM, Stage, keys_of, running, staged

FORGETS_S = 45.0
"""How soon partitions forget here: sooner than in life, and late for a heartbeat."""
DEAD = 3


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("directory.memory.REMEMBERED_S", FORGETS_S)


async def hold_everywhere(stage: Stage, count: int) -> None:
    for partition in range(PARTITIONS):
        for each in keys_of(partition, count):
            stage.publisher.record(each, DRAM)
    await stage.time.advance(1)


def test_in_life_a_partition_has_much_room_before_it_forgets() -> None:
    assert 10 * 2 * (QUIET_S + 1) < REMEMBERED_S


async def test_partitions_that_are_not_written_to_hear_of_a_life_all_the_same() -> None:
    async with staged() as stage:
        await hold_everywhere(stage, 2)
        await stage.time.advance(2 * FORGETS_S)
        for partition in range(PARTITIONS):
            await stage.pass_by(keys_of(partition, 2))
            assert await stage.all_have(keys_of(partition, 2), DRAM)
        assert len(stage.directory.lives_begun) == 1


async def test_a_directory_that_has_no_room_hears_of_a_life_with_placements_that_wait() -> None:
    async with staged() as stage:
        await hold_everywhere(stage, 2)
        stage.directory.is_full = True
        for partition in (1, DEAD):
            for each in keys_of(partition, 10)[2:]:
                stage.publisher.record(each, DRAM)
        await stage.time.advance(1.5 * FORGETS_S)
        for partition in range(PARTITIONS):
            await stage.pass_by(keys_of(partition, 2))
            assert await stage.all_have(keys_of(partition, 2), DRAM)
        stage.directory.is_full = False
        await stage.time.advance(2)
        assert await stage.all_have(keys_of(DEAD, 10), DRAM)
        assert len(stage.directory.lives_begun) == 1


async def test_a_walk_that_finds_no_room_leaves_the_life_before_known() -> None:
    async with staged() as stage:
        await hold_everywhere(stage, 2)
        await stage.time.advance(NEW_LIFE_MIN_S)
        stage.directory.is_full = True
        stage.publisher.doubt("calendar")
        await stage.time.advance(1.5 * FORGETS_S)
        for partition in range(PARTITIONS):
            await stage.pass_by(keys_of(partition, 2))
            assert await stage.all_have(keys_of(partition, 2), DRAM)
        assert await stage.live_count() == 2


async def test_removals_without_end_leave_the_life_before_known() -> None:
    async with staged() as stage:
        gone, kept = keys_of(1, 4_000), keys_of(1, 4_064)[4_000:]
        for each in (*kept, *gone):
            stage.publisher.record(each, DRAM)
        await stage.time.advance(NEW_LIFE_MIN_S)
        stage.directory.delay_s = 1.5
        stage.publisher.doubt("calendar")
        await stage.time.advance(READERS_HEAR_S + 0.1)
        for each in gone:
            stage.publisher.record(each, 0)
        await stage.time.advance(1.5 * FORGETS_S)
        old, _ = stage.publisher.lives.incarnations
        assert unpack_holders(await stage.record_of(kept[0])) == [(old, DRAM)], "the walk comes after the removals"
        await stage.pass_by(kept)
        assert await stage.all_have(kept, DRAM)
        assert stage.publisher.pending_keys, "which aren't over"


async def test_while_a_partition_is_dead_the_others_hear_of_both_lives() -> None:
    async with staged() as stage:
        await hold_everywhere(stage, 2)
        stage.directory.down.add(DEAD)
        stage.publisher.doubt("calendar")
        await stage.time.advance(2 * FORGETS_S)
        assert len(stage.publisher.lives.incarnations) == 2
        for life in stage.publisher.lives.incarnations:
            for partition in set(range(PARTITIONS)) - {DEAD}:
                heard_at = stage.directory.behind._attempts[partition, life].heard_at
                assert stage.time.now - heard_at <= 2 * (QUIET_S + 1)


async def test_who_was_forgotten_behind_a_dead_network_is_told_and_says_it_all_again() -> None:
    async with staged() as stage:
        await hold_everywhere(stage, 10)
        stage.directory.down.add(DEAD)
        await stage.time.advance(FORGETS_S + QUIET_S)
        await stage.pass_by(keys_of(DEAD, 5))
        assert not any([await stage.has(each, DRAM) for each in keys_of(DEAD, 5)]), "whom others can reach, they prune"
        assert await stage.all_have(keys_of(DEAD, 10)[5:], DRAM)
        stage.directory.down.clear()
        await stage.time.advance(RETRY_MAX_S + READERS_HEAR_S + 1)
        assert stage.walks("lost_writes") == 1
        assert await stage.all_have(keys_of(DEAD, 10), DRAM)
        assert await stage.live_count() == 1


async def test_a_life_that_was_left_is_forgotten_and_pruned() -> None:
    async with staged() as stage:
        (key,) = keys_of(1, 1)
        stage.publisher.record(key, DRAM)
        await stage.time.advance(NEW_LIFE_MIN_S)
        (left,) = stage.publisher.lives.incarnations
        stage.publisher.doubt("calendar")
        await stage.time.advance(READERS_HEAR_S + 1)
        rescued = stage.directory.behind
        rescued._records[key].masks[left] = DRAM  # an older copy of the record has come back
        await stage.pass_by([key])
        assert left in dict(unpack_holders(await stage.record_of(key)))
        await stage.time.advance(FORGETS_S)
        await stage.pass_by([key])
        assert left not in dict(unpack_holders(await stage.record_of(key)))
        assert await stage.has(key, DRAM)


async def test_a_directory_that_does_not_answer_is_told_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    stage.directory.is_down = True
    with caplog.at_level(logging.INFO):
        async with running(stage.publisher):
            await stage.time.advance(30)
            assert caplog.text.count("the registration of host-1; serving on") == 1
            stage.directory.is_down = False
            await stage.time.advance(RETRY_MAX_S + 1)
            assert caplog.text.count("the registration of host-1 again") == 1
    assert stage.sample("warmroute_directory_errors_total", op="register") > 1
    assert stage.sample("warmroute_degraded_total", reason="directory") == 1
