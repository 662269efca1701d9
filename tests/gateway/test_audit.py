"""What answers of every API say of their prompts, whole or at the end of a stream."""

import orjson
import pytest

from gateway.audit import COUNT_MAX, TAIL_BYTES_MAX, StreamTail, Usage, read_usage

USAGES = {
    "chat": ({"prompt_tokens": 9, "completion_tokens": 1}, Usage(9, None, 1)),
    "cached": ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
    "no details": ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, None)),
    "responses": ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
    "responses of several turns": (
        {"input_tokens": 70, "input_tokens_details": {"cached_tokens": 4, "input_tokens_per_turn": [9, 61]}},
        Usage(9, None),
    ),
    "messages": ({"input_tokens": 3, "output_tokens": 1, "cache_read_input_tokens": 6}, Usage(9, 6, 1)),
    "messages that were written to the cache": (
        {"input_tokens": 1, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 2},
        Usage(9, 6),
    ),
    "messages without a cache": ({"input_tokens": 9, "output_tokens": 1}, Usage(9, None, 1)),
    "a truth value": ({"prompt_tokens": True}, None),
    "a negative": ({"prompt_tokens": -1}, None),
    "more than there can be": ({"prompt_tokens": COUNT_MAX + 1}, None),
    "more cached than there can be": (
        {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 2**63}},
        Usage(9, None),
    ),
    "a text": ({"prompt_tokens": "9"}, None),
    "nothing": ({"output_tokens": 3}, None),
    "null": (None, None),
    "a list": ([9], None),
}


@pytest.mark.parametrize(("usage", "found"), USAGES.values(), ids=USAGES.keys())
def test_usage_is_read_as_its_api_means_it(usage: object, found: Usage | None) -> None:
    assert read_usage(orjson.dumps({"id": "x", "usage": usage})) == found
    tail = StreamTail()
    tail.add(b'data: {"choices":[]}\n\nevent: end\ndata: ' + orjson.dumps({"response": {"usage": usage}}) + b"\n\n")
    assert tail.usage() == found


def test_the_end_of_a_long_event_is_enough() -> None:
    tail = StreamTail()
    event = {"response": {"output": "x" * 3 * TAIL_BYTES_MAX, "usage": {"input_tokens": 9}, "user": None}}
    for start in range(0, 4 * TAIL_BYTES_MAX, 1000):
        tail.add(orjson.dumps(event)[start : start + 1000])
    assert tail.usage() == Usage(9, None)


@pytest.mark.parametrize("last", [b'"usage":null', b'"usage":{"prompt_tok', b'"usage":' + b"[" * 5000], ids=repr)
def test_the_last_usage_that_can_be_read_counts(last: bytes) -> None:
    tail = StreamTail()
    tail.add(b'data: {"usage":{"prompt_tokens":9}}\n\ndata: {' + last + b"}\n\n")
    assert tail.usage() == Usage(9, None)


def test_usage_in_a_text_is_no_usage() -> None:
    tail = StreamTail()
    tail.add(b"data: " + orjson.dumps({"delta": {"content": '"usage":{"prompt_tokens":1}'}}) + b"\n\n")
    assert tail.usage() is None
