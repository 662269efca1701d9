"""The story of a request: encode -> keys -> lookup -> route -> book -> hint -> forward -> settle. And nothing else."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from gateway.admission import Admission
from gateway.aliases import Aliases
from gateway.audit import StreamTail, Usage, is_json, read_usage
from gateway.dispatcher import Dispatch, Dispatcher
from gateway.error_shapes import broken_stream_event
from gateway.errors import ModelNotFound, NoEngineAvailable, UpstreamError, UpstreamTimeout, quoted
from gateway.fleet import EngineView, Fleet
from gateway.hang_watch import HangWatch
from gateway.ids_sender import IdsSender
from gateway.metrics import GatewayMetrics
from gateway.openai_schema import RESPONSES, InferenceRequest
from gateway.parity.parity import Parity, WatchedAnswer
from gateway.preparation import Incoming, Preparation, Prepared
from gateway.response_homes import ResponseHomes
from gateway.retry_after import retry_after_s
from gateway.retry_budget import RetryBudget
from gateway.routing.query import RoutingDecision, Score
from gateway.sink import Sink
from gateway.stream_relay import StreamRelay
from gateway.trace_recorder import TraceRecorder
from gateway.upstream import Answer, EngineFailed, WholeAnswer

logger = logging.getLogger(__name__)

ATTEMPTS_MAX = 3
PASSING_TYPES = ("text/event-stream", "audio/", "video/", "application/octet-stream")
"""Streams, and answers that are played while they come: they aren't read to their end first."""
RETRY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
FAULT = 500
"""May be the request's own doing: it is sent elsewhere once."""
RETRY_PAUSE_S = 0.02
"""Before a request that was refused is sent again: up to so many seconds, and twice as many each time."""


class Completion:
    """Serves requests to every endpoint of `openai_schema.ENDPOINTS`."""

    def __init__(
        self,
        fleet: Fleet,
        aliases: Aliases,
        admission: Admission,
        preparation: Preparation,
        dispatcher: Dispatcher,
        sender: IdsSender,
        parity: Parity,
        homes: ResponseHomes,
        recorder: TraceRecorder,
        hangs: HangWatch,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.hangs, self._sleep = hangs, sleep
        self.admission, self._aliases = admission, aliases
        self._fleet, self._preparation, self._dispatcher = fleet, preparation, dispatcher
        self._sender, self._parity, self._homes, self._recorder = sender, parity, homes, recorder
        self._metrics, self._clock, self._budget = metrics, clock, RetryBudget()

    async def serve(self, incoming: Incoming, sink: Sink) -> None:
        """Answer a request. Raises `GatewayError` while nothing was sent to the client."""
        async with self.admission.admitted() as deadline:
            await self._serve(self._aliases.resolved(incoming), sink, deadline)

    async def _serve(self, incoming: Incoming, sink: Sink, deadline: float) -> None:
        request, note = incoming.request, incoming.note
        note.model = request.model
        views = self._serving(request.model)
        prepared = await self._preparation.prepare(incoming, views)
        tried: set[str] = set()
        failure: EngineFailed | None = None
        words: WholeAnswer | None = None
        self._budget.note_request()
        while len(tried) < ATTEMPTS_MAX:
            left = self._left(request, views, tried)
            if not left or (tried and not self._budget.take()):
                break
            if failure is not None and failure.answer is not None:
                await self._sleep(random.uniform(0, RETRY_PAUSE_S * 2 ** len(tried)))
            decision = self._dispatcher.decide(prepared, await self.admission.with_room(left, deadline))
            view = next(each for each in left if each.engine == decision.ranked[0].engine)
            if tried:
                self._metrics.retries.inc()
            tried.add(view.engine)
            note.engine, note.attempts = view.engine, len(tried)
            may_retry = len(left) > 1 and len(tried) < ATTEMPTS_MAX and self._budget.allows_one
            again = RETRY_STATUSES if words is None or words.status != FAULT else RETRY_STATUSES - {FAULT}
            failure = await self._attempt(incoming, prepared, decision, view, sink, again if may_retry else frozenset())
            if failure is None:
                return
            words = failure.answer or words
            logger.warning("engine %s failed before its first byte: %s", view.engine, failure)
        if words is not None:
            await self._pass_on(words, sink)
            return
        raise self._unserved(request.model, failure)

    def _serving(self, model: str) -> Sequence[EngineView]:
        views = self._fleet.table.serving(model) or self._fleet.table.doubtful(model)
        if not views and model not in self._fleet.models_seen:
            raise ModelNotFound(f"the model {quoted(model)} is not served here", "model")
        if not views:
            raise NoEngineAvailable(f"no engine that serves {quoted(model)} is ready")
        return views

    def _left(self, request: InferenceRequest, views: Sequence[EngineView], tried: set[str]) -> list[EngineView]:
        """Who may have the request next: the engine that keeps what it goes on from, before all others."""
        home = self._homes.view_of(request, self._fleet.table)
        return [home] if home and home.engine not in tried else self._untried(request.model, views, tried)

    def _untried(self, model: str, views: Sequence[EngineView], tried: set[str]) -> list[EngineView]:
        """Who is left to try: ready engines; then those in doubt; or, if none is ready any more, those that were when
        the request came: one of them may be well.
        """
        ready, doubtful = self._fleet.table.serving(model), self._fleet.table.doubtful(model)
        for group in (ready, doubtful, () if ready else views):
            if left := [view for view in group if view.engine not in tried]:
                return left
        return []

    def _unserved(self, model: str, failure: EngineFailed | None) -> Exception:
        if failure is None:
            return NoEngineAvailable(f"no engine that serves {quoted(model)} is ready")
        kind = UpstreamTimeout if failure.is_timeout else UpstreamError
        return kind(f"every engine tried for {quoted(model)} failed; the last one {failure}")

    async def explain(self, incoming: Incoming) -> tuple[Prepared, RoutingDecision]:
        """What would be decided now, with every candidate; nothing is sent or booked. Raises as `serve` does."""
        incoming = self._aliases.resolved(incoming)
        views = self._serving(incoming.request.model)
        prepared = await self._preparation.prepare(incoming, views)
        home = self._homes.view_of(incoming.request, self._fleet.table)
        return prepared, self._dispatcher.decide(prepared, [home] if home else views)

    async def _attempt(
        self,
        incoming: Incoming,
        prepared: Prepared,
        decision: RoutingDecision,
        view: EngineView,
        sink: Sink,
        again: frozenset[int],
    ) -> EngineFailed | None:
        """Send the request to one engine. A failure before the client's first byte is returned, not raised; so is an
        answer whose status is in `again`, which is empty where nobody else is left to ask.
        """
        request, score = incoming.request, decision.ranked[0]
        answer: Answer | None = None
        own = prepared.prompt.of(view)
        watched = self._parity.watch(request, view, own)
        dispatch = self._dispatcher.send_off(prepared, decision, view, request.stream)
        try:
            async with self._unless_lost(view.engine, bool(again)):
                known = None if view.engine in prepared.approximate else own
                send = partial(self._sender.send, view, incoming.path, incoming.headers, known)
                with self.hangs.waiting(view, request, score.expected_ttft_s):
                    answer = await watched.send(send)
                headers, is_stream = answer.headers(), answer.content_type == "text/event-stream"
                is_announced = is_stream and request.endpoint == RESPONSES  # by events that come before any token
                if not is_announced:
                    dispatch.first_byte(answer.status, retry_after_s(answer.status, headers))
                is_refusal = answer.status in again
                body = await self._read_whole(answer) if is_refusal or _is_read_first(answer) else None
            if is_refusal:
                kept = None if body is None else WholeAnswer(answer.status, headers, body)
                return EngineFailed(f"answered with status {answer.status}", answer=kept)
            if incoming.wants_explanation:
                headers += explanation(decision, prepared.encoding_class(view))
            observe: Callable[[], None] = partial(self._observe_first_byte, incoming, prepared, score)
            on_first_token = partial(_note_first_token, dispatch, observe) if is_announced else None
            sink = self._homes.watched(request, sink, view.engine, on_first_token)
            if is_stream:
                observe = _do_nothing if is_announced else observe
                tail = await self._relay_stream(answer, headers, sink, dispatch, observe, watched, request.endpoint)
                usage, events = tail.usage(), tail.events
            else:
                usage, events = await self._relay_whole(answer, body, headers, sink, dispatch), 0
            if answer.status == 200:
                self._audit(incoming, prepared, score, usage)
                dispatch.note_usage(usage)
                self._recorder.note(incoming.arrived_at, prepared, view, usage, events)
                watched.note(usage, body, answer.has_ids)
        except EngineFailed as failure:
            if failure.is_connection:
                self._fleet.note_failure(view.engine)
            return failure
        finally:
            if answer is not None:
                answer.close()
            watched.release()
            dispatch.release()
            self.admission.note_freed()
        return None

    @asynccontextmanager
    async def _unless_lost(self, engine: str, may_leave: bool) -> AsyncIterator[None]:
        """Leave an engine that is found unwell inside this block, if there is another: raises `EngineFailed`."""
        try:
            async with asyncio.timeout(None) as wait:
                leave = partial(wait.reschedule, 0.0) if may_leave else _do_nothing
                with self._fleet.told_when_lost(engine, leave):
                    yield
        except TimeoutError:
            raise EngineFailed("was found unwell before its answer was there") from None

    async def _read_whole(self, answer: Answer) -> bytes | None:
        """The whole body before anything is sent on, so that an engine that dies while writing it can be replaced."""
        body = await answer.read_whole()
        is_told = answer.is_end_told or answer.content_type != "application/json"
        if body is not None and not is_told and not is_json(body):
            raise EngineFailed("connection failed in the middle of an answer", is_connection=True)
        return body

    async def _pass_on(self, answer: WholeAnswer, sink: Sink) -> None:
        """An engine's own words, where no other engine could do better."""
        await sink.start(answer.status, answer.headers)
        await sink.write(answer.body)
        await sink.finish()

    async def _relay_stream(
        self,
        answer: Answer,
        headers: list[tuple[bytes, bytes]],
        sink: Sink,
        dispatch: Dispatch,
        observe: Callable[[], None],
        watched: WatchedAnswer,
        endpoint: str,
    ) -> StreamTail:
        """Pass events on as they come. An event that breaks off is dropped, and one that says so ends the stream.

        Raises `EngineFailed` before the first whole event: the request may go elsewhere.
        """
        # An event may be added at the end, so a length that was promised can't be kept.
        headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]

        async def start() -> None:
            observe()
            await sink.start(answer.status, headers)

        relay = StreamRelay(sink, start, watched.take)
        try:
            await relay.run(answer)
            if not answer.is_end_told and not relay.tail.is_done:
                raise EngineFailed("connection ended in the middle of a stream", is_connection=True)
        except EngineFailed as failure:
            if not relay.has_started:
                raise
            if not relay.tail.is_done:
                self._note_broken("stream_broken", dispatch, failure)
                said = f"the engine failed while it was answering: {failure}"
                await sink.write(broken_stream_event(said, endpoint, relay.tail.kept))
        if not relay.has_started:
            await sink.start(answer.status, headers)
        await sink.finish()
        return relay.tail

    async def _relay_whole(
        self, answer: Answer, body: bytes | None, headers: list[tuple[bytes, bytes]], sink: Sink, dispatch: Dispatch
    ) -> Usage | None:
        """Send a body that was read, or one that is too large for that, piece by piece."""
        await sink.start(answer.status, headers)
        if body is not None:
            await sink.write(body)
            await sink.finish()
            return read_usage(body)
        try:
            async for piece in answer.pieces():
                await sink.write(piece)
        except EngineFailed as failure:  # the client's connection is cut: it sees that this isn't the end
            self._note_broken("answer_broken", dispatch, failure)
            return None
        await sink.finish()
        return None

    def _note_broken(self, reason: str, dispatch: Dispatch, failure: EngineFailed) -> None:
        """An answer broke after its first byte."""
        logger.warning("an answer of engine %s broke after its first byte: %s", dispatch.engine, failure)
        self._metrics.degraded.labels(reason).inc()
        if failure.is_connection:
            self._fleet.note_failure(dispatch.engine)

    def _observe_first_byte(self, incoming: Incoming, prepared: Prepared, score: Score) -> None:
        usable = prepared.encoding.prompt_tokens
        cache = "miss" if not score.matched_tokens else "hit" if score.matched_tokens * 2 >= usable else "partial"
        self._metrics.ttft.labels(incoming.request.model, cache).observe(self._clock() - incoming.arrived_at)

    def _audit(self, incoming: Incoming, prepared: Prepared, score: Score, usage: Usage | None) -> None:
        model, incoming.note.usage = incoming.request.model, usage
        if prepared.encoding.tokens is not None and prepared.encoding.is_whole:
            self._metrics.prompt_tokens.labels(model).inc(prepared.encoding.prompt_tokens)
        for tier, tokens in score.tier_tokens.items():
            self._metrics.cached_tokens.labels(model, tier.label, "predicted").inc(tokens)
        if usage is not None and usage.cached_tokens is not None:
            self._metrics.cached_tokens.labels(model, "any", "reported").inc(usage.cached_tokens)
            self._metrics.prediction_error.observe(abs(usage.cached_tokens - score.matched_tokens))


def explanation(decision: RoutingDecision, encoded: str) -> list[tuple[bytes, bytes]]:
    """The headers that explain a decision to its client; `encoded` is how well the engine's prompt is known."""
    score = decision.ranked[0]
    tiers = ",".join(f"{tier.label}={tokens}" for tier, tokens in score.tier_tokens.items())
    rows = {
        "engine": score.engine,
        "matched-tokens": str(score.matched_tokens),
        "tier-tokens": tiers or "none",
        "reason": decision.reason,
        "encoding": encoded,
        "expected-ttft-ms": f"{score.expected_ttft_s * 1000:.0f}",
    }
    return [(f"x-warmroute-{name}".encode(), value.encode()) for name, value in rows.items()]


def _is_read_first(answer: Answer) -> bool:
    return not answer.content_type.startswith(PASSING_TYPES)


def _do_nothing() -> None:
    """Nothing is to be done: there is no other engine to go to, or nothing to observe."""


def _note_first_token(dispatch: Dispatch, observe: Callable[[], None]) -> None:
    dispatch.first_byte()
    observe()
