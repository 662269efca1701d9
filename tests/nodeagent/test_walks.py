"""Walks: a new life says everything anew, for every cause, while what was said before is believed until it has."""

from itertools import pairwise

import pytest

from directory.errors import DirectoryUnavailable, RegistrationRefused
from directory.members import TERM_S
from directory.placements import PARTITIONS, unpack_holders
from nodeagent.lane import RETRY_MAX_S
from nodeagent.pacing import NEW_LIFE_MAX_S, NEW_LIFE_MIN_S
from nodeagent.publisher import INTERVAL_SPREAD, READERS_HEAR_S, WALK_SPREAD_S
from tests.nodeagent.publishing import DRAM, Stage, key, keys_of, running, staged

DEAD = 3
WELL = [each for each in range(PARTITIONS) if each != DEAD]


async def test_the_first_life_says_at_once_what_it_holds():
    stage = Stage()
    stage.publisher.record(key(1), DRAM)
    async with running(stage.publisher):
        await stage.time.settle()
        assert await stage.believed(1) == DRAM


async def test_a_walk_that_leaves_a_believed_life_waits_until_readers_have_heard_of_the_next():
    async with staged() as stage:
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(1)
        stage.directory.sent.clear()
        stage.publisher.doubt("calendar")
        await stage.time.advance(READERS_HEAR_S - 0.1)
        assert await stage.live_count() == 2
        stage.publisher.record(key(2), DRAM)
        await stage.time.settle()
        old, new = stage.publisher.lives.incarnations
        assert {batch.incarnation for batch in stage.directory.sent} == {old}
        await stage.time.advance(0.2)
        assert {batch.incarnation for batch in stage.directory.sent} == {old, new}


async def test_a_life_that_is_not_believed_is_left_at_once():
    """Though a batch may find a loss a moment before a renewal says that the life is unknown."""
    async with staged(chance=lambda: 1.0) as stage:
        before, after = keys_of(1, 2)
        stage.publisher.record(before, DRAM)
        await stage.time.advance(1)
        stage.directory.flush()
        stage.publisher.record(after, DRAM)
        await stage.time.advance(WALK_SPREAD_S + 0.1)
        assert await stage.believed(before) == DRAM
        assert stage.walks("unknown") == 1


async def test_a_flushed_directory_is_filled_again():
    async with staged() as stage:
        for number in range(200):
            stage.publisher.record(key(number), DRAM)
        await stage.time.advance(2)
        stage.directory.flush()
        await stage.time.advance(READERS_HEAR_S + 4)
        assert stage.walks("unknown") == 1
        for number in range(200):
            assert await stage.believed(number) == DRAM
        assert await stage.live_count() == 1


async def test_a_partition_that_lost_writes_is_noticed_by_its_number():
    async with staged() as stage:
        for number in range(200):
            stage.publisher.record(key(number), DRAM)
        await stage.time.advance(2)
        for partition in range(PARTITIONS):
            stage.directory.empty(partition)
        stage.publisher.record(key(1_000), DRAM)
        await stage.time.advance(READERS_HEAR_S + 2)
        assert stage.walks("lost_writes") == 1
        for number in (*range(200), 1_000):
            assert await stage.believed(number) == DRAM


async def test_a_lapse_longer_than_a_term_begins_a_new_life_and_a_shorter_one_does_not():
    async with staged() as stage:
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(1)
        first = stage.publisher.lives.incarnations
        stage.directory.is_down = True
        await stage.time.advance(TERM_S + 2)
        stage.directory.is_down = False
        await stage.time.advance(3)
        assert stage.publisher.lives.incarnations == first
        assert await stage.believed(1) == DRAM
        stage.directory.is_down = True
        await stage.time.advance(2 * TERM_S + 3)
        assert await stage.believed(1) == 0
        stage.directory.is_down = False
        await stage.time.advance(READERS_HEAR_S + 6)
        assert stage.publisher.lives.incarnations != first
        assert await stage.believed(1) == DRAM


async def test_during_a_walk_readers_never_lose_what_is_held():
    async with staged() as stage:
        for number in range(300):
            stage.publisher.record(key(number), DRAM)
        await stage.time.advance(2)
        stage.publisher.doubt("calendar")
        for _ in range(80):
            await stage.time.advance(0.05)
            for number in (0, 150, 299):
                assert await stage.believed(number) == DRAM
        assert stage.walks("calendar") == 1
        assert await stage.live_count() == 1


async def test_a_walk_leaves_no_entry_of_the_life_before():
    async with staged() as stage:
        for number in range(50):
            stage.publisher.record(key(number), DRAM)
        await stage.time.advance(2)
        stage.publisher.doubt("calendar")
        await stage.time.advance(READERS_HEAR_S + 2)
        for number in range(50):
            record = (await stage.directory.lookup([key(number)], 1)).records[0]
            assert len(record) == 9
            assert record[:8] == stage.publisher.lives.incarnations[0]


async def test_the_inventory_is_walked_most_recently_used_first():
    async with staged() as stage:
        numbers = [number for number in range(4_000) if key(number)[0] >> 4 == 0][:200]
        for number in numbers:
            stage.publisher.record(key(number), DRAM)
        stage.publisher.record(key(numbers[0]), DRAM)
        await stage.time.advance(2)
        stage.directory.sent.clear()
        stage.publisher.doubt("calendar")
        await stage.time.advance(READERS_HEAR_S + 2)
        walked = [each for batch in stage.directory.sent for each, _ in batch.states]
        assert walked == [key(number) for number in [numbers[0], *numbers[:0:-1]]]


async def test_everything_is_announced_anew_by_the_calendar():
    async with staged(walk_interval_s=60.0) as stage:
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(70)
        assert stage.walks("calendar") == 1
        assert stage.directory.sent[-1].ttl_s == 120.0, "records expire after two walks"
        for _ in range(5):
            await stage.time.advance(60)
            assert await stage.believed(1) == DRAM


async def test_stopping_retires_every_life():
    async with staged() as stage:
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(1)
    await stage.publisher.stop()
    assert await stage.live_count() == 0
    assert await stage.believed(1) == 0


async def test_a_taken_incarnation_is_drawn_anew(monkeypatch):
    draws = [b"a" * 8, b"a" * 8, b"b" * 8]
    monkeypatch.setattr("nodeagent.registration.draw_incarnation", lambda: draws.pop(0))
    stage = Stage()
    assert await stage.publisher.lives.begin() == b"a" * 8
    assert await stage.publisher.lives.begin() == b"b" * 8


async def test_a_directory_that_takes_no_name_is_an_error(monkeypatch):
    monkeypatch.setattr("nodeagent.registration.draw_incarnation", lambda: b"a" * 8)
    stage = Stage()
    await stage.publisher.lives.begin()
    with pytest.raises(RegistrationRefused):
        await stage.publisher.lives.begin()


async def test_a_name_whose_registration_had_no_answer_is_tried_again():
    stage = Stage()
    stage.directory.is_mute = True
    with pytest.raises(DirectoryUnavailable):
        await stage.publisher.lives.begin()
    stage.directory.is_mute = False
    name = await stage.publisher.lives.begin()
    assert stage.directory.lives_begun == [name]
    assert stage.publisher.lives.incarnations == (name,)


async def test_a_server_too_slow_for_registrations_is_not_given_a_row_with_each_try():
    stage = Stage()
    stage.directory.is_mute = True
    async with running(stage.publisher):
        await stage.time.advance(60)
        assert len(stage.directory.lives_begun) == 1


async def test_a_walk_goes_on_for_the_partitions_that_answer_and_both_lives_are_believed():
    async with staged() as stage:
        for partition in range(PARTITIONS):
            for each in keys_of(partition, 100):
                stage.publisher.record(each, DRAM)
        await stage.time.advance(1)
        stage.directory.down.add(DEAD)
        stage.publisher.doubt("calendar")
        await stage.time.advance(READERS_HEAR_S + 5)
        old, new = stage.publisher.lives.incarnations
        for partition in WELL:
            for each in keys_of(partition, 100):
                assert unpack_holders(await stage.record_of(each)) == [(new, DRAM)]
        assert await stage.all_believed(keys_of(DEAD, 100)), "what the dead one holds is still the old life's"
        assert unpack_holders(await stage.record_of(keys_of(DEAD, 1)[0])) == [(old, DRAM)]
        stage.directory.down.clear()
        await stage.time.advance(RETRY_MAX_S + 1)
        assert stage.publisher.lives.incarnations == (new,)
        assert stage.walks("calendar") == 1
        for each in keys_of(DEAD, 100):
            assert unpack_holders(await stage.record_of(each)) == [(new, DRAM)]


async def test_doubts_during_a_walk_that_cannot_end_begin_ever_fewer_lives_and_never_a_third_at_once():
    async with staged() as stage:
        for partition in range(PARTITIONS):
            for each in keys_of(partition, 10):
                stage.publisher.record(each, DRAM)
        await stage.time.advance(60)
        stage.directory.down.add(DEAD)
        stage.directory.lives_begun.clear()
        for _ in range(120):
            stage.publisher.doubt("again")
            await stage.time.advance(1)
            assert await stage.live_count() <= 2
        assert len(stage.directory.lives_begun) <= 5, "after 0, 5, 15, 35, 75 seconds"
        for partition in WELL:
            assert await stage.all_believed(keys_of(partition, 10))
        stage.directory.down.clear()
        await stage.time.advance(NEW_LIFE_MAX_S + READERS_HEAR_S + RETRY_MAX_S)
        assert await stage.live_count() == 1
        assert await stage.all_believed(keys_of(DEAD, 10))


async def test_a_second_doubt_waits_until_another_life_is_due():
    async with staged() as stage:
        await stage.time.advance(60)
        stage.directory.lives_begun.clear()
        stage.publisher.doubt("once")
        await stage.time.advance(READERS_HEAR_S + 0.5)
        assert stage.walks("once") == 1
        stage.publisher.doubt("twice")
        await stage.time.advance(NEW_LIFE_MIN_S - READERS_HEAR_S - 0.7)
        assert len(stage.directory.lives_begun) == 1
        await stage.time.advance(0.4)
        assert len(stage.directory.lives_begun) == 2


@pytest.mark.parametrize(("partitions_down", "kept"), [(1, "the new"), (14, "the old")])
async def test_of_a_walk_that_is_begun_again_the_life_is_kept_that_has_said_more(partitions_down, kept):
    async with staged() as stage:
        for partition in range(PARTITIONS):
            for each in keys_of(partition, 10):
                stage.publisher.record(each, DRAM)
        await stage.time.advance(60)
        stage.directory.down = set(range(partitions_down))
        stage.publisher.doubt("calendar")
        await stage.time.advance(READERS_HEAR_S + 1)
        lives = dict(zip(("the old", "the new"), stage.publisher.lives.incarnations, strict=True))
        stage.publisher.doubt("again")
        await stage.time.advance(NEW_LIFE_MIN_S - READERS_HEAR_S)
        assert stage.publisher.lives.incarnations[0] == lives[kept]
        believed = [all([await stage.all_believed(keys_of(each, 10))]) for each in range(PARTITIONS)]
        assert sum(believed) >= 14
        stage.directory.down = set()
        await stage.time.advance(2 * READERS_HEAR_S + RETRY_MAX_S)
        for partition in range(PARTITIONS):
            assert await stage.all_believed(keys_of(partition, 10))
        assert await stage.live_count() == 1


async def test_a_late_batch_of_the_life_before_does_not_bring_back_what_was_removed_since():
    async with staged() as stage:
        gone, kept = keys_of(DEAD, 2)
        stage.publisher.record(gone, DRAM)
        stage.publisher.record(kept, DRAM)
        await stage.time.advance(1)
        stage.publisher.record(gone, DRAM | 4)
        stage.publisher.record(kept, DRAM | 4)
        stage.directory.faults = ["late request"]
        await stage.time.settle()
        stage.directory.down.add(DEAD)
        stage.publisher.doubt("calendar")
        await stage.time.advance(READERS_HEAR_S + 1)
        stage.publisher.record(gone, 0)
        stage.directory.down.clear()
        await stage.time.advance(RETRY_MAX_S + 1)
        (life,) = stage.publisher.lives.incarnations
        (late,) = stage.directory.late
        assert late.incarnation != life
        await stage.directory.deliver_late()
        assert await stage.record_of(gone) == b""
        assert unpack_holders(await stage.record_of(kept)) == [(life, DRAM | 4)]


async def test_live_changes_go_before_a_walk():
    async with staged() as stage:
        keys = keys_of(1, 64 * 50)
        for each in keys:
            stage.publisher.record(each, DRAM)
        await stage.time.advance(2)
        stage.directory.delay_s = 0.01
        stage.publisher.doubt("calendar")
        await stage.time.advance(READERS_HEAR_S + 0.5)
        (changed,) = keys_of(1, 64 * 50 + 1)[-1:]
        stage.publisher.record(changed, DRAM)
        stage.publisher.record(keys[0], 0)
        await stage.time.advance(0.04)
        assert await stage.believed(changed) == DRAM
        assert await stage.believed(keys[0]) == 0
        assert not stage.publisher.is_settled, "the walk goes on"
        for _ in range(60):
            stage.publisher.record(changed, DRAM - stage.publisher.inventory.mask(changed))
            await stage.time.advance(0.013)
        assert stage.directory.collisions == 0


async def test_of_a_walk_one_batch_is_in_flight_and_it_rests_between_them():
    async with staged() as stage:
        for partition in range(PARTITIONS):
            for each in keys_of(partition, 130):
                stage.publisher.record(each, DRAM)
        await stage.time.advance(2)
        stage.directory.delay_s, stage.directory.most_in_flight = 0.01, 0
        stage.publisher.doubt("calendar")
        began_at = stage.time.now
        await stage.time.advance(READERS_HEAR_S + PARTITIONS * 3 * (0.01 + 0.025) + 1)
        assert stage.walks("calendar") == 1
        assert stage.directory.most_in_flight == 1
        walked_at = [at for at, batch in stage.directory.tried if at > began_at and batch.states]
        assert len(walked_at) == 3 * PARTITIONS
        assert min(later - at for at, later in pairwise(walked_at)) == pytest.approx(0.035)


async def test_a_fleet_that_lost_its_directory_at_one_moment_does_not_walk_in_step():
    async with staged(chance=lambda: 1.0) as stage:
        await stage.time.advance(30)
        stage.directory.lives_begun.clear()
        stage.directory.flush()
        await stage.time.advance(WALK_SPREAD_S - 0.1)
        assert stage.directory.lives_begun == []
        await stage.time.advance(WALK_SPREAD_S + 0.2)
        assert len(stage.directory.lives_begun) == 1


async def test_calendars_drift_apart():
    async with staged(walk_interval_s=100.0, chance=lambda: 0.5) as stage:
        await stage.time.advance(100 * (1 - INTERVAL_SPREAD / 2) + 4)
        assert stage.walks("calendar") == 1
        await stage.time.advance(100 * (1 - INTERVAL_SPREAD / 2) - 10)
        assert stage.walks("calendar") == 1
