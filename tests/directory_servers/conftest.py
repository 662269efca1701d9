"""The servers that the stage's tests stand on."""

from collections.abc import Iterator

import pytest

from tests.directory.cluster_fixtures import cluster, directory, paused, running_cluster
from tests.directory.servers import ServerProcess
from tests.directory_servers.standalone import standalone

__all__ = ["cluster", "directory", "paused", "redis_server", "running_cluster", "server"]


@pytest.fixture
def redis_server() -> Iterator[ServerProcess]:
    """Debian's Redis, alone and empty."""
    with standalone("redis") as server:
        yield server


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """Each brand in turn, alone and empty."""
    with standalone(request.param) as server:
        yield server
