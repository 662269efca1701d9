"""On Debian's Redis: the users that the README documents, and TLS, are enough for a fleet at work, and no more."""

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import redis

from directory.errors import DirectoryError
from directory.redis_directory import RedisDirectory
from directory.redis_schema import functions_source
from tests.directory.certificates import make_certificate
from tests.directory.documented_users import documented_sentinel_user, documented_users
from tests.directory.servers import ClusterOfThree, SentinelGroup, ServerProcess
from tests.directory_servers.agents import working_agents
from tests.directory_servers.agreement import until_equal
from tests.directory_servers.corpus import Corpus
from tests.directory_servers.gateway_view import GatewayView, until_rate
from tests.directory_servers.installation import redis_server_binary
from tests.directory_servers.standalone import standalone, url_of

CORPUS = Corpus(prompts=4, chunks=64, agents=2)
SETTLED_BOUND_S = 60.0
PASSWORD = "pw"
FORBIDDEN = [("FLUSHALL",), ("KEYS", "*"), ("SET", "other", "1"), ("FUNCTION", "FLUSH"), ("CONFIG", "GET", "*"),
             ("EVAL", "return 1", "0"), ("CLUSTER", "RESET")]  # fmt: skip

Servers = tuple[str, list[ServerProcess], list[ServerProcess]]
"""The directory's URL without a user, its masters, and the sentinels."""


@contextmanager
def one_server() -> Iterator[Servers]:
    with standalone("redis") as server:
        yield url_of(server), [server], []


@contextmanager
def cluster() -> Iterator[Servers]:
    with ClusterOfThree(binary=redis_server_binary()) as servers:
        yield servers.url, servers.masters, []


@contextmanager
def sentinels() -> Iterator[Servers]:
    with SentinelGroup(binary=redis_server_binary()) as group:
        yield group.url, [group.master()], group.sentinels


def as_user(url: str, name: str) -> str:
    return url.replace("://", f"://{name}:{PASSWORD}@", 1)


@pytest.mark.parametrize("start", [one_server, cluster, sentinels])
async def test_a_fleet_works_with_the_documented_users_and_they_may_do_nothing_else(
    start: Callable[[], AbstractContextManager[Servers]],
) -> None:
    with start() as (url, masters, guards):
        for master in masters:
            for rule in documented_users().values():
                master.client().execute_command(*rule)
            operator = redis.Redis(port=master.port, username="operator", password=PASSWORD, protocol=2)
            with operator:
                operator.function_load(functions_source(), replace=True)
        extra = ""
        for guard in guards:
            guard.client().execute_command(*documented_sentinel_user())
            guard.client().execute_command("ACL", "SETUSER", "default", "-sentinel|get-master-addr-by-name")
            extra = f"?sentinel_username=seeker&sentinel_password={PASSWORD}"
        holdings = [CORPUS.held_by(number) for number in range(CORPUS.agents)]
        async with working_agents(as_user(url, "agent") + extra, holdings) as agents:
            async with GatewayView(as_user(url, "gateway") + extra) as view:
                async with view.asking(CORPUS.all_prompts()) as asked:
                    await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
                    for agent in agents:
                        agent.walk()
                    await until_equal(view.directory, agents, [], SETTLED_BOUND_S)
        for name in documented_users():
            with redis.Redis(port=masters[0].port, username=name, password=PASSWORD, protocol=2) as plain:
                for command in FORBIDDEN:
                    with pytest.raises(redis.ResponseError, match=r"(?i)permission"):
                        plain.execute_command(*command)


async def test_a_fleet_works_over_tls_and_believes_no_other_certificate(tmp_path: Path) -> None:
    ours, other = (make_certificate(tmp_path, name) for name in ("ours", "other"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = {"tls_port": str(port), "tls_auth_clients": "no"}
    files = {"tls_cert_file": ours.certificate, "tls_key_file": ours.key, "tls_ca_cert_file": ours.certificate}
    with standalone("redis", **options, **{name: str(path) for name, path in files.items()}):
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs="
        holdings = [CORPUS.held_by(number) for number in range(CORPUS.agents)]
        async with working_agents(f"{url}{ours.certificate}", holdings) as agents:
            async with GatewayView(f"{url}{ours.certificate}") as view:
                async with view.asking(CORPUS.all_prompts()) as asked:
                    await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
                await until_equal(view.directory, agents, [], SETTLED_BOUND_S)
        stranger = RedisDirectory.connect(f"{url}{other.certificate}")
        with pytest.raises(DirectoryError, match=r"(?i)certificate"):
            await stranger.members()
        await stranger.aclose()
