"""Cached prefixes as the engine sees them: what can be loaded of a prompt's beginning, and what is kept of it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from directory.chunks import chunk_keys, directory_key, usable_chunks
from directory.identity import Identity, Scope
from directory.tiers import Tier
from nodeagent.client import ChunkLabel, OpenedChunk
from nodeagent.engines.reference.chunk_store import ChunkStore, ChunkWriter, payload_bytes
from nodeagent.engines.reference.gpu_tier import GpuTier
from nodeagent.engines.reference.kv import KvSequence

OPEN_TIMEOUT_S = 0.25


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The names of a prompt's full chunks: what bytes are found under, and what is announced."""

    storage: tuple[bytes, ...]
    directory: tuple[bytes, ...]


class PrefixHit(Protocol):
    """The leading chunks of one prompt, loaded one at a time so that other work can go on in between."""

    def load_next(self, sequence: KvSequence) -> str | None:
        """Add the next chunk to `sequence` and name the tier it came from; None where the run ends."""
        ...

    def close(self) -> None:
        """Give back what is still referenced."""
        ...


class PrefixCache(Protocol):
    """Where prefixes come from and go to."""

    def find(self, tokens: bytes, scope: Scope) -> tuple[PromptKeys, PrefixHit]:
        """The keys of a prompt (token ids as little-endian u32) and what is held of its usable beginning."""
        ...

    def keep(self, keys: PromptKeys, index: int, sequence: KvSequence) -> None:
        """Keep the chunk that prefill has just computed. Never waits."""
        ...

    def stop(self) -> None:
        """Hand over what is in hand and end."""
        ...


class NoHit:
    """Nothing is cached."""

    def load_next(self, sequence: KvSequence) -> str | None:
        """The run is empty."""
        return None

    def close(self) -> None:
        """Nothing is referenced."""


class NoPrefixCache:
    """Every prompt is computed from its first token."""

    def find(self, tokens: bytes, scope: Scope) -> tuple[PromptKeys, PrefixHit]:
        """No keys, no hit."""
        return PromptKeys((), ()), NoHit()

    def keep(self, keys: PromptKeys, index: int, sequence: KvSequence) -> None:
        """Nothing is kept."""

    def stop(self) -> None:
        """Nothing to end."""


class TieredPrefixCache:
    """The engine's own `gpu` tier joined with its host's tiers behind the store."""

    def __init__(
        self, identity: Identity, tp_rank: int, chunk_tokens: int, gpu: GpuTier, store: ChunkStore, writer: ChunkWriter
    ) -> None:
        self._shard_digest = identity.shard_digest(tp_rank)
        self._fleet_digest = identity.fleet_digest()
        self._chunk_tokens = chunk_tokens
        self._gpu = gpu
        self._store = store
        self._writer = writer

    def find(self, tokens: bytes, scope: Scope) -> tuple[PromptKeys, PrefixHit]:
        """See `PrefixCache`."""
        storage = chunk_keys(scope.root(self._shard_digest), tokens, self._chunk_tokens)
        fleet = chunk_keys(scope.root(self._fleet_digest), tokens, self._chunk_tokens)
        keys = PromptKeys(tuple(storage), tuple(directory_key(key) for key in fleet))
        usable = usable_chunks(len(tokens) // 4, self._chunk_tokens)
        wanted = keys.storage[:usable]
        in_gpu = self._gpu.leading(wanted)
        rest = wanted[len(in_gpu) :]
        opened = self._store.open(rest, OPEN_TIMEOUT_S) if rest else []
        return keys, _TieredHit(self, keys, in_gpu, opened)

    def keep(self, keys: PromptKeys, index: int, sequence: KvSequence) -> None:
        """See `PrefixCache`: into `gpu`, and through to the host's `dram`."""
        payload = sequence.export_tokens(index * self._chunk_tokens, (index + 1) * self._chunk_tokens)
        self.hold_in_gpu(keys, index, payload)
        parent = keys.storage[index - 1] if index else None
        self._writer.offer(ChunkLabel(keys.storage[index], keys.directory[index], parent, index), payload)

    def hold_in_gpu(self, keys: PromptKeys, index: int, payload: NDArray[np.float32]) -> None:
        """Put a chunk into the `gpu` tier and report what changed there."""
        changes = self._gpu.insert(keys.storage[: index + 1], keys.directory[index], payload)
        if changes.stored or changes.evicted:
            self._store.report_gpu(changes.stored, changes.evicted)

    def read(self, chunk: OpenedChunk, sequence: KvSequence) -> NDArray[np.float32] | None:
        """A chunk's payload from the store, or None for a miss."""
        payload = sequence.empty_payload(self._chunk_tokens)
        if chunk.length != payload.nbytes or not self._store.read_into(chunk, payload_bytes(payload)):
            return None
        return payload

    def give_back(self, chunks: Sequence[OpenedChunk]) -> None:
        """Close references of the store."""
        self._store.close(chunks)

    def stop(self) -> None:
        """See `PrefixCache`."""
        self._writer.stop()


class _TieredHit:
    """A run: first what `gpu` holds (the arrays themselves, so eviction can't touch them), then the store's chunks."""

    def __init__(
        self,
        cache: TieredPrefixCache,
        keys: PromptKeys,
        in_gpu: list[NDArray[np.float32]],
        opened: list[OpenedChunk],
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._in_gpu = deque(in_gpu)
        self._opened = deque(opened)
        self._next = 0

    def load_next(self, sequence: KvSequence) -> str | None:
        """See `PrefixHit`. A chunk that can't be read ends the run."""
        index = self._next
        if self._in_gpu:
            sequence.import_tokens(self._in_gpu.popleft())
            self._next += 1
            return Tier.GPU.label
        if not self._opened:
            return None
        chunk = self._opened.popleft()
        payload = self._cache.read(chunk, sequence) if chunk.storage_key == self._keys.storage[index] else None
        self._cache.give_back([chunk])
        if payload is None:
            self.close()
            return None
        sequence.import_tokens(payload)
        self._cache.hold_in_gpu(self._keys, index, payload)
        self._next += 1
        return str(chunk.tier)

    def close(self) -> None:
        """See `PrefixHit`."""
        if self._opened:
            self._cache.give_back(list(self._opened))
            self._opened.clear()
