"""Assumed placements: what engines without an agent hold in GPU memory, as far as it follows from what they answered.

Nobody announces what such an engine holds. A prompt that it answered was computed there, so its chunks are assumed to
be there, least recently used first out, for a lifetime and up to a capacity. What the engine reports corrects that: if
a prompt's chunk is gone that was last used at a time, so is all that was used no later. Pure: every method is told the
time, in monotonic seconds.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

MISSES_MAX = 3
"""Answers in a row in which nothing was cached where chunks were assumed, until nothing is assumed any more."""
DISTRUST_S = 300.0
"""For how long that is: the engine may have no prefix cache, or be restarted with one."""

Change = Callable[[str, bytes, bool], None]
"""An engine, a directory key, and whether it is assumed to be there from now on."""


@dataclass(frozen=True, slots=True)
class AssumedRun:
    """The leading chunks of a prompt that are assumed to be in an engine, and when each was last used before."""

    used_at: tuple[float, ...] = ()

    @property
    def chunks(self) -> int:
        """The run's length."""
        return len(self.used_at)


@dataclass(slots=True)
class _Engine:
    capacity_chunks: int
    used_at: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    misses: int = 0
    distrusted_until: float = float("-inf")


class AssumedPlacements:
    """What each engine is assumed to hold. Memory is bounded by the engines' capacities, in chunks.

    `on_change` hears of every chunk that comes or goes.
    """

    def __init__(self, lifetime_s: float, on_change: Change = lambda engine, key, is_there: None) -> None:
        self._lifetime_s, self.on_change = lifetime_s, on_change
        self._engines: dict[str, _Engine] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is ever assumed."""
        return self._lifetime_s > 0

    def chunks(self, engine: str, keys: Sequence[bytes], now: float) -> int:
        """How many leading chunks of a prompt `engine` is assumed to hold.

        By bisection: whoever uses a chunk uses all before it, which are never older and never go first.
        """
        held = self._engines.get(engine)
        if held is None:
            return 0
        used_at, expired = held.used_at, now - self._lifetime_s
        return bisect_left(keys, True, key=lambda key: used_at.get(key, expired) <= expired)

    def run(self, engine: str, keys: Sequence[bytes], now: float) -> AssumedRun:
        """Those chunks."""
        found = keys[: self.chunks(engine, keys, now)]
        return AssumedRun(tuple(self._engines[engine].used_at[key] for key in found))

    def note_computed(self, engine: str, keys: Sequence[bytes], capacity_chunks: int, now: float) -> None:
        """`engine` has begun to answer the prompt with these chunks: they are there, used now."""
        held = self._engines.setdefault(engine, _Engine(capacity_chunks))
        held.capacity_chunks = capacity_chunks
        if not self.is_on or now < held.distrusted_until:
            return
        for key in reversed(keys[:capacity_chunks]):  # an engine frees a prompt's last blocks first
            if key not in held.used_at:
                self.on_change(engine, key, True)
            held.used_at[key] = now
            held.used_at.move_to_end(key)
        self._drop(engine, held, now - self._lifetime_s)

    def note_cached(self, engine: str, run: AssumedRun, promised_chunks: int, cached_chunks: int, now: float) -> None:
        """`engine` says that the first `cached_chunks` chunks were there of a prompt of which `run` was assumed here,
        and `promised_chunks` here or by another gateway."""
        held = self._engines.get(engine)
        if held is None or not promised_chunks:
            return
        held.misses = 0 if cached_chunks else held.misses + 1
        if held.misses >= MISSES_MAX:
            held.misses, held.distrusted_until = 0, now + DISTRUST_S
            self._drop(engine, held, now)
        elif cached_chunks < run.chunks:
            self._drop(engine, held, run.used_at[cached_chunks])

    def is_distrusted(self, engine: str, now: float) -> bool:
        """Whether it reported too often that nothing was cached of what was assumed."""
        held = self._engines.get(engine)
        return held is not None and now < held.distrusted_until

    def keep(self, engines: Collection[str]) -> None:
        """Forget every other engine: it is gone, or may have lost what it held."""
        for engine in self._engines.keys() - engines:
            self._drop(engine, self._engines.pop(engine), float("inf"))

    def expire(self, now: float) -> None:
        """Forget what wasn't used for a lifetime."""
        for engine, held in self._engines.items():
            self._drop(engine, held, now - self._lifetime_s)

    def held(self, engine: str) -> tuple[bytes, ...]:
        """Everything that `engine` is assumed to hold, the most recently used last."""
        held = self._engines.get(engine)
        return tuple(held.used_at) if held else ()

    def count(self, engine: str) -> int:
        """How many chunks `engine` is assumed to hold."""
        held = self._engines.get(engine)
        return len(held.used_at) if held else 0

    def holds(self, engine: str, key: bytes) -> bool:
        """Whether `engine` is assumed to hold a chunk."""
        held = self._engines.get(engine)
        return held is not None and key in held.used_at

    def engines(self) -> frozenset[str]:
        """Engines of which anything is assumed."""
        return frozenset(engine for engine, held in self._engines.items() if held.used_at)

    def _drop(self, engine: str, held: _Engine, used_until: float) -> None:
        """Drop what was last used no later than `used_until`, and what exceeds the capacity."""
        while held.used_at:
            key, moment = next(iter(held.used_at.items()))
            if moment > used_until and len(held.used_at) <= held.capacity_chunks:
                return
            del held.used_at[key]
            self.on_change(engine, key, False)
