"""What every directory promises (`directory/interface.py`): tests for whoever has a `stand` fixture."""

import asyncio
from dataclasses import replace

import pytest

from directory.errors import RegistrationRefused
from directory.interface import LOST
from directory.members import REMEMBERED_S, TERM_S, Load, Member, Registration
from tests.directory.fleet_samples import BOOKED, ENGINE, GATEWAY, HOST, LOAD, batch, holders, incarnation, key
from tests.directory.stands import Stand

A, B, C = incarnation(1), incarnation(2), incarnation(3)
K1, K2, K3 = key(1), key(2), key(3)
DEADLINE_S = 5.0


async def held(stand: Stand, of: bytes = K1) -> dict[bytes, int]:
    return holders((await stand.directory.lookup([of], DEADLINE_S)).records[0])


async def row(stand: Stand, of: bytes = A) -> Member | None:
    rows = [member for member in await stand.directory.members() if member.incarnation == of]
    assert len(rows) <= 1
    return rows[0] if rows else None


async def live_row(stand: Stand, of: bytes = A) -> Member:
    found = await row(stand, of)
    assert found is not None
    return found


class TestRegistrations:
    async def test_an_empty_directory_has_no_members(self, stand: Stand) -> None:
        assert await stand.directory.members() == ()

    @pytest.mark.parametrize(
        ("registration", "load"), [(HOST, LOAD), (ENGINE, LOAD), (GATEWAY, BOOKED)], ids=["host", "engine", "gateway"]
    )
    async def test_a_registration_is_read_as_it_was_written(
        self, stand: Stand, registration: Registration, load: Load
    ) -> None:
        await stand.directory.register(A, registration, load)
        found = await live_row(stand)
        assert (found.registration, found.load) == (registration, load)
        assert found.is_live
        assert TERM_S - 1 < found.remaining_s <= TERM_S

    async def test_an_incarnation_registers_once(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD)
        with pytest.raises(RegistrationRefused):
            await stand.directory.register(A, ENGINE, Load())
        assert (await live_row(stand)).registration == HOST

    async def test_a_lapsed_incarnation_cannot_be_registered_again(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD)
        stand.pass_time(TERM_S + 1)
        with pytest.raises(RegistrationRefused):
            await stand.directory.register(A, HOST, LOAD)

    async def test_a_retired_incarnation_cannot_be_registered_again(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD)
        await stand.directory.retire(A)
        with pytest.raises(RegistrationRefused):
            await stand.directory.register(A, HOST, LOAD)

    async def test_a_life_ends_with_its_term(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD, term_s=2.0)
        stand.pass_time(3.0)
        found = await live_row(stand)
        assert not found.is_live
        assert not found.retired
        assert -2.0 < found.remaining_s <= -1.0

    async def test_renewal_begins_a_new_term_and_replaces_the_load(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD)
        stand.pass_time(TERM_S - 1)
        renewal = await stand.directory.renew(A, Load(running=9))
        assert (renewal.known, renewal.lapsed_s) == (True, 0.0)
        found = await live_row(stand)
        assert found.remaining_s > TERM_S - 1
        assert found.load == Load(running=9)

    async def test_what_is_left_of_a_term_tells_how_old_a_report_is(self, stand: Stand) -> None:
        await stand.directory.register(A, GATEWAY, Load())
        stand.pass_time(TERM_S - 1)
        await stand.directory.renew(A, BOOKED)
        stand.pass_time(2.0)
        found = await live_row(stand)
        assert found.load == BOOKED
        assert 2.0 <= TERM_S - found.remaining_s < 3.0

    async def test_renewal_after_a_lapse_says_how_long_it_was(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD, term_s=2.0)
        stand.pass_time(9.0)
        renewal = await stand.directory.renew(A, LOAD)
        assert renewal.known
        assert 7.0 <= renewal.lapsed_s < 8.0
        assert (await live_row(stand)).is_live

    async def test_an_unknown_incarnation_cannot_be_renewed(self, stand: Stand) -> None:
        assert not (await stand.directory.renew(A, LOAD)).known
        assert await row(stand) is None

    async def test_a_retired_life_is_shown_as_such_and_is_unknown_to_renewals(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD)
        await stand.directory.register(B, ENGINE, LOAD)
        await stand.directory.retire(A)
        assert not (await stand.directory.renew(A, LOAD)).known
        found = await live_row(stand)
        assert found.retired
        assert not found.is_live
        assert (await live_row(stand, B)).is_live

    async def test_retiring_the_unknown_is_ignored(self, stand: Stand) -> None:
        await stand.directory.retire(A)
        assert await stand.directory.members() == ()

    async def test_retiring_twice_does_not_prolong_the_memory_of_it(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD)
        await stand.directory.retire(A)
        stand.pass_time(REMEMBERED_S - 10)
        await stand.directory.retire(A)
        stand.pass_time(20)
        assert await row(stand) is None

    @pytest.mark.parametrize("retired", [False, True], ids=["lapsed", "retired"])
    async def test_an_ended_life_is_remembered_for_ten_minutes(self, stand: Stand, retired: bool) -> None:
        await stand.directory.register(A, HOST, LOAD)
        if retired:
            await stand.directory.retire(A)
        else:
            stand.pass_time(TERM_S)
        stand.pass_time(REMEMBERED_S - 5)
        assert await row(stand) is not None
        stand.pass_time(10)
        assert await row(stand) is None
        assert not (await stand.directory.renew(A, LOAD)).known

    async def test_a_retired_life_is_remembered_from_when_it_retired(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD, term_s=3 * REMEMBERED_S)
        await stand.directory.register(B, HOST, LOAD, term_s=1.0)
        stand.pass_time(REMEMBERED_S / 2)
        for life in (A, B):
            await stand.directory.retire(life)
        stand.pass_time(REMEMBERED_S - 5)
        assert {member.incarnation for member in await stand.directory.members()} == {A, B}
        stand.pass_time(10)
        assert await stand.directory.members() == ()

    async def test_lives_are_read_by_themselves_as_they_report_now(self, stand: Stand) -> None:
        for life in (A, B, C):
            await stand.directory.register(life, GATEWAY, Load())
        known = await stand.directory.members()
        stand.pass_time(TERM_S - 1)
        await stand.directory.renew(A, BOOKED)
        asked = tuple(each for each in known if each.incarnation != C)
        found = {each.incarnation: each for each in await stand.directory.refreshed(asked)}
        assert found.keys() == {A, B}
        assert (found[A].registration, found[A].load, found[B].load) == (GATEWAY, BOOKED, Load())
        assert TERM_S - 1 < found[A].remaining_s <= TERM_S
        assert 0 <= found[B].remaining_s <= 1
        assert await stand.directory.refreshed(()) == ()

    async def test_of_lives_read_by_themselves_ended_ones_are_shown_and_forgotten_ones_are_not(
        self, stand: Stand
    ) -> None:
        await stand.directory.register(A, GATEWAY, BOOKED)
        await stand.directory.register(B, GATEWAY, BOOKED)
        known = await stand.directory.members()
        await stand.directory.retire(A)
        stand.pass_time(TERM_S + 1)
        found = {each.incarnation: each for each in await stand.directory.refreshed(known)}
        assert (found[A].retired, found[B].retired) == (True, False)
        assert not any(each.is_live for each in found.values())
        stand.flush()
        assert await stand.directory.refreshed(known) == ()

    async def test_registrations_are_lost_with_the_server(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD)
        stand.flush()
        assert not (await stand.directory.renew(A, LOAD)).known
        await stand.directory.register(A, HOST, LOAD)


class TestPlacements:
    async def test_the_first_attempt_finds_none_before_it(self, stand: Stand) -> None:
        assert await stand.directory.place(batch(A, 0, {K1: 1})) == LOST
        assert await held(stand) == {A: 1}

    async def test_each_attempt_returns_the_number_held_before(self, stand: Stand) -> None:
        numbers = [await stand.directory.place(batch(A, number, {K1: 1})) for number in (3, 4, 9)]
        assert numbers == [LOST, 3, 4]

    @pytest.mark.parametrize("late", [4, 5], ids=["lower", "equal"])
    async def test_an_overtaken_attempt_changes_nothing(self, stand: Stand, late: int) -> None:
        await stand.directory.place(batch(A, 5, {K1: 4}))
        assert await stand.directory.place(batch(A, late, {K1: 1, K2: 1})) == 5
        assert await held(stand) == {A: 4}
        assert await held(stand, K2) == {}
        assert await stand.directory.place(batch(A, 6, {})) == 5

    async def test_an_overtaken_withdrawal_removes_nothing(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 5, {K1: 4}))
        assert await stand.directory.withdraw(batch(A, 4, {K1: 0})) == 5
        assert await held(stand) == {A: 4}

    async def test_attempts_are_counted_by_partition_and_incarnation(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 7, {key(1, partition=0): 1}))
        assert await stand.directory.place(batch(A, 2, {key(1, partition=15): 1})) == LOST
        assert await stand.directory.place(batch(B, 2, {key(1, partition=0): 1})) == LOST
        assert await stand.directory.place(batch(A, 8, {key(1, partition=0): 1})) == 7

    async def test_a_partition_that_lost_everything_says_so(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 7, {K1: 1}))
        stand.flush()
        assert await stand.directory.place(batch(A, 8, {K2: 1})) == LOST
        assert await held(stand) == {}

    async def test_a_loss_is_told_even_when_the_answer_that_told_it_is_lost(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 7, {K1: 1}))
        stand.flush()
        await stand.directory.place(batch(A, 8, {K2: 1}, acknowledged=7))  # its answer doesn't arrive
        assert await stand.directory.place(batch(A, 9, {K2: 1}, acknowledged=7)) < 7
        assert await stand.directory.place(batch(A, 9, {K2: 1}, acknowledged=7)) < 7
        assert await stand.directory.place(batch(A, 10, {K2: 1}, acknowledged=9)) < 9
        assert await held(stand, K2) == {A: 1}

    async def test_an_older_copy_of_the_partition_is_a_loss(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 5, {K1: 1}))  # 6 and 7 were acknowledged by a server that is gone
        assert await stand.directory.place(batch(A, 8, {K1: 1}, acknowledged=7)) < 7
        assert await stand.directory.place(batch(A, 9, {K1: 1}, acknowledged=7)) < 7

    async def test_an_answer_that_was_lost_is_no_loss_of_writes(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 7, {K1: 1}))
        await stand.directory.place(batch(A, 8, {K1: 2}, acknowledged=7))
        assert await stand.directory.place(batch(A, 9, {K1: 2}, acknowledged=7)) == 8
        assert await stand.directory.place(batch(A, 12, {K1: 2}, acknowledged=9)) == 9

    async def test_a_state_replaces_the_writers_own(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 0, {K1: 2}))
        await stand.directory.place(batch(A, 1, {K1: 6}))
        assert await held(stand) == {A: 6}

    async def test_zero_removes_the_writers_own_and_nobody_elses(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 0, {K1: 2, K2: 2}))
        await stand.directory.place(batch(B, 0, {K1: 1}))
        await stand.directory.place(batch(A, 1, {K1: 0}))
        await stand.directory.withdraw(batch(A, 2, {K2: 0, K3: 0}))
        assert await held(stand) == {B: 1}
        assert await held(stand, K2) == {}
        assert await held(stand, K3) == {}

    async def test_two_writers_share_a_record(self, stand: Stand) -> None:
        writes = [
            stand.directory.place(batch(writer, number, {K1: mask}))
            for number in range(3)
            for writer, mask in ((A, 1), (B, 6))
        ]
        for write in writes:
            await write
        assert await held(stand) == {A: 1, B: 6}

    async def test_simultaneous_writers_lose_nothing_of_each_other(self, stand: Stand) -> None:
        writers = [incarnation(number) for number in range(20)]
        await asyncio.gather(*(stand.directory.place(batch(writer, 0, {K1: 5})) for writer in writers))
        assert await held(stand) == dict.fromkeys(writers, 5)

    async def test_64_hosts_with_3_tiers_on_one_key_are_all_reported(self, stand: Stand) -> None:
        hosts = [incarnation(number) for number in range(64)]
        engines = [incarnation(number) for number in range(64, 128)]
        for host, engine in zip(hosts, engines, strict=True):
            await stand.directory.place(batch(host, 0, {K1: 2 | 4}))
            await stand.directory.place(batch(engine, 0, {K1: 1}))
        found = await held(stand)
        assert found == {**dict.fromkeys(hosts, 6), **dict.fromkeys(engines, 1)}
        assert sum(mask.bit_count() for mask in found.values()) == 192

    async def test_holders_that_the_partition_has_not_heard_of_for_ten_minutes_go_from_the_records_touched(
        self, stand: Stand
    ) -> None:
        for writer in (B, C):
            await stand.directory.place(batch(writer, 0, {K1: 1, K2: 1}))
        stand.pass_time(10)
        await stand.directory.place(batch(B, 1, {K3: 1}))
        stand.pass_time(REMEMBERED_S - 5)
        await stand.directory.place(batch(A, 0, {K1: 2}))
        assert await held(stand) == {A: 2, B: 1}
        assert await held(stand, K2) == {B: 1, C: 1}

    async def test_a_holder_is_kept_up_to_the_ten_minutes(self, stand: Stand) -> None:
        await stand.directory.place(batch(B, 0, {K1: 1}))
        stand.pass_time(REMEMBERED_S - 5)
        await stand.directory.place(batch(A, 0, {K1: 2}))
        assert await held(stand) == {A: 2, B: 1}

    async def test_an_empty_batch_is_heard_and_only_in_its_partition(self, stand: Stand) -> None:
        far = key(1, partition=9)
        for partition, of in ((0, K1), (9, far)):
            await stand.directory.place(batch(B, 0, {of: 1}))
            stand.pass_time(REMEMBERED_S / 2)
            await stand.directory.withdraw(batch(B, 1, {}, partition=0))
            await stand.directory.place(batch(A, partition, {of: 2}))
        assert await held(stand) == {A: 2, B: 1}
        stand.pass_time(REMEMBERED_S / 2 + 5)
        await stand.directory.withdraw(batch(B, 2, {}, partition=0))
        await stand.directory.place(batch(A, 10, {far: 2}))
        assert await held(stand, far) == {A: 2}
        await stand.directory.place(batch(A, 11, {K1: 2}))
        assert await held(stand) == {A: 2, B: 1}

    async def test_an_overtaken_batch_is_not_heard(self, stand: Stand) -> None:
        await stand.directory.place(batch(B, 5, {K1: 1}))
        stand.pass_time(REMEMBERED_S - 5)
        assert await stand.directory.place(batch(B, 4, {})) == 5
        stand.pass_time(10)
        await stand.directory.place(batch(A, 0, {K1: 2}))
        assert await held(stand) == {A: 2}

    async def test_a_late_batch_of_a_forgotten_life_is_applied_and_forgotten_again(self, stand: Stand) -> None:
        await stand.directory.place(batch(B, 3, {K1: 1}))
        stand.pass_time(REMEMBERED_S + 5)
        assert await stand.directory.place(batch(B, 4, {K2: 1}, acknowledged=3)) == LOST
        await stand.directory.place(batch(A, 0, {K1: 2, K2: 2}))
        assert await held(stand, K2) == {A: 2, B: 1}
        stand.pass_time(REMEMBERED_S + 5)
        await stand.directory.place(batch(A, 1, {K1: 2, K2: 2}))
        assert await held(stand) == await held(stand, K2) == {A: 2}

    @pytest.mark.parametrize("mask", [0, 4], ids=["removal", "placement"])
    async def test_every_record_of_a_batch_is_pruned_whatever_else_is_in_it(self, stand: Stand, mask: int) -> None:
        keys = [key(number) for number in range(12)]
        lives = [incarnation(10 + number) for number in range(6)]
        for number, life in enumerate(lives):
            await stand.directory.place(batch(life, 0, dict.fromkeys(keys[number // 2 :], 1 + number)))
        await stand.directory.place(batch(A, 0, dict.fromkeys(keys[::3], 4)))
        stand.pass_time(REMEMBERED_S / 2)
        for life in lives[::2]:
            await stand.directory.place(batch(life, 1, {}))
        stand.pass_time(REMEMBERED_S / 2 + 5)
        writes = stand.directory.place if mask else stand.directory.withdraw
        await writes(batch(A, 1, dict.fromkeys(keys, mask)))
        for place, of in enumerate(keys):
            heard = {life: 1 + 2 * rank for rank, life in enumerate(lives[::2]) if place >= rank}
            assert await held(stand, of) == heard | ({A: mask} if mask else {})

    async def test_who_was_silent_for_longer_than_ten_minutes_is_told_of_a_loss_from_then_on(
        self, stand: Stand
    ) -> None:
        await stand.directory.place(batch(A, 7, {K1: 1}))
        stand.pass_time(REMEMBERED_S + 5)
        assert await stand.directory.place(batch(A, 8, {}, acknowledged=7)) == LOST
        assert await stand.directory.place(batch(A, 9, {}, acknowledged=7)) == LOST
        assert await held(stand) == {A: 1}, "its own batch doesn't take it for another's"

    async def test_a_life_that_said_nothing_here_prunes_and_loses_nothing(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD)
        await stand.directory.place(batch(B, 0, {K1: 1}))
        stand.pass_time(REMEMBERED_S / 2)
        assert await stand.directory.place(batch(A, 0, {K1: 2})) == LOST
        assert await stand.directory.place(batch(A, 1, {K1: 2}, acknowledged=0)) == 0
        assert await held(stand) == {A: 2, B: 1}

    async def test_the_life_left_behind_goes_from_the_records_touched(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 0, {K1: 2, K2: 2, K3: 2}))
        await stand.directory.place(batch(C, 0, {K1: 1}))
        await stand.directory.place(batch(B, 0, {K1: 2, K2: 0}, replaces=A))
        assert await held(stand) == {B: 2, C: 1}
        assert await held(stand, K2) == {}
        assert await held(stand, K3) == {A: 2}

    async def test_records_end_with_their_time(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 0, {K1: 1}, ttl_s=60.0))
        stand.pass_time(50)
        assert await held(stand) == {A: 1}
        stand.pass_time(20)
        assert await held(stand) == {}

    @pytest.mark.parametrize("mask", [0, 1], ids=["removal", "placement"])
    async def test_expiry_is_never_lowered(self, stand: Stand, mask: int) -> None:
        await stand.directory.place(batch(A, 0, {K1: 1}, ttl_s=1000.0))
        await stand.directory.place(batch(B, 0, {K1: mask}, ttl_s=10.0))
        stand.pass_time(900)
        assert A in await held(stand)

    async def test_expiry_is_raised(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 0, {K1: 1}, ttl_s=10.0))
        await stand.directory.place(batch(B, 0, {K1: 1}, ttl_s=1000.0))
        stand.pass_time(900)
        assert await held(stand) == {A: 1, B: 1}

    async def test_attempts_are_kept_for_ten_minutes_however_long_the_records_are(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 3, {K1: 1}, ttl_s=4 * REMEMBERED_S))
        stand.pass_time(REMEMBERED_S - 5)
        assert await stand.directory.place(batch(A, 4, {K1: 1}, ttl_s=10.0)) == 3
        stand.pass_time(REMEMBERED_S - 5)
        assert await stand.directory.place(batch(A, 5, {K1: 1}, ttl_s=10.0)) == 4
        stand.pass_time(REMEMBERED_S + 5)
        assert await stand.directory.place(batch(A, 6, {K1: 1})) == LOST
        assert await held(stand) == {A: 1}

    async def test_placements_need_no_registration_and_outlive_a_retirement(self, stand: Stand) -> None:
        await stand.directory.register(A, HOST, LOAD)
        await stand.directory.place(batch(A, 0, {K1: 2}))
        await stand.directory.retire(A)
        assert await held(stand) == {A: 2}

    async def test_a_batch_of_the_wrong_partition_is_a_bug(self) -> None:
        with pytest.raises(AssertionError):
            batch(A, 0, {key(1, partition=3): 1, key(1, partition=4): 1})

    async def test_a_batch_says_one_thing_of_a_key(self) -> None:
        with pytest.raises(AssertionError, match="one thing"):
            replace(batch(A, 0, {K1: 2}), states=((K1, 2), (K1, 0)))

    async def test_a_batch_is_bounded(self) -> None:
        with pytest.raises(AssertionError):
            batch(A, 0, {key(number): 1 for number in range(65)})

    async def test_a_withdrawal_that_places_is_a_bug(self, stand: Stand) -> None:
        with pytest.raises(AssertionError):
            await stand.directory.withdraw(batch(A, 0, {K1: 1}))


class TestLookups:
    async def test_a_lookup_of_nothing_is_empty(self, stand: Stand) -> None:
        assert (await stand.directory.lookup([], DEADLINE_S)).records == ()

    @pytest.mark.parametrize("length", [1, 255, 256, 257, 767, 768, 769, 2000])
    async def test_records_are_as_many_as_keys_and_in_their_order(self, stand: Stand, length: int) -> None:
        keys = [key(number, partition=number % 16) for number in range(length)]
        for partition in range(16):
            mine = keys[partition::16]
            for attempt, start in enumerate(range(0, len(mine), 64)):
                states = {each: 1 + (int.from_bytes(each) % 7) for each in mine[start : start + 64]}
                await stand.directory.place(batch(A, attempt, states))
        records = (await stand.directory.lookup(keys, DEADLINE_S)).records
        assert [holders(record) for record in records] == [{A: 1 + (int.from_bytes(each) % 7)} for each in keys]

    async def test_a_key_asked_for_twice_is_answered_twice(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 0, {K1: 1}))
        records = (await stand.directory.lookup([K1, K2, K1], DEADLINE_S)).records
        assert [holders(record) for record in records] == [{A: 1}, {}, {A: 1}]

    @pytest.mark.parametrize("length", [3, 700])
    async def test_what_nobody_holds_is_empty_and_not_unknown(self, stand: Stand, length: int) -> None:
        lookup = await stand.directory.lookup([key(number) for number in range(length)], DEADLINE_S)
        assert lookup.records == (b"",) * length
        assert not lookup.is_partial

    async def test_a_hole_does_not_hide_what_the_same_step_holds(self, stand: Stand) -> None:
        await stand.directory.place(batch(A, 0, {K1: 1, K3: 1}))
        records = (await stand.directory.lookup([K1, K2, K3], DEADLINE_S)).records
        assert [bool(record) for record in records] == [True, False, True]
