"""Belief: whose placements count, by what is left of each life's term, and what is made of many lapses at once.

A life that isn't renewed is believed for its term and no longer; what it has left counts down here, between polls as
well. Two things are no evidence against a life, and it is believed for one more term at most:

- *The table can't be read.* Whoever was live at that moment is kept until a term after the last table.
- *More than half of the fleet lapses together.* That is more likely the directory's fault than theirs. Together is what
  lapsed since the last table or within `RENEW_INTERVAL_S` before it, over which renewals are spread, and what will have
  lapsed when the next table is due, so that the countdown doesn't empty the fleet meanwhile. They are kept until a
  term after their lapse: beyond that a writer begins a new life anyway.

When each life's belief ends is settled by a table or a failed poll; between them belief only shrinks. No clock is read
here: every method is told the time, in monotonic seconds.
"""

from collections.abc import Sequence

from directory.members import POLL_INTERVAL_S, RENEW_INTERVAL_S, TERM_MAX_S, TERM_S, Member


class Belief:
    """Whose placements count, from one table to the next."""

    def __init__(self) -> None:
        self._ends: dict[bytes, float] = {}
        self._excused: set[bytes] = set()
        self._kept: frozenset[bytes] = frozenset()
        self._read_at: float | None = None

    def is_known(self, now: float) -> bool:
        """Whether a table was read within the last term: without one nothing can be said of placements."""
        return self._read_at is not None and now < self._read_at + TERM_S

    def read(self, members: Sequence[Member], now: float) -> None:
        """A table arrived at `now`, its remaining seconds counted down to that moment."""
        since = (now - TERM_S if self._read_at is None else self._read_at) - RENEW_INTERVAL_S
        until = now + POLL_INTERVAL_S
        self._ends = {each.incarnation: now + _left_s(each) for each in members if not each.retired}
        self._excused &= {life for life, end in self._ends.items() if end <= now}
        overdue = {life for life, end in self._ends.items() if since < end <= until}
        if len(overdue) > sum(end > until for end in self._ends.values()):
            self._excused |= overdue
        self._kept, self._read_at = frozenset(), now

    def miss(self, now: float) -> None:
        """The table couldn't be read."""
        if not self._kept:
            self._kept = frozenset(life for life, end in self._ends.items() if now < end)

    def lives(self, now: float) -> frozenset[bytes]:
        """The incarnations whose placements are believed at `now`."""
        if not self.is_known(now):
            return frozenset()
        return frozenset(life for life in self._ends if now < self._believed_until(life))

    def excused(self, now: float) -> int:
        """How many lapsed lives are believed nevertheless, because they lapsed with most of the fleet."""
        return sum(self._ends[life] <= now < self._believed_until(life) for life in self._excused)

    def changes_at(self, now: float) -> float:
        """When belief next shrinks without another table; infinity for never."""
        if self._read_at is None or not self._ends:
            return float("inf")
        moments = [self._read_at + TERM_S, *map(self._believed_until, self._ends)]
        return min((moment for moment in moments if moment > now), default=float("inf"))

    def _believed_until(self, life: bytes) -> float:
        end = self._ends[life]
        if life in self._excused:
            return end + TERM_S
        if life in self._kept and self._read_at is not None:
            return max(end, self._read_at + TERM_S)
        return end


def _left_s(member: Member) -> float:
    """What is left of a term. More than any term is a dead writer's row after the server's clock went back."""
    return member.remaining_s if member.remaining_s <= TERM_MAX_S else 0.0
