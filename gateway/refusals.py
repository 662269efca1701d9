"""Refusals: an engine that says no at once has nothing to do, and would get more than all others for it.

A sick engine, or one that others have filled, answers 500, 503 or 429 in a millisecond: nothing stays booked there, so
it looks idle, and every request would try it first. So others go first for a moment after a refusal, and for twice as
long after each that follows; then it is tried again, and a good answer ends it. Where all refuse, all are tried. Pure:
every method is told the time, in monotonic seconds.
"""

from dataclasses import dataclass

BACK_OFF_S, BACK_OFF_S_MAX = 0.25, 8.0
"""How long others go before an engine after its first refusal, and at most."""
ENGINES_MAX = 4096
"""Engines whose refusals are remembered."""


@dataclass(slots=True)
class _BackOff:
    until: float
    lasts_s: float


class Refusals:
    """Who refused lately."""

    def __init__(self) -> None:
        self._back_offs: dict[str, _BackOff] = {}

    def note_refused(self, engine: str, now: float) -> None:
        """It said no. Requests that were under way together are one refusal."""
        before = self._back_offs.pop(engine, None)
        if before is None or now >= before.until:
            lasts_s = BACK_OFF_S if before is None else min(BACK_OFF_S_MAX, 2 * before.lasts_s)
            before = _BackOff(now + lasts_s, lasts_s)
        self._back_offs[engine] = before
        if len(self._back_offs) > ENGINES_MAX:
            del self._back_offs[next(iter(self._back_offs))]

    def note_served(self, engine: str) -> None:
        """It answers."""
        self._back_offs.pop(engine, None)

    def back_off_s(self, engine: str, now: float) -> float:
        """For how many seconds more the others go first."""
        back_off = self._back_offs.get(engine)
        return 0.0 if back_off is None else max(0.0, back_off.until - now)
