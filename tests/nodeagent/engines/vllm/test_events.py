import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engines.vllm import events as kv_events
from nodeagent.engines.vllm import payload_bound
from nodeagent.engines.vllm.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, decode_batch
from tests.nodeagent.engines.vllm.recorded import SERVERS, as_array, as_map, payload, payloads, recorded, stored

HASHES = st.integers(0, 2**64 - 1) | st.binary(min_size=32, max_size=32)
NAMES = st.none() | st.text(max_size=5)
NUMBERS = st.none() | st.integers(0, 9)
KEYS = st.text(max_size=4) | st.binary(max_size=4) | st.tuples(st.text(max_size=4), st.integers(0, 9))
STORED = st.builds(
    BlockStored,
    block_hashes=st.lists(HASHES, max_size=3).map(tuple),
    parent_block_hash=st.none() | HASHES,
    tokens=st.lists(st.binary(min_size=4, max_size=4), max_size=6).map(b"".join),
    block_size=st.integers(1, 64),
    lora_id=NUMBERS,
    medium=NAMES,
    lora_name=NAMES,
    extra_keys=st.none() | st.lists(st.none() | st.lists(KEYS, max_size=2).map(tuple), max_size=3).map(tuple),
    group_idx=NUMBERS,
    kv_cache_spec_kind=NAMES,
    kv_cache_spec_sliding_window=NUMBERS,
    locality=NAMES,
    ownership=NAMES,
    session_id=NAMES,
)
REMOVED = st.builds(BlockRemoved, st.lists(HASHES, max_size=3).map(tuple), NAMES, NUMBERS, NAMES, NAMES)
EVENTS = st.lists(STORED | REMOVED | st.just(AllBlocksCleared()), max_size=4)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise(raw: bytes) -> None:
    decode_batch(raw)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
FIELD_NAMES = st.sampled_from(["type", "token_ids", *(item.name for item in dataclasses.fields(BlockStored))])


@given(
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]),
    st.lists(ANYTHING, max_size=16) | st.dictionaries(FIELD_NAMES, ANYTHING, max_size=8),
)
def test_events_with_fields_of_any_kind_never_raise(kind: str, fields: Any) -> None:
    event = [kind, *fields] if isinstance(fields, list) else fields | {"type": kind}
    batch = decode_batch(msgspec.msgpack.encode([1.0, [event], 0]))
    assert len(batch.events) + sum(batch.skipped.values()) >= 1


@given(EVENTS)
def test_both_encodings_decode_to_the_same_events(events: list[Event]) -> None:
    for encode in (as_map, as_array):
        batch = decode_batch(payload(*map(encode, events), ts=2.5, rank=3))
        assert batch.events == tuple(events)
        assert (batch.ts, batch.data_parallel_rank, batch.skipped, batch.is_complete) == (2.5, 3, {}, True)


@pytest.mark.parametrize("server", SERVERS)
def test_recorded_messages_decode_to_what_vllm_sent(server: str) -> None:
    for message, raw in zip(recorded(server), payloads(server), strict=True):
        batch = decode_batch(raw)
        ts, sent, rank = message["decoded"]
        assert (batch.ts, batch.data_parallel_rank, batch.skipped) == (ts, rank, {})
        assert [plain(as_map(event)) for event in batch.events] == [plain(event) for event in sent]


def plain(value: Any) -> Any:
    """JSON's view of an event: lists for tuples, bytes in their wrapper, fields that are None left out."""
    if isinstance(value, dict) and "__bytes_hex__" not in value:
        return {name: plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {"__bytes_hex__": value.hex()} if isinstance(value, bytes) else value


FULL = stored([7], [1, 2], parent=5, lora_id=None, lora_name=None, kv_cache_spec_sliding_window=None)


@pytest.mark.parametrize("length", range(4, 15), ids=lambda length: f"{length} fields")
def test_arrays_of_every_older_length_decode(length: int) -> None:
    batch = decode_batch(payload(as_array(FULL, length)))
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash, event.tokens) == ((7,), 5, FULL.tokens)
    assert event.medium == ("GPU" if length > 5 else None)
    assert batch.skipped == {}


def test_unknown_fields_and_types_are_counted_and_the_rest_is_read() -> None:
    newer_map = as_map(FULL) | {"colour": "red", "weight": 3}
    newer_array = [*as_array(FULL), "red"]
    batch = decode_batch(payload(newer_map, newer_array, {"type": "BlockMoved"}, ["BlockMoved", 3], FULL))
    assert batch.events == (FULL, FULL, FULL)
    assert batch.skipped == {"unknown_field": 3, "unknown_event": 2}
    assert batch.is_complete


MALFORMED = {
    "bigram tokens": as_map(FULL) | {"token_ids": [[1, 2], [2, 3]]},
    "a token that isn't a u32": as_map(FULL) | {"token_ids": [1, 2**32]},
    "no parent said": {name: value for name, value in as_map(FULL).items() if name != "parent_block_hash"},
    "blocks of no tokens": as_map(FULL) | {"block_size": 0},
    "a text for a hash": as_map(FULL) | {"block_hashes": ["x"]},
    "an array cut short": as_array(FULL, 2),
}


@pytest.mark.parametrize("event", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_store_is_counted_and_the_batch_stays_complete(event: Any) -> None:
    batch = decode_batch(payload(event, FULL))
    assert (batch.events, batch.skipped, batch.is_complete) == ((FULL,), {"malformed_event": 1}, True)


@pytest.mark.parametrize("event", [{"type": "BlockRemoved"}, ["BlockRemoved", "x"], 5, [], {"type": 3}], ids=repr)
def test_a_batch_that_may_have_lost_a_removal_says_so(event: Any) -> None:
    batch = decode_batch(payload(event, FULL))
    assert (batch.events, batch.skipped, batch.is_complete) == ((FULL,), {"malformed_event": 1}, False)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "EVENTS_MAX", 2)
    assert decode_batch(payload(FULL, FULL)).is_complete
    assert decode_batch(payload(FULL, FULL, FULL)).skipped == {"too_many_events": 1}
    monkeypatch.setattr(kv_events, "PAYLOAD_BYTES_MAX", 10)
    batch = decode_batch(payload(FULL))
    assert (batch.events, batch.skipped, batch.is_complete) == ((), {"payload_too_large": 1}, False)


@pytest.mark.parametrize("field", ["group_idx", "lora_id", "kv_cache_spec_sliding_window"])
@pytest.mark.parametrize("number", [-1, 2**31, 2**64 - 1])
def test_numbers_that_an_engine_cannot_mean_are_malformed(field: str, number: int) -> None:
    batch = decode_batch(payload(as_map(FULL) | {field: number}))
    assert (batch.events, batch.skipped) == ((), {"malformed_event": 1})


@pytest.mark.parametrize(
    "part", [b"\x90", b"\x80", b"\xa0", b"\xa1x", b"\xd9\x00", b"\xd4\x00\x00"], ids=lambda part: part.hex()
)
def test_a_large_payload_of_tiny_parts_is_refused_before_it_is_decoded(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_DECODER", None)
    count = 2 * payload_bound.PARTS_MAX
    raw = b"\x93\xca\0\0\0\0\xdd" + count.to_bytes(4, "big") + part * count + b"\x00"
    assert decode_batch(raw).skipped == {"payload_too_large": 1}


def test_what_an_engine_sends_at_its_largest_is_counted_to_the_end_and_read() -> None:
    tokens = [number * 7_919 % 150_000 for number in range(320_000)]
    hashes = [number.to_bytes(4, "little") * 8 for number in range(20_000)]
    store = as_map(stored(hashes, tokens))
    batch = decode_batch(payload(store, *({"type": "BlockRemoved", "block_hashes": [each]} for each in hashes)))
    assert (len(batch.events), batch.skipped) == (20_001, {})


@given(st.recursive(ANYTHING, lambda inner: st.lists(inner, max_size=5), max_leaves=30))
def test_parts_are_counted_as_they_are(value: Any) -> None:
    def parts(each: Any) -> int:
        if isinstance(each, dict):
            return 1 + sum(parts(name) + parts(item) for name, item in each.items())
        if isinstance(each, list):
            return 1 + sum(map(parts, each))
        return int((isinstance(each, str) and len(each.encode()) < 3) or isinstance(each, bytes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload_bound, "UNCOUNTED_BYTES_MAX", -1)
        for most, is_bounded in ((parts(value), True), (parts(value) - 1, not parts(value))):
            patch.setattr(payload_bound, "PARTS_MAX", max(most, 0))
            assert payload_bound.is_bounded(msgspec.msgpack.encode(value)) is is_bounded


@given(st.binary(max_size=300))
def test_counting_never_raises(raw: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload_bound, "UNCOUNTED_BYTES_MAX", -1)
        payload_bound.is_bounded(raw)


@pytest.mark.parametrize("raw", [b"", b"\xc0", b"\x91" * 5000, b"\x93\x01\x02\x03", b"\xdd\xff\xff\xff\xff"], ids=repr)
def test_what_is_no_batch_is_one_undecodable_message(raw: bytes) -> None:
    batch = decode_batch(raw)
    assert (batch.events, batch.skipped, batch.is_complete) == ((), {"undecodable": 1}, False)
