"""`warmroute directory`: hosts and holders, for people and programs."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from directory.interface import Batch
from directory.members import draw_incarnation
from directory.placements import partition_of
from directory.redis_directory import RedisDirectory
from tests.directory.stands import running_valkey
from tests.gateway.samples import ENGINE_LOAD, HOST_LOAD, engine_registration, host_registration

KEY = bytes(range(16))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_valkey() as server:
        url = f"redis://127.0.0.1:{server.port}"
        asyncio.run(fill(url))
        yield url


async def fill(url: str) -> None:
    directory = RedisDirectory.connect(url, clock=time.monotonic)
    host, engine = draw_incarnation(), draw_incarnation()
    await directory.register(host, host_registration("h1"), HOST_LOAD, 60)
    await directory.register(engine, engine_registration("e1", host="h1"), ENGINE_LOAD, 60)
    for life, mask in ((host, 2), (engine, 1), (draw_incarnation(), 4)):
        await directory.place(Batch(life, partition_of(KEY), 1, ((KEY, mask),), 60))
    await directory.retire(engine)
    await directory.aclose()


def ask(url: str, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warmroute.cli", "directory", *words, "--redis", url]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def test_hosts_and_their_engines_are_listed(url: str) -> None:
    rows = json.loads(ask(url, "hosts", "--json").stdout)
    assert [(row["host"], row["engine"], row["state"]) for row in rows] == [
        ("h1", None, "live"),
        ("h1", "e1", "retired"),
    ]
    assert rows[0]["dram_bytes_limit"] == 10**9
    table = ask(url).stdout.splitlines()
    assert table[0].split()[:3] == ["host", "engine", "state"]
    assert len(table) == 3


def test_holders_are_named_with_their_tiers_and_state(url: str) -> None:
    for words, stdin in ((("lookup", KEY.hex()), ""), (("lookup",), KEY.hex() + "\n")):
        (row,) = json.loads(ask(url, *words, "--json", stdin=stdin).stdout)
        holders = {(each["holder"].split()[0], *each["tiers"], each["state"]) for each in row["holders"]}
        assert holders == {("h1", "dram", "live"), ("e1", "gpu", "retired"), ("unknown", "nvme", "gone")}
    assert "h1 (live): dram" in ask(url, "lookup", KEY.hex()).stdout


def test_what_nobody_holds_has_no_holders(url: str) -> None:
    (row,) = json.loads(ask(url, "lookup", "ff" * 16, "--json").stdout)
    assert row["answered"] is True
    assert row["holders"] == []


@pytest.mark.parametrize("key", ["zz", "00", "00" * 17])
def test_a_wrong_key_is_one_sentence(url: str, key: str) -> None:
    done = ask(url, "lookup", key)
    assert done.returncode == 2
    assert done.stderr.startswith("warmroute directory: a directory key is 32 hex digits")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("lookup",), "lookup needs directory keys"),
        (("hosts", "extra"), "keys are for lookup: hosts takes none, not 'extra'"),
    ],
)
def test_what_is_missing_or_too_much_is_said(url: str, words: tuple[str, ...], says: str) -> None:
    done = ask(url, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"warmroute directory: {says}")


def test_flags_and_keys_come_in_any_order(url: str) -> None:
    command = [sys.executable, "-m", "warmroute.cli", "directory", "lookup", "--redis", url, KEY.hex(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[0]["key"] == KEY.hex()


def test_a_server_that_does_not_answer_is_one_sentence() -> None:
    done = ask("redis://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.startswith("warmroute directory: ")
    assert done.stderr.count("\n") == 1
