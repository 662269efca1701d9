"""vLLM's blocks and our chunk keys for them: a tree by block hash, filled from events' token ids. Pure.

vLLM's hash names a block and all before it, whatever the group, so it is a handle for a place in a prompt. The chunk
keys are our own chain, computed from token ids: neither vLLM's algorithm nor its seed matters. A block that ends a
chunk has the chunk's key; the blocks before it have the digest's midstate, never token ids.

A block's place is either known (`key` or `midstate`), refused (with all below it), or cold: it was read back from a
file, which can't hold midstates, and becomes known when an event about it is seen again (`warm`). A block stays as
long as the table holds copies of it or there are blocks below it.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from directory.chunks import TOKEN_BYTES, directory_key
from directory.identity import Scope
from nodeagent.engines.vllm.block_scope import AdapterDigests, Refusal, first_block_scope, later_block_refusal
from nodeagent.engines.vllm.events import BlockHash, BlockStored


class Block:
    """One block's place. `index` counts from the prompt's start; `key` is that of the chunk it ends, 32 bytes."""

    __slots__ = ("children", "hash", "index", "is_held", "is_refused", "key", "midstate", "parent", "salt_tag")

    def __init__(self, block_hash: BlockHash, parent: "Block | None") -> None:
        self.hash = block_hash
        self.parent = parent
        self.index: int = 0 if parent is None else parent.index + 1
        self.key: bytes | None = None
        self.midstate: hashlib._Hash | None = None
        self.salt_tag: bytes | None = None
        self.is_refused = False
        self.is_held = False
        self.children: dict[BlockHash, Block] | None = None

    @property
    def is_known(self) -> bool:
        """Whether a chunk key leads through it."""
        return not self.is_refused and (self.key is not None or self.midstate is not None)

    def path(self, blocks: int) -> "Iterator[Block]":
        """This block and those before it, `blocks` in all, or as many as there are."""
        block: Block | None = self
        for _ in range(blocks):
            if block is None:
                return
            yield block
            block = block.parent


@dataclass(frozen=True, slots=True)
class Label:
    """What a chunk is called on both sides: vLLM's whole hash of its last block (32 bytes), and its directory key (16).

    `parent` and `parent_hash` are the same of the chunk before it; `position` counts chunks from 0; `salt_tag` is its
    scope's.
    """

    block_hash: bytes
    directory_key: bytes
    parent: bytes | None
    position: int
    parent_hash: bytes | None = None
    salt_tag: bytes | None = None


class BlockTree:
    """Places of blocks by vLLM's hash. `blocks_per_chunk` is set once the engine's block size is known."""

    def __init__(self, fleet_digest: bytes, adapters: AdapterDigests, skipped: Counter[str]) -> None:
        self._fleet_digest = fleet_digest
        self._adapters = adapters
        self._skipped = skipped
        self.blocks_per_chunk = 0
        self.blocks: dict[BlockHash, Block] = {}
        self.refused_while_held: list[Block] = []

    def __len__(self) -> int:
        return len(self.blocks)

    def place(self, event: BlockStored) -> list[Block] | None:
        """Give each block of `event` its place; None where its parent is unknown. Tokens must cover the hashes."""
        parent = None
        if event.parent_block_hash is not None:
            parent = self.blocks.get(event.parent_block_hash)
            if parent is None:
                return None
        placed: list[Block] = []
        chain = _Chain(self, event, parent)
        for index, block_hash in enumerate(event.block_hashes):
            block = self.blocks.get(block_hash)
            if block is None:
                block = self.add(block_hash, parent)
                chain.continue_into(block, index)
            elif block.parent is not parent:
                self._conflict(block)
            elif not block.is_refused and (not block.is_known or isinstance(block_hash, int)):
                chain.continue_into(block, index)
            else:
                chain.skip()
            placed.append(block)
            parent = block
        return placed

    def warm(self, event: BlockStored) -> list[Block]:
        """Make known what is cold of `event`'s blocks; blocks that aren't here are passed over."""
        parent = None if event.parent_block_hash is None else self.blocks.get(event.parent_block_hash)
        if parent is None and event.parent_block_hash is not None:
            return []
        warmed: list[Block] = []
        chain = _Chain(self, event, parent)
        for index, block_hash in enumerate(event.block_hashes):
            block = self.blocks.get(block_hash)
            if block is None or block.parent is not parent:
                break
            if block.is_known or block.is_refused:
                chain.skip()
            else:
                chain.continue_into(block, index)
                warmed.append(block)
            parent = block
        return warmed

    def add(self, block_hash: BlockHash, parent: Block | None) -> Block:
        """A new block below `parent`; its place isn't known yet."""
        block = self.blocks[block_hash] = Block(block_hash, parent)
        if parent is not None:
            if parent.children is None:
                parent.children = {}
            parent.children[block_hash] = block
        return block

    def trim(self, block: Block, has_copies: Callable[[BlockHash], bool]) -> None:
        """Forget `block`, then its ancestors, as far as nothing holds them."""
        last: Block | None = block
        while last is not None and not last.children and not has_copies(last.hash) and not last.is_held:
            if self.blocks.pop(last.hash, None) is None:
                return
            if last.parent is not None and last.parent.children is not None:
                del last.parent.children[last.hash]
            last = last.parent

    def clear(self) -> None:
        """Forget every block."""
        self.blocks.clear()
        self.refused_while_held.clear()

    def ends_chunk(self, block: Block) -> bool:
        """Whether `block` is the last one of a chunk."""
        return block.index % self.blocks_per_chunk == self.blocks_per_chunk - 1

    def label(self, block: Block) -> Label | None:
        """The label of the chunk that `block` ends, if it has a key and vLLM told the whole hash."""
        if block.key is None or block.is_refused or not isinstance(block.hash, bytes):
            return None
        *_, first = block.path(self.blocks_per_chunk)
        before = first.parent.key if first.parent is not None else None
        above = first.parent.hash if first.parent is not None else None
        return Label(
            block_hash=block.hash,
            directory_key=directory_key(block.key),
            parent=None if before is None else directory_key(before),
            position=block.index // self.blocks_per_chunk,
            parent_hash=above if isinstance(above, bytes) else None,
            salt_tag=block.salt_tag,
        )

    def refuse(self, block: Block, reason: str) -> None:
        """Take the place of `block`, and of all below it, for unusable. Counts `reason` once."""
        self._skipped[reason] += 1
        below = [block]
        while below:
            refused = below.pop()
            refused.is_refused, refused.midstate = True, None
            if refused.is_held:
                self.refused_while_held.append(refused)
            below.extend(child for child in (refused.children or {}).values() if not child.is_refused)

    def state_below(self, block: Block) -> "hashlib._Hash | None":
        """A digest that holds what stands before a block below `block`; None where that isn't known."""
        if block.is_refused:
            return None
        if block.key is not None:
            return hashlib.sha256(block.key)
        return block.midstate.copy() if block.midstate is not None else None

    def first_scope(self, event: BlockStored) -> Scope | Refusal:
        """What narrows the keys of the prompt that begins with `event`."""
        return first_block_scope(event, self._adapters)

    def first_state(self, scope: Scope) -> "hashlib._Hash":
        """A digest that holds what stands before the first block of a prompt: its scoped root."""
        return hashlib.sha256(scope.root(self._fleet_digest))

    def _conflict(self, block: Block) -> None:
        """Two prefixes under one hash: neither is claimed. (Possible where vLLM tells 64 bits only.)"""
        if not block.is_refused:
            self.refuse(block, "hash_conflict")


class _Chain:
    """The digest that runs along the blocks of one event. It is computed only where a block needs it."""

    def __init__(self, tree: BlockTree, event: BlockStored, parent: Block | None) -> None:
        self._tree = tree
        self._event = event
        self._state: hashlib._Hash | None = None
        self._is_running = False
        self._step = event.block_size * TOKEN_BYTES

    def skip(self) -> None:
        """A block is known already; its own place is where the chain goes on."""
        self._state, self._is_running = None, False

    def continue_into(self, block: Block, index: int) -> None:
        """Give `block`, the event's at `index`, its place, or check the place that it has."""
        if block.parent is not None and block.parent.is_refused:
            block.is_refused = True
            return
        refusal = self._begin(block, index)
        if refusal is not None:
            self._tree.refuse(block, refusal.reason)
            return
        if self._state is None:
            return  # below a cold block: cold as well
        self._state.update(self._event.tokens[index * self._step : (index + 1) * self._step])
        if self._tree.ends_chunk(block):
            key = self._state.digest()
            if block.key is not None and block.key != key:
                self._tree.refuse(block, "hash_conflict")
                return
            block.key, self._state = key, hashlib.sha256(key)
        elif block.midstate is None:
            block.midstate = self._state.copy()
        elif block.midstate.digest() != self._state.digest():
            self._tree.refuse(block, "hash_conflict")

    def _begin(self, block: Block, index: int) -> Refusal | None:
        """Have the state that stands before `block`, unless it is refused."""
        if block.parent is None:
            scope = self._tree.first_scope(self._event)
            if isinstance(scope, Refusal):
                return scope
            block.salt_tag = scope.salt_tag
            self._state, self._is_running = self._tree.first_state(scope), True
            return None
        block.salt_tag = block.parent.salt_tag
        refusal = later_block_refusal(self._event, index)
        if refusal is None and not self._is_running:
            self._state, self._is_running = self._tree.state_below(block.parent), True
        return refusal
