"""The directory may be stale and converges: under lost requests, lost replies, late duplicates, flushes, restarts."""

import asyncio
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from directory.errors import RegistrationRefused
from directory.interface import BATCH_PLACEMENTS_MAX, SETTLE_S
from directory.members import REMEMBERED_S, TERM_S, HostRegistration, Load
from tests.nodeagent.publishing import DRAM, Stage, key, running, staged


async def test_a_new_life_places_nothing_before_others_have_heard_of_it():
    stage = Stage()
    stage.publisher.record(key(1), DRAM)
    async with running(stage.publisher, stage.table):
        await stage.time.advance(SETTLE_S - 0.1)
        assert await stage.live_count() == 1
        assert stage.directory.sent == []
        await stage.time.advance(0.2)
        assert await stage.believed(1) == DRAM


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
        sent = len(stage.directory.sent)
        stage.publisher.record(key(1), DRAM)
        stage.publisher.record(key(2), 0)
        await stage.time.advance(1)
        assert len(stage.directory.sent) == sent


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


async def test_removals_go_before_placements():
    async with staged() as stage:
        for number in range(100):
            stage.publisher.record(key(number), DRAM)
        await stage.time.advance(1)
        stage.directory.sent.clear()
        for number in range(100, 200):
            stage.publisher.record(key(number), DRAM)
        for number in range(100):
            stage.publisher.record(key(number), 0)
        await stage.time.advance(1)
        kinds = [any(mask for _, mask in batch.states) for batch in stage.directory.sent]
        assert kinds == sorted(kinds)
        assert all(len({bool(mask) for _, mask in batch.states}) == 1 for batch in stage.directory.sent)


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


async def test_a_flushed_directory_is_filled_again():
    async with staged() as stage:
        for number in range(200):
            stage.publisher.record(key(number), DRAM)
        await stage.time.advance(2)
        stage.directory.flush()
        await stage.time.advance(SETTLE_S + 4)
        assert stage.walks("unknown") == 1
        for number in range(200):
            assert await stage.believed(number) == DRAM
        assert await stage.live_count() == 1


async def test_a_partition_that_lost_writes_is_noticed_by_its_number():
    async with staged() as stage:
        for number in range(200):
            stage.publisher.record(key(number), DRAM)
        await stage.time.advance(2)
        stage.directory.behind._attempts.clear()
        stage.directory.behind._records.clear()
        stage.publisher.record(key(1_000), DRAM)
        await stage.time.advance(SETTLE_S + 2)
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
        await stage.time.advance(SETTLE_S + 6)
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
        await stage.time.advance(SETTLE_S + 2)
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
        await stage.time.advance(SETTLE_S + 2)
        walked = [each for batch in stage.directory.sent for each, _ in batch.states]
        assert walked == [key(number) for number in [numbers[0], *numbers[:0:-1]]]


async def test_everything_is_announced_anew_by_the_calendar():
    async with staged(walk_interval_s=60.0) as stage:
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(70)
        assert stage.walks("calendar") == 1
        assert stage.directory.sent[-1].ttl_s == 120.0
        for _ in range(5):
            await stage.time.advance(60)
            assert await stage.believed(1) == DRAM


async def test_too_much_pending_becomes_a_walk():
    async with staged(pending_keys_max=100) as stage:
        stage.directory.is_down = True
        for number in range(150):
            stage.publisher.record(key(number), DRAM)
        for number in range(50):
            stage.publisher.record(key(number), 0)
        assert stage.publisher.pending_keys <= 100
        stage.directory.is_down = False
        await stage.time.advance(SETTLE_S + 5)
        assert stage.walks("overflow") == 1
        assert [await stage.believed(number) for number in range(150)] == [0] * 50 + [DRAM] * 100


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
        full = "warmroute_degraded_total", {"reason": "directory_full"}
        assert stage.metrics.registry.get_sample_value(*full) == 1
        await stage.time.advance(10)
        assert await stage.believed(2) == DRAM
        stage.directory.faults = ["full"]
        stage.publisher.record(key(3), DRAM)
        await stage.time.advance(10)
        assert stage.metrics.registry.get_sample_value(*full) == 2, "told once each time"


async def test_known_is_passed_only_from_a_fresh_table():
    async with staged() as stage:
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(1)
        assert stage.publisher.lives.incarnations[0] in stage.directory.sent[-1].known
        stage.table._polled_at = stage.time.now - 2.5
        stage.publisher.record(key(2), DRAM)
        await stage.time.settle()
        assert stage.directory.sent[-1].known is None


async def test_known_names_lives_that_ended_lately_and_drops_old_ones():
    async with staged() as stage:
        other = b"o" * 8
        await stage.directory.behind.register(other, HostRegistration("host-2", "http://x"), Load())
        await stage.time.advance(TERM_S + 3)
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(1)
        assert other in stage.directory.sent[-1].known
        await stage.time.advance(REMEMBERED_S + TERM_S)
        stage.publisher.record(key(2), DRAM)
        await stage.time.advance(1)
        assert other not in stage.directory.sent[-1].known


async def test_an_unforeseen_fault_does_not_end_the_loops(monkeypatch):
    async with staged() as stage:
        calls = iter([RuntimeError("poll"), RuntimeError("renew")])

        async def fault(*_):
            raise next(calls)

        monkeypatch.setattr(stage.directory, "members", fault)
        monkeypatch.setattr(stage.directory, "renew", fault)
        await stage.time.advance(1)
        monkeypatch.undo()
        stage.directory.faults = ["bug"]
        stage.publisher.record(key(1), DRAM)
        await stage.time.advance(SETTLE_S + 5)
        assert stage.walks("fault") == 1
        assert await stage.believed(1) == DRAM
        assert stage.table.known() is not None


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


EVENTS = ["record"] * 8 + ["pass"] * 3 + ["faults", "faults", "down", "up", "flush", "late", "walk"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_whatever_happens_the_directory_converges_to_the_inventories(seed):
    asyncio.run(_play(random.Random(seed)))


async def _play(chance: random.Random) -> None:
    stage = Stage(walk_interval_s=120.0, pending_keys_max=60)
    second = stage.make(walk_interval_s=120.0)
    async with running(stage.publisher, stage.table), running(second, stage.table):
        for _ in range(60):
            event = chance.choice(EVENTS)
            if event == "record":
                for _ in range(chance.randrange(1, 30)):
                    chance.choice([stage.publisher, second]).record(key(chance.randrange(80)), chance.choice([0, DRAM]))
            elif event == "pass":
                await stage.time.advance(chance.choice([0.01, 0.3, 3.0]))
            elif event == "faults":
                kinds = ["lost request", "lost reply", "late request", "duplicate", "full", ""]
                stage.directory.faults = chance.choices(kinds, k=6)
            elif event in ("down", "up"):
                stage.directory.is_down = event == "down"
            elif event == "flush":
                stage.directory.flush()
            elif event == "late":
                await stage.directory.deliver_late()
            else:
                stage.publisher.doubt("calendar")
        stage.directory.is_down, stage.directory.faults = False, []
        await stage.time.advance(30)
        # A very late batch brings an old `known` with it and may prune a younger life: the calendar repairs that.
        await stage.directory.deliver_late()
        await stage.time.advance(135)
        assert stage.publisher.is_settled
        assert second.is_settled
        for number in range(80):
            expected = stage.publisher.inventory.mask(key(number)) | second.inventory.mask(key(number))
            assert await stage.believed(number) == expected
        assert await stage.live_count() == 2
