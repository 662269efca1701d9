"""What one vLLM engine's GPU holds, in directory keys, kept by its KV events. Pure: no clock, no I/O.

Copies are counted per (group, block hash), because vLLM may hold a block twice and tells of each copy. A chunk is held
while every group with full attention has all its blocks, and every group with a sliding window has the last window of
blocks before the chunk's end. The run of chunks that a reader finds is then usable wherever it ends: a chunk whose own
window is gone ends the run early, so the claim may be too short and is never too long. Models with recurrent state, or
groups that can't be followed, are `approximation`: nothing is claimed, and the reason is said.

What isn't known is unclaimed: blocks whose parent was never seen wait for it, in a bounded table; blocks with keys
that can't be read are refused with all below them. `skipped` counts all of it by reason.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from directory.chunks import TOKEN_BYTES, directory_key
from nodeagent.engines.vllm.block_scope import AdapterDigests
from nodeagent.engines.vllm.block_tree import Block, BlockTree, Label
from nodeagent.engines.vllm.events import AllBlocksCleared, Batch, BlockHash, BlockRemoved, BlockStored, Event

ENTRIES_MAX = 2**19
"""Blocks and counts of copies; a block of one group is two entries, about 1 KiB together."""
WAITING_BLOCKS_MAX = 2**13
WAITING_BYTES_MAX = 8 * 2**20
GROUPS_MAX = 64

FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})


@dataclass(frozen=True, slots=True)
class GpuChanges:
    """What a batch changed, in directory keys (16 bytes), parents first; and the labels of chunks that are new."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    labels: tuple[Label, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.labels)


class Group:
    """One KV-cache group of the engine: its geometry, and how many copies of each block it has."""

    __slots__ = ("block_size", "copies", "kind", "window_blocks", "window_tokens")

    def __init__(self, kind: str | None, window_tokens: int | None, block_size: int) -> None:
        self.kind = kind
        self.window_tokens = window_tokens
        self.block_size = block_size
        self.window_blocks = -(-(window_tokens - 1) // block_size) if window_tokens is not None else 0
        """How many blocks before a place an engine needs to go on from there (vLLM: cdiv(window - 1, block))."""
        self.copies: dict[BlockHash, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether the group attends to everything, so that a chunk needs all its blocks."""
        return self.kind is None or self.kind in FULL_KINDS


class GpuTable:
    """The `gpu` tier of one engine. `is_complete` says whether all that the engine holds is known.

    `fleet_digest` is the engine's, `adapters` resolves a LoRA name to the digest of its content. Not thread-safe.
    """

    def __init__(
        self, fleet_digest: bytes, chunk_tokens: int, adapters: AdapterDigests, entries_max: int = ENTRIES_MAX
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.fleet_digest = fleet_digest
        self.skipped: Counter[str] = Counter()
        self.approximation: str | None = None
        self.is_complete = True
        self.groups: dict[int, Group] = {}
        self.tree = BlockTree(fleet_digest, adapters, self.skipped)
        self._entries_max = entries_max
        self._held: dict[bytes, int] = {}
        self._waiting: OrderedDict[BlockHash, list[BlockStored]] = OrderedDict()
        self._waiting_blocks = 0
        self._waiting_bytes = 0
        self._touched: dict[Block, None] = {}
        self._before: dict[bytes, bool] = {}

    @property
    def held(self) -> frozenset[bytes]:
        """The directory keys of the chunks that the GPU holds."""
        return frozenset(self._held)

    @property
    def entries(self) -> int:
        """Blocks and counts of copies in the table; at most `entries_max` after a batch."""
        return len(self.tree) + sum(len(group.copies) for group in self.groups.values())

    @property
    def waiting_blocks(self) -> int:
        """Blocks that wait for their parent; at most `WAITING_BLOCKS_MAX`."""
        return self._waiting_blocks

    def apply(self, batch: Batch) -> GpuChanges:
        """Take in one batch, in its order. A table that outgrows its bound drops all, and is incomplete then."""
        self.skipped.update(batch.skipped)
        for event in batch.events:
            self._take(event)
            if self.entries > self._entries_max:
                self.skipped["table_full"] += 1
                self._forget(is_complete=False)
        return self._settle()

    def warm(self, batch: Batch) -> GpuChanges:
        """Learn places again from a batch that the table has taken in before it was saved; copies stay as they are."""
        for event in batch.events:
            if isinstance(event, BlockStored) and self._is_gpu(event.medium) and self._covers(event):
                group = self.groups.get(event.group_idx or 0)
                if group is not None and group.is_full and group.block_size == event.block_size:
                    self._touched.update(dict.fromkeys(self.tree.warm(event)))
        return self._settle()

    def clear(self, *, is_complete: bool) -> GpuChanges:
        """Drop everything: the engine is empty (`is_complete`), or what it holds isn't known any more."""
        self._forget(is_complete=is_complete)
        return self._settle()

    def begin_life(self) -> GpuChanges:
        """Another engine process, with nothing in its memory; its groups may be others."""
        self._forget(is_complete=True)
        self.groups.clear()
        self.approximation = None
        self.tree.blocks_per_chunk = 0
        return self._settle()

    def labels(self) -> tuple[Label, ...]:
        """The labels of all chunks whose key is known, held or not."""
        found = (self.tree.label(block) for block in self.tree.blocks.values() if block.key is not None)
        return tuple(label for label in found if label is not None)

    def revise(self, blocks: Iterable[Block]) -> GpuChanges:
        """Judge anew whether `blocks` end chunks that are held."""
        self._touched.update(dict.fromkeys(blocks))
        return self._settle()

    def _take(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self._forget(is_complete=True)
        elif not self._is_gpu(event.medium):
            self.skipped["other_medium"] += 1
        elif self.approximation is not None:
            self.skipped["approximate"] += 1
        elif isinstance(event, BlockStored):
            self._store(event)
        else:
            self._remove(event)

    def _store(self, event: BlockStored) -> None:
        group = self._group_of(event)
        if group is None:
            return
        if group.is_full and not self._covers(event):
            self.skipped["token_count"] += 1
            return
        for block_hash in event.block_hashes:
            group.copies[block_hash] = group.copies.get(block_hash, 0) + 1
        if group.is_full:
            self._place(event)
        else:
            self._touch(event.block_hashes)

    def _place(self, event: BlockStored) -> None:
        """Place the event's blocks, then those that waited for them, and so on."""
        ready = [event]
        while ready:
            stored = ready.pop()
            placed = self.tree.place(stored)
            if placed is None:
                self._wait(stored)
                continue
            self._touched.update(dict.fromkeys(placed))
            if self._waiting:
                for block_hash in stored.block_hashes:
                    ready.extend(self._stop_waiting(block_hash))

    def _wait(self, event: BlockStored) -> None:
        assert event.parent_block_hash is not None
        self._waiting.setdefault(event.parent_block_hash, []).append(event)
        self._waiting_blocks += len(event.block_hashes)
        self._waiting_bytes += len(event.tokens)
        while self._waiting_blocks > WAITING_BLOCKS_MAX or self._waiting_bytes > WAITING_BYTES_MAX:
            self._stop_waiting(next(iter(self._waiting)))
            self.skipped["parent_unknown"] += 1

    def _stop_waiting(self, parent: BlockHash) -> list[BlockStored]:
        events = self._waiting.pop(parent, [])
        self._waiting_blocks -= sum(len(event.block_hashes) for event in events)
        self._waiting_bytes -= sum(len(event.tokens) for event in events)
        return events

    def _remove(self, event: BlockRemoved) -> None:
        group = self.groups.get(event.group_idx or 0)
        if group is None:
            self.skipped["removed_unknown"] += len(event.block_hashes)
            return
        for block_hash in event.block_hashes:
            copies = group.copies.get(block_hash, 0)
            if copies > 1:
                group.copies[block_hash] = copies - 1
            elif copies:
                del group.copies[block_hash]
            else:
                self.skipped["removed_unknown"] += 1
        self._touch(event.block_hashes)

    def _group_of(self, event: BlockStored) -> Group | None:
        """The event's group, learned from the first event about it; None where the event doesn't fit it."""
        index = event.group_idx or 0
        group = self.groups.get(index)
        if group is None:
            group = Group(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, event.block_size)
            reason = self._why_not(index, group)
            if reason is not None:
                self.approximation = reason
                self._forget(is_complete=False)
                return None
            self.groups[index] = group
            self.tree.blocks_per_chunk = self.chunk_tokens // group.block_size
            if not group.is_full:
                self._touched.update(dict.fromkeys(self.tree.blocks.values()))
        elif group.block_size != event.block_size or group.kind != event.kv_cache_spec_kind:
            self.skipped["group_conflict"] += 1
            return None
        return group

    def _why_not(self, index: int, group: Group) -> str | None:
        """Why an engine with this group can't be followed exactly, if so."""
        if group.kind is None:
            if index:
                return f"group {index} of unknown kind"
        elif group.kind in WINDOW_KINDS:
            if group.window_tokens is None or group.window_tokens < 1:
                return f"group {index} has a window of unknown length"
        elif group.kind not in FULL_KINDS:
            return f"group {index} is {group.kind}"
        if self.chunk_tokens % group.block_size:
            return f"blocks of {group.block_size} tokens don't divide a chunk of {self.chunk_tokens}"
        if any(other.block_size != group.block_size for other in self.groups.values()):
            return f"group {index} has blocks of {group.block_size} tokens, others don't"
        return "too many groups" if len(self.groups) >= GROUPS_MAX else None

    def _forget(self, *, is_complete: bool) -> None:
        for key in self._held:
            self._before.setdefault(key, True)
        self._held.clear()
        self._touched.clear()
        self._waiting.clear()
        self._waiting_blocks = self._waiting_bytes = 0
        self.tree.clear()
        for group in self.groups.values():
            group.copies.clear()
        self.is_complete = is_complete and self.approximation is None

    def _touch(self, block_hashes: Iterable[BlockHash]) -> None:
        for block_hash in block_hashes:
            block = self.tree.blocks.get(block_hash)
            if block is not None:
                self._touched[block] = None

    def _settle(self) -> GpuChanges:
        """Judge the chunks that the touched blocks bear on, forget blocks that nothing holds, and say what changed."""
        self._touched.update(dict.fromkeys(self.tree.refused_while_held))
        self.tree.refused_while_held.clear()
        deepest_first = sorted(self._touched, key=lambda block: block.index, reverse=True)
        chunks = sorted(self._chunks_below(deepest_first), key=lambda block: block.index)
        for block in chunks:
            self._judge(block)
        new = [self.tree.label(block) for block in chunks if block in self._touched]
        labels = tuple(label for label in new if label is not None and self._has_copies(label.block_hash))
        for block in deepest_first:
            self.tree.trim(block, self._has_copies)
        self._touched.clear()
        before, self._before = self._before, {}
        return GpuChanges(
            stored=tuple(key for key, was_held in before.items() if not was_held and key in self._held),
            removed=tuple(key for key, was_held in before.items() if was_held and key not in self._held),
            labels=labels,
        )

    def _chunks_below(self, deepest_first: list[Block]) -> list[Block]:
        """The last blocks of all chunks that these blocks are part of, or lie in the window of.

        Each block is visited again only with a longer way to go, which deepest first hardly happens.
        """
        window = max((group.window_blocks for group in self.groups.values() if not group.is_full), default=0)
        ways: dict[Block, int] = {}
        chunks: list[Block] = []
        for start in deepest_first:
            way = max(window, self.tree.blocks_per_chunk - 1 - start.index % self.tree.blocks_per_chunk)
            ahead = [(start, way)]
            while ahead:
                block, way = ahead.pop()
                if ways.get(block, -1) >= way:
                    continue
                if block not in ways and block.key is not None:
                    chunks.append(block)
                ways[block] = way
                if way and block.children:
                    ahead.extend((child, way - 1) for child in block.children.values())
        return chunks

    def _judge(self, block: Block) -> None:
        """Note whether the chunk that `block` ends is held now."""
        is_held = self._is_usable(block)
        if is_held == block.is_held:
            return
        assert block.key is not None
        key = directory_key(block.key)
        count = self._held.get(key, 0)  # two adapters of equal content give one key
        self._before.setdefault(key, count > 0)
        block.is_held = is_held
        if is_held:
            self._held[key] = count + 1
        elif count > 1:
            self._held[key] = count - 1
        else:
            del self._held[key]

    def _is_usable(self, block: Block) -> bool:
        if not block.is_known or block.key is None:
            return False
        for group in self.groups.values():
            blocks = self.tree.blocks_per_chunk if group.is_full else group.window_blocks
            if not all(part.hash in group.copies for part in block.path(blocks)):
                return False
        return True

    def _has_copies(self, block_hash: BlockHash) -> bool:
        return any(block_hash in group.copies for group in self.groups.values())

    @staticmethod
    def _is_gpu(medium: str | None) -> bool:
        """vLLM before 0.10 names no medium: there was one."""
        return medium is None or medium == "GPU"

    @staticmethod
    def _covers(event: BlockStored) -> bool:
        return len(event.tokens) == len(event.block_hashes) * event.block_size * TOKEN_BYTES
