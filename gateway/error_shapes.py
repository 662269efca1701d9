"""Errors in the shape of the API that was asked: OpenAI's, or Anthropic's for `/v1/messages`; and as a stream's end.

Anthropic's error has no field for a parameter's name or a code: the message says both.
"""

import re
from typing import Any

import orjson

from gateway.errors import GatewayError, error_body
from gateway.openai_schema import ANTHROPICS, RESPONSES

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; others are `api_error` from 500 on, and `invalid_request_error` below. From Anthropic's list of errors."""
BROKEN_TYPE, BROKEN_CODE = "upstream_error", "stream_broken"
INTERNAL_TYPE = "internal_error"
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


def error_answer(error: GatewayError, path: str) -> bytes:
    """The JSON body that tells `error` to a client of `path`."""
    return anthropic_body(error.message, error.status) if path in ANTHROPICS else error.body()


def bug_answer(path: str) -> bytes:
    """The JSON body of a status 500 that is the gateway's own fault."""
    if path in ANTHROPICS:
        return anthropic_body("internal error", 500)
    return error_body("internal error", INTERNAL_TYPE, None, None)


def anthropic_body(message: str, status: int) -> bytes:
    """Anthropic's error object as JSON."""
    type_ = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return orjson.dumps({"type": "error", "error": {"type": type_, "message": message}})


def broken_stream_event(message: str, path: str, tail: bytes) -> bytes:
    """The last event of a stream whose engine failed after the first byte; `tail` is what came before it."""
    if path in ANTHROPICS:
        return b"event: error\ndata: " + anthropic_body(message, 500) + b"\n\n"
    if path != RESPONSES:
        return b"data: " + error_body(message, BROKEN_TYPE, None, BROKEN_CODE) + b"\n\n"
    numbers = [int(number) for number in _SEQUENCE_NUMBER.findall(tail)]
    said: dict[str, Any] = {"type": "error", "code": BROKEN_CODE, "message": message, "param": None}
    return b"event: error\ndata: " + orjson.dumps({**said, "sequence_number": max(numbers, default=-1) + 1}) + b"\n\n"
