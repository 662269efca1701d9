"""Follows one vLLM engine for as long as it is attached: its KV events, its metrics, and the table's copy on disk.

    events -> table -> `gpu` placements of the engine, and labels for the chunks it stores on the host

The table is saved every few seconds under the engine's process, so that an agent that restarts knows again what the
engine's GPU holds, as far as the engine's replay joins it.
"""

import asyncio
import hashlib
import logging
import os
from collections import Counter
from pathlib import Path

import httpx
import zmq.asyncio

from directory.chunks import foreign_storage_key
from nodeagent.engines.vllm.engine_metrics import METRICS_BYTES_MAX, MetricsUnreadable, PrefillRate, read_metrics
from nodeagent.engines.vllm.gpu_table import GpuChanges, GpuTable
from nodeagent.engines.vllm.saved_table import SavedTable, load_table
from nodeagent.engines.vllm.staging_file import remove_staging_file
from nodeagent.engines.vllm.subscriber import GpuUnknown, KvEventSubscriber
from nodeagent.label_book import LabelBook, Labelled
from nodeagent.labels import ChunkLabel
from nodeagent.messages import KvEventSource, LoadReport
from nodeagent.metrics import AgentMetrics
from nodeagent.registration import Sleep
from nodeagent.roster import AttachedEngine

SAVE_INTERVAL_S = 3.0
SCRAPE_INTERVAL_S = 1.0
SCRAPE_TIMEOUT_S = 2.0
SCRAPES_FAILED_MAX = 10
"""After so many failures in a row the last numbers aren't repeated any more."""
FLOPS_WEIGHT = 0.3

logger = logging.getLogger(__name__)


class VllmFollower:
    """Follows engines, each in a task of its caller's. `folder` keeps their tables between lives of the agent."""

    def __init__(
        self,
        folder: Path,
        labels: LabelBook,
        tiers: Labelled,
        metrics: AgentMetrics,
        *,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._folder = folder
        self._labels = labels
        self._tiers = tiers
        self._metrics = metrics
        self._sleep = sleep
        self._subscribers: dict[str, KvEventSubscriber] = {}

    async def __call__(self, engine: AttachedEngine, source: KvEventSource) -> None:
        """See `Follow`."""
        life = process_life(engine.process.pid)
        path = self._folder / f"{hashlib.sha256(engine.name.encode()).hexdigest()[:32]}.gpu"
        registration = engine.registration
        digest, chunk_tokens = registration.identity.fleet_digest(), registration.chunk_tokens
        saved = self._read(path, life, digest, chunk_tokens)
        start = saved or SavedTable(GpuTable(digest, chunk_tokens, _no_adapter), 0, b"")
        listener = _Listener(engine, start.table, self._labels, self._tiers, self._metrics)
        context = zmq.asyncio.Context()
        subscriber = self._subscribers[engine.name] = KvEventSubscriber(source, start, listener, context)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(subscriber.run())
                group.create_task(self._save(path, subscriber, life))
                group.create_task(self._watch_metrics(engine, subscriber))
        finally:
            if self._subscribers.get(engine.name) is subscriber:
                del self._subscribers[engine.name]
            context.destroy(linger=0)
            if engine.process.is_gone and source.staging_path is not None:
                remove_staging_file(source.staging_path)

    def is_known(self, engine: str) -> bool:
        """Whether all that this engine's GPU holds is known."""
        subscriber = self._subscribers.get(engine)
        return subscriber is not None and subscriber.is_known

    def was_reset(self, engine: str) -> None:
        """An operator has reset an engine's prefix cache: it says so itself only with its next step."""
        subscriber = self._subscribers.get(engine)
        if subscriber is not None:
            subscriber.cleared()

    def _read(self, path: Path, life: bytes, digest: bytes, chunk_tokens: int) -> SavedTable | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("the table of an engine's gpu can't be read; it begins empty: %s", error)
            return None
        return load_table(data, life=life, fleet_digest=digest, chunk_tokens=chunk_tokens, adapters=_no_adapter)

    async def _save(self, path: Path, subscriber: KvEventSubscriber, life: bytes) -> None:
        """Every few seconds and at the end; a copy that isn't to be trusted any more goes. Counts what was skipped."""
        written, counted = -1, Counter[str]()
        try:
            while True:
                await self._sleep(SAVE_INTERVAL_S)
                counted = self._count_skipped(subscriber.table.skipped + subscriber.counts, counted)
                if subscriber.next_sequence != written:
                    written = subscriber.next_sequence
                    await asyncio.to_thread(_write, path, subscriber.dump(life))
        finally:
            _write(path, subscriber.dump(life))

    def _count_skipped(self, now: Counter[str], before: Counter[str]) -> Counter[str]:
        for reason, number in (now - before).items():
            self._metrics.events_skipped.labels(reason).inc(number)
        return now

    async def _watch_metrics(self, engine: AttachedEngine, subscriber: KvEventSubscriber) -> None:
        """Metrics into what the engine's registration reports. An engine that doesn't answer is routed on."""
        rate, failures, was_asleep = PrefillRate(), 0, False
        async with httpx.AsyncClient(timeout=SCRAPE_TIMEOUT_S, trust_env=False) as http:
            while True:
                try:
                    seen = read_metrics(await _fetch(http, f"{engine.registration.url}/metrics"))
                    failures = 0
                except (httpx.HTTPError, MetricsUnreadable, UnicodeDecodeError) as error:
                    failures += 1
                    if failures == SCRAPES_FAILED_MAX:
                        self._metrics.degraded.labels("engine_metrics").inc()
                        logger.info("engine %s doesn't tell its metrics: %s", engine.name, error)
                        engine.note_load(LoadReport(0, 0, engine.flops))
                else:
                    tokens_per_s = rate.note(seen)
                    flops = engine.flops
                    if tokens_per_s is not None:
                        observed = 2 * engine.registration.shape.parameters * tokens_per_s
                        flops += FLOPS_WEIGHT * (observed - flops)
                    engine.note_load(LoadReport(seen.running, seen.waiting, flops))
                    if seen.is_asleep and not was_asleep:
                        # Its KV is gone, and no step may come that says so.
                        subscriber.cleared()
                    was_asleep = seen.is_asleep
                await self._sleep(SCRAPE_INTERVAL_S)


class _Listener:
    """Tells the engine's publisher, and the host's tiers, what the events say."""

    def __init__(
        self, engine: AttachedEngine, table: GpuTable, labels: LabelBook, tiers: Labelled, metrics: AgentMetrics
    ) -> None:
        self._engine = engine
        self._table = table
        self._labels = labels
        self._tiers = tiers
        self._metrics = metrics

    def changed(self, changes: GpuChanges) -> None:
        """See `GpuListener`."""
        self._engine.change_gpu(list(changes.stored), list(changes.removed))
        if len(self._table.groups) != 1:
            return  # a chunk of several groups has as many parts: served, and not announced
        for label in changes.labels:
            parent = None if label.parent_hash is None else self._storage_key(label.parent_hash)
            self._labels.note(
                ChunkLabel(self._storage_key(label.block_hash), label.directory_key, parent, label.position),
                self._tiers,
            )

    def unknown(self, unknown: GpuUnknown) -> None:
        """See `GpuListener`."""
        self._metrics.degraded.labels("gpu_unknown").inc()
        logger.warning("what engine %s holds in its gpu isn't known: %s", self._engine.name, unknown.reason)

    def _storage_key(self, block_hash: bytes) -> bytes:
        return foreign_storage_key(self._table.fleet_digest, offload_key(block_hash))


def offload_key(block_hash: bytes, group: int = 0) -> bytes:
    """vLLM's key for a chunk of a KV group: the hash of its last block, and the group's number, big-endian."""
    return block_hash + group.to_bytes(4, "big")


def process_life(pid: int) -> bytes:
    """32 bytes that name one life of a process: its number, when it began, and this boot of the host."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return os.urandom(32)
    return hashlib.sha256(b"%d %s %s" % (pid, fields[19], boot)).digest()


def _no_adapter(name: str) -> bytes | None:
    """An adapter's name and path say nothing of its weights: its blocks aren't announced."""
    return None


async def _fetch(http: httpx.AsyncClient, url: str) -> str:
    body = bytearray()
    async with http.stream("GET", url) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > METRICS_BYTES_MAX:
                raise MetricsUnreadable(f"more than {METRICS_BYTES_MAX} bytes")
    return body.decode()


def _write(path: Path, data: bytes | None) -> None:
    """Replace the copy, or remove it. One that can't be written costs a restart its knowledge."""
    try:
        if data is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        logger.warning("the table of an engine's gpu can't be saved: %s", error)
