"""Cached prefixes as the engine sees them: what can be loaded of a prompt's beginning, and what is kept of it.

A run may be longer than what the host's DRAM holds at once, and parts of it may have to be read from disk. So it is
opened in pieces: open, copy, close, open the rest, for as long as the host says that it goes on. The host is given the
time that computing the rest would take; a thread of its own waits, so that the replies under way go on meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from directory.chunks import chunk_keys, directory_key, usable_chunks
from directory.identity import Identity, Scope
from directory.tiers import Tier
from nodeagent.client import ChunkLabel, OpenedChunk, OpenedPiece
from nodeagent.engines.reference.chunk_store import ChunkStore, ChunkWriter, payload_bytes
from nodeagent.engines.reference.gpu_tier import GpuTier
from nodeagent.engines.reference.kv import KvSequence

OPEN_TIMEOUT_MIN_S = 0.25
"""What an open is given at least: the host's DRAM answers at once, but its agent may be busy."""
OPEN_TIMEOUT_MAX_S = 10.0
"""What the opens of one prompt wait at most, but for the minimum of each; the agent itself waits no longer."""
OPEN_TURN_S = 0.02
"""How long a turn of the scheduler waits for an open."""
OPENS_MAX = 2
"""Opens under way: that of the prompt in hand, and of one that was given up."""


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The names of a prompt's full chunks: what bytes are found under, and what is announced; and of which salt."""

    storage: tuple[bytes, ...]
    directory: tuple[bytes, ...]
    salt_tag: bytes | None = None


class PrefixHit(Protocol):
    """The leading chunks of one prompt, loaded one at a time so that other work can go on in between."""

    def is_ready(self) -> bool:
        """Whether `load_next` needn't wait; gives it a moment of at most `OPEN_TURN_S`."""
        ...

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

    def is_ready(self) -> bool:
        """There is nothing to wait for."""
        return True

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
    """The engine's own `gpu` tier joined with its host's tiers behind the store.

    `prefill_s(end, start)` is the seconds it would take to compute the tokens between.
    """

    def __init__(
        self,
        identity: Identity,
        tp_rank: int,
        chunk_tokens: int,
        gpu: GpuTier,
        store: ChunkStore,
        writer: ChunkWriter,
        prefill_s: Callable[[int, int], float],
    ) -> None:
        self._shard_digest = identity.shard_digest(tp_rank)
        self._fleet_digest = identity.fleet_digest()
        self._chunk_tokens = chunk_tokens
        self._gpu = gpu
        self._store = store
        self._writer = writer
        self._prefill_s = prefill_s
        self._is_silent = False
        self._opens = ThreadPoolExecutor(OPENS_MAX, thread_name_prefix="prefix-open")

    def find(self, tokens: bytes, scope: Scope) -> tuple[PromptKeys, PrefixHit]:
        """See `PrefixCache`."""
        storage = chunk_keys(scope.root(self._shard_digest), tokens, self._chunk_tokens)
        fleet = chunk_keys(scope.root(self._fleet_digest), tokens, self._chunk_tokens)
        keys = PromptKeys(tuple(storage), tuple(directory_key(key) for key in fleet), scope.salt_tag)
        usable = usable_chunks(len(tokens) // 4, self._chunk_tokens)
        return keys, _TieredHit(self, keys, usable, self._gpu.leading(keys.storage[:usable]))

    def keep(self, keys: PromptKeys, index: int, sequence: KvSequence) -> None:
        """See `PrefixCache`: into `gpu`, and through to the host's `dram`."""
        payload = sequence.export_tokens(index * self._chunk_tokens, (index + 1) * self._chunk_tokens)
        self.hold_in_gpu(keys, index, payload)
        parent = keys.storage[index - 1] if index else None
        label = ChunkLabel(keys.storage[index], keys.directory[index], parent, index, keys.salt_tag)
        self._writer.offer(label, payload)

    def hold_in_gpu(self, keys: PromptKeys, index: int, payload: NDArray[np.float32]) -> None:
        """Put a chunk into the `gpu` tier and report what changed there."""
        changes = self._gpu.insert(keys.storage[: index + 1], keys.directory[index], payload)
        if changes.stored or changes.evicted:
            self._store.report_gpu(changes.stored, changes.evicted)

    def begin_open(self, keys: PromptKeys, start: int, end: int, waited_s: float) -> "Future[_Opening]":
        """Open chunks start..end of a prompt whose opens have waited for so long already."""
        worth_s = self._prefill_s(end * self._chunk_tokens, start * self._chunk_tokens)
        timeout_s = max(OPEN_TIMEOUT_MIN_S, min(worth_s, OPEN_TIMEOUT_MAX_S) - waited_s)
        if self._is_silent:
            # An agent that doesn't answer isn't waited for by every prompt anew.
            timeout_s = OPEN_TIMEOUT_MIN_S
        return self._opens.submit(self._open, keys.storage[start:end], timeout_s)

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
        """See `PrefixCache`. An open under way gives back by itself what it gets."""
        self._writer.stop()
        self._opens.shutdown(wait=False, cancel_futures=True)

    def _open(self, keys: Sequence[bytes], timeout_s: float) -> "_Opening":
        began_s = time.monotonic()
        piece = self._store.open_piece(keys, timeout_s)
        self._is_silent = not piece.is_answered
        return _Opening(piece, time.monotonic() - began_s)


@dataclass(frozen=True, slots=True)
class _Opening:
    """A piece, and how long it was waited for."""

    piece: OpenedPiece
    waited_s: float


class _TieredHit:
    """A run: first what `gpu` holds (the arrays themselves, so eviction can't touch them), then the store's chunks.

    `usable` is how many of the prompt's chunks may be loaded.
    """

    def __init__(
        self, cache: TieredPrefixCache, keys: PromptKeys, usable: int, in_gpu: list[NDArray[np.float32]]
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._usable = usable
        self._in_gpu = deque(in_gpu)
        self._opened: deque[OpenedChunk] = deque()
        self._next = 0
        self._waited_s = 0.0
        self._goes_on = False
        self._opening = cache.begin_open(keys, len(in_gpu), usable, 0.0) if len(in_gpu) < usable else None

    def is_ready(self) -> bool:
        """See `PrefixHit`."""
        if self._in_gpu or self._opening is None:
            return True
        return bool(wait([self._opening], OPEN_TURN_S).done)

    def load_next(self, sequence: KvSequence) -> str | None:
        """See `PrefixHit`. A chunk that can't be read ends the run."""
        index = self._next
        if self._in_gpu:
            sequence.import_tokens(self._in_gpu.popleft())
            self._next += 1
            return Tier.GPU.label
        if self._opening is not None:
            self._take(self._opening.result())
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
        if not self._opened and self._goes_on and self._next < self._usable:
            self._opening = self._cache.begin_open(self._keys, self._next, self._usable, self._waited_s)
        return str(chunk.tier)

    def close(self) -> None:
        """See `PrefixHit`. An open that is still waited for gives back what it gets."""
        if self._opening is not None:
            self._opening.add_done_callback(self._give_back_late)
            self._opening.cancel()
            self._opening = None
        if self._opened:
            self._cache.give_back(list(self._opened))
            self._opened.clear()

    def _take(self, opening: _Opening) -> None:
        self._opening = None
        self._opened.extend(opening.piece.chunks)
        self._goes_on = opening.piece.goes_on
        self._waited_s += opening.waited_s

    def _give_back_late(self, opening: "Future[_Opening]") -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._cache.give_back(opening.result().piece.chunks)
