"""The `gpu` tier: chunks in this process's memory, the way an accelerator would hold them.

Least recently used goes first, and touching a chunk touches its ancestors after it: a parent is never older than its
child, so a prefix shrinks from its end and stays unbroken. A prompt longer than the tier keeps its beginning.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GpuChunk:
    """A chunk's payload and the key it is announced under."""

    payload: Floats
    directory_key: bytes


@dataclass(frozen=True, slots=True)
class GpuChanges:
    """What an insertion did, in directory keys."""

    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()


class GpuTier:
    """At most `chunks_max` chunks by storage key. Thread-safe."""

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._chunks: OrderedDict[bytes, GpuChunk] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def chunks_max(self) -> int:
        """How many chunks fit."""
        return self._chunks_max

    def leading(self, keys: Sequence[bytes]) -> list[Floats]:
        """The chunks of the longest run of `keys` from its start that is held; they count as used."""
        with self._lock:
            run: list[Floats] = []
            for key in keys:
                chunk = self._chunks.get(key)
                if chunk is None:
                    break
                run.append(chunk.payload)
            self._touch(keys[: len(run)])
            return run

    def insert(self, keys: Sequence[bytes], directory_key: bytes, payload: Floats) -> GpuChanges:
        """Hold `payload` as the chunk `keys[-1]`, whose ancestors are the keys before it.

        Where only ancestors could make room, the chunk itself isn't held.
        """
        key = keys[-1]
        with self._lock:
            is_new = key not in self._chunks
            if is_new:
                self._chunks[key] = GpuChunk(payload, directory_key)
            self._touch(keys)
            surplus = len(self._chunks) - self._chunks_max
            dropped = [self._chunks.popitem(last=False) for _ in range(surplus)]
            is_held = key in self._chunks
        evicted = tuple(chunk.directory_key for each, chunk in dropped if each != key)
        return GpuChanges((directory_key,) if is_new and is_held else (), evicted)

    def clear(self) -> tuple[bytes, ...]:
        """Drop everything; returns the directory keys that are gone."""
        with self._lock:
            gone = tuple(chunk.directory_key for chunk in self._chunks.values())
            self._chunks.clear()
        return gone

    def inventory(self) -> list[bytes]:
        """The directory keys of all chunks, least recently used first."""
        with self._lock:
            return [chunk.directory_key for chunk in self._chunks.values()]

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)
