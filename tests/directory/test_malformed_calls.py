"""Malformed calls of the functions, on the bundled Valkey; `tests/directory_servers` has them on Redis as well."""

import pytest
import redis

from directory import redis_schema as schema
from tests.directory.malformed_calls import (
    PLACE,
    REGISTER,
    RENEW,
    check_malformed_calls_change_nothing,
    check_well_formed_calls_are_taken,
    contents,
)


def test_malformed_calls_say_what_is_wrong_and_change_nothing(raw: "redis.Redis") -> None:
    check_malformed_calls_change_nothing(raw)


def test_the_well_formed_ones_are_taken(raw: "redis.Redis") -> None:
    check_well_formed_calls_are_taken(raw)


def test_a_call_that_meets_keys_of_another_kind_changes_nothing(raw: "redis.Redis") -> None:
    raw.function_load(schema.functions_source(), replace=True)
    for each in (PLACE, REGISTER):
        for name in {schema.attempts_key(0), schema.REGISTRATIONS_KEY, schema.VERSIONS_KEY} & set(each.keys):
            raw.flushall()
            raw.set(name, b"a text")
            before = contents(raw)
            with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
                each.made(raw)
            if name != schema.REGISTRATIONS_KEY:
                raw.hdel(schema.REGISTRATIONS_KEY, "swept")  # a sweep of old rows isn't the caller's change
            assert contents(raw) == before


def test_a_strange_moment_of_the_last_sweep_ends_nothing(raw: "redis.Redis") -> None:
    raw.function_load(schema.functions_source(), replace=True)
    raw.hset(schema.REGISTRATIONS_KEY, "swept", "long ago")
    assert REGISTER.made(raw) == 1
    raw.hset(schema.REGISTRATIONS_KEY, "swept", "long ago")
    assert RENEW.made(raw) == [0, 0]
    assert int(raw.hget(schema.REGISTRATIONS_KEY, "swept") or 0) > 0
