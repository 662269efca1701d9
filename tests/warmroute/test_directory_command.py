"""`warmroute directory`: hosts and holders, for people and programs."""

import asyncio
import contextlib
import io
import json
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

from directory import redis_schema as schema
from directory.errors import DirectoryUnavailable
from directory.interface import Batch
from directory.members import GatewayRegistration, Load, draw_incarnation
from directory.placements import partition_of
from directory.redis_directory import RedisDirectory
from directory.server_report import ServerReport
from directory.statistics import NodeSample, summarise
from tests.directory.stands import running_valkey
from tests.gateway.samples import ENGINE_LOAD, HOST_LOAD, engine_registration, host_registration
from warmroute.cli import main
from warmroute.demo import DemoRow, as_report
from warmroute.directory_tables import as_page, as_table

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
    await directory.register(draw_incarnation(), GatewayRegistration("g1:8000", "http://g1:8001"), Load(), 60)
    await directory.aclose()


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def ask(url: str, *words: str, stdin: str = "") -> Done:
    """The command in this process: a Python for each call would take seconds."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        unittest.mock.patch("sys.stdin", io.StringIO(stdin)),
    ):
        status = main(["directory", *words, "--redis", url])
    return Done(status, out.getvalue(), err.getvalue())


def test_hosts_and_their_engines_are_listed(url: str) -> None:
    rows = json.loads(ask(url, "hosts", "--json").stdout)
    assert [(row["host"], row["engine"], row["state"]) for row in rows] == [
        ("h1", None, "live"),
        ("h1", "e1", "retired"),
        (None, None, "live"),
    ]
    assert [row.get("gateway") for row in rows] == [None, None, "g1:8000"]
    assert rows[0]["dram_bytes_limit"] == 10**9
    table = ask(url).stdout.splitlines()
    assert table[0].split()[:3] == ["host", "engine", "state"]
    assert len(table) == 4


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
        (("stats", "extra"), "keys are for lookup: stats takes none, not 'extra'"),
        (("forget",), "forget needs one name"),
        (("forget", "a", "b"), "forget needs one name"),
        (("hosts", "--force"), "--force is for forget and load, not for hosts"),
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


def test_statistics_say_what_the_servers_hold(url: str) -> None:
    said = json.loads(ask(url, "stats", "--json").stdout)
    records = said["records"]
    assert (records["about_records"], records["is_exact"], records["sampled"]) == (1, True, 1)
    assert records["holder_share_by_state"] == {
        "live": pytest.approx(1 / 3),
        "lapsed": 0,
        "retired": pytest.approx(1 / 3),
        "unknown": pytest.approx(1 / 3),
    }
    assert said["lives"]["hosts"] == {"live": 1, "lapsed": 0, "retired": 0}
    assert said["servers"][0]["warnings"] == []
    page = {line.split()[0]: line for line in ask(url, "stats").stdout.splitlines() if not line.startswith(" ")}
    assert list(page) == ["server", "records", "balance", "holders", "lives", "schema", "lookup"]
    assert "functions current" in page["server"]


def test_what_a_narrower_user_cannot_know_reads_as_unknown(url: str) -> None:
    with redis.Redis.from_url(url, protocol=2) as client:
        client.execute_command("ACL SETUSER narrow on >pw ~wr:* -@all +mget +hgetall +time +ping +select")
        page = ask(url.replace("://", "://narrow:pw@"), "stats").stdout
        client.execute_command("ACL DELUSER narrow")
    lines = {line.split()[0]: line.split(None, 1)[1] for line in page.splitlines()}
    assert [lines[name] for name in ("records", "balance", "holders", "schema")] == ["unknown"] * 4
    assert "unknown used of an unknown limit" in lines["server"]
    assert lines["lives"].startswith("hosts 1 live")
    assert sum(line.startswith("refused") for line in page.splitlines()) == 1


def test_a_server_that_is_silent_is_named_and_is_trouble() -> None:
    dead = ServerReport("h:1", error="no answer from the server")
    page = as_page(summarise([NodeSample(ServerReport("h:2"), is_whole=True), NodeSample(dead)], (), [0.001]))
    assert page.splitlines()[1].split(None, 1)[1] == "h:1: no answer from the server"


def test_a_live_host_is_forgotten_by_force_only(url: str) -> None:
    lives = asyncio.run(join(url, "h9", "e9"))
    refused = ask(url, "forget", "h9", "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["done"] is False
    assert states(url, lives) == ["live", "live"]
    one = ask(url, "forget", "e9", "--force")
    assert (one.returncode, one.stdout) == (
        0,
        "e9: 1 lives ended; an agent that still runs begins a new life and announces all again\n",
    )
    assert states(url, lives) == ["live", "retired"]
    assert ask(url, "forget", "h9", "--force").returncode == 0
    assert states(url, lives) == ["retired", "retired"]
    assert ask(url, "forget", "h9").returncode == 0, "what has ended needs no force"


def test_a_lapsed_host_is_forgotten_with_its_engines(url: str) -> None:
    lives = asyncio.run(join(url, "h8", "e8", term_s=0.001))
    while states(url, lives) != ["lapsed", "lapsed"]:
        pass
    done = json.loads(ask(url, "forget", "h8", "--json").stdout)
    assert [(row["holder"], row["was"], row["state"]) for row in done["lives"]] == [
        ("h8", "lapsed", "retired"),
        ("e8", "lapsed", "retired"),
    ]
    assert states(url, lives) == ["retired", "retired"]


async def join(url: str, host: str, engine: str, term_s: float = 60) -> list[str]:
    directory = RedisDirectory.connect(url)
    lives = [draw_incarnation(), draw_incarnation()]
    await directory.register(lives[0], host_registration(host), HOST_LOAD, term_s)
    await directory.register(lives[1], engine_registration(engine, host=host), ENGINE_LOAD, term_s)
    await directory.aclose()
    return [life.hex() for life in lives]


def states(url: str, lives: list[str]) -> list[str]:
    found = {row["incarnation"]: row["state"] for row in json.loads(ask(url, "hosts", "--json").stdout)}
    return [found[life] for life in lives]


def test_a_name_that_nobody_has_is_not_forgotten(url: str) -> None:
    done = ask(url, "forget", "nobody")
    assert (done.returncode, done.stdout) == (1, "nothing of the name nobody is registered\n")


@contextlib.contextmanager
def functions_of(url: str) -> Iterator["redis.Redis"]:
    """A plain client; afterwards the functions are as they should be."""
    with redis.Redis.from_url(url, protocol=2) as client:
        yield client
        client.function_load(schema.functions_source(), replace=True)


def test_no_question_loads_functions_and_what_needs_them_says_what_to_do(url: str) -> None:
    with functions_of(url) as client:
        client.function_flush()
        assert ask(url, "hosts").returncode == 0
        done = ask(url, "forget", "h1", "--force")
        assert done.returncode == 2
        assert "lacks the directory's functions: run `warmroute directory load`" in done.stderr
        stats = ask(url, "stats")
        assert stats.returncode == 0
        assert "functions missing" in stats.stdout
        assert client.function_list() == []


def test_functions_are_loaded_once_and_another_release_s_are_replaced_by_force_only(url: str) -> None:
    with functions_of(url) as client:
        client.function_flush()
        (row,) = json.loads(ask(url, "load", "--json").stdout)
        assert row["became"] == "loaded"
        assert ask(url, "hosts").returncode == 0
        assert ask(url, "load").stdout.endswith(": current\n")
        other = schema.functions_source() + "-- another release\n"
        client.function_load(other, replace=True)
        kept = ask(url, "load")
        assert (kept.returncode, ": kept\n" in kept.stdout) == (1, True)
        assert ask(url, "load", "--force").stdout.endswith(": replaced\n")
        assert ask(url, "load").stdout.endswith(": current\n")


def test_a_server_that_does_not_answer_is_one_sentence() -> None:
    done = ask("redis://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.startswith("warmroute directory: ")
    assert done.stderr.count("\n") == 1


def test_a_default_that_leads_nowhere_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: RedisDirectory) -> None:
        raise DirectoryUnavailable("not there")

    monkeypatch.setattr(RedisDirectory, "members", fail)
    for words in (["directory"], ["forget", "--keys", "ab" * 16]):
        with contextlib.redirect_stderr(io.StringIO()) as err:
            assert main(words) == 2
            assert err.getvalue().endswith(": not there (this is the default: --redis URL says where it is)\n")
            assert main([*words, "--redis", "redis://elsewhere"]) == 2
            assert err.getvalue().endswith(": not there\n")


@pytest.mark.parametrize("width", [40, 80, 92, 120, None])
def test_a_table_fits_its_terminal(width: int | None) -> None:
    row = {"host": "h" * 20, "engine": "e" * 20, "url": "u" * 20, "models": ["m" * 9, "n" * 9, "o" * 9]}
    lines = as_table([row, row], "", width).splitlines()
    assert max(map(len, lines)) <= (width or 200)
    assert len(lines) == {40: 9, 80: 9, 92: 5, 120: 3, None: 3}[width]
    assert "".join("".join(lines).split()).count("m" * 9) == 2


def test_a_page_fits_its_terminal() -> None:
    server = ServerReport("h:1", version="valkey 9", role="master", replicas=0, keys=5)
    page = as_page(summarise([NodeSample(server, is_whole=True)], (), [0.001]), 60)
    assert max(map(len, page.splitlines())) <= 60
    assert " ".join(page.split()).startswith("server h:1: valkey 9, master with 0 replicas, unknown used")


def test_names_cannot_steer_the_terminal(url: str) -> None:
    assert as_table([{"host": "h\x1b[2J\nx", "models": ["m\r"]}], "").splitlines()[1].split() == [
        "h\\x1b[2J\\nx",
        "m\\r",
    ]
    assert "\x1b" not in ask(url, "forget", "h7\x1b[2J").stdout


def test_a_reader_who_has_read_enough_is_no_trouble(url: str) -> None:
    line = f"{sys.executable} -m warmroute.cli directory stats --json --redis {url} | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("width", "lines"), [(80, 7), (None, 2)])
def test_the_demos_rows_fit_a_terminal(width: int | None, lines: int) -> None:
    row = DemoRow("1  reader A, a document", "engine-1", 2542, "dram=1024,nvme=1536", 2560, 7.31, "prefix", "yes")
    table, _, answer = as_report([row], width).partition("\n\n")
    assert len(table.splitlines()) == lines
    assert max(map(len, table.splitlines())) <= (width or 200)
    assert answer == "1  reader A, a document: yes"
