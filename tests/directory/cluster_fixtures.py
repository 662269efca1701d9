"""A cluster of three masters for a file of tests; a `conftest.py` that imports these names lends them to its folder."""

from collections.abc import AsyncIterator, Iterator

import pytest

from directory.redis_directory import RedisDirectory
from tests.directory.servers import ClusterOfThree, ServerProcess

__all__ = ["cluster", "directory", "paused", "running_cluster"]


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[ClusterOfThree]:
    with ClusterOfThree() as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: ClusterOfThree) -> ClusterOfThree:
    """Empty, with all of its servers up."""
    running_cluster.wait_until_ok()
    for master in running_cluster.masters:
        master.client().flushall()
    return running_cluster


@pytest.fixture
async def directory(cluster: ClusterOfThree) -> AsyncIterator[RedisDirectory]:
    directory = RedisDirectory.connect(cluster.url)
    yield directory
    await directory.aclose()


@pytest.fixture
def paused(cluster: ClusterOfThree) -> Iterator[list[ServerProcess]]:
    """Servers put here are continued at the end."""
    servers: list[ServerProcess] = []
    yield servers
    for server in servers:
        server.resume()
