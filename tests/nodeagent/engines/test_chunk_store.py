import threading

import numpy as np

from nodeagent.client import ChunkLabel, PutResult
from nodeagent.engines.reference.chunk_store import WRITE_QUEUE_CHUNKS_MAX, ChunkWriter, NoStore, payload_bytes
from tests.nodeagent.engines.fakes import MemoryStore

PAYLOAD = np.arange(8, dtype=np.float32)


def label(index: int) -> ChunkLabel:
    return ChunkLabel(bytes([index]) * 32, bytes([index]) * 16, None, index)


class StuckStore(MemoryStore):
    """Takes nothing until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.released = threading.Event()

    def put(self, label: ChunkLabel, payload: memoryview, timeout_s: float) -> PutResult:
        self.entered.release()
        assert self.released.wait(30)
        return super().put(label, payload, timeout_s)


class BrokenStore(MemoryStore):
    """Breaks its promise not to raise."""

    def put(self, label: ChunkLabel, payload: memoryview, timeout_s: float) -> PutResult:
        raise OSError("gone")


def test_chunks_are_written_as_their_bytes() -> None:
    store, outcomes = MemoryStore(), []
    writer = ChunkWriter(store, outcomes.append)
    writer.offer(label(1), PAYLOAD)
    writer.offer(label(1), PAYLOAD)
    writer.drain()
    writer.stop()
    assert store.chunks == {label(1).storage_key: PAYLOAD.tobytes()}
    assert outcomes == ["stored", "already"]


def test_a_full_queue_drops_and_counts_and_never_waits() -> None:
    store, outcomes = StuckStore(), []
    writer = ChunkWriter(store, outcomes.append)
    writer.offer(label(0), PAYLOAD)
    assert store.entered.acquire(timeout=30)
    for index in range(1, WRITE_QUEUE_CHUNKS_MAX + 4):
        writer.offer(label(index), PAYLOAD)
    assert outcomes == ["dropped"] * 3
    store.released.set()
    writer.drain()
    writer.stop()
    assert len(store.chunks) == WRITE_QUEUE_CHUNKS_MAX + 1


def test_stopping_finishes_the_chunk_in_hand_and_drops_the_rest() -> None:
    store, outcomes = StuckStore(), []
    writer = ChunkWriter(store, outcomes.append)
    for index in range(WRITE_QUEUE_CHUNKS_MAX):
        writer.offer(label(index), PAYLOAD)
    assert store.entered.acquire(timeout=30)
    stopping = threading.Thread(target=writer.stop)
    stopping.start()
    store.released.set()
    stopping.join(30)
    assert not stopping.is_alive()
    assert len(outcomes) == WRITE_QUEUE_CHUNKS_MAX
    assert 1 <= outcomes.count("stored") == len(store.chunks)


def test_a_store_that_fails_costs_the_chunk_not_the_writer() -> None:
    outcomes: list[str] = []
    writer = ChunkWriter(BrokenStore(), outcomes.append)
    writer.offer(label(1), PAYLOAD)
    writer.offer(label(2), PAYLOAD)
    writer.drain()
    writer.stop()
    assert outcomes == ["dropped", "dropped"]


def test_without_a_host_nothing_is_held_and_nothing_taken() -> None:
    store, keys = NoStore(), [b"k" * 32]
    assert store.open_piece(keys, 1.0).chunks == []
    assert store.put(label(1), payload_bytes(PAYLOAD), 1.0) is PutResult.REFUSED


def test_a_payload_is_seen_not_copied() -> None:
    target = np.zeros(8, np.float32)
    payload_bytes(target)[:] = PAYLOAD.tobytes()
    np.testing.assert_array_equal(target, PAYLOAD)
