"""Chunks between a vLLM engine's staging rows and its host's tiers; never in the scheduler's way.

The scheduler's thread calls every public method here; none of them waits, but `drain` and `close`. Three kinds of
threads do the waiting: one asks the agent (a batch of keys for each request, opened as one run), a few copy chunks
into rows, one stores rows. Whatever becomes of the agent, a lookup ends as a miss and a job as failed within their
deadlines: the engine then computes what it would have loaded.

A key that is found is held by a reference until it was loaded or its requests are finished, so what was promised to
the scheduler is there when it loads. It depends on nothing of vLLM.
"""

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass, field
from typing import Protocol

from nodeagent.client import ChunkLabel, OpenedChunk, PutResult

LOOKUP_WAIT_MIN_S, LOOKUP_WAIT_MAX_S = 0.05, 2.0
"""Bounds on how long a run may be looked for and read from disk; in between, a part of what computing it would take."""
LOOKUP_WAIT_FRACTION = 0.5
SILENCE_S = 0.25
"""An agent that let a whole lookup pass in silence isn't asked for this long: requests behind it don't wait as well."""
PUT_WAIT_S = 2.0
LOAD_THREADS = 2
STORES_QUEUED_MAX = 256
VERDICTS_MAX = 1_000_000

logger = logging.getLogger(__name__)


class Host(Protocol):
    """The host's tiers, as `ChunkClient` has them."""

    @property
    def is_connected(self) -> bool:
        """Whether the agent has let this engine in."""
        ...

    def open(self, keys: Sequence[bytes], timeout_s: float) -> list[OpenedChunk]:
        """References to the leading run of storage keys that is held."""
        ...

    def read_into(self, chunk: OpenedChunk, target: memoryview) -> bool:
        """Copy and check; False is a miss."""
        ...

    def close(self, chunks: Sequence[OpenedChunk]) -> None:
        """Give references back."""
        ...

    def put(self, label: ChunkLabel, payload: memoryview, timeout_s: float) -> PutResult:
        """Store a chunk."""
        ...


class Verdict(enum.Enum):
    """What is known of a key: it can be loaded, it can't, or ask again at the next step."""

    HIT = enum.auto()
    MISS = enum.auto()
    RETRY = enum.auto()


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A chunk, by the engine's own key, its row in the staging area, and its place in its prompt where it is known."""

    key: bytes
    row: int
    position: int = 0


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job's end: the keys that were moved, in order; `is_complete` if those are all."""

    job: int
    is_complete: bool
    moved: tuple[bytes, ...]
    seconds: float
    moved_bytes: int


@dataclass(eq=False, slots=True)
class _Asked:
    """A key that requests wait for. `opened` is the reference that a hit holds."""

    requests: set[str] = field(default_factory=set)
    verdict: Verdict = Verdict.RETRY
    opened: OpenedChunk | None = None


class ChunkTransfers:
    """Moves chunks of `chunk_bytes` between the staging area and the host.

    `area` is one flat, writable view of bytes; a chunk's row begins at a multiple of `row_bytes`. `storage_key` names
    the bytes of an engine's key. `seconds_per_chunk` is about what computing a chunk takes.
    """

    def __init__(
        self,
        host: Host,
        area: memoryview,
        row_bytes: int,
        chunk_bytes: int,
        storage_key: Callable[[bytes], bytes],
        seconds_per_chunk: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._area = area
        self._row_bytes = row_bytes
        self._chunk_bytes = chunk_bytes
        self._storage_key = storage_key
        self._seconds_per_chunk = seconds_per_chunk
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: dict[bytes, _Asked] = {}
        self._by_request: dict[str, dict[bytes, None]] = {}
        self._batch: dict[str, list[bytes]] = {}
        self._silent_until = 0.0
        self._finished: queue.SimpleQueue[FinishedJob] = queue.SimpleQueue()
        self._under_way: dict[int, Future[None]] = {}
        self._queued_stores = 0
        self._is_draining = False
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="warmroute-lookup")
        self._loads = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="warmroute-load")
        self._stores = ThreadPoolExecutor(1, thread_name_prefix="warmroute-store")

    @property
    def has_jobs(self) -> bool:
        """Whether jobs are under way, or their ends not yet taken."""
        return bool(self._under_way) or not self._finished.empty()

    def look_up(self, key: bytes, request: str) -> Verdict:
        """What is known of a key; one that is new is asked for at the next `flush`."""
        with self._lock:
            asked = self._asked.get(key)
            if asked is None:
                if not self._host.is_connected or self._is_silent() or len(self._asked) >= VERDICTS_MAX:
                    return Verdict.MISS
                asked = self._asked[key] = _Asked()
                self._batch.setdefault(request, []).append(key)
            asked.requests.add(request)
            self._by_request.setdefault(request, {})[key] = None
            return asked.verdict

    def flush(self) -> None:
        """Send what was looked up in this step to the agent, a run for each request."""
        with self._lock:
            batch, self._batch = self._batch, {}
        for keys in batch.values():
            self._lookups.submit(self._find, keys)

    def forget(self, request: str) -> None:
        """A request is finished: what was held for it alone is given back."""
        given_back: list[OpenedChunk] = []
        with self._lock:
            self._batch.pop(request, None)
            for key in self._by_request.pop(request, ()):
                asked = self._asked.get(key)
                if asked is None:
                    continue
                asked.requests.discard(request)
                if not asked.requests:
                    del self._asked[key]
                    if asked.opened is not None:
                        given_back.append(asked.opened)
        if given_back:
            self._lookups.submit(self._host.close, given_back)

    def load(self, job: int, chunks: Sequence[ChunkRow]) -> None:
        """Fill rows with chunks that were hits. What isn't there any more fails, and is a miss from then on."""
        opened = []
        with self._lock:
            for chunk in chunks:
                asked = self._asked.get(chunk.key)
                opened.append(asked.opened if asked is not None else None)
                if asked is not None:
                    asked.opened = None
        self._under_way[job] = self._loads.submit(self._load, job, list(chunks), opened, self._clock())

    def store(self, job: int, chunks: Sequence[ChunkRow]) -> None:
        """Store rows. With too many queued, or without an agent, the job fails at once."""
        if not self._host.is_connected or self._queued_stores >= STORES_QUEUED_MAX or self._is_silent():
            self._finished.put(FinishedJob(job, False, (), 0.0, 0))
            return
        with self._lock:
            self._queued_stores += 1
        self._under_way[job] = self._stores.submit(self._store, job, list(chunks), self._clock())

    def take_finished(self) -> list[FinishedJob]:
        """The jobs that ended since the last call."""
        taken: list[FinishedJob] = []
        while True:
            try:
                finished = self._finished.get_nowait()
            except queue.Empty:
                return taken
            self._under_way.pop(finished.job, None)
            taken.append(finished)

    def drain(self) -> None:
        """Wait until no job touches a row. Copies under way end; stores that haven't begun fail."""
        self._is_draining = True
        wait_for_all(list(self._under_way.values()))
        self._is_draining = False

    def close(self) -> None:
        """Drain, give everything back, end the threads."""
        self._is_draining = True
        for pool in (self._loads, self._stores, self._lookups):
            pool.shutdown(wait=True, cancel_futures=pool is self._lookups)
        with self._lock:
            held = [asked.opened for asked in self._asked.values() if asked.opened is not None]
            self._asked.clear()
            self._by_request.clear()
        self._host.close(held)

    def _is_silent(self) -> bool:
        return self._clock() < self._silent_until

    def _find(self, keys: list[bytes]) -> None:
        """Open a run. Keys whose requests were forgotten meanwhile are given back."""
        wait_s = len(keys) * self._seconds_per_chunk * LOOKUP_WAIT_FRACTION
        wait_s = min(max(wait_s, LOOKUP_WAIT_MIN_S), LOOKUP_WAIT_MAX_S)
        opened: list[OpenedChunk] = []
        started = self._clock()
        try:
            if not self._is_silent():
                opened = self._host.open([self._storage_key(key) for key in keys], wait_s)
        except Exception:  # the edge of the thread: a fault here must be a miss, not a request that waits for ever
            logger.exception("chunks can't be looked up")
        if not opened and self._clock() - started >= wait_s:
            self._silent_until = self._clock() + SILENCE_S
        unwanted: list[OpenedChunk] = []
        with self._lock:
            for index, key in enumerate(keys):
                found = opened[index] if index < len(opened) else None
                if found is not None and found.length != self._chunk_bytes:
                    unwanted.append(found)
                    found = None
                asked = self._asked.get(key)
                if asked is None or asked.verdict is not Verdict.RETRY:
                    unwanted += [found] if found is not None else []
                    continue
                asked.opened = found
                asked.verdict = Verdict.HIT if found is not None else Verdict.MISS
        if unwanted:
            self._host.close(unwanted)

    def _load(self, job: int, chunks: list[ChunkRow], opened: list[OpenedChunk | None], started: float) -> None:
        moved: list[bytes] = []
        try:
            for chunk, found in zip(chunks, opened, strict=True):
                if found is not None and self._host.read_into(found, self._row(chunk.row)):
                    moved.append(chunk.key)
        except Exception:  # the edge of the thread: the job must end
            logger.exception("chunks can't be loaded")
        finally:
            self._end_load(chunks, set(moved), [found for found in opened if found is not None])
            self._end(job, len(moved) == len(chunks), moved, started)

    def _end_load(self, chunks: Sequence[ChunkRow], moved: set[bytes], opened: list[OpenedChunk]) -> None:
        with self._lock:
            for chunk in chunks:
                asked = self._asked.get(chunk.key)
                if asked is None:
                    continue
                # What was loaded is in the staging rows: who asks again, after it left them, asks the agent anew. What
                # failed is a miss for as long as its requests live, or they would try for ever.
                if chunk.key in moved:
                    self._drop(chunk.key, asked)
                else:
                    asked.verdict = Verdict.MISS
        self._host.close(opened)

    def _drop(self, key: bytes, asked: _Asked) -> None:
        for request in asked.requests:
            self._by_request.get(request, {}).pop(key, None)
        del self._asked[key]

    def _store(self, job: int, chunks: list[ChunkRow], started: float) -> None:
        moved: list[bytes] = []
        try:
            for chunk in chunks:
                if self._is_draining or self._is_silent():
                    break
                asked_at = self._clock()
                label = ChunkLabel(self._storage_key(chunk.key), None, None, chunk.position)
                if self._host.put(label, self._row(chunk.row), PUT_WAIT_S) is not PutResult.REFUSED:
                    moved.append(chunk.key)
                elif self._clock() - asked_at >= PUT_WAIT_S:
                    self._silent_until = self._clock() + SILENCE_S
        except Exception:  # the edge of the thread: the job must end
            logger.exception("chunks can't be stored")
        finally:
            with self._lock:
                self._queued_stores -= 1
            self._end(job, len(moved) == len(chunks), moved, started)

    def _end(self, job: int, is_complete: bool, moved: list[bytes], started: float) -> None:
        seconds = self._clock() - started
        self._finished.put(FinishedJob(job, is_complete, tuple(moved), seconds, len(moved) * self._chunk_bytes))

    def _row(self, row: int) -> memoryview:
        start = row * self._row_bytes
        return self._area[start : start + self._chunk_bytes]
