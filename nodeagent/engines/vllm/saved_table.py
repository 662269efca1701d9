"""A table of what the GPU holds, as bytes, so that an agent's restart doesn't forget the hottest prefixes.

    "WRGT" | version, 1 byte | xxh3-128 of the rest, 16 bytes | msgpack

Prefix hits emit no event, so what is forgotten stays unknown until it is evicted and computed again. What is read
back is believed only for the same engine process (`life`), identity and chunk size, and only after the engine's replay
has shown that the events go on where the table ends (`last_digest`). Neither token ids nor digest midstates are saved:
blocks of a chunk that isn't full come back cold, and `GpuTable.warm` learns them again from replayed events.
"""

from dataclasses import dataclass

import msgspec
import xxhash

from directory.identity import SALT_TAG_BYTES
from nodeagent.engines.vllm.block_scope import AdapterDigests
from nodeagent.engines.vllm.block_tree import Block
from nodeagent.engines.vllm.events import BlockHash
from nodeagent.engines.vllm.gpu_table import ENTRIES_MAX, GpuTable, Group

MAGIC = b"WRGT\x01"
CHECKSUM_BYTES = 16
KEY_BYTES = 32
PAYLOAD_DIGEST_BYTES = 8
SAVED_BYTES_MAX = 2**30


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A table, and the place in the engine's events that it stands for.

    `next_sequence` is the number of the first batch that isn't in it, `last_digest` that of the last one that is.
    """

    table: GpuTable
    next_sequence: int
    last_digest: bytes


class _SavedGroup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    index: int
    kind: str | None
    window_tokens: int | None
    block_size: int
    copies: list[int]
    loose: list[tuple[BlockHash, int]]


class _Saved(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Blocks are columns, parents before children; `parents` are positions in them, -1 for none.

    `tag_numbers` are positions in `salt_tags`, -1 for none; a table of an earlier release has no such columns.
    """

    life: bytes
    fleet_digest: bytes
    chunk_tokens: int
    next_sequence: int
    last_digest: bytes
    is_complete: bool
    approximation: str | None
    groups: list[_SavedGroup]
    hashes: list[BlockHash]
    parents: list[int]
    keys: list[bytes | None]
    refused: list[int]
    salt_tags: list[bytes] = []
    tag_numbers: list[int] = []


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Saved)


def dump_table(saved: SavedTable, life: bytes) -> bytes:
    """The table as bytes. `life` names the engine's process: another one has nothing of this in its memory."""
    table = saved.table
    blocks = _parents_first(table)
    places = {block: place for place, block in enumerate(blocks)}
    tags = {
        tag: number for number, tag in enumerate(dict.fromkeys(block.salt_tag for block in blocks if block.salt_tag))
    }
    body = _ENCODER.encode(
        _Saved(
            life=life,
            fleet_digest=table.fleet_digest,
            chunk_tokens=table.chunk_tokens,
            next_sequence=saved.next_sequence,
            last_digest=saved.last_digest,
            is_complete=table.is_complete,
            approximation=table.approximation,
            groups=[_saved_group(index, group, table, blocks) for index, group in table.groups.items()],
            hashes=[block.hash for block in blocks],
            parents=[-1 if block.parent is None else places[block.parent] for block in blocks],
            keys=[block.key for block in blocks],
            refused=[place for place, block in enumerate(blocks) if block.is_refused],
            salt_tags=list(tags),
            tag_numbers=[-1 if block.salt_tag is None else tags[block.salt_tag] for block in blocks],
        )
    )
    return MAGIC + xxhash.xxh3_128_digest(body) + body


def load_table(
    data: bytes,
    *,
    life: bytes,
    fleet_digest: bytes,
    chunk_tokens: int,
    adapters: AdapterDigests,
    entries_max: int = ENTRIES_MAX,
) -> SavedTable | None:
    """The table in `data`; None where anything is off: damage, another version, process, identity or chunk size."""
    start = len(MAGIC) + CHECKSUM_BYTES
    if len(data) > SAVED_BYTES_MAX or not data.startswith(MAGIC):
        return None
    if xxhash.xxh3_128_digest(memoryview(data)[start:]) != data[len(MAGIC) : start]:
        return None
    try:
        saved = _DECODER.decode(memoryview(data)[start:])
    except (msgspec.MsgspecError, RecursionError):
        return None
    if (saved.life, saved.fleet_digest, saved.chunk_tokens) != (life, fleet_digest, chunk_tokens):
        return None
    if not _is_sound(saved):
        return None
    table = GpuTable(fleet_digest, chunk_tokens, adapters, entries_max)
    _fill(table, saved)
    if table.entries > entries_max:
        return None
    return SavedTable(table, saved.next_sequence, saved.last_digest)


def _parents_first(table: GpuTable) -> list[Block]:
    return sorted(table.tree.blocks.values(), key=lambda block: block.index)


def _saved_group(index: int, group: Group, table: GpuTable, blocks: list[Block]) -> _SavedGroup:
    copies = group.copies
    return _SavedGroup(
        index=index,
        kind=group.kind,
        window_tokens=group.window_tokens,
        block_size=group.block_size,
        copies=[copies.get(block.hash, 0) for block in blocks],
        loose=[(block_hash, count) for block_hash, count in copies.items() if block_hash not in table.tree.blocks],
    )


def _is_sound(saved: _Saved) -> bool:
    """Whether the columns fit together, so that filling a table from them can't fail."""
    count = len(saved.hashes)
    chunk, sizes = saved.chunk_tokens, {group.block_size for group in saved.groups}
    return (
        saved.next_sequence > 0
        and len(saved.last_digest) == PAYLOAD_DIGEST_BYTES
        and len(saved.parents) == len(saved.keys) == count == len(set(saved.hashes))
        and all(-1 <= parent < place for place, parent in enumerate(saved.parents))
        and all(key is None or len(key) == KEY_BYTES for key in saved.keys)
        and all(0 <= place < count for place in saved.refused)
        and len(saved.tag_numbers) in (0, count)
        and all(-1 <= number < len(saved.salt_tags) for number in saved.tag_numbers)
        and all(len(tag) == SALT_TAG_BYTES for tag in saved.salt_tags)
        and len(sizes) <= 1
        and all(size > 0 and chunk % size == 0 for size in sizes)
        and (bool(sizes) or not count)
        and all(len(group.copies) == count and min(group.copies, default=0) >= 0 for group in saved.groups)
        and all(copies > 0 for group in saved.groups for _, copies in group.loose)
        and all(group.window_tokens is None or group.window_tokens > 0 for group in saved.groups)
    )


def _fill(table: GpuTable, saved: _Saved) -> None:
    blocks: list[Block] = []
    table.is_complete, table.approximation = saved.is_complete, saved.approximation
    for item in saved.groups:
        group = table.groups[item.index] = Group(item.kind, item.window_tokens, item.block_size)
        group.copies.update((key, copies) for key, copies in zip(saved.hashes, item.copies, strict=True) if copies)
        group.copies.update(item.loose)
        table.tree.blocks_per_chunk = table.chunk_tokens // item.block_size
    refused = set(saved.refused)
    numbers = saved.tag_numbers or [-1] * len(saved.hashes)
    for place, (block_hash, parent, key) in enumerate(zip(saved.hashes, saved.parents, saved.keys, strict=True)):
        block = table.tree.add(block_hash, None if parent < 0 else blocks[parent])
        block.key, block.is_refused = key, place in refused
        block.salt_tag = saved.salt_tags[numbers[place]] if numbers[place] >= 0 else None
        blocks.append(block)
    table.revise(blocks)
