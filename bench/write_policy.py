"""What to write to NVMe: replays request traces through the agent's eviction and write policies, and counts.

    python -m bench.write_policy TRACE... [--json] [--dram 2000,8000] [--nvme-per-dram 4,16] [--dwpd 0,1,3]

A trace is one in Mooncake's format (github.com/kvcache-ai/Mooncake, FAST25-release/traces): one JSON object a line with
`timestamp` (ms) and `hash_ids`, the ids of a prompt's consecutive blocks. One host serves all of it; a block is a
chunk. Per request, as an agent does it: the leading run that either tier holds is opened (from NVMe it is read into
DRAM), then what is missing is stored in DRAM. A write is done at once: the drive is never too slow. With `--dwpd` it is
written within its endurance budget, of which a burst is there at first; the drive is as large as the tier.

The best policy of a case is the one with the most NVMe hits per byte written among those that keep at least 95% of the
most NVMe hits: one that writes nothing would wear no drive, and serve nobody.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any, TextIO

from nodeagent.tiers.chunk_file import file_bytes
from nodeagent.tiers.endurance import DAY_S, DailyBudget, Instant
from nodeagent.tiers.eviction import Lru
from nodeagent.tiers.write_policy import WRITE_POLICIES, Ageing, Moment, WritePolicy

KEEPS = 0.95
CHUNK_BYTES = 2**26  # 512 tokens of an 8B model with grouped heads: 128 KiB a token


@dataclass(slots=True)
class Tier:
    """Chunks in the order in which the real policy evicts them."""

    slots: int
    order: Lru = field(default_factory=Lru)
    held: set[bytes] = field(default_factory=set)

    def add(self, key: bytes, parent: bytes | None, position: int) -> None:
        self.order.add(key, parent, position)
        self.held.add(key)

    def take_victim(self) -> bytes:
        victim = self.order.take_victims(1, lambda _: False)[0]
        self.held.discard(victim)
        return victim


@dataclass(slots=True)
class Count:
    requested: int = 0
    dram_hits: int = 0
    nvme_hits: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    key: bytes
    parent: bytes | None
    position: int


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    chunks: list[Chunk]


class Host:
    """One host's two tiers under one write policy. `budget` begins with a full burst, `file_size_bytes` is a write."""

    def __init__(
        self, policy: WritePolicy, dram_slots: int, nvme_slots: int, file_size_bytes: int, day_bytes: int | None
    ) -> None:
        self.count = Count()
        self._file_bytes = file_size_bytes
        self._budget = DailyBudget(day_bytes, instant(-2 * DAY_S)) if day_bytes is not None else None
        self._now = instant(0.0)
        self._policy = policy
        self._dram, self._nvme = Tier(dram_slots), Tier(nvme_slots)
        self._ageing = Ageing(dram_slots)
        self._chunks: dict[bytes, Chunk] = {}

    def serve(self, request: Request) -> None:
        self._now, chunks = instant(request.at_s), request.chunks
        run = self._open(chunks)
        self.count.requested += len(chunks)
        for chunk in chunks[run:]:
            if chunk.key in self._dram.held:
                self._dram.order.touch(chunk.key)
            else:
                self._store(chunk)
                self._come(Moment.STORED, [chunk])

    def _open(self, chunks: Sequence[Chunk]) -> int:
        run = 0
        for chunk in chunks:
            if chunk.key in self._dram.held:
                self.count.dram_hits += 1
            elif chunk.key in self._nvme.held:
                self.count.nvme_hits += 1
                self._nvme.order.touch(chunk.key)
                self._store(chunk)
            else:
                break
            run += 1
        if run:
            opened = chunks[:run]
            self._dram.order.touch(opened[-1].key)
            last = next((chunk for chunk in reversed(opened) if chunk.key in self._nvme.held), None)
            if last is not None:
                self._nvme.order.touch(last.key)
            self._come(Moment.HIT, opened)
        return run

    def _store(self, chunk: Chunk) -> None:
        """Into DRAM, which may evict; what is about to be evicted has its moment before."""
        if len(self._dram.held) >= self._dram.slots - self._ageing.ahead and self._ageing.is_time():
            oldest = list(islice(self._dram.order.oldest_first(), self._ageing.ahead))
            self._come(Moment.AGED, [self._chunks[key] for key in self._ageing.take_aged(oldest)])
        if len(self._dram.held) >= self._dram.slots:
            self._chunks.pop(self._dram.take_victim())
        self._chunks[chunk.key] = chunk
        self._dram.add(chunk.key, chunk.parent, chunk.position)

    def _come(self, moment: Moment, chunks: Iterable[Chunk]) -> None:
        if moment not in self._policy.moments:
            return
        for chunk in chunks:
            if self._policy.is_due(moment, chunk.key) and chunk.key not in self._nvme.held and self._may_write():
                if len(self._nvme.held) >= self._nvme.slots:
                    self._nvme.take_victim()
                self._nvme.add(chunk.key, chunk.parent, chunk.position)
                self.count.written += 1

    def _may_write(self) -> bool:
        budget, size = self._budget, self._file_bytes
        if budget is None or budget.spend(size, self._now):
            return True
        return budget.draw(size, self._now) and budget.spend(size, self._now)


def instant(at_s: float) -> Instant:
    return Instant("trace", at_s, at_s)


@cache
def key_of(block_id: int) -> bytes:
    """A digest, as storage keys are."""
    return hashlib.sha256(b"%d" % block_id).digest()


def requests(path: Path) -> Iterator[Request]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            keys = [key_of(each) for each in row["hash_ids"]]
            chunks = [Chunk(key, keys[place - 1] if place else None, place) for place, key in enumerate(keys)]
            yield Request(row["timestamp"] / 1_000, chunks)


def measure(
    trace: Sequence[Request], dram: int, nvme: int, chunk_bytes: int, day_bytes: int | None
) -> list[dict[str, Any]]:
    rows = []
    for name, policy in WRITE_POLICIES.items():
        host = Host(policy(), dram, nvme, file_bytes(chunk_bytes), day_bytes)
        for request in trace:
            host.serve(request)
        count, written = host.count, host.count.written * file_bytes(chunk_bytes)
        rows.append(
            {
                "policy": name,
                "dram_hit_rate": count.dram_hits / count.requested,
                "nvme_hit_rate": count.nvme_hits / count.requested,
                "nvme_hits": count.nvme_hits,
                "written_bytes": written,
                "nvme_hits_per_gb_written": count.nvme_hits / max(written / 1e9, 1e-9),
            }
        )
    return rows


def best_of(rows: Sequence[dict[str, Any]]) -> str:
    """The policy with the most hits per byte written among those that keep nearly all hits."""
    most = max(row["nvme_hits"] for row in rows)
    kept = [row for row in rows if row["nvme_hits"] >= KEEPS * most]
    return str(max(kept, key=lambda row: row["nvme_hits_per_gb_written"])["policy"])


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--dram", type=numbers, default=[2_000, 8_000], help="chunks of DRAM")
    parser.add_argument("--nvme-per-dram", type=numbers, default=[4, 16], help="NVMe's size in times of DRAM's")
    parser.add_argument("--dwpd", type=numbers, default=[0, 1, 3], help="drive writes per day; 0: no budget")
    parser.add_argument("--chunk-bytes", type=int, default=CHUNK_BYTES)
    parser.add_argument("--json", action="store_true", help="the table then goes to stderr")
    options = parser.parse_args()
    table = sys.stderr if options.json else sys.stdout
    cases = []
    for path in options.traces:
        trace = list(requests(path))
        for dram, ratio, dwpd in product(options.dram, options.nvme_per_dram, options.dwpd):
            nvme = dram * ratio
            day_bytes = nvme * file_bytes(options.chunk_bytes) * dwpd if dwpd else None
            rows = measure(trace, dram, nvme, options.chunk_bytes, day_bytes)
            cases.append(
                {"trace": path.stem, "dram_chunks": dram, "nvme_chunks": nvme, "dwpd": dwpd, "best": best_of(rows)}
                | {"policies": rows}
            )
            show(cases[-1], table)
    best = Counter(case["best"] for case in cases)
    print("best in cases:", ", ".join(f"{name} {best[name]}" for name in WRITE_POLICIES), file=table)
    if options.json:
        print(json.dumps({"chunk_bytes": options.chunk_bytes, "cases": cases, "best_in_cases": best}, indent=1))


def show(case: dict[str, Any], table: TextIO) -> None:
    budget = f"{case['dwpd']} DWPD" if case["dwpd"] else "no budget"
    sizes = f"{case['dram_chunks']:,} chunks of DRAM, {case['nvme_chunks']:,} of NVMe"
    print(f"{case['trace']}, {sizes}, {budget}: {case['best']}", file=table)
    for row in case["policies"]:
        print(
            f"  {row['policy']:8} dram {row['dram_hit_rate']:6.1%}  nvme {row['nvme_hit_rate']:6.1%}  "
            f"written {row['written_bytes'] / 1e12:7.3f} TB  "
            f"hits per GB written {row['nvme_hits_per_gb_written']:6.2f}",
            file=table,
            flush=True,
        )


if __name__ == "__main__":
    main()
