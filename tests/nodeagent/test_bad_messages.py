"""Well-formed msgpack with wrong or extreme values, in every field of every message of the chunk door."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from directory.members import Load, decode_load, encode_load
from directory.tiers import Tier
from nodeagent.client import PutResult
from nodeagent.errors import DoorProtocolError
from nodeagent.messages import (
    LENGTH_BYTES,
    Abort,
    ClientMessage,
    Close,
    Commit,
    GpuChanges,
    GpuSnapshot,
    Holding,
    LoadReport,
    Open,
    Refused,
    Reserve,
    Welcome,
    decode_client,
    decode_hello,
    preamble,
)
from nodeagent.roster import AttachedEngine
from tests.nodeagent.running import (
    CHUNK_BYTES,
    CLIENT,
    WAIT_S,
    connected,
    label,
    make_hello,
    payload,
    running_agent,
    storage_key,
)
from tests.nodeagent.test_door import RawClient

KEY, SHORT_KEY = storage_key("x"), storage_key("x")[:16]
MESSAGES: list[Any] = [
    Holding([1], [1]),
    Open(1, [KEY], 0.0),
    Close([1], [1], 1, 1.0),
    Reserve(1, KEY, SHORT_KEY, storage_key("y"), 0, 10, b"c" * 16),
    Commit(1, 1),
    Abort(1),
    GpuSnapshot([SHORT_KEY]),
    GpuChanges([SHORT_KEY], [SHORT_KEY]),
    LoadReport(1, 1, 1.0),
]
VALUES: list[Any] = [
    None, True, 0, 1, -1, 2**63 - 1, 2**63, 0.0, -0.0, 5e-324, 1e308, -1.0, math.inf, -math.inf, math.nan, "", "text",
    b"", b"short", KEY, SHORT_KEY, [], [None], [0], [2**63 - 1], [[]], [KEY], [SHORT_KEY], [SHORT_KEY] * 3, {},
    {"a": 1},
]  # fmt: skip


def odd_versions(message: Any) -> Iterator[list[Any]]:
    """The message as an array, with each field replaced by each value, some fields too few and some too many."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    for place in range(1, len(fields)):
        for value in VALUES:
            yield [*fields[:place], value, *fields[place + 1 :]]
        yield fields[:place]
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    yield [*fields, deep]


def nested(prefix: list[Any], levels: int) -> bytes:
    """An array that holds `prefix` and one more element, nested `levels` deep."""
    elements = b"".join(map(msgspec.msgpack.encode, prefix))
    return b"\xdc" + (len(prefix) + 1).to_bytes(2, "big") + elements + b"\x91" * levels + b"\x90"


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    # Reservations of lost connections keep their slots while their process, this one, lives: there must be enough.
    with running_agent(tmp_path_factory.mktemp("door"), dram_bytes=4_096 + 400 * CHUNK_BYTES) as running:
        yield running


def test_depth_is_refused_in_a_hello_and_in_a_message():
    hello = msgspec.msgpack.decode(msgspec.msgpack.encode(make_hello().message(CLIENT)))
    for prefix, decode in ((hello, decode_hello), (["Abort", 1], decode_client)):
        with pytest.raises(DoorProtocolError):
            decode(nested(prefix, 100_000))


def said(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_an_odd_value_costs_its_connection_at_most(agent, caplog, message: ClientMessage):
    with caplog.at_level(logging.INFO):
        for fields in odd_versions(message):
            with RawClient(agent.config.door) as raw:
                raw.send(preamble(), make_hello("odd").message(CLIENT))
                assert isinstance(raw.receive(), Welcome)
                raw.send(said(msgspec.msgpack.encode(fields)))
                raw.socket.shutdown(1)
                assert raw.is_closed_by_the_agent()
    assert not [record.getMessage() for record in caplog.records if record.exc_info], "no fault of the agent's own"
    with connected(agent.config.door, make_hello("witness")) as client:
        assert client.put(label("w"), payload("w"), WAIT_S) in (PutResult.STORED, PutResult.ALREADY)
    agent.status()


@pytest.mark.parametrize(
    ("read_bytes", "read_s"), [(2**63 - 1, 5e-324), (1, math.inf), (1, math.nan), (0, 1.0), (1, 0.0)]
)
def test_a_read_beyond_reason_does_not_spoil_a_rate_for_good(read_bytes: int, read_s: float):
    engine = AttachedEngine("e", None, None, 1e9, b"")  # type: ignore[arg-type]
    engine.rates.note_read(read_bytes, read_s)
    for _ in range(3):
        engine.rates.note_read(10**9, 1.0)
    load = Load(engine.rates.rates(engine.flops))
    assert 0 < load.rates.bytes_per_s[Tier.DRAM] < 1e11
    assert decode_load(encode_load(load)) == load


def test_every_odd_value_in_a_hello_is_refused_with_a_reason_or_taken(agent, caplog):
    hello = msgspec.msgpack.decode(msgspec.msgpack.encode(make_hello("odd").message(CLIENT)))
    with caplog.at_level(logging.INFO):
        for place in range(1, len(hello)):
            for value in VALUES:
                with RawClient(agent.config.door) as raw:
                    raw.send(preamble(), said(msgspec.msgpack.encode([*hello[:place], value, *hello[place + 1 :]])))
                    raw.socket.shutdown(1)
                    answer = raw.receive()
                    assert isinstance(answer, Refused | Welcome), (place, value)
                    if isinstance(answer, Refused):
                        assert len(answer.reason) > 10, answer
                    assert raw.is_closed_by_the_agent()
    assert not [record.getMessage() for record in caplog.records if record.exc_info], "no fault of the agent's own"
    with connected(agent.config.door, make_hello("witness")) as client:
        assert client.put(label("w"), payload("w"), WAIT_S) in (PutResult.STORED, PutResult.ALREADY)
