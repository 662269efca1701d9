"""Inputs that are wrong in one way each, made from a well-formed request; shared by the tests of gateway and engine."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

TYPES: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "false": False,
    "integer": 7,
    "zero": 0,
    "negative": -1,
    "huge": 10**18,
    "beyond 64 bits": 2**70,
    "fraction": 1.5,
    "string": "text",
    "empty string": "",
    "list": [1],
    "empty list": [],
    "list of lists": [[]],
    "list of null": [None],
    "object": {"a": 1},
    "empty object": {},
}
"""One value for each JSON type, and the odd ones within a type."""

NOT_AN_OBJECT: dict[str, bytes] = {
    "empty": b"",
    "white": b" \n\t ",
    "truncated": b'{"model":"tiny","messages":[',
    "trailing": b'{"model":"tiny"} x',
    "two objects": b"{}{}",
    "single quotes": b"{'model':'tiny'}",
    "comment": b'{"model":"tiny" /* x */}',
    "bad utf-8": b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "overlong utf-8": b'{"model":"\xc0\xaf"}',
    "cut utf-8": b'{"model":"tiny\xe2\x82"}',
    "utf-16": '{"model":"tiny"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"model":"tiny"}',
    "lone surrogate": b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
    "lone low surrogate in a key": b'{"\\udfff":1,"model":"tiny"}',
    "raw control character": b'{"model":"ti\x00ny"}',
    "deep lists": b'{"model":"tiny","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "unclosed depth": b"[" * 100_000,
    "1e999": b'{"model":"tiny","max_tokens":1e999}',
    "400 digits": b'{"model":"tiny","max_tokens":1' + b"0" * 400 + b"}",
    "5000 digits": b'{"model":"tiny","seed":' + b"9" * 5_000 + b"}",
    "NaN": b'{"model":"tiny","temperature":NaN}',
    "Infinity": b'{"model":"tiny","temperature":-Infinity}',
    "a list": b"[]",
    "null": b"null",
    "a number": b"7",
    "a string": b'"model"',
    "gzip bytes": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab\xae\x05\x00C\xbf\xa6\xa3\x02\x00\x00\x00",
}
"""Bodies that hold no JSON object at all."""


def deep_list(levels: int) -> Any:
    """A list in a list, `levels` deep: within what JSON parsers take, beyond what careless code walks."""
    return Deep(levels)


class Deep:
    """Stands for a deep list, which Python's own encoder can't write."""

    def __init__(self, levels: int) -> None:
        self.levels = levels


def encoded(value: Any) -> bytes:
    """As JSON; also what orjson refuses to write, such as integers beyond 64 bits and depth."""
    marks: list[int] = []

    def mark(deep: Deep) -> str:
        marks.append(deep.levels)
        return f"deep-{len(marks) - 1}"

    text = json.dumps(value, default=mark)
    for number, levels in enumerate(marks):
        text = text.replace(f'"deep-{number}"', "[" * levels + "]" * levels)
    return text.encode()


def replaced(body: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """A copy of `body` with the value at `path` replaced."""
    copy: dict[str, Any] = deepcopy(body)
    place: Any = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return copy


def param_of(path: tuple[str | int, ...]) -> str:
    """How an error names the field at `path`: `messages[0].content`."""
    name = ""
    for step in path:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name


def wrong_types(right: set[str]) -> Iterator[tuple[str, Any]]:
    """Every row of `TYPES` but those that the field takes."""
    unknown = right - TYPES.keys()
    assert not unknown, unknown
    for name, value in TYPES.items():
        if name not in right:
            yield name, value


def check_error_shape(answer: Any) -> dict[str, Any]:
    """The error object of an answer (status and JSON), which has OpenAI's shape; fails the test where it hasn't."""
    body = json.loads(answer)
    assert body.keys() == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str), error
    assert 10 < len(error["message"]) < 500, error
    assert isinstance(error["type"], str), error
    return error
