"""Overlay: chunks on their way to an engine count as held there for a short time, so that siblings in a burst follow.

Between a decision and the announcement of what was computed lie the prefill and the announcer's lag. Only the engine's
own GPU memory is counted on: what its host writes to DRAM, and when, is for the host to say, and other engines there
would wait for the prefill and the write. Pure: every method is told the time, in monotonic seconds.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from directory.placements import PrefixMatch
from directory.tiers import Tier

LIFETIME_S = 5.0
"""How long after its expected first token a prompt is still believed to be on its way."""
CHUNKS_MAX = 16_384
"""Chunks on their way to one engine, more than its GPU memory holds; those of the oldest prompts go first."""
FOLLOWERS_MAX = 8
"""How many prompts may wait on one engine for a chunk that isn't computed yet. The next one goes by load and becomes a
second holder: a crowd doesn't stand behind one prefill, nor behind one engine that may fail."""


@dataclass(eq=False, slots=True)
class Expectation:
    """One prompt on its way to one engine, believed until `until`; the overlay's, not to be changed by others."""

    engine: str
    until: float
    is_settled: bool = False


_TAKEN_BACK = float("-inf")


class Overlay:
    """What was sent where, until it must have been announced.

    A chunk is on its way while any of the prompts that bring it is: one that fails takes back its own part only, by
    one assignment. A prompt's last chunks are forgotten before its first: without those they would be worth nothing.
    """

    def __init__(self, chunks_max: int = CHUNKS_MAX) -> None:
        self._chunks_max = chunks_max
        self._chunks: dict[str, dict[bytes, tuple[Expectation, ...]]] = {}

    def expect(self, engine: str, keys: Sequence[bytes], until: float, now: float = float("-inf")) -> Expectation:
        """These chunks will be in the GPU memory of `engine`; believe it until `until`. What ended by `now` goes."""
        expectation = Expectation(engine, until)
        chunks = self._chunks.setdefault(engine, {})
        for key in reversed(keys):
            chunks[key] = _added(expectation, _alive(chunks.pop(key, ()), now))
        while chunks and (len(chunks) > self._chunks_max or not _alive(next(iter(chunks.values())), now)):
            del chunks[next(iter(chunks))]
        return expectation

    def settle(self, expectation: Expectation, until: float) -> None:
        """The prompt's chunks are there; until `until` they must have been announced."""
        expectation.until, expectation.is_settled = until, True

    def take_back(self, expectation: Expectation) -> None:
        """The prompt won't be computed, or wasn't; repeating it changes nothing."""
        expectation.until = _TAKEN_BACK

    def keep(self, engines: Collection[str]) -> None:
        """Forget what is on its way to any other engine: it is gone, or may have lost what it was sent."""
        for engine in self._chunks.keys() - engines:
            del self._chunks[engine]

    def extend(self, engine: str, match: PrefixMatch, keys: Sequence[bytes], now: float) -> PrefixMatch:
        """`match` with what is on its way to `engine`: in its GPU memory, whatever slower tier holds it now, and longer
        by the chunks that follow, as long as no more than `FOLLOWERS_MAX` wait for them. A prompt brings its chunks
        from the first one on: where that isn't on its way, none is."""
        chunks = self._chunks.get(engine)
        if not chunks:
            return match
        run = 0
        for key in keys:
            bringing = _alive(chunks.get(key, ()), now)
            if not bringing or (run >= match.chunks and _is_crowded(bringing)):
                break
            run += 1
        return PrefixMatch((Tier.GPU,) * run + match.tiers[run:]) if run else match

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))


def _alive(expectations: tuple[Expectation, ...], now: float) -> tuple[Expectation, ...]:
    return tuple([each for each in expectations if each.until > now])


def _added(expectation: Expectation, bringing: tuple[Expectation, ...]) -> tuple[Expectation, ...]:
    """The newest `FOLLOWERS_MAX`; one that is settled stays before those that aren't."""
    if len(bringing) >= FOLLOWERS_MAX:
        bringing = tuple(sorted(bringing, key=lambda each: not each.is_settled)[: FOLLOWERS_MAX - 1])
    return expectation, *bringing


def _is_crowded(bringing: tuple[Expectation, ...]) -> bool:
    return len(bringing) >= FOLLOWERS_MAX and not any(each.is_settled for each in bringing)
