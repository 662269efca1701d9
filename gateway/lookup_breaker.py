"""LookupBreaker: leaves a directory that doesn't answer alone for a while, and tells its silence from our own lateness.

*Closed*, every lookup is sent. `FAILURES_MAX` failures in a row open it for `PAUSE_S`: nobody waits for a dead
directory. Then it is *half open*: one lookup is sent as a probe while the others go without; an answer closes the
breaker, the probe's failure opens it again. Lookups that were under way together meet the same trouble and count as
one failure: one is counted only if it was sent after the last one counted had ended.

A timeout that ended `LATE_S` or more after its deadline says that the event loop was busy, not that the directory was
slow: the answer may lie unread in the socket. It is excused, `EXCUSES_MAX` times in a row at most, since a directory
may be dead while the gateway is busy. No clock is read here: every method is told the time, in monotonic seconds.
"""

from dataclasses import dataclass

FAILURES_MAX = 3
PAUSE_S = 1.0
LATE_S = 0.002
EXCUSES_MAX = 10


@dataclass(frozen=True, slots=True)
class SentLookup:
    """A lookup that was let through, to be told of its end."""

    sent_at: float
    is_probe: bool


class LookupBreaker:
    """`send` before a lookup; then exactly one of `answered`, `failed`, `abandoned`."""

    def __init__(self) -> None:
        self.failures = 0
        """Failures in a row."""
        self.pauses = 0
        """How often it opened."""
        self._open_until: float | None = None
        self._is_probing = False
        self._counted_at = self._excused_at = float("-inf")
        self._excuses = 0

    def is_open(self, now: float) -> bool:
        """Whether no lookup at all is sent."""
        return self._open_until is not None and now < self._open_until

    def is_half_open(self, now: float) -> bool:
        """Whether one lookup at a time is sent."""
        return self._open_until is not None and now >= self._open_until

    def send(self, now: float) -> SentLookup | None:
        """A lookup that may be sent now, or `None`."""
        is_probe = self.is_half_open(now)
        if self.is_open(now) or (is_probe and self._is_probing):
            return None
        self._is_probing = is_probe
        return SentLookup(now, is_probe)

    def answered(self) -> None:
        """A lookup was answered, if only in part."""
        self.failures = self._excuses = 0
        self._open_until, self._is_probing = None, False

    def failed(self, lookup: SentLookup, now: float, deadline_s: float, is_timeout: bool) -> bool:
        """A lookup wasn't answered. Returns whether our own lateness excuses that."""
        self.abandoned(lookup)
        is_late = is_timeout and now - lookup.sent_at - deadline_s >= LATE_S
        if is_late and lookup.sent_at < self._excused_at:
            return True
        if is_late and self._excuses < EXCUSES_MAX:
            self._excused_at = now
            self._excuses += 1
            return True
        if lookup.sent_at >= self._counted_at and not self.is_open(now):
            self._counted_at = now
            self.failures += 1
            if self.failures >= FAILURES_MAX:
                self._open_until = now + PAUSE_S
                self.pauses += 1
        return False

    def abandoned(self, lookup: SentLookup) -> None:
        """A lookup was cancelled: that says nothing, and the next may be the probe."""
        if lookup.is_probe:
            self._is_probing = False
