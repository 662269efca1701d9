"""The schema's document says what the code does, byte for byte."""

import json
import re
from pathlib import Path

import pytest
import redis

from directory import redis_schema as schema
from directory.members import (
    UnreadableMember,
    decode_load,
    decode_registration,
    encode_load,
    encode_registration,
)
from directory.placements import pack_holders
from directory.redis_directory import RedisDirectory
from tests.directory.fleet_samples import BOOKED, ENGINE, GATEWAY, HOST, LOAD, batch
from tests.directory.stands import RedisStand

README = Path(schema.__file__).with_name("README.md").read_text()
GOLDEN = {
    name.strip(): value.strip()
    for block in re.findall(r"```golden\n(.*?)```", README, re.DOTALL)
    for name, value in (line.split("  ", 1) for line in block.splitlines())
}
INCARNATION = bytes.fromhex("0123456789abcdef")
LEFT_BEHIND = bytes.fromhex("fedcba9876543210")
KEY = bytes.fromhex("515c19d99bf5e7aaa37092b7c4314dde")
ATTEMPT = 7


def golden_bytes(name: str) -> bytes:
    return bytes.fromhex(GOLDEN[name])


def test_the_golden_keys_and_values_are_the_codes() -> None:
    assert schema.record_key(KEY) == golden_bytes("record key")
    assert schema.attempts_key(5) == golden_bytes("attempts key")
    assert pack_holders([(INCARNATION, 5)]) == golden_bytes("record")


def test_the_golden_json_is_the_codes() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    engine, host, gateway, load, booked = (json.loads(line) for line in block.splitlines())
    assert engine == json.loads(encode_registration(ENGINE))
    assert host == json.loads(encode_registration(HOST))
    assert gateway == json.loads(encode_registration(GATEWAY))
    assert load == json.loads(encode_load(LOAD))
    assert booked == json.loads(encode_load(BOOKED))


def test_the_table_of_tags_is_the_codes() -> None:
    tags = {int(partition): tag for partition, tag in re.findall(r"\| (\d+) \| (\d+) (?=\|)", README)}
    assert tags == dict(enumerate(schema.PARTITION_TAGS))


async def test_the_golden_bytes_are_what_the_server_holds(redis_stand: RedisStand, raw: "redis.Redis") -> None:
    await redis_stand.directory.place(batch(INCARNATION, ATTEMPT, {KEY: 5}))
    assert raw.get(golden_bytes("record key")) == golden_bytes("record")
    (attempt, heard_ms), golden = (
        raw.hget(golden_bytes("attempts key"), INCARNATION).split(b":"),
        golden_bytes("attempts"),
    )
    assert (attempt, len(heard_ms)) == (golden.split(b":")[0], len(golden.split(b":")[1]))
    seconds, _ = raw.time()
    assert 0 <= seconds * 1000 - int(heard_ms) + 1000 < 60_000


async def test_the_golden_call_does_what_the_code_does(redis_stand: RedisStand, raw: "redis.Redis") -> None:
    await redis_stand.directory.place(batch(LEFT_BEHIND, 0, {KEY: 2}))
    raw.function_load(schema.functions_source(), replace=True)
    words = {"<attempts key>": "attempts key", "<record key>": "record key"}
    tokens = re.findall(r"<[a-z ]+>|\S+", GOLDEN["place"])
    call: list[bytes | str] = [golden_bytes(words[token]) if token in words else token for token in tokens]
    call[5], call[8], call[9] = INCARNATION, b"\x05", LEFT_BEHIND
    assert call[10:] == [str(schema.REMEMBERED_MS), "-1"]
    assert tokens[5:10] == [INCARNATION.hex(), str(ATTEMPT), "7200000", "05", LEFT_BEHIND.hex()]
    assert raw.execute_command(*call) == -1
    assert raw.get(golden_bytes("record key")) == golden_bytes("record")
    assert 7_100_000 < raw.pttl(golden_bytes("record key")) <= 7_200_000


@pytest.mark.parametrize("name", ["PLACE", "WITHDRAW", "REGISTER", "RENEW", "RETIRE"])
def test_every_function_is_documented_and_in_the_library(name: str) -> None:
    function = getattr(schema, name)
    assert function in README
    assert f"function_name = '{function}'" in schema.functions_source()


def test_the_library_is_named_once_and_carries_the_version() -> None:
    assert schema.functions_source().startswith(f"#!lua name={schema.LIBRARY}\n")
    assert schema.LIBRARY.endswith(schema.VERSION)


def test_the_implementation_names_no_key_by_itself() -> None:
    source = Path(RedisDirectory.connect.__func__.__code__.co_filename).read_text()  # type: ignore[attr-defined]
    assert "wr:" not in source
    assert "wr_v1" not in source


REQUIRED = {
    of.strip(): fields.replace("`", "").split()
    for of, fields in re.findall(
        r"\| (an engine|its `identity`|its `shape`|a host|a load|its `rates`) \| ([^|]*) \|", README
    )
}
WITHIN = {"its `identity`": "identity", "its `shape`": "shape", "its `rates`": "rates"}


@pytest.mark.parametrize(("of", "field"), [(of, field) for of, fields in REQUIRED.items() for field in fields])
def test_what_is_required_is_named_where_it_is_missing(of: str, field: str) -> None:
    is_load = of in ("a load", "its `rates`")
    encoded = encode_load(LOAD) if is_load else encode_registration(HOST if of == "a host" else ENGINE)
    row = json.loads(encoded)
    part = row[WITHIN[of]] if of in WITHIN else row
    assert part.pop(field, None) is not None
    with pytest.raises(UnreadableMember, match=f"'{field}'"):
        (decode_load if is_load else decode_registration)(json.dumps(row).encode())


def test_nothing_else_is_required() -> None:
    assert len(REQUIRED) == 6
    registration, load = json.loads(encode_registration(ENGINE)), json.loads(encode_load(LOAD))
    for row, part, of in (
        (registration, registration, "an engine"),
        (registration, registration["identity"], "its `identity`"),
        (registration, registration["shape"], "its `shape`"),
        (load, load, "a load"),
        (load, json.loads(encode_load(LOAD))["rates"], "its `rates`"),
    ):
        for field in set(part) - set(REQUIRED[of]):
            del part[field]
        (decode_load if row is load else decode_registration)(json.dumps(row).encode())
