"""Server-sent events as they pass: bytes untouched, cut only where an event ends.

A stream of chat or completion chunks ends with a line of its own, `[DONE]`; one of named events (`/v1/messages`,
`/v1/responses`) with an event of a certain name.
"""

import re
from collections.abc import AsyncIterator

import orjson

EVENT_ENDS = (b"\n\n", b"\n\r\n")
EVENT_BYTES_MAX = 2**20
"""A longer event is passed on in parts."""
_EVENT_END = re.compile(rb"\n\r?\n")
DONE_LINES = (b"data: [DONE]", b"data:[DONE]")
LAST_EVENTS = frozenset((b"message_stop", b"response.completed", b"response.failed", b"response.incomplete", b"error"))
"""Names of the events after which nothing comes."""
EARLY_EVENTS = frozenset({b"response.created", b"response.queued", b"response.in_progress", b"ping"})
"""Names of the events that an engine sends before it has computed anything."""


async def whole_events(pieces: AsyncIterator[bytes], is_end_told: bool) -> AsyncIterator[bytes]:
    """The same bytes, cut at ends of events.

    What follows the last end is given only when the stream ends well: when HTTP tells where it ends (`is_end_told`),
    or when it is the terminator, which then gets the end of an event.
    """
    cutter = EventCutter()
    async for piece in pieces:
        if events := cutter.add(piece):
            yield events
    if rest := cutter.rest(is_end_told):
        yield rest


class EventCutter:
    """Cuts one stream at ends of events."""

    def __init__(self) -> None:
        self._held = b""

    def add(self, piece: bytes) -> bytes:
        """The whole events that there are with the next piece; may be empty."""
        if not self._held and piece.endswith(b"\n\n"):
            return piece
        joined = self._held + piece
        end = len(joined) if len(joined) > EVENT_BYTES_MAX else _last_event_end(joined)
        self._held = joined[end:]
        return joined[:end]

    def rest(self, is_end_told: bool) -> bytes:
        """What of the stream's end is given, which follows the last end of an event: see `whole_events`."""
        if self._held and is_end_told:
            return self._held
        return self._held.rstrip() + b"\n\n" if is_done(self._held) else b""


def single_events(events: bytes) -> list[bytes]:
    """The same bytes, cut after each event; what follows the last end comes last."""
    ends = [match.end() for match in _EVENT_END.finditer(events)]
    starts = [0, *ends]
    cut = [events[start:end] for start, end in zip(starts, ends, strict=False)]
    return [*cut, events[starts[-1] :]] if starts[-1] < len(events) else cut


def event_data(event: bytes) -> bytes:
    """What an event's `data` lines say; empty for a comment."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def is_done(tail: bytes) -> bool:
    """Whether a stream that ends with `tail` ends with its terminator, which is a line of its own, or a whole event."""
    line = tail.rstrip(b"\r\n").rpartition(b"\n")[2].rstrip()
    if line in DONE_LINES:
        return True
    return last_event_name(tail) in LAST_EVENTS and line.startswith(b"data:") and _is_json(line[5:])


def last_event_name(events: bytes) -> bytes:
    """The name of the last event that has one; empty where none has. A name stands at the beginning of a line."""
    start = events.rfind(b"\nevent:") + 1
    if not start and not events.startswith(b"event:"):
        return b""
    return events[start + 6 :].partition(b"\n")[0].strip()


def are_early(events: bytes) -> bool:
    """Whether these events say no more than that an answer is to come; comments, which keep it open, say nothing."""
    lines = events.split(b"\n")
    names = [line[6:].strip() for line in lines if line.startswith(b"event:")]
    if not names:
        return not any(line.startswith(b"data:") for line in lines)
    return EARLY_EVENTS.issuperset(names)


def _is_json(data: bytes) -> bool:
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return True


def _last_event_end(piece: bytes) -> int:
    """Where the last event in `piece` ends: after an empty line, with either kind of line end; 0 for nowhere."""
    if piece.endswith(b"\n\n"):
        return len(piece)
    ends = [piece.rfind(mark) + len(mark) for mark in EVENT_ENDS if mark in piece]
    return max(ends, default=0)
