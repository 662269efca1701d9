"""One thread owns the model. In turn it does one step of the oldest prompt and one token of every running reply.

So a long prompt never stops the streams: they go on at the pace of one token per batch. A request nobody waits for
any more is dropped at the next step, whichever phase it is in.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from nodeagent.engines.reference.errors import Overloaded
from nodeagent.engines.reference.generation import Generation, GenerationStep
from nodeagent.engines.reference.metrics import EngineMetrics
from nodeagent.engines.reference.model import LlamaModel
from nodeagent.engines.reference.prefix_cache import PrefixCache
from nodeagent.engines.reference.sequences import Prefill, Reply
from nodeagent.engines.reference.speed import Speedometer
from nodeagent.engines.reference.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

WAITING_MAX = 64
RUNNING_MAX = 8
STOP_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Arrival:
    """A request in the queue, and when it came."""

    generation: Generation
    arrived_s: float


@dataclass(slots=True)
class _Running:
    """A reply being generated, and when its request came and its last token went."""

    reply: Reply
    arrived_s: float
    last_token_s: float


class Scheduler:
    """Admits, computes and drops requests. `submit` from any thread; all else happens on its own."""

    def __init__(
        self,
        model: LlamaModel,
        tokenizer: TextTokenizer,
        cache: PrefixCache,
        chunk_tokens: int,
        metrics: EngineMetrics,
        speed: Speedometer,
        *,
        waiting_max: int = WAITING_MAX,
        running_max: int = RUNNING_MAX,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._metrics = metrics
        self._speed = speed
        self._waiting_max = waiting_max
        self._running_max = running_max
        self._changed = threading.Condition()
        self._waiting: deque[_Arrival] = deque()
        self._prefill: Prefill | None = None
        self._prefill_arrived_s = 0.0
        self._running: list[_Running] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def running(self) -> int:
        """Requests being computed."""
        return len(self._running) + (self._prefill is not None)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and takes requests."""
        return self._thread.is_alive() and not self._is_stopping

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Queue a request. Raises `Overloaded` where the queue is full or the engine is stopping."""
        with self._changed:
            if self._is_stopping:
                raise Overloaded("the engine is stopping", 503)
            if len(self._waiting) >= self._waiting_max:
                self._drop_cancelled_waiting()
            if len(self._waiting) >= self._waiting_max:
                raise Overloaded(f"{self._waiting_max} requests are waiting already; try again later", 429)
            self._waiting.append(_Arrival(generation, time.monotonic()))
            self._changed.notify()

    def stop(self) -> None:
        """End the thread after the step in hand; every unfinished request is told."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._prefill or self._running or self._is_stopping):
                    self._publish_gauges()
                    self._changed.wait()
                if self._is_stopping:
                    break
                self._drop_cancelled()
                self._publish_gauges()
            self._advance_prefill()
            self._advance_replies()
        self._abandon_all()

    def _drop_cancelled(self) -> None:
        self._drop_cancelled_waiting()
        if self._prefill is not None and self._prefill.generation.is_cancelled:
            self._end_prefill()
        self._running = [each for each in self._running if not each.reply.generation.is_cancelled]

    def _drop_cancelled_waiting(self) -> None:
        self._waiting = deque(each for each in self._waiting if not each.generation.is_cancelled)

    def _advance_prefill(self) -> None:
        """One step of the oldest prompt: admit it, load a chunk, or compute a batch."""
        if self._prefill is None and not self._admit():
            return
        prefill = self._prefill
        assert prefill is not None
        try:
            logits = prefill.advance()
            if logits is None:
                return
            reply = Reply(
                prefill.generation,
                prefill.sequence,
                prefill.cached_tokens,
                self._model,
                self._tokenizer,
                self._metrics,
            )
            now_s = time.monotonic()
            self._metrics.count_prompt(len(prefill.generation.request.tokens), prefill.loaded_tokens)
            self._metrics.prefill_s.observe(now_s - prefill.started_s)
            self._metrics.first_token_s.observe(now_s - self._prefill_arrived_s)
            reply.accept(logits)
            if reply.is_finished:
                self._metrics.request_s.observe(time.monotonic() - self._prefill_arrived_s)
            else:
                self._running.append(_Running(reply, self._prefill_arrived_s, now_s))
            self._end_prefill()
        except Exception:
            log.exception("a prompt could not be computed")
            self._end_prefill()
            self._abandon(prefill.generation, "the engine failed on this request")

    def _admit(self) -> bool:
        with self._changed:
            if not self._waiting or len(self._running) >= self._running_max:
                return False
            arrival = self._waiting.popleft()
        self._prefill_arrived_s = arrival.arrived_s
        try:
            self._prefill = Prefill(arrival.generation, self._model, self._cache, self._chunk_tokens, self._speed)
        except Exception:
            log.exception("a prompt could not be admitted")
            self._abandon(arrival.generation, "the engine failed on this request")
            return False
        return True

    def _advance_replies(self) -> None:
        """One token of every reply that was running before this turn."""
        for running in list(self._running):
            if running.reply.generation.is_cancelled:
                continue
            try:
                running.reply.advance()
            except Exception:
                log.exception("a token could not be computed")
                self._running.remove(running)
                self._abandon(running.reply.generation, "the engine failed on this request")
                continue
            now_s = time.monotonic()
            self._metrics.between_tokens_s.observe(now_s - running.last_token_s)
            running.last_token_s = now_s
            if running.reply.is_finished:
                self._running.remove(running)
                self._metrics.request_s.observe(now_s - running.arrived_s)

    def _end_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill.close()
            self._prefill = None

    def _abandon_all(self) -> None:
        with self._changed:
            left = [each.generation for each in self._waiting]
            left += [each.reply.generation for each in self._running]
            if self._prefill is not None:
                left.append(self._prefill.generation)
            self._end_prefill()
            self._waiting.clear()
            self._running.clear()
        for generation in left:
            self._abandon(generation, "the engine is stopping")
        self._publish_gauges()

    def _abandon(self, generation: Generation, failure: str) -> None:
        self._metrics.finished["abort"].inc()
        generation.on_step(GenerationStep("", 0, 0, "abort", failure))

    def _publish_gauges(self) -> None:
        self._metrics.running.set(self.running)
        self._metrics.waiting.set(self.waiting)
