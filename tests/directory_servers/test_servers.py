"""The groups of servers that other tests stand on are what they say."""

from typing import Any

from tests.directory.servers import MASTER_NAME, SLOTS, ClusterOfThree, SentinelGroup


def test_a_cluster_shares_the_slots_and_moves_one_with_its_keys() -> None:
    with ClusterOfThree() as cluster:
        first, second, _ = cluster.masters
        assert [cluster.owner(slot) for slot in (0, SLOTS // 2, SLOTS - 1)] == cluster.masters
        slot: Any = first.client().execute_command("CLUSTER KEYSLOT", "{3560}:k")
        source = cluster.owner(slot)
        target = second if source is first else first
        source.client().set("{3560}:k", "v")
        cluster.begin_migration(slot, source, target)
        assert cluster.move_keys(slot, source, target) == 1
        cluster.end_migration(slot, source, target)
        assert cluster.owner(slot) is target
        assert target.client().get("{3560}:k") == b"v"


def test_sentinels_agree_on_a_master() -> None:
    with SentinelGroup() as group:
        master, replica = group.servers
        assert (group.master(), group.replica()) == (master, replica)
        assert group.url.endswith(f"/{MASTER_NAME}")
        master.client().set("k", "v")
        group.wait_until_replicated()
        assert replica.client().get("k") == b"v"
