"""How many bytes a drive may be written: its rating as a daily budget. Pure: no clock, no I/O.

A drive is rated for so many writes of its whole capacity per day (DWPD), over its warranty. That is a budget of
`capacity x DWPD` bytes a day, and this keeps it over *any* 24 hours, not per calendar day, where two days' budgets
could meet at midnight. It is a token bucket in which burst and flow share the budget:

    burst = budget / 8        what may be written at once
    flow  = budget - burst    bytes a day that come back, evenly
    any 24 h                <= burst + flow = budget

The bucket survives restarts, even those that nobody announced. Bytes are *drawn* from it in portions that are saved
as spent before the first of them is written; what is drawn is then spent in memory. A crash loses what was left of
one draw: it can cost budget, never exceed it. A draw is 1/1024 of the budget, so there are about as many saves in a
day, however small the chunks; where less is left, nothing is written until it has come together.

Time that passed between two lives is judged by the clock that counts from the host's boot (which nobody sets) and by
the wall clock, and the shorter is believed: on another boot, or another host, the drive was away at most as long as
the host is up. A clock that jumps earns nothing. A bucket whose past isn't known begins empty.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

DAY_S = 86_400.0
BURST_FRACTION = 8
DRAWS_PER_DAY = 1_024
ROUNDING_BYTES = 4_096
"""More than the arithmetic of a day can be off by; it stays out of the burst."""
STATE_BYTES_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment by both clocks: seconds since the boot named `boot_id`, and wall-clock seconds since 1970 (UTC)."""

    boot_id: str
    boot_s: float
    wall_s: float


class _State(msgspec.Struct, forbid_unknown_fields=True):
    left_bytes: float
    boot_id: str
    boot_s: float
    wall_s: float
    day: int
    day_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class DailyBudget:
    """One drive's budget of `day_bytes` in any 24 hours. What is drawn but not spent is known to this object alone.

    `saved` is what `state` gave in an earlier life; anything else begins empty. `now` never goes back in `boot_s`.
    """

    def __init__(self, day_bytes: int, now: Instant, saved: bytes | None = None) -> None:
        self.day_bytes = day_bytes
        self.burst_bytes = max(day_bytes // BURST_FRACTION - ROUNDING_BYTES, 0)
        self.flow_bytes_per_s = (day_bytes - day_bytes // BURST_FRACTION) / DAY_S
        self._drawn_bytes = 0
        self._left_bytes = 0.0
        self._at_s = now.boot_s
        self._day = _day_of(now)
        self._written_bytes = 0
        state = _read(saved)
        self.has_past = state is not None
        if state is not None:
            self._left_bytes = max(state.left_bytes, 0.0)
            self._left_bytes = self._left_at(now.boot_s + _away_s(state, now))
            if state.day == self._day:
                self._written_bytes = state.day_bytes

    def available_bytes(self, now: Instant) -> int:
        """What may be written now."""
        return self._drawn_bytes + int(self._left_at(now.boot_s))

    def written_today_bytes(self, now: Instant) -> int:
        """What was written since midnight (UTC); up to one draw more where a life ended without a word."""
        return self._written_bytes if self._day == _day_of(now) else 0

    def allows(self, size_bytes: int, now: Instant) -> bool:
        """Whether `spend` would do, after a `draw` if need be."""
        return self._drawn_bytes >= size_bytes or self._left_at(now.boot_s) >= self.needed_bytes(size_bytes)

    def needed_bytes(self, size_bytes: int) -> int:
        """What must have come together for a write of `size_bytes`: a whole draw."""
        return max(self.day_bytes // DRAWS_PER_DAY, size_bytes)

    def draw(self, size_bytes: int, now: Instant) -> bool:
        """Take a portion of at least `size_bytes` out of the bucket; save `state` before it is spent.

        `False` where the bucket doesn't hold so much.
        """
        wanted, left = self.needed_bytes(size_bytes), self._left_at(now.boot_s)
        if left < wanted:
            return False
        # What is drawn may be spent a day later: the bucket and it together never hold more than a burst.
        self._left_bytes, self._at_s = left - wanted, max(now.boot_s, self._at_s)
        self._drawn_bytes += wanted
        return True

    def spend(self, size_bytes: int, now: Instant) -> bool:
        """Note bytes that are about to be written. `False` where fewer are drawn."""
        if self._drawn_bytes < size_bytes:
            return False
        self._drawn_bytes -= size_bytes
        self._written_bytes = self.written_today_bytes(now) + size_bytes
        self._day = _day_of(now)
        return True

    def give_back(self, size_bytes: int) -> None:
        """What was spent hasn't been written after all."""
        self._drawn_bytes += size_bytes
        self._written_bytes = max(self._written_bytes - size_bytes, 0)

    def put_back(self) -> None:
        """What is drawn goes back into the bucket: it couldn't be saved as spent, or this life ends in good order."""
        self._left_bytes += self._drawn_bytes
        self._drawn_bytes = 0

    def state(self, now: Instant) -> bytes:
        """What the next life must know. What is drawn counts as written."""
        return msgspec.json.encode(
            _State(
                left_bytes=self._left_at(now.boot_s),
                boot_id=now.boot_id,
                boot_s=now.boot_s,
                wall_s=now.wall_s,
                day=_day_of(now),
                day_bytes=self.written_today_bytes(now) + self._drawn_bytes,
            )
        )

    def _left_at(self, boot_s: float) -> float:
        flowed = max(boot_s - self._at_s, 0.0) * self.flow_bytes_per_s
        return max(min(self._left_bytes + flowed, float(self.burst_bytes - self._drawn_bytes)), 0.0)


def _away_s(state: _State, now: Instant) -> float:
    """How long the drive was surely without us."""
    by_boot = now.boot_s - state.boot_s if state.boot_id == now.boot_id else now.boot_s
    return max(min(by_boot, now.wall_s - state.wall_s), 0.0)


def _day_of(now: Instant) -> int:
    return int(now.wall_s // DAY_S)


def _read(saved: bytes | None) -> _State | None:
    if saved is None or len(saved) > STATE_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(saved, type=_State)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
