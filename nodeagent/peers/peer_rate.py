"""How fast a peer brings chunks, measured over the spans in which anything is asked of it. Pure: moments are arguments.

Chunks come side by side and share the network, so what counts is a span: from a question to an idle peer to the moment
at which nothing is asked any more, or `SPAN_MAX_S` where that never happens; its bytes by its length is a rate. A
shared network makes some spans many times as long as others: the middle one of the last `SPANS_MAX` counts. Nothing is
believed of a peer until it has brought something, for a fetch must be expected to pay.
"""

import statistics
from collections import deque

SPAN_MAX_S = 1.0
SPANS_MAX = 9


class PeerRate:
    """Learns from spans. Moments are monotonic seconds."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=SPANS_MAX)
        self._under_way = 0
        self._began_s = 0.0
        self._span_bytes = 0

    @property
    def bytes_per_s(self) -> float | None:
        """Good bytes a second while busy; `None` until some have come."""
        return statistics.median_low(self._rates) if self._rates else None

    def begin(self, now_s: float) -> None:
        """A chunk is asked for."""
        if not self._under_way:
            self._began_s, self._span_bytes = now_s, 0
        self._under_way += 1

    def end(self, now_s: float, good_bytes: int) -> None:
        """It has brought so many good bytes; 0 where it wasn't there, or went wrong."""
        assert self._under_way, "what ends has begun"
        self._under_way -= 1
        self._span_bytes += good_bytes
        if not self._under_way or now_s - self._began_s >= SPAN_MAX_S:
            if self._span_bytes and now_s > self._began_s:
                self._rates.append(self._span_bytes / (now_s - self._began_s))
            self._began_s, self._span_bytes = now_s, 0
