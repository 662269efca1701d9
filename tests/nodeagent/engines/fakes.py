"""Stand-ins: a host's tiers in memory, a model that waits for permission, and a way to run one request alone."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from directory.identity import UNSCOPED, Scope
from nodeagent.client import ChunkLabel, OpenedPiece, PutResult
from nodeagent.engines.reference.chunk_store import ChunkStore, ChunkWriter
from nodeagent.engines.reference.generation import Generation, GenerationRequest, GenerationStep
from nodeagent.engines.reference.gpu_tier import GpuTier
from nodeagent.engines.reference.kv import KvSequence
from nodeagent.engines.reference.loaded_model import LoadedModel
from nodeagent.engines.reference.metrics import EngineMetrics
from nodeagent.engines.reference.prefix_cache import PrefixCache, TieredPrefixCache
from nodeagent.engines.reference.sampling import SamplingSettings
from nodeagent.engines.reference.scheduler import Scheduler
from nodeagent.engines.reference.sequences import Prefill, Reply
from nodeagent.engines.reference.service import EngineService


class MemoryStore:
    """A host that holds chunks in memory. Chunks in `corrupt` fail their check, as the client would find.

    At most `piece_chunks` are opened at once, as by a host whose DRAM is that small.
    """

    def __init__(self, piece_chunks: int = 1_000) -> None:
        self.piece_chunks = piece_chunks
        self.timeouts_s: list[float] = []
        self.chunks: dict[bytes, bytes] = {}
        self.labels: dict[bytes, ChunkLabel] = {}
        self.corrupt: set[bytes] = set()
        self.in_gpu: set[bytes] = set()
        self.loads: list[tuple[int, int, float]] = []
        self.references = 0
        self.gave_back = 0
        self.is_stopped = False

    def open_piece(self, keys: Sequence[bytes], timeout_s: float) -> OpenedPiece:
        self.timeouts_s.append(timeout_s)
        run: list[Any] = []
        for key in keys:
            if key not in self.chunks:
                break
            run.append(SimpleNamespace(storage_key=key, tier="dram", length=len(self.chunks[key])))
        run = run[: max(self.piece_chunks - self.references, 0)]
        self.references += len(run)
        return OpenedPiece(run, goes_on=any(key in self.chunks for key in keys[len(run) :][:1]))

    def read_into(self, chunk: Any, target: memoryview) -> bool:
        if chunk.storage_key in self.corrupt:
            target[:] = b"\xff" * len(target)
            return False
        target[:] = self.chunks[chunk.storage_key]
        return True

    def close(self, chunks: Sequence[Any]) -> None:
        self.references -= len(chunks)
        self.gave_back += len(chunks)

    def put(self, label: ChunkLabel, payload: memoryview, timeout_s: float) -> PutResult:
        if label.storage_key in self.chunks:
            return PutResult.ALREADY
        self.chunks[label.storage_key] = bytes(payload)
        self.labels[label.storage_key] = label
        return PutResult.STORED

    def report_gpu(self, stored: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        self.in_gpu |= set(stored)
        self.in_gpu -= set(evicted)

    def report_load(self, running: int, waiting: int, flops: float) -> None:
        self.loads.append((running, waiting, flops))

    def stop(self) -> None:
        self.is_stopped = True


class GatedModel:
    """A model whose every forward pass waits until the test lets it go; it notes what was computed."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self.passes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: Any, sequence: KvSequence, *, want_logits: bool) -> Any:
        self._arrived.release()
        assert self._permits.acquire(timeout=30)
        self.passes.append(len(tokens))
        return self._model.forward(tokens, sequence, want_logits=want_logits)

    def wait_for_pass(self) -> None:
        """Wait until a pass is about to be computed."""
        assert self._arrived.acquire(timeout=30)

    def let_go(self, passes: int = 1) -> None:
        self._permits.release(passes)

    def step(self) -> None:
        """Wait for a pass and let it go."""
        self.wait_for_pass()
        self.let_go()

    def open_gate(self) -> None:
        self._permits.release(100_000)


class RecordingModel:
    """A model that notes the bits of all logits it returns."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.logits: list[bytes] = []
        self.computed_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: Any, sequence: KvSequence, *, want_logits: bool) -> Any:
        self.computed_tokens += len(tokens)
        logits = self._model.forward(tokens, sequence, want_logits=want_logits)
        if logits is not None:
            self.logits.append(logits.tobytes())
        return logits


class Outcome:
    """What one request gave: text, bits of all logits, bits of the prompt's KV, and what was cached."""

    def __init__(self, recording: RecordingModel, prefill: Prefill, steps: list[GenerationStep]) -> None:
        self.text = "".join(step.text for step in steps)
        self.logits = recording.logits
        self.kv = prefill.sequence.export_tokens(0, len(prefill.generation.request.tokens)).tobytes()
        self.loaded = dict(prefill.loaded_tokens)
        self.cached_tokens = steps[-1].cached_tokens
        self.computed_tokens = recording.computed_tokens
        self.reason = steps[-1].finish_reason

    def same_bits(self, other: "Outcome") -> bool:
        return (self.text, self.logits, self.kv, self.reason) == (other.text, other.logits, other.kv, other.reason)


def run_alone(
    loaded: LoadedModel, cache: PrefixCache, tokens: Sequence[int], max_tokens: int = 8, scope: Scope = UNSCOPED
) -> Outcome:
    """Run one greedy request without a scheduler."""
    steps: list[GenerationStep] = []
    request = GenerationRequest(
        np.array(tokens, np.uint32), max_tokens, SamplingSettings(temperature=0.0), scope, ignore_eos=True
    )
    generation = Generation(request, steps.append)
    model: Any = RecordingModel(loaded.model)
    prefill = Prefill(generation, model, cache, loaded.chunk_tokens, loaded.speed)
    while (logits := prefill.advance()) is None:
        continue
    prefill.close()
    metrics = EngineMetrics(loaded.name)
    reply = Reply(generation, prefill.sequence, prefill.cached_tokens, model, loaded.tokenizer, metrics)
    reply.accept(logits)
    while not reply.is_finished:
        reply.advance()
    return Outcome(model, prefill, steps)


class Caches:
    """A `gpu` tier before a store, and the writer between them."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        gpu_chunks: int = 0,
        gpu: GpuTier | None = None,
        store: ChunkStore | None = None,
        prefill_s: Callable[[int, int], float] = lambda end, start: 0.0,
    ) -> None:
        self.store: Any = store if store is not None else MemoryStore()
        self.gpu = gpu if gpu is not None else GpuTier(gpu_chunks)
        self.outcomes: list[str] = []
        self.writer = ChunkWriter(self.store, self.outcomes.append)
        self.cache = TieredPrefixCache(
            loaded.identity, 0, loaded.chunk_tokens, self.gpu, self.store, self.writer, prefill_s
        )

    def __enter__(self) -> "Caches":
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.stop()


def build_service(loaded: LoadedModel, model: Any = None, **limits: int) -> EngineService:
    """A service on a store in memory; `model` replaces the loaded one."""
    metrics = EngineMetrics(loaded.name)
    store = MemoryStore()
    gpu = GpuTier(16)
    writer = ChunkWriter(store, metrics.count_write)
    cache = TieredPrefixCache(loaded.identity, 0, loaded.chunk_tokens, gpu, store, writer, loaded.speed.prefill_s)
    scheduler = Scheduler(
        model or loaded.model, loaded.tokenizer, cache, loaded.chunk_tokens, metrics, loaded.speed, **limits
    )
    return EngineService(loaded, scheduler, cache, gpu, store, metrics, 0)
