"""The door's frames: what goes in comes out, and garbage is an error of one kind."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.errors import DoorProtocolError
from nodeagent.messages import (
    LENGTH_BYTES,
    MESSAGE_BYTES_MAX,
    Close,
    Commit,
    GpuChanges,
    Open,
    Reserve,
    body_length,
    decode_agent,
    decode_client,
    decode_hello,
    frame,
    preamble,
    read_preamble,
)
from tests.nodeagent.running import CLIENT, make_hello

KEYS = st.binary(min_size=32, max_size=32)
DIRECTORY_KEYS = st.binary(min_size=16, max_size=16)
COUNTS = st.integers(0, 2**63 - 1)
MESSAGES = st.one_of(
    st.builds(Open, COUNTS, st.lists(KEYS, max_size=5)),
    st.builds(Close, st.lists(COUNTS), st.lists(COUNTS), COUNTS, st.floats(0, 1e9)),
    st.builds(
        Reserve,
        COUNTS,
        KEYS,
        st.none() | DIRECTORY_KEYS,
        st.none() | KEYS,
        COUNTS,
        st.integers(1, 2**40),
        st.binary(min_size=16, max_size=16),
    ),
    st.builds(Commit, COUNTS, COUNTS),
    st.builds(GpuChanges, st.lists(DIRECTORY_KEYS), st.lists(DIRECTORY_KEYS)),
)


@given(MESSAGES)
def test_a_message_survives_its_frame(message):
    data = frame(message)
    assert body_length(data[:LENGTH_BYTES]) == len(data) - LENGTH_BYTES
    assert decode_client(data[LENGTH_BYTES:]) == message


def test_a_hello_survives_its_frame():
    message = make_hello().message(CLIENT)
    assert decode_hello(frame(message)[LENGTH_BYTES:]) == message


def test_a_hello_may_say_less_or_more_than_this_version_knows():
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(make_hello(kv_tokens=4096).message(CLIENT)))
    earlier, later = msgspec.msgpack.encode(said[:-1]), msgspec.msgpack.encode([*said, "new"])
    assert decode_hello(earlier) == make_hello().message(CLIENT)
    assert decode_hello(later) == make_hello(kv_tokens=4096).message(CLIENT)


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_and_nothing_else(data):
    for decode in (decode_client, decode_agent, decode_hello):
        with pytest.raises(DoorProtocolError):
            decode(data)


@given(MESSAGES, st.data())
def test_a_damaged_message_is_read_or_refused_but_never_raises_otherwise(message, data):
    body = bytearray(frame(message)[LENGTH_BYTES:])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode_client(bytes(body))
    except DoorProtocolError:
        return


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(["Open", 1, [b"short"]], id="a key of five bytes"),
        pytest.param(["Open", -1, []], id="a negative id"),
        pytest.param(["Reserve", 1, b"k" * 32, None, None, 0, 0, b"c" * 16], id="no bytes"),
        pytest.param(["Welcome", b"l"], id="an agent's message"),
        pytest.param(["Open", 1, 2], id="a number for a list"),
    ],
)
def test_fields_out_of_bounds_are_refused(fields):
    with pytest.raises(DoorProtocolError):
        decode_client(msgspec.msgpack.encode(fields))


def test_deep_nesting_is_refused():
    with pytest.raises(DoorProtocolError):
        decode_client(b"\x91" * 100_000)


@pytest.mark.parametrize("length", [0, MESSAGE_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused(length):
    with pytest.raises(DoorProtocolError):
        body_length(length.to_bytes(LENGTH_BYTES, "big"))


def test_the_preamble_carries_the_version():
    assert read_preamble(preamble(7)) == 7
    with pytest.raises(DoorProtocolError):
        read_preamble(b"GET / HT")
