"""What a chunk in the index costs, and what finding and touching it does; without files."""

import gc
import time
from typing import Any

from bench.tiers.samples import header_of, key_of, resident_bytes
from directory.tiers import Tier
from nodeagent.inventory import Inventory
from nodeagent.tiers.nvme_index import NvmeIndex, order_of_use


def index(count: int) -> dict[str, Any]:
    """What a chunk in the index costs, also with its place in what is announced, and what finding it does."""
    gc.collect()
    before, held = resident_bytes(), NvmeIndex(lambda key, mask: None)
    began = time.process_time()
    for number in range(count):
        held.restore(header_of(number, 32 << 20, key_of(number)[:16]), float(number))
    added_s = time.process_time() - began
    gc.collect()
    took = resident_bytes() - before
    announced = Inventory(count)
    for number in range(count):
        announced.set(key_of(number)[:16], int(Tier.NVME))
    gc.collect()
    took_announced = resident_bytes() - before
    began = time.process_time()
    *_, account = held.account_of_use()
    ordered = order_of_use(account)
    ordered_s = time.process_time() - began
    keys = [key_of(number) for number in range(0, count, max(1, count // 10_000))]
    began = time.process_time()
    found = sum(held.get(key) is not None for key in keys)
    return {
        "chunks": len(ordered.rows),
        "bytes_per_chunk": took / count,
        "bytes_per_announced_chunk": took_announced / count,
        "add_us": added_s / count * 1e6,
        "order_s": ordered_s,
        "get_us": (time.process_time() - began) / found * 1e6,
    }
