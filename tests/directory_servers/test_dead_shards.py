"""Shards that die, hang, come back empty or hand over to a replica: what their partitions cost, and for how long."""

import asyncio

import pytest

from directory.errors import DirectoryUnavailable, PartitionUnavailable
from directory.redis_directory import RedisDirectory
from directory.redis_topology import PARTITION_SLOTS
from tests.directory.cluster_probes import DEADLINE_S, ONE_OF_EACH, A, found, hold_one_of_each, home, partitions_of
from tests.directory.fleet_samples import ENGINE, HOST, LOAD, batch, incarnation
from tests.directory.servers import ClusterOfThree, ServerProcess
from tests.directory.stands import until

B = incarnation(2)


class TestShards:
    async def test_a_silent_server_is_not_waited_for_until_it_is_heard_again(
        self, cluster: ClusterOfThree, directory: RedisDirectory
    ) -> None:
        await hold_one_of_each(directory)
        silent = cluster.masters[1]
        lost = [ONE_OF_EACH[partition] for partition in partitions_of(cluster, silent)]

        async def is_given_up() -> bool:
            with pytest.raises(PartitionUnavailable) as refusal:
                await directory.lookup(lost, DEADLINE_S)
            return "fallen silent" in str(refusal.value)

        async def is_heard() -> bool:
            return None not in await found(directory, ONE_OF_EACH)

        silent.pause()
        try:
            await until(is_given_up)
        finally:
            silent.resume()
        await until(is_heard)

    async def test_a_server_that_comes_back_on_its_port_is_found_again(self) -> None:
        with ClusterOfThree() as cluster:
            directory = RedisDirectory.connect(cluster.url)
            await hold_one_of_each(directory)
            dead = cluster.masters[0]
            lost = partitions_of(cluster, dead)
            dead.kill()
            assert {place for place, each in enumerate(await found(directory, ONE_OF_EACH)) if each is None} == lost
            dead.start()

            async def is_whole() -> bool:
                return None not in await found(directory, ONE_OF_EACH)

            await until(is_whole)
            assert [each for each in await found(directory, ONE_OF_EACH) if not each] == [{}] * len(lost)
            assert await directory.place(batch(A, 1, {ONE_OF_EACH[min(lost)]: 1}, acknowledged=0)) == -1
            await directory.aclose()

    @pytest.mark.parametrize("index", [0, 1])
    async def test_it_survives_the_death_of_each_of_its_homes(
        self,
        cluster: ClusterOfThree,
        directory: RedisDirectory,
        paused: list[ServerProcess],
        caplog: pytest.LogCaptureFixture,
        index: int,
    ) -> None:
        await directory.register(A, HOST, LOAD)
        dead = home(cluster, index)
        paused.append(dead)
        dead.pause()
        assert [member.registration for member in await directory.members()] == [HOST]
        assert (await directory.renew(A, LOAD)).known
        await directory.register(B, ENGINE, LOAD)
        await directory.retire(B)
        assert {member.incarnation: member.is_live for member in await directory.members()} == {A: True, B: False}
        assert len([each for each in caplog.records if "table" in each.message]) == 1

    async def test_it_is_unavailable_only_when_both_homes_are(
        self, cluster: ClusterOfThree, directory: RedisDirectory, paused: list[ServerProcess]
    ) -> None:
        await directory.register(A, HOST, LOAD)
        for index in (0, 1):
            paused.append(home(cluster, index))
        for server in paused:
            server.pause()
        calls = (
            directory.members(),
            directory.renew(A, LOAD),
            directory.register(B, HOST, LOAD),
            directory.retire(A),
        )
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [DirectoryUnavailable] * 4

    async def test_a_replica_that_is_promoted_serves_with_the_library_and_the_attempts_that_it_had(self) -> None:
        with ClusterOfThree(replicas_each=1, password="p@ss") as cluster:
            directory = RedisDirectory.connect(cluster.url)
            await hold_one_of_each(directory)
            old = cluster.masters[0]
            lost = sorted(partitions_of(cluster, old))
            old.client().execute_command("WAIT", 1, 5000)
            old.kill()
            new = await asyncio.to_thread(cluster.wait_for_new_owner, PARTITION_SLOTS[lost[0]], old)
            assert new in cluster.replicas
            attempt = 0

            async def is_taken() -> bool:
                nonlocal attempt
                attempt += 1
                try:
                    place = batch(A, attempt, {ONE_OF_EACH[lost[0]]: 2}, acknowledged=0)
                    return await directory.place(place) < attempt
                except DirectoryUnavailable:
                    return False

            assert await until(is_taken)

            async def is_whole() -> bool:
                return None not in await found(directory, ONE_OF_EACH)

            await until(is_whole)
            expected = [{A: place % 7 + 1} for place in range(16)]
            expected[lost[0]] = {A: 2}
            assert await found(directory, ONE_OF_EACH) == expected
            await directory.aclose()
