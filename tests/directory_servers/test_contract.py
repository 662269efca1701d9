"""The contract in memory, on one server of each brand, on a cluster of three masters and on a Sentinel group."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from directory.redis_directory import RedisDirectory
from tests.directory.contract import TestLookups, TestPlacements, TestRegistrations
from tests.directory.servers import ClusterOfThree, SentinelGroup, ServerProcess
from tests.directory.stands import MemoryStand, RedisStand, Stand
from tests.directory_servers.installation import redis_server_binary
from tests.directory_servers.standalone import standalone, url_of

__all__ = ["TestLookups", "TestPlacements", "TestRegistrations"]

Masters = tuple[str, Sequence[ServerProcess]]


@contextmanager
def redis_alone() -> Iterator[Masters]:
    with standalone("redis") as server:
        yield url_of(server), [server]


@contextmanager
def valkey_alone() -> Iterator[Masters]:
    with standalone("valkey") as server:
        yield url_of(server), [server]


@contextmanager
def redis_cluster() -> Iterator[Masters]:
    with ClusterOfThree(binary=redis_server_binary()) as cluster:
        yield cluster.url, cluster.masters


@contextmanager
def valkey_cluster() -> Iterator[Masters]:
    with ClusterOfThree() as cluster:
        yield cluster.url, cluster.masters


@contextmanager
def redis_sentinels() -> Iterator[Masters]:
    with SentinelGroup(binary=redis_server_binary()) as group:
        yield group.url, [group.master()]


@pytest.fixture(
    scope="module", params=[None, redis_alone, valkey_alone, redis_cluster, valkey_cluster, redis_sentinels],
    ids=["memory", "redis", "valkey", "redis-cluster", "valkey-cluster", "redis-sentinels"]
)  # fmt: skip
def masters(request: pytest.FixtureRequest) -> Iterator[Masters | None]:
    """A URL and who answers for it; `None` for the directory in memory."""
    with ExitStack() as stack:
        yield None if request.param is None else stack.enter_context(request.param())


@pytest.fixture
async def stand(masters: Masters | None) -> AsyncIterator[Stand]:
    if masters is None:
        yield MemoryStand()
        return
    url, servers = masters
    raws = [server.client() for server in servers]
    for raw in raws:
        raw.flushall()
    directory = RedisDirectory.connect(url)
    yield RedisStand(directory, *raws)
    await directory.aclose()
    for raw in raws:
        raw.close()
