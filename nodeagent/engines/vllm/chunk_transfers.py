"""Chunks between a vLLM engine's staging rows and its host's tiers; never in the scheduler's way.

The scheduler's thread calls every public method here; none of them waits, but `drain` and `close`. Three kinds of
threads do the waiting: one asks the agent (a batch of keys for each request, opened as one run), a few copy chunks
into rows, one stores rows. Whatever becomes of the agent, a lookup ends as a miss and a job as failed within their
deadlines: the engine then computes what it would have loaded.

What is asked, in which pieces, and what the scheduler is promised is `promises.py`'s to decide. Neither depends on
anything of vLLM.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass
from typing import Protocol

from nodeagent.client import ChunkLabel, OpenedChunk, OpenedPiece, PutResult
from nodeagent.engines.vllm.promises import Promises, Run, Verdict

LOOKUP_WAIT_MIN_S, LOOKUP_WAIT_MAX_S = 0.05, 2.0
"""Bounds on how long a piece may be looked for and read from disk. In between, the pieces of a run together have a part
of what computing it would take."""
LOOKUP_WAIT_FRACTION = 0.5
SILENCE_S = 0.25
"""An agent that let a whole lookup pass in silence isn't asked for this long: requests behind it don't wait as well."""
PUT_WAIT_S = 2.0
LOAD_THREADS = 2
STORES_QUEUED_MAX = 256

logger = logging.getLogger(__name__)


class Host(Protocol):
    """The host's tiers, as `ChunkClient` has them."""

    @property
    def is_connected(self) -> bool:
        """Whether the agent has let this engine in."""
        ...

    def open_piece(self, keys: Sequence[bytes], timeout_s: float) -> OpenedPiece:
        """References to the leading run of storage keys that is held at once, and whether it goes on."""
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
        self._promises = Promises(area.nbytes // row_bytes)
        self._silent_until = 0.0
        self._finished: queue.SimpleQueue[FinishedJob] = queue.SimpleQueue()
        self._under_way: dict[int, Future[None]] = {}
        self._queued_stores = 0
        self._is_draining = False
        self._is_closing = False
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
            return self._promises.look_up(key, request, may_ask=self._host.is_connected and not self._is_silent())

    def flush(self) -> None:
        """The end of a step, its loads being begun: ask the agent for what was looked up in it and isn't known."""
        with self._lock:
            end = self._promises.end_step()
        self._give_back(end.given_back)
        for run in end.to_open:
            self._lookups.submit(self._find, run)

    def forget(self, request: str) -> None:
        """A request is through with its lookups, or begins them anew: what was held for it alone is given back."""
        with self._lock:
            given_back = self._promises.forget(request)
        self._give_back(given_back)

    def load(self, job: int, chunks: Sequence[ChunkRow]) -> None:
        """Fill rows with chunks that were hits. What isn't there any more fails, and is a miss from then on."""
        with self._lock:
            opened = self._promises.begin_load([chunk.key for chunk in chunks])
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
        self._is_draining = self._is_closing = True
        for pool in (self._loads, self._stores, self._lookups):
            pool.shutdown(wait=True)
        with self._lock:
            held = self._promises.forget_all()
        self._host.close(held)

    def _is_silent(self) -> bool:
        return self._clock() < self._silent_until

    def _find(self, run: Run) -> None:
        """Open the next piece of a run."""
        with self._lock:
            keys = self._promises.wanted(run)
        patience_s = run.keys * self._seconds_per_chunk * LOOKUP_WAIT_FRACTION - run.waited_s
        wait_s = min(max(patience_s, LOOKUP_WAIT_MIN_S), LOOKUP_WAIT_MAX_S)
        piece = OpenedPiece([])
        started = self._clock()
        try:
            if keys and not self._is_silent() and not self._is_closing:
                piece = self._host.open_piece([self._storage_key(key) for key in keys], wait_s)
        except Exception:  # the edge of the thread: a fault here must be a miss, not a request that waits for ever
            logger.exception("chunks can't be looked up")
        waited_s = self._clock() - started
        run.waited_s += waited_s
        if not piece.is_answered and waited_s >= wait_s:
            self._silent_until = self._clock() + SILENCE_S
        fitting = next((i for i, chunk in enumerate(piece.chunks) if chunk.length != self._chunk_bytes), None)
        found = piece.chunks[:fitting]
        with self._lock:
            unwanted = self._promises.settle(run, keys, found, piece.goes_on and fitting is None)
        self._host.close([*unwanted, *piece.chunks[len(found) :]])

    def _load(self, job: int, chunks: list[ChunkRow], opened: list[OpenedChunk | None], started: float) -> None:
        moved: list[bytes] = []
        try:
            for chunk, found in zip(chunks, opened, strict=True):
                if found is not None and self._host.read_into(found, self._row(chunk.row)):
                    moved.append(chunk.key)
        except Exception:  # the edge of the thread: the job must end
            logger.exception("chunks can't be loaded")
        finally:
            # Given back before the next piece can be asked for: the host needs the room for it.
            self._host.close([found for found in opened if found is not None])
            with self._lock:
                self._promises.end_load([chunk.key for chunk in chunks], set(moved))
            self._end(job, len(moved) == len(chunks), moved, started)

    def _give_back(self, chunks: list[OpenedChunk]) -> None:
        if chunks:
            self._lookups.submit(self._host.close, chunks)

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
