"""Looks whether engines announce the chunks of prompts under the gateway's own keys: the only check of ids themselves.

Equal counts of tokens aren't equal ids. But an agent names what its engine's `gpu` tier holds by keys made of the token
ids in the engine's events, and the gateway by those of its own encoding. So some seconds after an answer a prompt's
chunks are looked up, as every request's are: if the engine says to hold chunks, and none of these is with it in any
tier, its ids differ; or they were evicted, or their announcement is late, which is why one look says little. What the
answer took from the cache was announced long ago, maybe to a directory that has lost it; where it is known, only what
was computed is asked for.

It costs a lookup a second of at most `LOOKS_PER_STEP` times two keys, and each bucket has one look in a step at most.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from directory.chunks import usable_chunks
from directory.errors import DirectoryError
from directory.identity import Scope
from directory.interface import DirectoryReader
from directory.placements import unpack_holders
from gateway.fleet import EngineView, Fleet
from gateway.lookup import chain_chunks, group_by_naming
from gateway.metrics import GatewayMetrics
from gateway.parity.buckets import Buckets, Kind

logger = logging.getLogger(__name__)

SETTLE_S = 4.0
"""From an answer's end until its chunks must have been announced: events and a batch take less than a second."""
STEP_S = 1.0
LOOKS_PER_STEP = 32
LOOKS_WAITING_MAX = 256
DEADLINE_S = 0.25


@dataclass(frozen=True, slots=True)
class Look:
    """Chunks that an engine computed for an answer, or used: the first of them and the last, by directory keys."""

    engine: str
    kind: Kind
    keys: tuple[bytes, ...]
    lives: frozenset[bytes]
    due_at: float


class AnnouncedIds:
    """Samples prompts and looks for their chunks, in the background."""

    def __init__(
        self,
        directory: DirectoryReader,
        fleet: Fleet,
        buckets: Buckets,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._directory, self._fleet, self._buckets, self._metrics = directory, fleet, buckets, metrics
        self._clock, self._sleep = clock, sleep
        self._waiting: deque[Look] = deque()
        self._taken: set[tuple[str, Kind]] = set()

    def consider(
        self, view: EngineView, kind: Kind, tokens: bytes, salt: str | None, cached_tokens: int | None
    ) -> None:
        """Perhaps look for this prompt's chunks later; never waits. `tokens` are all of its ids."""
        place, registration = (view.engine, kind), view.registration
        if (
            not view.announced_chunks
            or registration is None
            or place in self._taken
            or len(self._taken) >= LOOKS_PER_STEP
            or len(self._waiting) >= LOOKS_WAITING_MAX
        ):
            return
        chunks = usable_chunks(len(tokens) // 4, registration.chunk_tokens)
        computed_from = (cached_tokens or 0) // registration.chunk_tokens
        if computed_from >= chunks:
            return
        chains = chain_chunks(group_by_naming([view]), tokens, Scope(salt=salt))
        if not chains or not chains[0].keys:
            return
        keys = chains[0].keys[computed_from:]
        self._taken.add(place)
        looked_for = (keys[0], keys[-1]) if len(keys) > 1 else keys
        self._waiting.append(Look(view.engine, kind, looked_for, view.reach.own, self._clock() + SETTLE_S))

    async def run(self) -> None:
        """Look, a step at a time, until cancelled."""
        while True:
            await self._sleep(STEP_S)
            try:
                await self.step()
            except Exception:  # the edge of the loop: a strange record must not end the gateway
                logger.exception("comparing announced ids met a fault")

    async def step(self) -> None:
        """Look for what is due."""
        self._taken.clear()
        now = self._clock()
        looks: list[Look] = []
        while self._waiting and self._waiting[0].due_at <= now and len(looks) < LOOKS_PER_STEP:
            looks.append(self._waiting.popleft())
        looks = [look for look in looks if self._can_tell(look)]
        if not looks:
            return
        keys = [key for look in looks for key in look.keys]
        try:
            records = iter((await self._directory.lookup(keys, DEADLINE_S)).records)
        except DirectoryError:
            self._count("unknown", len(looks))
            return
        for look in looks:
            self._note(look, [next(records) for _ in look.keys])

    def _can_tell(self, look: Look) -> bool:
        """Whether the engine is the one that answered, is believed, and has its placements taken."""
        view = self._fleet.table.engines.get(look.engine)
        return (
            view is not None
            and self._fleet.is_directory_known()
            and not look.lives.isdisjoint(view.reach.own)
            and bool(view.announced_chunks)
            and look.engine not in self._fleet.directory_full_for
        )

    def _note(self, look: Look, records: list[bytes | None]) -> None:
        view = self._fleet.table.engines.get(look.engine)
        if view is None:
            return
        lives = view.reach.own | view.reach.host | look.lives
        is_held = any(life in lives for record in records if record for life, _ in unpack_holders(record))
        if not is_held and None in records:
            self._count("unknown")
            return
        self._count("match" if is_held else "mismatch")
        self._buckets.note_ids(view, look.kind, is_held)

    def _count(self, result: str, looks: int = 1) -> None:
        self._metrics.parity.labels("ids", result).inc(looks)
