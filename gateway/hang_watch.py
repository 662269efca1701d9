"""Finds engines that hang: they accept requests and look well, and no answer ever comes.

That a request waits for long proves nothing: prompts are long, queues are, and an answer that isn't streamed shows
nothing before its end. So an engine is suspected when a request has waited there for `SUSPECT_SHARE` times as long as
was expected, and no request there had its first byte meanwhile. Then it is asked for one token. It hangs if that has no
answer in `timeouts.probe_s`, nor in twice the work booked there, nor in `SLOWEST_SHARE` times the longest wait for a
first byte that it had lately, and still nobody had one: what waits there goes elsewhere (`Fleet.told_when_lost`), and
nothing more is sent there until it answers such a question. Only where another engine could take over, and never by a
gateway that is late itself; an answer that has begun is never cut off.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import orjson

from gateway.fleet import EngineView, Fleet
from gateway.openai_schema import CHAT, COMPLETIONS, MESSAGES, RESPONSES, InferenceRequest
from gateway.upstream import EngineFailed, Upstream

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Between two looks at who waits."""
SUSPECT_S, SUSPECT_SHARE = 1.5, 3.0
"""A wait is suspicious after so many seconds, and so many times the expected seconds to the first token."""
PROBE_S_MAX, WAIT_SHARE, SLOWEST_SHARE = 120.0, 2.0, 3.0
SLOWEST_LASTS_S = 600.0
"""For so long the longest wait counts, unless a longer one follows."""
LATE_S = 0.5
"""A gateway whose looks come so much later than they should can't tell who is slow."""
PAUSE_S, PAUSE_S_MAX = 4.0, 60.0
"""Between two questions to an engine that answers, though requests wait there: twice as long each time."""
AGAIN_S, AGAIN_AT_ONCE_MAX = 1.0, 4
"""An engine that hangs is asked so often whether it still does; that many questions may be without an answer."""
ENGINES_MAX = 4096
"""Engines whose longest wait is remembered."""
GENERATING = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})
"""Endpoints of models that can be asked for a token."""


@dataclass(eq=False, slots=True)
class _Wait:
    """A request that has no first byte yet."""

    view: EngineView
    model: str
    endpoint: str
    suspicious_at: float


@dataclass(slots=True)
class _Doubt:
    """When this engine may be asked next, and how long the pause after that is."""

    next_at: float
    pause_s: float
    is_asked: bool = False


class HangWatch:
    """Of one gateway. `wait_s` is the work booked on an engine; without `probe_s` no engine is asked."""

    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        wait_s: Callable[[str], float],
        probe_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_hung: Callable[[], None] = lambda: None,
    ) -> None:
        self._fleet, self._upstream, self._wait_s, self._probe_s = fleet, upstream, wait_s, probe_s
        self._slowest: dict[str, tuple[float, float]] = {}
        self._clock, self._sleep, self._on_hung = clock, sleep, on_hung
        self._waits: dict[str, dict[_Wait, None]] = {}
        self._signs: dict[str, float] = {}
        self._doubts: dict[str, _Doubt] = {}
        self._was_late_at = float("-inf")

    @contextlib.contextmanager
    def waiting(self, view: EngineView, request: InferenceRequest, expected_s: float) -> Iterator[None]:
        """A request waits for its first byte inside this block, which was expected after so many seconds."""
        if request.endpoint not in GENERATING or not self._probe_s:
            yield
            return
        began = self._clock()
        suspicious_at = began + max(SUSPECT_S, SUSPECT_SHARE * expected_s)
        wait, waits = _Wait(view, request.model, request.endpoint, suspicious_at), self._waits
        waits.setdefault(view.engine, {})[wait] = None
        try:
            yield
            self._note_sign(view.engine, self._clock() - began)
        finally:
            del waits[view.engine][wait]
            if not waits[view.engine]:
                for known in (waits, self._signs, self._doubts):
                    known.pop(view.engine, None)

    def configure(self, probe_s: float) -> None:
        """So long engines have for an answer from now on; 0: none is asked."""
        self._probe_s = probe_s

    def _note_sign(self, engine: str, waited_s: float) -> None:
        now = self._signs[engine] = self._clock()
        longest_s, at = self._slowest.get(engine, (0.0, now))
        if waited_s >= longest_s or now > at + SLOWEST_LASTS_S:
            self._slowest.pop(engine, None)
            self._slowest[engine] = waited_s, now
            if len(self._slowest) > ENGINES_MAX:
                del self._slowest[next(iter(self._slowest))]

    def _bound_s(self, engine: str) -> float:
        slowest_s, _ = self._slowest.get(engine, (0.0, 0.0))
        return min(PROBE_S_MAX, max(self._probe_s, WAIT_SHARE * self._wait_s(engine), SLOWEST_SHARE * slowest_s))

    async def run(self) -> None:
        """Look, and ask, until cancelled."""
        async with asyncio.TaskGroup() as questions:
            while True:
                for wait in self._suspects():
                    questions.create_task(self._question(wait))
                looked_at = self._clock()
                await self._sleep(LOOK_S)
                if self._clock() > looked_at + LOOK_S + LATE_S:
                    self._was_late_at = self._clock()

    def _suspects(self) -> list[_Wait]:
        """The first request to wait on each engine that is to be asked now."""
        now, found = self._clock(), []
        for engine, waits in self._waits.items():
            wait, doubt = next(iter(waits)), self._doubts.get(engine)
            if now < wait.suspicious_at or now < self._signs.get(engine, now - SUSPECT_S) + SUSPECT_S:
                continue
            is_in_turn = doubt is None or (not doubt.is_asked and now >= doubt.next_at)
            if is_in_turn and self._could_be_left(wait):
                found.append(wait)
        return found

    def _could_be_left(self, wait: _Wait) -> bool:
        serving = [view.engine for view in self._fleet.table.serving(wait.model)]
        return len(serving) > 1 and wait.view.engine in serving

    async def _question(self, wait: _Wait) -> None:
        engine = wait.view.engine
        doubt = self._doubts.setdefault(engine, _Doubt(self._clock(), PAUSE_S))
        doubt.is_asked, asked_at = True, self._clock()
        bound_s = self._bound_s(engine)
        try:
            answers = await self._answers(wait, bound_s)
        finally:
            doubt.is_asked = False
        is_told = answers or self._signs.get(engine, asked_at) > asked_at or wait not in self._waits.get(engine, {})
        if is_told or self._was_late_at >= asked_at or not self._could_be_left(wait):
            doubt.next_at, doubt.pause_s = self._clock() + doubt.pause_s, min(PAUSE_S_MAX, 2 * doubt.pause_s)
            return
        logger.warning("the engine %s hangs: nothing answers there, not even one token in %.1f s", engine, bound_s)
        self._on_hung()
        self._fleet.note_hung(engine, True)
        await self._until_it_answers(wait)

    async def _until_it_answers(self, wait: _Wait) -> None:
        """Ask an engine that hangs again and again, as long as it is in the fleet."""
        engine, first = wait.view.engine, asyncio.Event()

        async def ask() -> None:
            if await self._answers(wait, AGAIN_S * AGAIN_AT_ONCE_MAX):
                first.set()

        async with _ended_together() as questions:
            while engine in self._fleet.hung and not first.is_set():
                questions.add(asyncio.create_task(ask()))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(first.wait(), AGAIN_S)
                questions -= {each for each in questions if each.done()}
        if first.is_set():
            logger.info("the engine %s answers again", engine)
            self._fleet.note_hung(engine, False)

    async def _answers(self, wait: _Wait, bound_s: float) -> bool:
        """Whether it answers a question for one token in time, whatever it says. A broken connection is no hang."""
        try:
            async with asyncio.timeout(bound_s):
                path = COMPLETIONS if wait.endpoint == COMPLETIONS else CHAT
                headers = [(b"content-type", b"application/json")]
                answer = await self._upstream.send(
                    wait.view.url + path, headers, _question_body(wait.model, path), wait.view.api_key
                )
                answer.close()
        except EngineFailed as failure:
            return not failure.is_timeout
        except TimeoutError:
            return False
        return True


def _question_body(model: str, path: str) -> bytes:
    text = {"prompt": "."} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "."}]}
    return orjson.dumps({"model": model, **text, "max_tokens": 1, "temperature": 0})


@contextlib.asynccontextmanager
async def _ended_together() -> AsyncIterator[set[asyncio.Task[None]]]:
    """Tasks that are cancelled at the end of the block."""
    tasks: set[asyncio.Task[None]] = set()
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
