"""What the directory keeps in a cluster: shards fail alone, slots move under it, the fleet's table is kept twice."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis

from directory import redis_schema as schema
from directory.errors import (
    DirectoryError,
    DirectoryUnavailable,
    PartitionUnavailable,
    RegistrationRefused,
    SchemaMismatch,
)
from directory.function_library import load_functions
from directory.redis_directory import FIRST_STEP_KEYS, RedisDirectory
from directory.redis_topology import PARTITION_SLOTS, ClusterSlots
from directory.statistics import gather
from tests.directory.cluster_probes import DEADLINE_S, ONE_OF_EACH, A, found, hold_one_of_each, home, partitions_of
from tests.directory.documented_users import documented_users
from tests.directory.fleet_samples import BOOKED, ENGINE, GATEWAY, HOST, LOAD, batch, incarnation, key
from tests.directory.servers import ClusterOfThree, ServerProcess
from tests.directory.stands import until
from tests.free_port import free_port
from warmroute.local_fleet import FleetError, FleetOptions, local_fleet

B, C = incarnation(2), incarnation(3)
SHORT_S = 0.8
MOVING = 5
"""The partition whose slot moves in these tests."""


class TestLookups:
    async def test_every_server_is_asked_at_once_and_the_order_is_the_keys(
        self, cluster: ClusterOfThree, directory: RedisDirectory
    ) -> None:
        await hold_one_of_each(directory)
        keys = [ONE_OF_EACH[place * 7 % 16] for place in range(40)] + [key(9, 3)]
        expected = [{A: place * 7 % 16 % 7 + 1} for place in range(40)] + [{}]
        assert await found(directory, keys) == expected
        assert all(partitions_of(cluster, master) for master in cluster.masters)

    async def test_a_shard_that_hangs_makes_its_own_positions_unknown_and_no_others(
        self, cluster: ClusterOfThree, directory: RedisDirectory, paused: list[ServerProcess]
    ) -> None:
        await hold_one_of_each(directory)
        lost = partitions_of(cluster, cluster.masters[1])
        paused.append(cluster.masters[1])
        cluster.masters[1].pause()
        records = await found(directory, ONE_OF_EACH, SHORT_S)
        assert records == [None if place in lost else {A: place % 7 + 1} for place in range(16)]

    async def test_a_lookup_that_only_a_dead_shard_could_answer_says_that_it_was_a_part(
        self, cluster: ClusterOfThree, directory: RedisDirectory, paused: list[ServerProcess]
    ) -> None:
        await hold_one_of_each(directory)
        lost = [ONE_OF_EACH[partition] for partition in partitions_of(cluster, cluster.masters[1])]
        paused.append(cluster.masters[1])
        cluster.masters[1].pause()
        with pytest.raises(PartitionUnavailable, match="no answer"):
            await directory.lookup(lost, SHORT_S)

    async def test_unknown_positions_do_not_end_a_long_lookup_and_a_key_nobody_holds_does(
        self, cluster: ClusterOfThree, directory: RedisDirectory, paused: list[ServerProcess]
    ) -> None:
        dead = cluster.masters[1]
        lost = min(partitions_of(cluster, dead))
        alive = min(partitions_of(cluster, cluster.masters[0]))
        keys = [key(number, lost if number == 7 else alive) for number in range(5 * FIRST_STEP_KEYS)]
        holding = [each for each in keys[: FIRST_STEP_KEYS + 10] if each is not keys[7]]
        for attempt, start in enumerate(range(0, len(holding), 64)):
            await directory.place(batch(A, attempt, dict.fromkeys(holding[start : start + 64], 2)))
        paused.append(dead)
        dead.pause()

        async def is_asked_beyond_the_first_step() -> bool:
            # While the dead server isn't known to be silent yet, the first step takes all the time there is.
            records = await found(directory, keys, SHORT_S)
            assert records[:8] == [{A: 2}] * 7 + [None]
            return records[8:] == [{A: 2}] * (FIRST_STEP_KEYS + 2) + [{}] * (4 * FIRST_STEP_KEYS - 10)

        await until(is_asked_beyond_the_first_step)


@pytest.fixture
def migration(cluster: ClusterOfThree) -> Iterator[tuple[int, ServerProcess, ServerProcess]]:
    """A slot, its owner, and the server that it moves to; it has moved, at the latest, when the test is over."""
    slot = PARTITION_SLOTS[MOVING]
    source = cluster.owner(slot)
    target = next(each for each in cluster.masters if each is not source)
    target.client().function_flush()
    yield slot, source, target
    if cluster.owner(slot) is source:
        cluster.begin_migration(slot, source, target)
    cluster.move_keys(slot, source, target)
    cluster.end_migration(slot, source, target)


Migration = tuple[int, ServerProcess, ServerProcess]


class TestMigration:
    async def test_lookups_miss_nothing_while_a_slots_keys_move_one_by_one(
        self, cluster: ClusterOfThree, directory: RedisDirectory, migration: Migration
    ) -> None:
        keys = [key(number, MOVING) for number in range(12)]
        everything = [*ONE_OF_EACH, *keys, key(99, MOVING)]
        await hold_one_of_each(directory)
        await directory.place(batch(A, 1, dict.fromkeys(keys, 4)))
        expected = await found(directory, everything)
        assert {} not in expected[:-1]
        cluster.begin_migration(*migration)
        assert await found(directory, everything) == expected
        moved = 0
        while cluster.move_keys(*migration, keys_max=2):
            moved += 2
            assert await found(directory, everything) == expected
        assert moved > len(keys)
        cluster.end_migration(*migration)
        assert await found(directory, everything) == expected
        assert await found(directory, everything) == expected

    async def test_a_write_to_a_slot_that_moves_is_applied_or_sent_again(
        self, cluster: ClusterOfThree, directory: RedisDirectory, migration: Migration
    ) -> None:
        keys = [key(number, MOVING) for number in range(12)]
        await directory.place(batch(A, 0, dict.fromkeys(keys, 4)))
        cluster.begin_migration(*migration)
        cluster.move_keys(*migration, keys_max=3)
        # Some of its keys are here and some there: nobody can apply it now, and nobody has.
        with pytest.raises(DirectoryUnavailable):
            await directory.place(batch(A, 1, dict.fromkeys(keys, 2)))
        assert await found(directory, keys) == [{A: 4}] * 12
        cluster.move_keys(*migration)
        # All are there: ASK, and the library that the new home hasn't got yet.
        assert await directory.place(batch(A, 2, dict.fromkeys(keys, 2))) == 0
        cluster.end_migration(*migration)
        # MOVED.
        assert await directory.place(batch(A, 3, dict.fromkeys(keys, 6))) == 2
        assert await found(directory, keys) == [{A: 6}] * 12
        assert await directory.place(batch(A, 4, {keys[0]: 0})) == 3

    async def test_a_slot_that_moves_takes_nobody_for_forgotten(
        self, cluster: ClusterOfThree, directory: RedisDirectory, migration: Migration
    ) -> None:
        """The attempts are one key, and declared: a server that hasn't got it applies nothing."""
        keys = [key(number, MOVING) for number in range(12)]
        await directory.place(batch(B, 0, dict.fromkeys(keys, 4)))
        await directory.place(batch(A, 0, {keys[0]: 2}))
        cluster.begin_migration(*migration)
        attempt, applied = 0, 0
        while cluster.move_keys(*migration, keys_max=1):
            for each in keys:
                attempt += 1
                with suppress(DirectoryUnavailable):
                    await directory.place(batch(A, attempt, {each: 2}))
                    applied += 1
        assert 0 < applied < attempt, "some keys lay beside the attempts, some didn't"
        cluster.end_migration(*migration)
        await directory.place(batch(A, attempt + 1, dict.fromkeys(keys, 2)))
        assert await found(directory, keys) == [{A: 2, B: 4}] * 12

    async def test_a_new_client_finds_where_the_slot_is_now(
        self, cluster: ClusterOfThree, directory: RedisDirectory, migration: Migration
    ) -> None:
        await hold_one_of_each(directory)
        cluster.begin_migration(*migration)
        cluster.move_keys(*migration)
        cluster.end_migration(*migration)
        other = RedisDirectory.connect(cluster.url)
        assert await found(other, ONE_OF_EACH) == await found(directory, ONE_OF_EACH)
        assert None not in await found(other, ONE_OF_EACH)
        await other.aclose()


class TestTable:
    @pytest.mark.parametrize("index", [0, 1])
    async def test_a_home_that_lost_everything_ends_the_life_for_its_writer_and_for_no_reader(
        self, cluster: ClusterOfThree, directory: RedisDirectory, index: int
    ) -> None:
        await directory.register(A, HOST, LOAD)
        home(cluster, index).client().flushall()
        assert not (await directory.renew(A, LOAD)).known
        assert [member.is_live for member in await directory.members()] == [True]

    @pytest.mark.parametrize("index", [0, 1])
    async def test_a_name_taken_in_either_home_is_refused(
        self, cluster: ClusterOfThree, directory: RedisDirectory, index: int
    ) -> None:
        await directory.register(A, HOST, LOAD)
        home(cluster, index).client().flushall()
        with pytest.raises(RegistrationRefused):
            await directory.register(A, HOST, LOAD)

    async def test_both_homes_hold_the_same_rows(self, cluster: ClusterOfThree, directory: RedisDirectory) -> None:
        await directory.register(A, HOST, LOAD)
        homes = schema.TABLE_HOMES_IN_A_CLUSTER
        clients = [home(cluster, index).client() for index in (0, 1)]
        names = [schema.DEFAULT_KEYSPACE.registrations(each) for each in homes]
        assert names == [b"wr:v1:{3560}:reg", b"wr:v1:{8209}:reg"]
        rows: list[Any] = [client.hkeys(name) for client, name in zip(clients, names, strict=True)]
        assert {b"r" + A, b"l" + A, b"t" + A} <= set(rows[0]) == set(rows[1])
        versions = [schema.DEFAULT_KEYSPACE.versions(each) for each in homes]
        assert [client.hkeys(name) for client, name in zip(clients, versions, strict=True)] == [[b"v1"], [b"v1"]]

    async def test_a_life_lapses_when_it_lapses_in_both_homes(
        self, cluster: ClusterOfThree, directory: RedisDirectory
    ) -> None:
        await directory.register(A, HOST, LOAD, term_s=3600.0)
        server = home(cluster, 1)
        name = schema.DEFAULT_KEYSPACE.registrations(schema.TABLE_HOMES_IN_A_CLUSTER[1])
        server_s: Any = server.client().time()[0]
        server.client().hset(
            name, b"t" + A, f"{(server_s - 60) * 1000}:0"
        )  # not reached for a minute, in which it lapsed
        (member,) = await directory.members()
        assert member.remaining_s > 3000

    async def test_a_fleet_of_another_version_is_named(
        self, cluster: ClusterOfThree, directory: RedisDirectory
    ) -> None:
        home(cluster, 1).client().hset(schema.DEFAULT_KEYSPACE.versions(schema.TABLE_HOMES_IN_A_CLUSTER[1]), "v2", 1)
        with pytest.raises(SchemaMismatch, match="v2"):
            await directory.members()

    async def test_a_home_that_lost_our_fleet_to_another_version_does_not_hide_it_in_the_other(
        self, cluster: ClusterOfThree, directory: RedisDirectory
    ) -> None:
        await directory.register(A, HOST, LOAD)
        server = home(cluster, 1).client()
        server.flushall()
        server.hset(schema.DEFAULT_KEYSPACE.versions(schema.TABLE_HOMES_IN_A_CLUSTER[1]), "v2", 1)
        assert len(await directory.members()) == 1


class TestServers:
    async def test_functions_are_loaded_on_each_server_that_lost_them(
        self, cluster: ClusterOfThree, directory: RedisDirectory
    ) -> None:
        for master in cluster.masters:
            master.client().function_flush()
        await hold_one_of_each(directory)
        assert await found(directory, ONE_OF_EACH) == [{A: place % 7 + 1} for place in range(16)]
        assert all(master.client().function_list() for master in cluster.masters)

    async def test_any_seed_that_answers_is_enough(self, cluster: ClusterOfThree, unused_tcp_port: int) -> None:
        port = cluster.masters[2].port
        directory = RedisDirectory.connect(f"redis-cluster://127.0.0.1:{unused_tcp_port},127.0.0.1:{port}")
        await hold_one_of_each(directory)
        await directory.aclose()

    async def test_a_cluster_of_which_nobody_answers_is_unavailable(self, unused_tcp_port: int) -> None:
        directory = RedisDirectory.connect(f"redis-cluster://127.0.0.1:{unused_tcp_port}")
        for call in (directory.lookup(ONE_OF_EACH, DEADLINE_S), directory.members(), directory.retire(A)):
            with pytest.raises(DirectoryUnavailable, match="no server of the cluster answers"):
                await call
        await directory.aclose()

    async def test_a_url_of_the_wrong_kind_is_named(
        self, cluster: ClusterOfThree, raw: "redis.Redis", caplog: pytest.LogCaptureFixture
    ) -> None:
        of_one = RedisDirectory.connect(f"redis://127.0.0.1:{cluster.masters[0].port}")
        for call in (hold_one_of_each(of_one), of_one.lookup(ONE_OF_EACH, DEADLINE_S)):
            with pytest.raises(DirectoryError, match="must begin with redis-cluster://"):
                await call
        (told,) = (record for record in caplog.records if "must begin with redis-cluster://" in record.message)
        assert told.levelname == "WARNING"
        of_none = RedisDirectory.connect(f"redis-cluster://127.0.0.1:{raw.connection_pool.connection_kwargs['port']}")
        with pytest.raises(DirectoryError, match="cluster"):
            await of_none.members()
        for directory in (of_one, of_none):
            await directory.aclose()

    async def test_a_fleet_does_not_start_on_one_member_of_a_cluster(self, cluster: ClusterOfThree) -> None:
        member = cluster.owner(PARTITION_SLOTS[0])  # it has the fleet's table, which alone would be well
        url = f"redis://127.0.0.1:{member.port}"
        options = FleetOptions(engine_urls=("http://127.0.0.1:1",), port=free_port(), redis_url=url)
        with pytest.raises(FleetError, match="must begin with redis-cluster://"):
            async with local_fleet(options, print):
                pass

    async def test_users_confined_to_the_documented_commands_work(
        self, cluster: ClusterOfThree, directory: RedisDirectory
    ) -> None:
        for master in cluster.masters:
            master.client().function_flush()
        users = documented_users()
        for rule in users.values():
            for master in cluster.masters:
                master.client().execute_command(*rule)
        hosts = ",".join(f"127.0.0.1:{master.port}" for master in cluster.masters)
        operator = RedisDirectory.connect(f"redis-cluster://operator:pw@{hosts}", loads_functions=False)
        assert [each.became for each in await load_functions(await operator.nodes(), False)] == ["loaded"] * 3
        await operator.aclose()
        await hold_one_of_each(directory)
        agent = RedisDirectory.connect(f"redis-cluster://agent:pw@{hosts}")
        gateway = RedisDirectory.connect(f"redis-cluster://gateway:pw@{hosts}")
        await agent.register(B, HOST, LOAD)
        assert (await agent.renew(B, LOAD)).known
        assert [await agent.place(batch(B, 0, {each: 1})) for each in ONE_OF_EACH] == [-1] * 16
        assert await agent.withdraw(batch(B, 1, {ONE_OF_EACH[3]: 0})) == 0
        assert len(await gateway.members()) == 1
        assert await found(gateway, ONE_OF_EACH) == await found(directory, ONE_OF_EACH)
        await agent.retire(B)
        await gateway.register(C, GATEWAY, BOOKED)
        assert (await gateway.renew(C, BOOKED)).known
        await gateway.retire(C)
        with pytest.raises(DirectoryError, match=r"(?i)permission"):
            await gateway.place(batch(C, 0, {ONE_OF_EACH[0]: 1}))
        for each in (agent, gateway):
            await each.aclose()


async def test_a_table_on_its_way_is_read_where_it_is(
    cluster: ClusterOfThree, directory: RedisDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterSlots, "table_homes", (0,))
    await directory.register(A, HOST, LOAD)
    slot, target = PARTITION_SLOTS[0], cluster.masters[2]
    source = cluster.owner(slot)
    cluster.begin_migration(slot, source, target)
    try:
        for moved in (None, schema.VERSIONS_KEY, schema.REGISTRATIONS_KEY):
            if moved:
                source.client().execute_command("MIGRATE", "127.0.0.1", target.port, moved, 0, 5000)
            assert [member.registration for member in await directory.members()] == [HOST], moved
    finally:
        cluster.move_keys(slot, source, target)
        cluster.end_migration(slot, source, target)


async def test_fleets_are_told_apart_by_their_prefix(cluster: ClusterOfThree, directory: RedisDirectory) -> None:
    other = RedisDirectory.connect(cluster.url, key_prefix="eu-west.1")
    await hold_one_of_each(directory)
    await directory.register(A, HOST, LOAD)
    assert await found(other, ONE_OF_EACH) == [{}] * 16
    assert await other.members() == ()
    await other.register(A, ENGINE, LOAD)
    assert await other.place(batch(A, 0, {ONE_OF_EACH[0]: 4})) == -1
    assert [member.registration for member in await directory.members()] == [HOST]
    keys = {name for master in cluster.masters for name in master.client().keys("eu-west.1:*")}
    assert b"eu-west.1:v1:{3560}:" + ONE_OF_EACH[0] in keys
    assert b"eu-west.1:{8209}:versions" in keys
    await other.aclose()


async def test_statistics_count_every_master(cluster: ClusterOfThree, directory: RedisDirectory) -> None:
    await directory.register(A, HOST, LOAD)
    await hold_one_of_each(directory)
    found = await gather(directory)
    assert len(found.servers) == 3
    assert {server.role for server in found.servers} == {"master"}
    assert found.records.about_records_by_partition == (1,) * 16
    assert found.records.is_exact
    assert set(found.schema_versions) == {"v1"}
    assert not found.refused
    assert not found.has_trouble


async def test_statistics_say_what_the_others_hold_while_a_master_is_silent(
    cluster: ClusterOfThree, directory: RedisDirectory, paused: list[ServerProcess]
) -> None:
    await directory.register(A, HOST, LOAD)
    await hold_one_of_each(directory)
    dead = cluster.masters[1]
    paused.append(dead)
    dead.pause()
    found = await gather(directory)
    errors = {server.name: server.error for server in found.servers}
    assert [name for name, error in errors.items() if error] == [f"127.0.0.1:{dead.port}"]
    assert found.has_trouble
    assert found.records.about_records is not None
    assert 5 <= found.records.about_records < 16
    assert not found.records.is_exact
    assert found.lives is not None
    assert found.lives["hosts"]["live"] == 1
