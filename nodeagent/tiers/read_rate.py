"""What the drive's reads cost, measured over the spans in which it is busy. Pure: moments are arguments.

Reads go on side by side and share the drive, and one that somebody else began may end a moment after it is asked for:
neither the seconds of a single read nor those of a single open say how fast bytes come. So a span runs from the moment
at which a read begins on an idle drive to the moment at which none is under way, or for `SPAN_MAX_S` where that never
happens, and its bytes took its seconds. Short spans tell the fixed part, long ones the rate (`load_cost.py`). It is
what an open that has the drive to itself can expect of reads as wide as those seen.
"""

from nodeagent.tiers.load_cost import LearnedCost, LoadCost

SPAN_MAX_S = 1.0
BELIEVED = LoadCost(0.001, 1e9)
"""Believed of a drive until reads were seen, or it was tested."""


class ReadRate:
    """Learns from spans; what was believed before, until then. Moments are monotonic seconds."""

    def __init__(self, believed: LoadCost = BELIEVED) -> None:
        self._learned = LearnedCost(believed)
        self._under_way = 0
        self._began_s = 0.0
        self._span_bytes = 0

    @property
    def cost(self) -> LoadCost:
        """Of reading from the drive, verified."""
        return self._learned.cost

    def begin(self, now_s: float) -> None:
        """A read begins."""
        if not self._under_way:
            self._began_s, self._span_bytes = now_s, 0
        self._under_way += 1

    def end(self, now_s: float, read_bytes: int) -> None:
        """A read has ended and brought so many good bytes; 0 for one that failed."""
        assert self._under_way, "a read that ends has begun"
        self._under_way -= 1
        self._span_bytes += read_bytes
        if not self._under_way or now_s - self._began_s >= SPAN_MAX_S:
            self._learned.note(self._span_bytes, now_s - self._began_s)
            self._began_s, self._span_bytes = now_s, 0
