"""Server-sent events as they pass: bytes untouched, cut only where an event ends."""

import re
from collections.abc import AsyncIterator

EVENT_ENDS = (b"\n\n", b"\n\r\n")
EVENT_BYTES_MAX = 2**20
"""A longer event is passed on in parts."""
_EVENT_END = re.compile(rb"\n\r?\n")
DONE_LINES = (b"data: [DONE]", b"data:[DONE]")


async def whole_events(pieces: AsyncIterator[bytes], is_end_told: bool) -> AsyncIterator[bytes]:
    """The same bytes, cut at ends of events.

    What follows the last end is given only when the stream ends well: when HTTP tells where it ends (`is_end_told`),
    or when it is the terminator, which then gets the end of an event.
    """
    held = b""
    async for piece in pieces:
        joined = held + piece if held else piece
        end = len(joined) if len(joined) > EVENT_BYTES_MAX else _last_event_end(joined)
        held = joined[end:]
        if end:
            yield joined[:end]
    if held and is_end_told:
        yield held
    elif is_done(held):
        yield held.rstrip() + b"\n\n"


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
    """Whether a stream that ends with `tail` ends with its terminator, which is a line of its own."""
    last = tail.rstrip(b"\r\n").rpartition(b"\n")[2]
    return last.rstrip() in DONE_LINES


def _last_event_end(piece: bytes) -> int:
    """Where the last event in `piece` ends: after an empty line, with either kind of line end; 0 for nowhere."""
    if piece.endswith(b"\n\n"):
        return len(piece)
    ends = [piece.rfind(mark) + len(mark) for mark in EVENT_ENDS if mark in piece]
    return max(ends, default=0)
