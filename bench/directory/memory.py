"""Bytes a chunk, and one large directory: what it holds in memory and how it answers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.directory.layouts import LOAD_CHUNKS_MAX, Layout, PackedRecords
from bench.directory.lookups import LookupCase, LookupRow, measure_prompts
from bench.directory.prompts import Prompts, prompts_of, random_keys
from bench.directory.server import Server

HOLDERS = (1, 4, 16)
MOMENTS = 10
"""How often memory is looked at while the large directory grows: tables double, so bytes a chunk go up and down."""
LOOKUP_CHUNKS = 128
PROMPTS_MAX = 400


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """What `used_memory`, less clients' buffers, grows by for each of `chunks` random keys with an expiry."""

    layout: str
    holders: int
    chunks: int
    bytes_per_chunk: float


@dataclass(frozen=True, slots=True)
class LargeDirectory:
    """So many chunks of one holder, and lookups of 128 of them that lie far apart."""

    chunks: int
    bytes_per_chunk: float
    bytes_per_chunk_least: float
    bytes_per_chunk_most: float
    used_gb: float
    lookups: LookupRow


def measure_memory(server: Server, layouts: Sequence[Layout], chunks: int, chance: random.Random) -> list[MemoryRow]:
    """Each layout alone in an empty server, at 1, 4 and 16 holders a chunk. Leaves the server empty."""
    rows = []
    for holders in HOLDERS:
        keys = random_keys(chance, chunks)
        record = prompts_of(chance, 1, 1, holders, varied=False).records[0][0]
        for layout in layouts:
            server.flush()
            empty_bytes = server.memory_bytes()
            layout.load(keys, [record] * chunks)
            layout.settle(keys, chunks)
            rows.append(MemoryRow(layout.name, holders, chunks, (server.memory_bytes() - empty_bytes) / chunks))
    server.flush()
    return rows


async def measure_large(
    server: Server, packed: PackedRecords, chunks: int, rounds: int, chance: random.Random
) -> LargeDirectory:
    """Fill an empty server with `chunks` chunks of one holder, then look up prompts made of them. Leaves it empty."""
    one = prompts_of(chance, 1, 1, 1, varied=False)
    record = one.records[0][0]
    empty_bytes = server.memory_bytes()
    kept: list[bytes] = []
    per_chunk: list[float] = []
    for moment in range(MOMENTS):
        first, last = chunks * moment // MOMENTS, chunks * (moment + 1) // MOMENTS
        for start in range(first, last, LOAD_CHUNKS_MAX):
            keys = random_keys(chance, min(LOAD_CHUNKS_MAX, last - start))
            packed.load(keys, [record] * len(keys))
            kept += chance.sample(keys, min(len(keys), LOOKUP_CHUNKS * PROMPTS_MAX * len(keys) // chunks + 1))
        per_chunk.append((server.memory_bytes() - empty_bytes) / last)
    packed.settle(kept, chunks)
    used_bytes = server.memory_bytes() - empty_bytes
    per_chunk.append(used_bytes / chunks)
    chance.shuffle(kept)
    count = len(kept) // LOOKUP_CHUNKS
    asked = tuple(tuple(kept[place * LOOKUP_CHUNKS : (place + 1) * LOOKUP_CHUNKS]) for place in range(count))
    prompts = Prompts(asked, ((record,) * LOOKUP_CHUNKS,) * count, one.reaches)
    case = LookupCase(LOOKUP_CHUNKS, 1, varied=False, prompts=count, lookups=32)
    (row,) = await measure_prompts(server, [packed], {case: prompts}, rounds)
    server.flush()
    return LargeDirectory(chunks, per_chunk[-1], min(per_chunk), max(per_chunk), used_bytes / 1e9, row)
