"""Breaker: leaves an engine that fails, or says that it has too much to do, to the others for a while.

A sick engine answers 500 in a millisecond: nothing stays booked there, so it looks idle, and every request would try it
first. After a failure it is left alone for `OPEN_S`, after each that follows for twice as long, at most `OPEN_S_MAX`:
an engine that is well again serves within two seconds. Then it is half open: one request tries it, and while that one
has no answer the others go elsewhere. A good answer closes it. What a client does wrong (4xx) says nothing; 429 is no
failure, and an engine that names a time (`Retry-After`) is left alone as long. Broken connections are the fleet's
matter: they put an engine in doubt until its next health check (`Fleet.note_failure`). Where no engine is admitted, the
least bad are: those that failed least often in a row. Pure: every method is told the time, in monotonic seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

OPEN_S, OPEN_S_MAX = 0.25, 1.0
"""How long others go before an engine after its first failure, and at most, in seconds."""
RETRY_AFTER_S_MAX = 60.0
"""How long an engine may ask to be left alone."""
TRIAL_S_MAX = 30.0
"""How long one request keeps the others from a half-open engine."""
ENGINES_MAX = 4096
"""Engines whose failures are remembered."""
TOO_MANY, TIMED_OUT, SERVER_ERRORS = 429, 408, 500
"""Statuses that say that an engine can't serve now: the last one, and from there on."""


class Named(Protocol):
    """Has an engine's name."""

    @property
    def engine(self) -> str:
        """The name."""
        ...


Each = TypeVar("Each", bound=Named)


@dataclass(slots=True)
class _Open:
    until: float
    lasts_s: float
    in_a_row: int = 1
    tried_since: float | None = None


class Breaker:
    """Who failed lately."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def admitted(self, views: Sequence[Each], now: float) -> Sequence[Each]:
        """Those of `views` that may be sent a request; of none the least bad."""
        if not self._open:
            return views
        admitted = [view for view in views if self.admits(view.engine, now)]
        if admitted or not views:
            return admitted
        in_a_row = {view.engine: self._open[view.engine].in_a_row for view in views}
        least = min(in_a_row.values())
        return [view for view in views if in_a_row[view.engine] == least]

    def admits(self, engine: str, now: float) -> bool:
        """Whether this engine may be sent a request: it is well, or nobody tries whether it is well again."""
        state = self._open.get(engine)
        if state is None:
            return True
        is_tried = state.tried_since is not None and now < state.tried_since + TRIAL_S_MAX
        return now >= state.until and not is_tried

    def state(self, engine: str, now: float) -> str:
        """In one word: `closed`, `open` or `half-open`."""
        state = self._open.get(engine)
        return "closed" if state is None else "open" if now < state.until else "half-open"

    def send(self, engine: str, now: float) -> "Trial":
        """A request goes to this engine. End the trial, however the request ends."""
        state = self._open.get(engine)
        if state is not None and self.admits(engine, now):
            state.tried_since = now
            return Trial(self, engine, state)
        return Trial(self, engine, None)

    def note_failed(self, engine: str, now: float) -> None:
        """It failed. Requests that were under way together are one failure."""
        before = self._open.pop(engine, None)
        if before is None:
            before = _Open(now + OPEN_S, OPEN_S)
        elif now >= before.until:
            lasts_s = min(OPEN_S_MAX, 2 * before.lasts_s)
            before = _Open(now + lasts_s, lasts_s, before.in_a_row + 1)
        self._open[engine] = before
        if len(self._open) > ENGINES_MAX:
            del self._open[next(iter(self._open))]

    def note_busy(self, engine: str, now: float, retry_after_s: float) -> None:
        """It has too much to do, and wants to be left alone for so many seconds."""
        self.note_failed(engine, now)
        state = self._open[engine]
        state.until = max(state.until, now + min(RETRY_AFTER_S_MAX, retry_after_s))

    def note_served(self, engine: str) -> None:
        """It answers."""
        self._open.pop(engine, None)


@dataclass(slots=True)
class Trial:
    """One request's way to an engine, and what it tells of it; `state` is that of the half-open engine it tries."""

    breaker: Breaker
    engine: str
    state: _Open | None

    def answered(self, status: int, retry_after_s: float, now: float) -> None:
        """The engine has answered with this status, and names this time."""
        if status == TOO_MANY:
            self.breaker.note_busy(self.engine, now, retry_after_s)
        elif status == TIMED_OUT or status >= SERVER_ERRORS:
            self.breaker.note_failed(self.engine, now)
        elif status < 400:
            self.breaker.note_served(self.engine)

    def end(self) -> None:
        """The request is over; repeating it changes nothing. Where it told nothing, the next one may try."""
        if self.state is not None:
            self.state.tried_since = None
            self.state = None
