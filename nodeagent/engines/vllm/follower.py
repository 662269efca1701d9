"""Follows one vLLM engine for as long as it is attached: its KV events, its metrics, and the table's copy on disk.

    events -> table -> `gpu` placements of the engine, and labels for the chunks it stores on the host

The table is saved every few seconds under the engine's process, so that an agent that restarts knows again what the
engine's GPU holds, as far as the engine's replay joins it.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from pathlib import Path

import httpx
import zmq.asyncio

from directory.chunks import foreign_storage_key
from nodeagent.engines.vllm.engine_metrics import (
    METRICS_BYTES_MAX,
    EngineMetrics,
    MetricsUnreadable,
    PrefillRate,
    read_metrics,
)
from nodeagent.engines.vllm.gpu_table import GpuChanges, GpuTable
from nodeagent.engines.vllm.process_life import process_life
from nodeagent.engines.vllm.saved_table import SavedTable, load_table
from nodeagent.engines.vllm.staging_file import remove_staging_file
from nodeagent.engines.vllm.staging_notes import StagingNotes
from nodeagent.engines.vllm.subscriber import GpuUnknown, KvEventSubscriber
from nodeagent.engines.vllm.table_file import TableFile
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
STAGING_LOOKS_MAX = 20
"""How often an engine's staging file is looked for, `SAVE_INTERVAL_S` apart: vLLM may make it after the hello."""
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
        self._followed: dict[str, _Followed] = {}
        self._staging = StagingNotes(folder)

    async def __call__(self, engine: AttachedEngine, source: KvEventSource) -> None:
        """See `Follow`."""
        life = process_life(engine.process.pid)
        name = hashlib.sha256(engine.name.encode()).hexdigest()[:32]
        file = TableFile(self._folder / f"{name}.gpu")
        registration = engine.registration
        digest, chunk_tokens = registration.identity.fleet_digest(), registration.chunk_tokens
        data = file.read()
        saved = None
        if data is not None:
            saved = load_table(data, life=life, fleet_digest=digest, chunk_tokens=chunk_tokens, adapters=_no_adapter)
        start = saved or SavedTable(GpuTable(digest, chunk_tokens, _no_adapter), 0, b"")
        listener = _Listener(engine, start.table, self._labels, self._tiers, self._metrics)
        context = zmq.asyncio.Context()
        subscriber = KvEventSubscriber(source, start, listener, context)
        followed = self._followed[engine.name] = _Followed(subscriber, file, life)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(subscriber.run())
                group.create_task(self._save(followed))
                group.create_task(self._watch_metrics(engine, followed))
                if source.staging_path is not None:
                    group.create_task(self._note_staging(name, source.staging_path, engine.process.pid, life))
        finally:
            if self._followed.get(engine.name) is followed:
                del self._followed[engine.name]
            context.destroy(linger=0)
            if engine.process.is_gone and source.staging_path is not None:
                remove_staging_file(source.staging_path)
                self._staging.drop(name)
            followed.write()

    def is_known(self, engine: str) -> bool:
        """Whether all that this engine's GPU holds is known."""
        followed = self._followed.get(engine)
        return followed is not None and followed.subscriber.is_known

    async def was_reset(self, engine: str) -> None:
        """An operator has reset an engine's prefix cache: it says so itself only with its next step.

        Returns once the saved table is empty too, so that an agent that is killed doesn't claim what was.
        """
        followed = self._followed.get(engine)
        if followed is not None:
            followed.subscriber.cleared()
            await followed.save()

    async def clear_leftovers(self) -> None:
        """Remove the staging files of engines that ended while no agent ran. Nothing is raised."""
        try:
            await asyncio.to_thread(self._staging.sweep)
        except Exception:  # the edge of a task: files that stay take memory, and nothing else
            logger.exception("removing the staging files of engines that are gone met a fault")

    async def _note_staging(self, name: str, path: str, pid: int, life: bytes) -> None:
        """What the engine's last life left goes; what this one has is noted."""
        try:
            await asyncio.to_thread(self._staging.sweep)
            for _ in range(STAGING_LOOKS_MAX):
                if await asyncio.to_thread(self._staging.keep, name, path, pid, life):
                    break
                await self._sleep(SAVE_INTERVAL_S)
        except Exception:  # the edge of a task: a file that stays is no reason to know nothing of an engine
            logger.exception("noting the staging file of an engine met a fault")

    async def _save(self, followed: "_Followed") -> None:
        """Every few seconds; a copy that isn't to be trusted any more goes. Counts what was skipped."""
        counted, subscriber = Counter[str](), followed.subscriber
        while True:
            await self._sleep(SAVE_INTERVAL_S)
            try:
                counted = self._count_skipped(subscriber.table.skipped + subscriber.counts, counted)
                await followed.save()
            except Exception:  # the edge of the loop: it costs a restart its knowledge
                logger.exception("saving the table of an engine's gpu met a fault")

    def _count_skipped(self, now: Counter[str], before: Counter[str]) -> Counter[str]:
        for reason, number in (now - before).items():
            self._metrics.events_skipped.labels(reason).inc(number)
        return now

    async def _watch_metrics(self, engine: AttachedEngine, followed: "_Followed") -> None:
        """Metrics into what the engine's registration reports. An engine that doesn't answer is routed on."""
        rate, failures, was_asleep = PrefillRate(), 0, False
        async with httpx.AsyncClient(timeout=SCRAPE_TIMEOUT_S, trust_env=False) as http:
            while True:
                try:
                    seen = read_metrics(await _fetch(http, f"{engine.registration.url}/metrics"))
                    self._note_metrics(engine, seen, rate)
                    failures = 0
                    if seen.is_asleep and not was_asleep:
                        # Its KV is gone, and no step may come that says so.
                        followed.subscriber.cleared()
                        await followed.save()
                    was_asleep = seen.is_asleep
                except Exception as error:  # noqa: BLE001 - the edge of the loop: an engine's words, and an HTTP client's
                    failures += 1
                    if failures == SCRAPES_FAILED_MAX:
                        self._metrics.degraded.labels("engine_metrics").inc()
                        logger.warning("engine %s doesn't tell its metrics: %r", engine.name, error)
                        engine.note_load(LoadReport(0, 0, engine.flops))
                await self._sleep(SCRAPE_INTERVAL_S)

    @staticmethod
    def _note_metrics(engine: AttachedEngine, seen: EngineMetrics, rate: PrefillRate) -> None:
        tokens_per_s, flops = rate.note(seen), engine.flops
        if tokens_per_s is not None:
            observed = 2 * engine.registration.shape.parameters * tokens_per_s
            flops += FLOPS_WEIGHT * (observed - flops)
        engine.note_load(LoadReport(seen.running, seen.waiting, flops))


class _Followed:
    """One engine while it is followed. `life` names its process."""

    def __init__(self, subscriber: KvEventSubscriber, file: TableFile, life: bytes) -> None:
        self.subscriber = subscriber
        self._file = file
        self._life = life
        self._written = -1

    async def save(self) -> None:
        """Write the table as it is now, off the event loop, unless it is on disk already."""
        revision = self.subscriber.revision
        if revision != self._written:
            await asyncio.to_thread(self._file.write, self.subscriber.dump(self._life), revision)
            self._written = max(self._written, revision)

    def write(self) -> None:
        """Write it at once: the last time."""
        try:
            if self.subscriber.revision != self._written:
                self._file.write(self.subscriber.dump(self._life), self.subscriber.revision)
        except Exception:  # the edge of a life: whoever cancels it waits for its end
            logger.exception("saving the table of an engine's gpu met a fault")


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
                ChunkLabel(
                    self._storage_key(label.block_hash), label.directory_key, parent, label.position, label.salt_tag
                ),
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


def _no_adapter(name: str) -> bytes | None:
    """An adapter's name and path say nothing of its weights: its blocks aren't announced."""
    return None


async def _fetch(http: httpx.AsyncClient, url: str) -> str:
    """The body as text, in `SCRAPE_TIMEOUT_S` altogether. Not compressed: a few bytes could be a gigabyte."""
    body = bytearray()
    headers = {"accept-encoding": "identity"}
    async with asyncio.timeout(SCRAPE_TIMEOUT_S), http.stream("GET", url, headers=headers) as answer:
        answer.raise_for_status()
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise MetricsUnreadable("the answer is compressed")
        async for part in answer.aiter_raw():
            body += part
            if len(body) > METRICS_BYTES_MAX:
                raise MetricsUnreadable(f"more than {METRICS_BYTES_MAX} bytes")
    return body.decode()
