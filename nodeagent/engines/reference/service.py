"""The engine in one piece, without HTTP: a loaded model, its scheduler, its caches, and the loop that reports load."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nodeagent.engines.reference.chunk_store import ChunkStore
from nodeagent.engines.reference.errors import InvalidRequest, Overloaded
from nodeagent.engines.reference.generation import Generation, GenerationRequest, GenerationStep
from nodeagent.engines.reference.gpu_tier import GpuTier
from nodeagent.engines.reference.loaded_model import LoadedModel
from nodeagent.engines.reference.metrics import EngineMetrics
from nodeagent.engines.reference.prefix_cache import PrefixCache
from nodeagent.engines.reference.scheduler import Scheduler

log = logging.getLogger(__name__)

LOAD_REPORT_INTERVAL_S = 1.0


class Steps:
    """The steps of one generation, for one reader on the event loop; at most as many as tokens were asked for."""

    def __init__(self, request: GenerationRequest) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[GenerationStep] = asyncio.Queue()
        self.generation = Generation(request, self._pass_on)

    async def next(self) -> GenerationStep:
        """The next step. Raises `Overloaded` (503) where the engine gave the request up."""
        step = await self._queue.get()
        if step.failure is not None:
            raise Overloaded(step.failure, 503)
        return step

    def cancel(self) -> None:
        """Nobody reads on. Idempotent."""
        self.generation.cancel()

    def _pass_on(self, step: GenerationStep) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, step)
        except RuntimeError:
            log.debug("a step came after its event loop was closed")


class EngineService:
    """What the HTTP face calls. Collaborators are given; `running` starts and stops them in order."""

    def __init__(
        self,
        loaded: LoadedModel,
        scheduler: Scheduler,
        cache: PrefixCache,
        gpu: GpuTier,
        store: ChunkStore,
        metrics: EngineMetrics,
        created: int,
    ) -> None:
        self.loaded = loaded
        self._scheduler = scheduler
        self._cache = cache
        self._gpu = gpu
        self._store = store
        self._metrics = metrics
        self._created = created

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start; at the end stop in order: no more tokens, then the chunks in hand, then the host's door."""
        self._scheduler.start()
        reporting = asyncio.create_task(self._report_load())
        try:
            yield
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await asyncio.to_thread(self._stop)

    @property
    def is_healthy(self) -> bool:
        """Whether requests are being computed, or would be."""
        return self._scheduler.is_alive

    def generate(self, request: GenerationRequest) -> Steps:
        """Queue a request. Raises `Overloaded`."""
        steps = Steps(request)
        self._scheduler.submit(steps.generation)
        return steps

    def reset_prefix_cache(self) -> None:
        """Empty the `gpu` tier, and say so. Prompts that are being computed keep what they have loaded."""
        self._store.report_gpu((), self._gpu.clear())

    async def encode(self, text: str, param: str) -> list[int]:
        """Token ids of a text, off the event loop. Raises `InvalidRequest` for one that can't fit the context."""
        loaded = self.loaded
        if len(text) > loaded.context_tokens * loaded.tokenizer.token_bytes_max:
            raise InvalidRequest(
                f"the prompt is too long: prompt and reply together may have {loaded.context_tokens} tokens",
                param,
                code="context_length_exceeded",
            )
        return await asyncio.to_thread(loaded.tokenizer.encode, text)

    def models(self) -> dict[str, Any]:
        """The list of models, as OpenAI and vLLM show it."""
        model = {
            "id": self.loaded.name,
            "object": "model",
            "created": self._created,
            "owned_by": "warmroute",
            "root": self.loaded.name,
            "parent": None,
            "max_model_len": self.loaded.context_tokens,
        }
        return {"object": "list", "data": [model]}

    def metrics_text(self) -> bytes:
        """The metrics as they are now."""
        self._metrics.kv_usage.set(len(self._gpu) / self._gpu.chunks_max if self._gpu.chunks_max else 0.0)
        return self._metrics.text()

    def _stop(self) -> None:
        self._scheduler.stop()
        self._cache.stop()
        self._store.stop()

    async def _report_load(self) -> None:
        last: tuple[int, int, float] | None = None
        while True:
            load = (self._scheduler.running, self._scheduler.waiting, self.loaded.speed.flops)
            if load != last:
                await asyncio.to_thread(self._store.report_load, *load)
                last = load
            await asyncio.sleep(LOAD_REPORT_INTERVAL_S)
