"""Which URLs are understood, what is said of the others, and that they lead to the server."""

from pathlib import Path

import pytest
import redis

from directory.errors import DirectoryError, DirectoryUnavailable
from directory.redis_directory import RedisDirectory
from directory.server_url import Address, parse_server_url
from tests.directory.fleet_samples import batch, holders, incarnation, key
from tests.directory.stands import running_valkey

A, K1, DEADLINE_S = incarnation(1), key(1), 5.0


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://localhost:6379",
        "redis://",
        "redis://:6379",
        "redis://host:port",
        "redis://host:99999",
        "redis://host:0",
        "redis://host/base",
        "redis://host?db=x",
        "redis://host?decode_responses=true",
        "rediss://host?ssl_cert_reqs=perhaps",
        "unix://",
        "redis://[::1",
        "rediss://user:geheim@",
        "redis://host1,host2",
        "redis://u:geheim/x@host",
        "redis://u:geheim#x@host",
        "redis://u:geheim?x@host",
        "redis://host?sentinel_password=geheim",
        "redis-cluster://",
        "redis-cluster://host,",
        "redis-cluster://host/1",
        "redis-cluster://host?db=0",
        "redis-cluster://host:6379:6380",
        "redis-cluster://" + ",".join(["host"] * 65),
        "redis-sentinel://host",
        "redis-sentinel://host/",
        "redis-sentinel://host/master/base",
        "redis-sentinel://:geheim@host:0/master",
        "unix://host/run/redis.sock",
        "rediss-cluster://host?ssl_cert_reqs=perhaps",
    ],
)
def test_a_malformed_url_is_refused_in_one_sentence(url: str) -> None:
    with pytest.raises(DirectoryError) as refusal:
        RedisDirectory.connect(url)
    message = str(refusal.value)
    assert message.startswith("the directory's URL ")
    assert "\n" not in message
    assert "geheim" not in message


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h?ssl_ca_certs=/ca.pem", "has the option 'ssl_ca_certs', which needs TLS"),
        ("unix:///s?ssl_cert_reqs=none", "has the option 'ssl_cert_reqs', which needs TLS"),
        ("redis-cluster://h?ssl_check_hostname=no", "has the option 'ssl_check_hostname', which needs TLS"),
        ("rediss://h?ssl_cert_reqs=nein", "ssl_cert_reqs='nein': it must be one of required, optional, none"),
        ("rediss://h?ssl_check_hostname=maybe", "ssl_check_hostname='maybe': it must be one of true, false"),
        ("rediss-sentinel://h/m?ssl_ca_certs=/no/ca.pem", "a file that can't be read: ssl_ca_certs=/no/ca.pem"),
        ("rediss://h?ssl_keyfile=/", "a file that can't be read: ssl_keyfile=/"),
    ],
)
def test_a_tls_option_that_cannot_work_is_named(url: str, says: str) -> None:
    with pytest.raises(DirectoryError) as caught:
        RedisDirectory.connect(url)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://user:pass%40word@host:6379/3",
        f"rediss://:password@host:6380?ssl_ca_certs={__file__}&ssl_cert_reqs=optional",
        "unix:///run/redis.sock",
        "unix://user:password@/run/redis.sock?db=2",
        "redis://[::1]:6379",
        "redis-sentinel://h1,h2:26380,[::1]/mymaster/2?sentinel_password=p%40ss&sentinel_username=u",
        "rediss-sentinel://user:pass@h1/mymaster?ssl_check_hostname=false",
        "redis-cluster://user:pass@h1:7000,[::1]:7001,h3",
        f"rediss-cluster://h1?ssl_ca_certs={__file__}",
    ],
)
async def test_a_good_url_is_accepted_without_connecting(url: str) -> None:
    await RedisDirectory.connect(url).aclose()


async def test_a_server_that_is_not_there_is_unavailable(unused_tcp_port: int) -> None:
    directory = RedisDirectory.connect(f"redis://127.0.0.1:{unused_tcp_port}")
    for call in (directory.lookup([K1], DEADLINE_S), directory.members(), directory.place(batch(A, 0, {K1: 1}))):
        with pytest.raises(DirectoryUnavailable):
            await call
    await directory.aclose()


async def test_passwords_users_databases_and_unix_sockets_work(tmp_path: Path) -> None:
    socket = tmp_path / "v.sock"
    with running_valkey(unix_socket_path=socket) as server:
        with redis.Redis(port=server.port, protocol=2) as client:
            client.config_set("requirepass", "a@b/c")
        good = [f"redis://:a%40b%2Fc@127.0.0.1:{server.port}/0", f"unix://default:a%40b%2Fc@{socket}?db=0"]
        for attempt, url in enumerate(good):
            directory = RedisDirectory.connect(url)
            assert await directory.place(batch(A, attempt, {K1: 1})) == attempt - 1
            await directory.aclose()
        other_database = RedisDirectory.connect(f"redis://:a%40b%2Fc@127.0.0.1:{server.port}/1")
        assert holders((await other_database.lookup([K1], DEADLINE_S)).records[0]) == {}
        await other_database.aclose()
        wrong = RedisDirectory.connect(f"redis://:wrong@127.0.0.1:{server.port}")
        with pytest.raises(DirectoryUnavailable, match="password"):
            await wrong.members()
        await wrong.aclose()


def test_sentinels_have_a_login_of_their_own() -> None:
    url = parse_server_url("rediss-sentinel://me:p%2Fw@h1,[::1]:9/m/2?sentinel_password=s%40t&ssl_ca_certs=/ca.pem")
    assert (url.kind, url.master_name) == ("sentinel", "m")
    assert url.seeds == (Address("h1", 26379), Address("::1", 9))
    assert url.of_server(Address("10.0.0.1", 7)) == "rediss://me:p%2Fw@10.0.0.1:7/2?ssl_ca_certs=%2Fca.pem"
    assert url.of_sentinel(url.seeds[1]) == "rediss://:s%40t@[::1]:9/?ssl_ca_certs=%2Fca.pem"


def test_a_url_does_not_show_its_passwords() -> None:
    url = parse_server_url("redis-sentinel://me:hunter2@h/m?sentinel_password=hunter2")
    assert "hunter2" not in repr(url)


@pytest.mark.parametrize("prefix", ["", "a:b", "{a}", "a b", "a*", "x" * 65, "é"])
def test_a_key_prefix_that_could_meet_another_fleets_keys_is_refused(prefix: str) -> None:
    with pytest.raises(DirectoryError, match="prefix"):
        RedisDirectory.connect("redis://host", key_prefix=prefix)
