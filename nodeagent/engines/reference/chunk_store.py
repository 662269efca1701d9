"""The host's tiers as the engine sees them, and the writer that hands chunks over without delaying a token."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nodeagent.client import ChunkLabel, OpenedChunk, OpenedPiece, PutResult

log = logging.getLogger(__name__)

WRITE_QUEUE_CHUNKS_MAX = 8
PUT_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 5.0


class ChunkStore(Protocol):
    """What the engine asks of `nodeagent.client.ChunkClient`.

    No call raises, or outlasts its time.
    """

    def open_piece(self, keys: Sequence[bytes], timeout_s: float) -> OpenedPiece:
        """References to the leading run of `keys` that the host holds at once; empty on any trouble."""
        ...

    def read_into(self, chunk: OpenedChunk, target: memoryview) -> bool:
        """Copy a chunk's verified bytes; False is a miss, and `target` may then hold anything."""
        ...

    def close(self, chunks: Sequence[OpenedChunk]) -> None:
        """Give references back."""
        ...

    def put(self, label: ChunkLabel, payload: memoryview, timeout_s: float) -> PutResult:
        """Hand a chunk over; refused on any trouble."""
        ...

    def report_gpu(self, stored: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """Say which directory keys the gpu tier took and dropped."""
        ...

    def report_load(self, running: int, waiting: int, flops: float) -> None:
        """Say how busy and how fast the engine is."""
        ...

    def stop(self) -> None:
        """Say goodbye."""
        ...


class NoStore:
    """The store of an engine without an agent: holds nothing, takes nothing."""

    def open_piece(self, keys: Sequence[bytes], timeout_s: float) -> OpenedPiece:
        """Nothing is held."""
        return OpenedPiece([])

    def read_into(self, chunk: OpenedChunk, target: memoryview) -> bool:
        """A miss."""
        return False

    def close(self, chunks: Sequence[OpenedChunk]) -> None:
        """Nothing to give back."""

    def put(self, label: ChunkLabel, payload: memoryview, timeout_s: float) -> PutResult:
        """Refused."""
        return PutResult.REFUSED

    def report_gpu(self, stored: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """Nobody listens."""

    def report_load(self, running: int, waiting: int, flops: float) -> None:
        """Nobody listens."""

    def stop(self) -> None:
        """Nothing to stop."""


def payload_bytes(payload: NDArray[np.float32]) -> memoryview:
    """A contiguous array's memory, as bytes; writable where the array is."""
    return memoryview(payload.data).cast("B")


class ChunkWriter:
    """Writes chunks through to the store on a thread of its own. A full queue drops the chunk and counts it."""

    def __init__(self, store: ChunkStore, on_outcome: Callable[[str], None]) -> None:
        self._store = store
        self._on_outcome = on_outcome
        self._queue: queue.Queue[tuple[ChunkLabel, NDArray[np.float32]] | None] = queue.Queue(WRITE_QUEUE_CHUNKS_MAX)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="chunk-writer", daemon=True)
        self._thread.start()

    def offer(self, label: ChunkLabel, payload: NDArray[np.float32]) -> None:
        """Queue a chunk to be written; never waits. `payload` must not change any more."""
        try:
            self._queue.put_nowait((label, payload))
        except queue.Full:
            self._on_outcome("dropped")

    def stop(self) -> None:
        """Finish the chunk in hand, drop the rest, end the thread."""
        self._is_stopping = True
        while True:
            try:
                self._queue.put_nowait(None)
                break
            except queue.Full:
                self._drop_one()
        self._thread.join(STOP_TIMEOUT_S)

    def drain(self) -> None:
        """Wait until everything queued so far was handed over."""
        self._queue.join()

    def _drop_one(self) -> None:
        try:
            self._queue.get_nowait()
        except queue.Empty:
            return
        self._queue.task_done()
        self._on_outcome("dropped")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if self._is_stopping:
                    self._on_outcome("dropped")
                    continue
                label, payload = item
                self._on_outcome(self._store.put(label, payload_bytes(payload), PUT_TIMEOUT_S).name.lower())
            except Exception:
                log.exception("a chunk could not be written through")
                self._on_outcome("dropped")
            finally:
                del item
                self._queue.task_done()
        self._queue.task_done()
