"""Buckets: requests of one kind to one engine, and whether the gateway's token ids can be taken for that engine's.

A drift rarely hits everything: a template that renders tools another way is right for all else. So answers are compared
by engine, model, endpoint, and whether tools or reasoning were asked for. A bucket whose comparisons are off is
*approximate*: its requests claim no hit, since their keys may name other chunks than the engine's; the keys still keep
equal prompts together. It goes back by itself: after a run of equal comparisons, or when the engine begins another
life or registers otherwise, which is how most faults are mended.
"""

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from directory.members import EngineRegistration
from gateway.encoding.model_files import ModelFiles
from gateway.fleet import EngineView
from gateway.openai_schema import InferenceRequest
from gateway.parity.tally import CHUNK_IDS, TOKEN_COUNTS, Tally

logger = logging.getLogger(__name__)

BUCKETS_MAX = 4_096
IDLE_S = 3_600.0
"""A bucket that nothing was compared in for so long is let go."""
SHOWN_MAX = 256
REASONING_FIELDS = ("reasoning_effort", "chat_template_kwargs", "reasoning", "thinking", "enable_thinking")
TOOLS_FIELDS = ("tools", "functions")


@dataclass(frozen=True, slots=True)
class Kind:
    """What requests have in common that an engine renders alike."""

    model: str
    endpoint: str
    has_tools: bool
    has_reasoning: bool

    def __str__(self) -> str:
        extras = [name for name, has in (("tools", self.has_tools), ("reasoning", self.has_reasoning)) if has]
        return f"{self.model!r} at {self.endpoint}" + (f" with {' and '.join(extras)}" if extras else "")


def kind_of(request: InferenceRequest) -> Kind:
    """The kind of a request."""
    fields = request.fields
    has_tools = any(fields.get(name) for name in TOOLS_FIELDS)
    return Kind(request.model, request.endpoint, has_tools, any(fields.get(name) for name in REASONING_FIELDS))


@dataclass(slots=True)
class Bucket:
    """One kind of requests to one engine. `example` is the last pair of token counts that differed: ours, theirs."""

    engine: str
    kind: Kind
    registration: EngineRegistration | None
    files: ModelFiles | None
    lives: frozenset[bytes]
    since: float
    used_at: float
    counts: Tally = field(default_factory=lambda: Tally(TOKEN_COUNTS))
    ids: Tally = field(default_factory=lambda: Tally(CHUNK_IDS))
    example: tuple[int, int] | None = None

    @property
    def is_approximate(self) -> bool:
        """Whether its requests' keys aren't believed to be the engine's."""
        return self.counts.is_off or self.ids.is_off

    @property
    def reason(self) -> str:
        """What differs, in plain words."""
        parts = [name for name, tally in (("token counts", self.counts), ("ids", self.ids)) if tally.is_off]
        return " and ".join(parts)

    def is_about(self, view: EngineView) -> bool:
        """Whether what was compared says something of the engine as it is now.

        A walk registers a second life beside the first; only where none of the lives is left, it is another process.
        """
        return _are_of_one(self.registration, self.files, self.lives, view)


def are_of_one_engine(earlier: EngineView, now: EngineView) -> bool:
    """Whether what was seen of the engine `earlier` says something of it `now`: it has neither begun another life,
    registered otherwise, nor changed its files.
    """
    return _are_of_one(earlier.registration, earlier.files, earlier.reach.own, now)


def _are_of_one(
    registration: EngineRegistration | None, files: ModelFiles | None, lives: frozenset[bytes], now: EngineView
) -> bool:
    if now.registration is not registration and now.registration != registration:
        return False
    if now.registration is None and now.files != files:
        return False
    return not lives or not now.reach.own or not lives.isdisjoint(now.reach.own)


class Buckets:
    """All buckets of a gateway, at most `BUCKETS_MAX`: those that weren't used for longest go first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, Kind], Bucket] = {}
        self._approximate: dict[Kind, set[str]] = {}

    def approximate(self, kind: Kind) -> frozenset[str]:
        """The engines whose keys aren't believed for requests of this kind."""
        engines = self._approximate.get(kind)
        return frozenset(engines) if engines else frozenset()

    @property
    def approximate_count(self) -> int:
        """How many buckets are approximate now."""
        return sum(map(len, self._approximate.values()))

    def note_counts(self, view: EngineView, kind: Kind, own: int, theirs: int) -> None:
        """An answer said how many tokens its prompt had."""
        bucket = self._bucket(view, kind)
        if own != theirs:
            bucket.example = own, theirs
        self._add(bucket, bucket.counts, own == theirs)

    def note_ids(self, view: EngineView, kind: Kind, is_held: bool) -> None:
        """A prompt's chunks were looked for among those that its engine announces."""
        bucket = self._bucket(view, kind)
        self._add(bucket, bucket.ids, is_held)

    def keep(self, engines: Container[str]) -> None:
        """Let go of the buckets of other engines, and of those that lie idle."""
        now = self._clock()
        gone = [each for each in self._buckets.values() if each.engine not in engines or now - each.used_at > IDLE_S]
        for bucket in gone:
            self._drop(bucket)

    def rows(self) -> list[dict[str, Any]]:
        """For `/fleet`: the approximate ones first, then the last ones used; `SHOWN_MAX` at most. No text."""
        shown = sorted(self._buckets.values(), key=lambda each: (not each.is_approximate, -each.used_at))
        return [self._row(bucket) for bucket in shown[:SHOWN_MAX]]

    def _bucket(self, view: EngineView, kind: Kind) -> Bucket:
        now, place = self._clock(), (view.engine, kind)
        bucket = self._buckets.pop(place, None)
        if bucket is not None and not bucket.is_about(view):
            if bucket.is_approximate:
                logger.info("engine %s is another now: its token counts are believed for %s", view.engine, kind)
            self._mark(bucket, False)
            bucket = None
        if bucket is None:
            bucket = Bucket(view.engine, kind, view.registration, view.files, view.reach.own, now, now)
        self._buckets[place] = bucket  # the last one in: the order is that of use
        bucket.used_at, bucket.lives = now, view.reach.own or bucket.lives
        if len(self._buckets) > BUCKETS_MAX:
            self._drop(next(iter(self._buckets.values())))
        return bucket

    def _add(self, bucket: Bucket, tally: Tally, is_same: bool) -> None:
        was_approximate = bucket.is_approximate
        tally.add(is_same)
        if bucket.is_approximate == was_approximate:
            return
        bucket.since = self._clock()
        self._mark(bucket, bucket.is_approximate)
        if was_approximate:
            logger.info("the prompts of engine %s are known exactly again: %s", bucket.engine, bucket.kind)
            return
        own, theirs = bucket.example or (None, None)
        logger.warning(
            "the prompts of engine %s aren't known exactly (%s): %s differ, %d of %d (the last: %s tokens here, "
            "%s there); no hits are counted on for them until they agree",
            bucket.engine,
            bucket.kind,
            bucket.reason,
            tally.different,
            tally.compared,
            own,
            theirs,
        )

    def _mark(self, bucket: Bucket, is_approximate: bool) -> None:
        engines = self._approximate.setdefault(bucket.kind, set())
        (engines.add if is_approximate else engines.discard)(bucket.engine)
        if not engines:
            del self._approximate[bucket.kind]

    def _drop(self, bucket: Bucket) -> None:
        self._mark(bucket, False)
        del self._buckets[bucket.engine, bucket.kind]

    def _row(self, bucket: Bucket) -> dict[str, Any]:
        kind, example = bucket.kind, bucket.example
        return {
            "engine": bucket.engine,
            "model": kind.model,
            "endpoint": kind.endpoint,
            "tools": kind.has_tools,
            "reasoning": kind.has_reasoning,
            "state": "approximate" if bucket.is_approximate else "exact",
            "reason": bucket.reason,
            "state_seconds": round(self._clock() - bucket.since, 1),
            "answers": bucket.counts.compared,
            "answers_different": bucket.counts.different,
            "ids_looked_for": bucket.ids.compared,
            "ids_not_found": bucket.ids.different,
            "example": {"own_tokens": example[0], "engine_tokens": example[1]} if example else None,
        }
