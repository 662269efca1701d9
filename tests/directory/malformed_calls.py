"""Calls of the directory's functions that are malformed: each is told what is wrong with it, and changes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import redis

from directory import redis_schema as schema
from tests.directory.fleet_samples import incarnation, key

A, B = incarnation(1), incarnation(2)
KEYS = [key(number) for number in range(3)]
RECORDS = [schema.record_key(each) for each in KEYS]


@dataclass(frozen=True)
class Call:
    """A function with its keys and arguments; `says` is a part of the error."""

    function: str
    keys: Sequence[bytes]
    args: Sequence[bytes | str | int]
    says: str = ""

    def with_key(self, place: int, key: bytes, says: str) -> "Call":
        return replace(self, keys=[*self.keys[:place], key, *self.keys[place + 1 :]], says=says)

    def with_argument(self, number: int, value: bytes | str | int, says: str) -> "Call":
        """Numbers count from 1, as the errors do."""
        return replace(self, args=[*self.args[: number - 1], value, *self.args[number:]], says=says)

    def made(self, raw: "redis.Redis") -> Any:
        return raw.execute_command("FCALL", self.function, len(self.keys), *self.keys, *self.args)


PLACE = Call(
    schema.PLACE, [schema.attempts_key(0), *RECORDS], [A, 1, 60_000, b"\x01\x02\x04", B, schema.REMEMBERED_MS, 0]
)
WITHDRAW = replace(PLACE, function=schema.WITHDRAW, args=[A, 1, 60_000, b"\0\0\0", b"", schema.REMEMBERED_MS, 0])
TABLE = [schema.REGISTRATIONS_KEY, schema.VERSIONS_KEY]
REGISTER = Call(schema.REGISTER, TABLE, [A, b"{}", b"{}", 5000, schema.REMEMBERED_MS, "v1"])
RENEW = Call(schema.RENEW, TABLE[:1], [B, b"{}", 5000, schema.REMEMBERED_MS])
RETIRE = Call(schema.RETIRE, TABLE[:1], [B, schema.REMEMBERED_MS])
WELL_FORMED = [PLACE, WITHDRAW, REGISTER, RENEW, RETIRE]
NO_NUMBERS = ["", "x", "-2", "1.5", "1e3", " 1", "0x10", "nan", "1" * 16]


def _malformed() -> list[Call]:
    calls = []
    for call in WELL_FORMED:
        calls += [
            replace(call, args=call.args[:-1], says="arguments, not"),
            replace(call, args=[*call.args, "1"], says="arguments, not"),
            replace(call, args=[], says="arguments, not"),
            replace(call, keys=[], says="0 keys, not"),
        ]
    for call in (REGISTER, RENEW, RETIRE):
        calls.append(replace(call, keys=[*call.keys, b"more"], says="keys, not"))
    for call, number, what in (
        (PLACE, 2, "an attempt"),
        (PLACE, 3, "a ttl in ms"),
        (PLACE, 6, "a span in ms"),
        (PLACE, 7, "the last attempt acknowledged"),
        (REGISTER, 4, "a term"),
        (REGISTER, 5, "a span"),
        (RENEW, 3, "a term"),
        (RENEW, 4, "a span"),
        (RETIRE, 2, "a span"),
    ):
        calls += [call.with_argument(number, value, f"not {what}") for value in NO_NUMBERS]
        if "a " in what:  # a span, a term, a ttl
            calls.append(call.with_argument(number, "0", f"not {what}"))
    for call in (PLACE, WITHDRAW, REGISTER, RENEW, RETIRE):
        calls += [call.with_argument(1, value, "not an incarnation") for value in (b"", A[:7], A + b"x")]
    calls += [REGISTER.with_argument(6, value, "not a version") for value in ("", "1", "v", "v1x")]
    calls += [PLACE.with_argument(5, value, "not the life left behind") for value in (B[:7], B + b"x")]
    calls += [PLACE.with_argument(4, value, "masks for 3 keys") for value in (b"", b"\x01\x02", b"\x01\x02\x04\x08")]
    calls += [WITHDRAW.with_argument(4, value, "only removes") for value in (b"\0\0\x01", b"\x01\x02\x04", b"\0\0\xff")]
    calls += [PLACE.with_key(0, value, "not that of attempts") for value in (RECORDS[0], b"attempts", b"x", b"")]
    others = (
        schema.record_key(key(1, 1)),
        schema.attempts_key(0),
        RECORDS[2][:-1],
        RECORDS[2] + b"x",
        b"",
        schema.Keyspace("other").record(KEYS[2]),
    )
    calls += [PLACE.with_key(3, value, "key 4") for value in others]
    many = [schema.record_key(key(number)) for number in range(65)]
    calls.append(replace(PLACE, keys=[PLACE.keys[0], *many], says="66 keys").with_argument(4, b"\x01" * 65, "66 keys"))
    return calls


MALFORMED = _malformed()


def contents(raw: "redis.Redis") -> dict[bytes, bytes | None]:
    """Everything that a server holds."""
    return {each: raw.dump(each) for each in raw.keys("*")}


def check_malformed_calls_change_nothing(raw: "redis.Redis") -> None:
    """On a server with a few records and two lives."""
    raw.function_load(schema.functions_source(), replace=True)
    replace(REGISTER, args=[B, *REGISTER.args[1:]]).made(raw)
    replace(PLACE, args=[B, 0, *PLACE.args[2:4], b"", *PLACE.args[5:]]).made(raw)
    before = contents(raw)
    for call in MALFORMED:
        with pytest.raises(redis.ResponseError) as refusal:
            call.made(raw)
        assert "warmroute: " in str(refusal.value), call
        assert call.says in str(refusal.value), call
        assert contents(raw) == before, call


def check_well_formed_calls_are_taken(raw: "redis.Redis") -> None:
    """What the malformed ones were made from."""
    raw.function_load(schema.functions_source(), replace=True)
    assert [call.made(raw) for call in WELL_FORMED[:3]] == [-1, -1, 1]
    assert RENEW.made(raw) == [0, 0]
    assert RETIRE.made(raw) == 0
