"""Admission: how many requests are served at once, and who waits.

A request has a place from its admission to the end of its answer. Where all `requests_max` are taken, or all engines of
its model have `engine_requests_max`, it waits in turn, at most `queue_s`, with at most `queue_max` others; beyond that
it is refused with 429. A place that becomes free goes to the first who can use it, so nobody is passed over by one who
came later for the same model.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from gateway.config import LimitsConfig
from gateway.errors import TooManyRequests
from gateway.fleet import EngineView
from gateway.metrics import GatewayMetrics


class Admission:
    """Of one gateway. `running` says how many requests this gateway has on an engine."""

    def __init__(self, limits: LimitsConfig, running: Callable[[str], int], metrics: GatewayMetrics) -> None:
        self._limits, self._running, self._metrics = limits, running, metrics
        self.open = 0
        """Requests that have a place."""
        self._waiting: deque[tuple[asyncio.Future[None], Callable[[], bool]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for a place, here or on an engine."""
        return len(self._waiting)

    def configure(self, limits: LimitsConfig) -> None:
        """These limits hold from now on; whoever has a place keeps it."""
        self._limits = limits
        self.note_freed()

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[float]:
        """A place for one request, until the end of the block; the loop's time until which it may wait for an engine.

        Raises `TooManyRequests`.
        """
        deadline = asyncio.get_running_loop().time() + self._limits.queue_s
        await self._until(lambda: self.open < self._limits.requests_max, deadline)
        self.open += 1
        try:
            yield deadline
        finally:
            self.open -= 1
            self.note_freed()

    async def with_room(self, views: Sequence[EngineView], deadline: float) -> Sequence[EngineView]:
        """Those of `views` that may have one more request: book it before anything else is awaited.

        Waits while there are none. Raises `TooManyRequests`.
        """
        if self._limits.engine_requests_max is None:
            return views
        await self._until(lambda: bool(self._free(views)), deadline)
        return self._free(views)

    def note_freed(self) -> None:
        """A place is free, here or on an engine: the first who can use it is told."""
        for entry in self._waiting:
            future, has_room = entry
            if not future.done() and has_room():
                future.set_result(None)
                return

    def _free(self, views: Sequence[EngineView]) -> list[EngineView]:
        most = self._limits.engine_requests_max or 0
        return [view for view in views if self._running(view.engine) < most]

    async def _until(self, has_room: Callable[[], bool], deadline: float) -> None:
        """Wait in turn. Who comes back finds the room that it was told of: it is told last before it runs."""
        if has_room() and not self._waiting:
            return
        if not has_room() and len(self._waiting) >= self._limits.queue_max:
            self._refuse("queue_full", "more requests wait already than may")
        entry = asyncio.get_running_loop().create_future(), has_room
        self._waiting.append(entry)
        if has_room():
            self.note_freed()
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    await entry[0]
                    if has_room():
                        return
                    renewed = asyncio.get_running_loop().create_future(), has_room
                    self._waiting[self._waiting.index(entry)] = renewed
                    entry = renewed
        except TimeoutError:
            self._refuse("queue_deadline", f"no place was free within {self._limits.queue_s:g} s")
        finally:
            self._waiting.remove(entry)
            if entry[0].done() and not entry[0].cancelled():
                self.note_freed()  # more than one place may be free, and who was told may have gone

    def _refuse(self, reason: str, why: str) -> None:
        self._metrics.admission_refused.labels(reason).inc()
        raise TooManyRequests(f"the gateway serves as many requests as it may, and {why}; try again later")
