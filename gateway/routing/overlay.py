"""Overlay: chunks on their way to an engine count as held there for a short time, so that siblings in a burst follow.

Between a decision and the announcement of what was computed lie the prefill and the announcer's lag. Only the engine's
own GPU memory is counted on: what its host writes to DRAM, and when, is for the host to say, and other engines there
would wait for the prefill and the write. Pure: every method is told the time, in monotonic seconds.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from directory.placements import PrefixMatch
from directory.tiers import Tier

LIFETIME_S = 5.0
"""How long after its expected first token a prompt is still believed to be on its way."""
CHUNKS_MAX = 16_384
"""Chunks of all prompts on their way to one engine, more than its GPU memory holds; the oldest prompts go first."""
FOLLOWERS_MAX = 8
"""How many prompts may wait on one engine for a chunk that isn't computed yet. The next one goes by load and becomes a
second holder: a crowd doesn't stand behind one prefill, nor behind one engine that may fail."""
MISSES_MAX = 3
"""Answers in a row in which nothing was cached although a prompt that begins alike was computed there just before."""
DISTRUST_S = 300.0
"""For how long nothing is then expected of the engine: it may have no prefix cache, whatever its agent says."""


@dataclass(eq=False, slots=True)
class Expectation:
    """One prompt on its way to one engine, believed until `until`; the overlay's, not to be changed by others.

    `is_led`: another that begins alike was computed there just before. Once it is settled, one that
    brought nothing new isn't believed beyond `until_at_most`, the end of those that did: else what is asked for again
    and again and never announced would be believed for ever.
    """

    engine: str
    until: float
    is_settled: bool = False
    is_led: bool = False
    until_at_most: float = float("inf")


_TAKEN_BACK = float("-inf")


@dataclass(eq=False, slots=True)
class _Stretch:
    """`chunks` consecutive chunks that the same prompts bring, the newest of these last."""

    chunks: int
    bringing: list[Expectation]


@dataclass(slots=True)
class _Engine:
    """What is on its way to one engine: by chunk, and by prompt, the oldest first."""

    stretches: dict[bytes, _Stretch] = field(default_factory=dict)
    prompts: deque[tuple[Expectation, Sequence[bytes]]] = field(default_factory=deque)
    named_chunks: int = 0
    misses: int = 0
    distrusted_until: float = float("-inf")


class Overlay:
    """What was sent where, until it must have been announced.

    A chunk is on its way while any of the prompts is that bring it, so one that fails takes back its own part only, by
    one assignment. A key names all before it, and who brings a chunk brings all before it. So the chunks of a prompt
    are a few stretches that have the same prompts in common, of which each is noted once, and how far a prompt is on
    its way is found by bisection.
    """

    def __init__(self, chunks_max: int = CHUNKS_MAX) -> None:
        self._chunks_max = chunks_max
        self._engines: dict[str, _Engine] = {}

    def expect(self, engine: str, keys: Sequence[bytes], until: float, now: float = float("-inf")) -> Expectation:
        """These chunks will be in the GPU memory of `engine`; believe it until `until`. What ended by `now` goes."""
        expectation, keys = Expectation(engine, until), keys[: self._chunks_max]
        if not keys:
            return expectation
        to = self._engines.setdefault(engine, _Engine())
        to.prompts.append((expectation, keys))
        to.named_chunks += len(keys)
        while to.named_chunks > self._chunks_max or to.prompts[0][0].until <= now:
            _forget_oldest(to, now)
            if not to.prompts:
                return expectation
        start, stretches = 0, to.stretches
        first = stretches.get(keys[0])
        expectation.is_led = first is not None and any(each.is_settled and each.until > now for each in first.bringing)
        while start < len(keys):
            end, stretch = start + 1, stretches.get(keys[start])
            while end < len(keys) and stretches.get(keys[end]) is stretch:
                end += 1
            if stretch is None or end - start < stretch.chunks:  # nobody brings them, or some go on otherwise
                bringing = []
                if stretch is not None:
                    stretch.chunks -= end - start
                    bringing = stretch.bringing.copy()
                stretch = _Stretch(end - start, bringing)
                stretches.update(dict.fromkeys(keys[start:end], stretch))
            if len(stretch.bringing) >= FOLLOWERS_MAX:
                stretch.bringing = _thinned(stretch.bringing, now)
            stretch.bringing.append(expectation)
            start = end
        ends = [each.until for each in to.stretches[keys[-1]].bringing if each.is_settled and each.until > now]
        expectation.until_at_most = max(ends, default=expectation.until_at_most)
        return expectation

    def settle(self, expectation: Expectation, until: float) -> None:
        """The prompt's chunks are there; until `until` they must have been announced."""
        expectation.until, expectation.is_settled = min(until, expectation.until_at_most), True

    def note_cached(self, expectation: Expectation, cached_tokens: int, now: float) -> None:
        """The engine says how many tokens of the prompt were there already."""
        to = self._engines.get(expectation.engine)
        if to is None or not (expectation.is_led or cached_tokens):
            return
        to.misses = 0 if cached_tokens else to.misses + 1
        if to.misses >= MISSES_MAX:
            to.misses, to.distrusted_until = 0, now + DISTRUST_S

    def take_back(self, expectation: Expectation) -> None:
        """The prompt won't be computed, or wasn't; repeating it changes nothing."""
        expectation.until = _TAKEN_BACK

    def keep(self, engines: Collection[str]) -> None:
        """Forget what is on its way to any other engine: it is gone, or may have lost what it was sent."""
        for engine in self._engines.keys() - engines:
            del self._engines[engine]

    def extend(self, engine: str, match: PrefixMatch, keys: Sequence[bytes], now: float) -> PrefixMatch:
        """`match` with what is on its way to `engine`: in its GPU memory, whatever slower tier holds it now, and longer
        by the chunks that follow, unless too many prompts wait for the last of them already."""
        to = self._engines.get(engine)
        if to is None or not keys or now < to.distrusted_until or not _is_coming(to, keys[0], now):
            return match
        run = bisect_left(keys, True, lo=1, key=lambda key: not _is_coming(to, key, now))
        if run > match.chunks and _is_crowded(to.stretches[keys[run - 1]].bringing, now):
            return match
        return PrefixMatch((Tier.GPU,) * run + match.tiers[run:])

    def __len__(self) -> int:
        return sum(len(to.stretches) for to in self._engines.values())


def _forget_oldest(to: _Engine, now: float) -> None:
    """Forget the oldest prompt, and the chunks that no other one brings."""
    oldest, keys = to.prompts.popleft()
    oldest.until = _TAKEN_BACK
    to.named_chunks -= len(keys)
    last, is_needed = None, True
    for key in keys:
        stretch = to.stretches.get(key)
        if stretch is not last:
            last, is_needed = stretch, _is_coming(to, key, now)
        if stretch is not None and not is_needed:
            del to.stretches[key]


def _is_coming(to: _Engine, key: bytes, now: float) -> bool:
    stretch = to.stretches.get(key)
    if stretch is None:
        return False
    if stretch.bringing[-1].until > now:  # almost always
        return True
    return any(each.until > now for each in stretch.bringing)


def _is_crowded(bringing: Sequence[Expectation], now: float) -> bool:
    alive = [each for each in bringing if each.until > now]
    return len(alive) >= FOLLOWERS_MAX and not any(each.is_settled for each in alive)


def _thinned(bringing: Sequence[Expectation], now: float) -> list[Expectation]:
    """Of those that are settled the one that is believed longest, and the newest of the others that still come."""
    alive = [each for each in bringing if each.until > now]
    settled = max((each for each in alive if each.is_settled), key=lambda each: each.until, default=None)
    waiting = [each for each in alive if not each.is_settled][1 - FOLLOWERS_MAX :]
    return waiting if settled is None else [settled, *waiting]
