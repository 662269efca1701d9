"""Compares what was predicted with what the engine reports: the usage at the end of an answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.events import EVENT_ENDS, LAST_EVENTS, is_done, last_event_name

TAIL_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts an engine reported; `cached_tokens` is `None` where it doesn't say."""

    prompt_tokens: int
    cached_tokens: int | None


class StreamTail:
    """Keeps the last bytes of a stream, where its usage stands."""

    def __init__(self) -> None:
        self._tail = b""
        self._last_name = b""

    def add(self, piece: bytes) -> None:
        """Take the next piece of the stream."""
        self._last_name = last_event_name(piece) or self._last_name  # its event may be longer than what is kept of it
        self._tail = piece[-TAIL_BYTES_MAX:] if len(piece) >= TAIL_BYTES_MAX else (self._tail + piece)[-TAIL_BYTES_MAX:]

    @property
    def is_done(self) -> bool:
        """Whether the stream's terminator was its last event."""
        return is_done(self._tail) or (self._last_name in LAST_EVENTS and self._tail.endswith(EVENT_ENDS))

    @property
    def kept(self) -> bytes:
        """The last bytes, as they came."""
        return self._tail

    def usage(self) -> Usage | None:
        """The usage in the last event that has one."""
        for line in reversed(self._tail.split(b"\n")):
            if line.startswith(b"data:") and b'"usage"' in line:
                found = read_usage(line[5:])
                if found is not None:
                    return found
        return None


def read_usage(data: bytes) -> Usage | None:
    """The usage of an answer or an event in JSON; `None` where there is none."""
    try:
        decoded = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    usage = decoded.get("usage") if isinstance(decoded, dict) else None
    if not isinstance(usage, Mapping) or not isinstance(usage.get("prompt_tokens"), int):
        return None
    details: Any = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return Usage(usage["prompt_tokens"], cached if isinstance(cached, int) else None)


def is_json(data: bytes) -> bool:
    """Whether an answer is a complete JSON value."""
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return True
