"""What tests ask of a directory in a cluster, and of the cluster about it."""

from collections.abc import Sequence
from typing import Any

from directory import redis_schema as schema
from directory.redis_directory import RedisDirectory
from directory.redis_topology import PARTITION_SLOTS
from tests.directory.fleet_samples import batch, holders, incarnation, key
from tests.directory.servers import ClusterOfThree, ServerProcess

A = incarnation(1)
DEADLINE_S = 5.0
ONE_OF_EACH = [key(1, partition) for partition in range(16)]
"""A key of each partition."""


def home(cluster: ClusterOfThree, index: int) -> ServerProcess:
    """The server that has the first, or the second, of the table's homes."""
    return cluster.owner(PARTITION_SLOTS[schema.TABLE_HOMES_IN_A_CLUSTER[index]])


def partitions_of(cluster: ClusterOfThree, server: ServerProcess) -> set[int]:
    return {partition for partition, slot in enumerate(PARTITION_SLOTS) if cluster.owner(slot) is server}


async def hold_one_of_each(directory: RedisDirectory) -> None:
    for partition, each in enumerate(ONE_OF_EACH):
        await directory.place(batch(A, 0, {each: partition % 7 + 1}))


async def found(directory: RedisDirectory, keys: Sequence[bytes], deadline_s: float = DEADLINE_S) -> list[Any]:
    """Each key's holders, `None` where they are unknown."""
    records = (await directory.lookup(keys, deadline_s)).records
    return [None if record is None else holders(record) for record in records]
