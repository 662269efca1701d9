"""Compares what was predicted with what the engine reports: the usage at the end of an answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import orjson

from gateway.events import EVENT_ENDS, LAST_EVENTS, is_done, last_event_name

TAIL_BYTES_MAX = 8192
USAGE_FIELD = b'"usage":'
OUTPUT_FIELDS = ("completion_tokens", "output_tokens")
COUNT_MAX = 2**26
"""No body has more tokens than its 64 MiB have bytes; a larger count is none."""
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts an engine reported; `None` where it doesn't say."""

    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int | None = None


class StreamTail:
    """Keeps the last bytes of a stream, where its usage stands, and counts its events."""

    def __init__(self) -> None:
        self.events = 0
        """So many came: about one for each token, and one to three more."""
        self._tail = b""
        self._last_name = b""
        self._added: list[bytes] = []
        self._added_bytes = 0

    def add(self, piece: bytes) -> None:
        """Take the next piece of the stream, whole events."""
        self.events += sum(map(piece.count, EVENT_ENDS))
        self._added.append(piece)
        self._added_bytes += len(piece)
        if self._added_bytes > TAIL_BYTES_MAX:
            self._cut()

    @property
    def is_done(self) -> bool:
        """Whether the stream's terminator was its last event."""
        return is_done(self.kept) or (self._last_name in LAST_EVENTS and self._tail.endswith(EVENT_ENDS))

    @property
    def kept(self) -> bytes:
        """The last bytes, as they came."""
        self._cut()
        return self._tail

    def _cut(self) -> None:
        """Keep the end of what was added: seldom, as each time all of it is copied."""
        added = b"".join(self._added)
        self._last_name = last_event_name(added) or self._last_name  # its event may be longer than what is kept of it
        self._tail = (self._tail + added)[-TAIL_BYTES_MAX:]
        self._added, self._added_bytes = [], 0

    def usage(self) -> Usage | None:
        """The last usage that tells how long the prompt was; within an event of any length, in any API's stream."""
        tail = self.kept
        place = len(tail)
        while (place := tail.rfind(USAGE_FIELD, 0, place)) >= 0:
            found = _usage_at(tail, place + len(USAGE_FIELD))
            if found is not None:
                return found
        return None


def read_usage(data: bytes) -> Usage | None:
    """The usage of an answer or an event in JSON; `None` where there is none."""
    try:
        decoded = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return _counts(decoded.get("usage")) if isinstance(decoded, dict) else None


def _usage_at(tail: bytes, start: int) -> Usage | None:
    """The usage whose value stands at `start`. It is a field: within a text its name's quotes would be escaped."""
    try:
        value, _ = _DECODER.raw_decode(tail[start:].lstrip().decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return _counts(value)


def _counts(usage: Any) -> Usage | None:
    """The prompt's tokens, the cached ones and the answer's, as the APIs name them.

    OpenAI: `prompt_tokens`; responses: `input_tokens`, and in vLLM those of each turn of an answer that called tools,
    of which the first is what was asked. Messages: `input_tokens` are those that were neither read from a cache nor
    written to one.
    """
    if not isinstance(usage, Mapping):
        return None
    prompt, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details")
    if prompt is None:
        prompt, details = usage.get("input_tokens"), usage.get("input_tokens_details")
    if not _is_count(prompt):
        return None
    output = next((each for name in OUTPUT_FIELDS if _is_count(each := usage.get(name))), None)
    if isinstance(details, Mapping):
        turns = details.get("input_tokens_per_turn")
        if isinstance(turns, list) and len(turns) > 1:
            return Usage(turns[0], None, output) if _is_count(turns[0]) else None
        cached = details.get("cached_tokens")
        return Usage(prompt, cached if _is_count(cached) else None, output)
    read, written = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
    total = prompt + sum(each for each in (read, written) if _is_count(each))
    return Usage(total, read if _is_count(read) else None, output)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_MAX


def is_json(data: bytes) -> bool:
    """Whether an answer is a complete JSON value."""
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return True
