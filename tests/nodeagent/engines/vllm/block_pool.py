"""vLLM's block pool in miniature: lazy reuse in the order of use, tails first, duplicates, silent prefix hits.

An oracle: it knows every block's whole prefix, so what its caches hold as chunks is computed without any event.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from directory.chunks import chunk_keys, directory_key, pack_tokens
from directory.identity import Scope
from nodeagent.engines.vllm.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event

ADAPTERS = {"good": b"\x07" * 32, "twin": b"\x07" * 32}
Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    tokens: Prefix
    salt: str | None = None
    adapter: str | None = None


@dataclass(slots=True)
class Running:
    request: Request
    tables: list[list[int | None]]
    cached: list[int] = field(default_factory=list)
    """Per group, how many blocks are in the prefix cache."""


class BlockPool:
    """`windows` has an entry for each group: None for full attention, else the window in tokens.

    With `segment_blocks`, groups with a window cache only the last window of each segment (vLLM's sparse retention).
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        *,
        ints: bool = False,
        segment_blocks: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.segment_blocks = segment_blocks
        self.windows = windows
        self.ints = ints
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.references = dict.fromkeys(range(blocks), 0)
        self.owner: dict[int, tuple[int, BlockHash]] = {}
        self.cache: list[dict[BlockHash, list[int]]] = [{} for _ in windows]
        self.seen: dict[BlockHash, tuple[Request, int]] = {}
        self.events: list[Event] = []

    def take_events(self) -> tuple[Event, ...]:
        events, self.events = tuple(self.events), []
        return events

    def name(self, request: Request, blocks: int) -> BlockHash:
        prefix = request.tokens[: blocks * self.block_size]
        digest = hashlib.sha256(repr((prefix, request.salt, request.adapter)).encode()).digest()
        name: BlockHash = int.from_bytes(digest[-8:], "big") if self.ints else digest
        self.seen[name] = (request, blocks)
        return name

    def start(self, request: Request) -> Running | None:
        """Allocate a prompt's blocks, after what the cache has of it. None where the pool is too small."""
        total = -(-len(request.tokens) // self.block_size)
        hit = self._hit(request)
        found = [self._hit_blocks(group, request, hit) for group in range(len(self.windows))]
        kept = [block for table in found for block in table if block is not None]
        if (total - hit) * len(self.windows) > sum(block not in kept for block in self.free):
            return None
        for block in kept:
            self.references[block] += 1
            self.free.pop(block, None)
        for table in found:
            for _ in range(total - hit):
                block, _ = self.free.popitem(last=False)
                self._evict(block)
                self.references[block] += 1
                table.append(block)
        return Running(request, found, [hit] * len(self.windows))

    def compute(self, running: Running, tokens: int) -> None:
        """The first `tokens` of the prompt are computed: their full blocks become reusable, old windows are let go."""
        for group, window in enumerate(self.windows):
            self._cache_full(running, group, tokens // self.block_size)
            if window is not None:
                self._release_before(running.tables[group], max(0, tokens - window + 1) // self.block_size)

    def finish(self, running: Running) -> None:
        for table in running.tables:
            self._release(table[::-1])

    def reset(self) -> None:
        for group in self.cache:
            group.clear()
        self.owner.clear()
        self.events.append(AllBlocksCleared())

    def held(self, fleet_digest: bytes, chunk_tokens: int) -> set[bytes]:
        """The directory keys of all chunks that are usable wherever a prompt leaves them."""
        per_chunk, held = chunk_tokens // self.block_size, set()
        for request, blocks in list(self.seen.values()):
            if request.adapter not in (None, *ADAPTERS) or blocks % per_chunk:
                continue
            if all(self._has_last(group, request, blocks, per_chunk) for group in range(len(self.windows))):
                lora = ADAPTERS[request.adapter] if request.adapter else None
                root = Scope(lora=lora, salt=request.salt).root(fleet_digest)
                tokens = pack_tokens(request.tokens[: blocks * self.block_size])
                held.add(directory_key(chunk_keys(root, tokens, chunk_tokens)[-1]))
        return held

    def _has_last(self, group: int, request: Request, blocks: int, per_chunk: int) -> bool:
        window = self.windows[group]
        needed = per_chunk if window is None else min(blocks, -(-(window - 1) // self.block_size))
        return all(self.name(request, blocks - back) in self.cache[group] for back in range(needed))

    def _hit(self, request: Request) -> int:
        """vLLM's rule: every block in full groups, the last window's in the others, one token left to compute."""
        for blocks in range((len(request.tokens) - 1) // self.block_size, 0, -1):
            if all(
                self._has_last(group, request, blocks, blocks if window is None else 0)
                for group, window in enumerate(self.windows)
            ):
                return blocks
        return 0

    def _hit_blocks(self, group: int, request: Request, hit: int) -> list[int | None]:
        window = self.windows[group]
        first = 0 if window is None else max(0, hit - -(-(window - 1) // self.block_size))
        names = [self.name(request, blocks + 1) for blocks in range(hit)]
        return [self.cache[group][name][0] if place >= first else None for place, name in enumerate(names)]

    def _cache_full(self, running: Running, group: int, full: int) -> None:
        start, table, request = running.cached[group], running.tables[group], running.request
        if full <= start:
            return
        names: list[BlockHash] = []
        keys: list[tuple[str, ...] | None] = []
        for place in range(start, full):
            block = table[place]
            if block is None or not self._is_retained(group, place):
                continue
            name = self.name(request, place + 1)
            self.cache[group].setdefault(name, []).append(block)
            self.owner[block] = (group, name)
            names.append(name)
            own = (request.adapter, request.salt if place == 0 else None)
            keys.append(tuple(key for key in own if key is not None) or None)
        running.cached[group] = full
        window = self.windows[group]
        self.events.append(
            BlockStored(
                block_hashes=tuple(names),
                parent_block_hash=self.name(request, start) if start else None,
                tokens=pack_tokens(request.tokens[start * self.block_size : full * self.block_size]),
                block_size=self.block_size,
                lora_id=1 if request.adapter else None,
                medium="GPU",
                lora_name=request.adapter,
                extra_keys=tuple(keys),
                group_idx=group,
                kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
                kv_cache_spec_sliding_window=window,
            )
        )

    def _is_retained(self, group: int, place: int) -> bool:
        window, segment = self.windows[group], self.segment_blocks
        if window is None or segment is None:
            return True
        return place % segment >= segment - -(-(window - 1) // self.block_size)

    def _evict(self, block: int) -> None:
        if block not in self.owner:
            return
        group, name = self.owner.pop(block)
        copies = self.cache[group][name]
        copies.remove(block)
        if not copies:
            del self.cache[group][name]
        self.events.append(BlockRemoved((name,), "GPU", group))

    def _release_before(self, table: list[int | None], end: int) -> None:
        self._release(table[:end])
        table[:end] = [None] * end

    def _release(self, blocks: list[int | None]) -> None:
        for block in blocks:
            if block is not None:
                self.references[block] -= 1
                if not self.references[block]:
                    self.free[block] = None
