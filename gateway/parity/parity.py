"""Parity, always on: every answer says how long its prompt was, and what was assumed of it is held against that.

What comes of it: buckets that are approximate (`buckets.py`), and the next turn's text in the cache (`warming.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from directory.interface import DirectoryReader
from gateway.audit import Usage
from gateway.encoding.encoder import Encoder, Encoders, Encoding
from gateway.encoding.warming import REPLY_CHARS_MIN, KeptEvents, Reply, Warmer, is_warmed
from gateway.fleet import EngineView, Fleet
from gateway.lookup import Holders
from gateway.metrics import GatewayMetrics
from gateway.openai_schema import InferenceRequest
from gateway.parity.announced_ids import AnnouncedIds
from gateway.parity.buckets import Buckets, are_of_one_engine, kind_of
from gateway.parity.self_checks import SelfChecks
from gateway.parity.stream_usage import Send, StreamUsage, UsageFilter
from gateway.upstream import Answer

KEEP_S = 10.0
"""How often buckets of engines that are gone, and idle ones, are let go."""


class Parity:
    """Watches answers. Nothing that it does is waited for by a client."""

    def __init__(
        self,
        fleet: Fleet,
        directory: DirectoryReader,
        encoders: Encoders,
        self_checks: SelfChecks,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._fleet, self._encoders, self._metrics, self._sleep = fleet, encoders, metrics, sleep
        self._self_checks = self_checks
        self._buckets = Buckets(clock)
        self._ids = AnnouncedIds(directory, fleet, self._buckets, metrics, clock, sleep)
        self._warmer = Warmer(lambda result: metrics.replies_warmed.labels(result).inc())
        self._stream_usage = StreamUsage(clock)
        metrics.approximate_buckets.set_function(lambda: self._buckets.approximate_count)

    def approximate(self, request: InferenceRequest, views: Sequence[EngineView]) -> frozenset[str]:
        """Those of the engines whose keys aren't believed for this request; counted where there are any."""
        if not self._buckets.approximate_count:
            return frozenset()
        engines = self._buckets.approximate(kind_of(request)) & {view.engine for view in views}
        if engines:
            self._metrics.degraded.labels("approximate").inc()
        return engines

    def watch(self, request: InferenceRequest, view: EngineView, encoding: Encoding | None) -> "WatchedAnswer":
        """The answer of one attempt, before it is asked for; `encoding` is this engine's. Release it in any case."""
        is_kept = request.stream and encoding is not None and is_warmed(request)
        return WatchedAnswer(self, request, view, encoding, KeptEvents(self._warmer) if is_kept else None)

    async def send(self, request: InferenceRequest, view: EngineView, send: Send) -> tuple[Answer, bool]:
        """See `StreamUsage`."""
        return await self._stream_usage.send(request, view, send)

    def note_usage(
        self, request: InferenceRequest, view: EngineView, encoding: Encoding | None, usage: Usage | None
    ) -> None:
        """An answer came to its end. Of several prompts only the first was encoded: such a request says nothing.

        Nor does one that an engine began in another life or with other files: it would be held against this one.
        """
        if encoding is None or encoding.tokens is None or not encoding.is_whole or len(request.prompts) > 1:
            return
        if usage is None:
            self._metrics.parity.labels("usage", "unreported").inc()
            return
        kind, own = kind_of(request), encoding.prompt_tokens
        is_same = own == usage.prompt_tokens
        self._metrics.parity.labels("usage", "match" if is_same else "mismatch").inc()
        if not is_same:
            self._metrics.token_count_mismatches.inc()
        now = self._fleet.table.engines.get(view.engine)
        if now is None or not are_of_one_engine(view, now):
            return
        self._buckets.note_counts(view, kind, own, usage.prompt_tokens)
        if is_same:
            self._ids.consider(view, kind, encoding.tokens, request.cache_salt, usage.cached_tokens)

    def warm(self, request: InferenceRequest, view: EngineView, data: bytes, is_stream: bool) -> None:
        """Have the reply encoded before the next turn asks for it, if it may be long enough to be worth that."""
        if len(data) < REPLY_CHARS_MIN:
            return
        encoder = self._encoder_of(view)
        if encoder is not None:
            self._warmer.send(Reply(encoder, request, view.context_tokens, data, is_stream))

    def rows(self) -> dict[str, Any]:
        """For `/fleet`."""
        return {
            "approximate_buckets": self._buckets.approximate_count,
            "buckets": self._buckets.rows(),
            "self_checks": self._self_checks.row(),
        }

    async def run(self) -> None:
        """Compare and encode in the background, until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._ids.run())
            loops.create_task(self._warmer.run())
            loops.create_task(self._keep_for_ever())

    async def _keep_for_ever(self) -> None:
        while True:
            await self._sleep(KEEP_S)
            self._buckets.keep(self._fleet.table.engines)

    def _encoder_of(self, view: EngineView) -> Encoder | None:
        return None if view.files is None else self._encoders.find(view.files)


class WatchedAnswer:
    """One attempt's answer on its way: what is asked for with it, what of it the client sees, what it tells."""

    def __init__(
        self,
        parity: Parity,
        request: InferenceRequest,
        view: EngineView,
        encoding: Encoding | None,
        kept: KeptEvents | None,
    ) -> None:
        self._parity, self._request, self._view, self._encoding = parity, request, view, encoding
        self._kept = kept
        self._filter: UsageFilter | None = None

    async def send(self, send: Send) -> Answer:
        """Send the request by `send`, which is given it with the body to send. Raises as it does."""
        answer, is_asked = await self._parity.send(self._request, self._view, send)
        self._filter = UsageFilter() if is_asked else None
        return answer

    def take(self, events: bytes) -> bytes:
        """What the client gets of a stream's next events; may be empty."""
        if self._kept is not None:
            self._kept.add(events)
        return events if self._filter is None else self._filter.take(events)

    def note(self, usage: Usage | None, body: bytes | None, has_ids: bool = False) -> None:
        """The answer has been sent, and was a good one. `body` is a whole answer's, where it was read.

        `has_ids`: its prompt was sent as token ids, and what the engine counted says nothing.
        """
        if not has_ids:
            self._parity.note_usage(self._request, self._view, self._encoding, usage)
        data = body if body is not None else self._kept.joined() if self._kept is not None else b""
        if data:
            self._parity.warm(self._request, self._view, data, body is None)

    def release(self) -> None:
        """Let go of what was kept of the stream."""
        if self._kept is not None:
            self._kept.release()


def without(holders: Holders, engines: frozenset[str]) -> Holders:
    """The same without what is said of some engines: nothing is counted on, loaded, or hinted at for them."""
    if not engines:
        return holders
    matches = {engine: match for engine, match in holders.matches.items() if engine not in engines}
    keys = {engine: found for engine, found in holders.keys.items() if engine not in engines}
    peers = {engine: found for engine, found in holders.peers.items() if engine not in engines}
    return replace(holders, matches=matches, keys=keys, peers=peers)
