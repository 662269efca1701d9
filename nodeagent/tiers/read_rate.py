"""How fast the drive delivers, measured over the spans in which it is busy. Pure: moments are arguments.

Reads go on side by side and share the drive, and one that somebody else began may end a moment after it is asked for:
neither the seconds of a single read nor those of a single open say how fast bytes come. So a span runs from the moment
at which a read begins on an idle drive to the moment at which none is under way, or for `SPAN_MAX_S` where that never
happens; the rate is all bytes that came in it, by its length. It is what an open that has the drive to itself can
expect of reads as wide as those seen.
"""

SPAN_MAX_S = 1.0
BELIEVED_BYTES_PER_S = 1e9
"""Believed of a drive until reads were seen."""
WEIGHT = 0.2
"""How much one span counts against those before."""


class ReadRate:
    """Bytes per second, smoothed over spans; what was believed before, until then. Moments are monotonic seconds."""

    def __init__(self, believed_bytes_per_s: float = BELIEVED_BYTES_PER_S) -> None:
        self.bytes_per_s = believed_bytes_per_s
        self._under_way = 0
        self._began_s = 0.0
        self._span_bytes = 0
        self._has_seen = False

    @property
    def is_measured(self) -> bool:
        """Whether a read was seen: until then, `bytes_per_s` is what was believed."""
        return self._has_seen

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
            self._count(now_s)

    def _count(self, now_s: float) -> None:
        span_s = now_s - self._began_s
        if self._span_bytes and span_s > 0:
            seen = self._span_bytes / span_s
            # The first span counts in full: what was believed before is no measurement.
            self.bytes_per_s += (WEIGHT if self._has_seen else 1.0) * (seen - self.bytes_per_s)
            self._has_seen = True
        self._began_s, self._span_bytes = now_s, 0
