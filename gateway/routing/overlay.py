"""Overlay: chunks on their way to an engine count as held there for a short time, so that siblings in a burst follow.

Between a decision and the announcement of what was computed lie the prefill and the announcer's lag. Pure: every
method is told the time, in monotonic seconds.
"""

from collections.abc import Sequence

from directory.placements import PrefixMatch
from directory.tiers import Tier

LIFETIME_S = 5.0
"""How long after its expected first token a prompt is still believed to be on its way."""
CHUNKS_MAX = 65_536
"""Chunks on their way to one engine; the oldest go first."""


class Overlay:
    """What was sent where, until it must have been announced."""

    def __init__(self, chunks_max: int = CHUNKS_MAX) -> None:
        self._chunks_max = chunks_max
        self._until: dict[str, dict[bytes, float]] = {}

    def expect(self, engine: str, keys: Sequence[bytes], until: float) -> None:
        """These chunks will be in the GPU memory of `engine`; believe it until `until`."""
        chunks = self._until.setdefault(engine, {})
        for key in keys:
            last = chunks.pop(key, until)
            chunks[key] = max(last, until)
        while len(chunks) > self._chunks_max:
            del chunks[next(iter(chunks))]

    def extend(self, engine: str, match: PrefixMatch, keys: Sequence[bytes], now: float) -> PrefixMatch:
        """`match`, lengthened by the chunks of `keys` that follow it and are on their way to `engine`."""
        chunks = self._until.get(engine)
        end = match.chunks
        if not chunks or end >= len(keys):
            return match
        while end < len(keys) and chunks.get(keys[end], now) > now:
            end += 1
        if end == match.chunks:
            return match
        return PrefixMatch(match.tiers + (Tier.GPU,) * (end - match.chunks))
