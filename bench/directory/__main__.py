"""What the directory costs: lookups, placements and memory, beside the layouts used elsewhere.

    python -m bench.directory [--quick] [--json] [--keys 5000000] [--server /usr/bin/redis-server]

Layouts and cases take turns, round after round; ratios are taken within a round, and medians of the rounds are told.
Server time is CPU time of the server's main thread (`INFO cpu`, user and system): it holds reading, parsing and
writing, and waiting for a core isn't in it. "In command" is the wall time inside the command alone (`INFO
commandstats`). Gateway time is CPU time of the thread that asks, as the gateway asks (uvloop, the same client),
decoding and joining included. p50 and p99 are wall time, of one client that asks one question after another.
"""

import argparse
import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import uvloop

from bench.directory import lookups, placements, report
from bench.directory.layouts import BareMget, HashLoop, HashPipeline, Layout, PackedRecords
from bench.directory.memory import measure_large, measure_memory
from bench.directory.server import Server, running_server, servers_found

SEED = 16_384
CHUNKS_MIN = 20_000


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured. `large_chunks`: how many the large directory holds."""

    rounds: int
    cases: Sequence[lookups.LookupCase]
    memory_chunks: int
    large_chunks: int


FULL = Setting(21, lookups.CASES, 200_000, 5_000_000)
QUICK = Setting(2, lookups.QUICK_CASES, 20_000, 200_000)


def main() -> None:
    options = _options()
    setting = QUICK if options.quick else FULL
    if options.keys is not None:
        setting = replace(setting, large_chunks=options.keys)
    reports = []
    for binary in options.server or servers_found():
        with running_server(binary) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            reports.append(runner.run(_measure(server, setting)))
        if not options.json:
            print(report.as_text(reports[-1]), flush=True)
    if options.json:
        print(json.dumps({"rounds": setting.rounds, "servers": [asdict(each) for each in reports]}, indent=1))


async def _measure(server: Server, setting: Setting) -> report.ServerReport:
    chance = random.Random(SEED)
    packed, pipeline, loop = PackedRecords(server), HashPipeline(server), HashLoop(server)
    layouts: tuple[Layout, ...] = (packed, BareMget(server), pipeline, loop)
    loaders: tuple[Layout, ...] = (packed, pipeline)
    async with contextlib.AsyncExitStack() as stack:
        for layout in layouts:
            stack.push_async_callback(layout.aclose)
        found = await lookups.measure_lookups(server, loaders, layouts, setting.cases, setting.rounds, chance)
        placed = await placements.measure_placements(server, packed, placements.CASES, setting.rounds, chance)
        memory = measure_memory(server, loaders, setting.memory_chunks, chance)
        large = await measure_large(server, packed, setting.large_chunks, setting.rounds, chance)
    targets = report.targets_of(found, placed, memory, packed.name, (pipeline.name, loop.name))
    return report.ServerReport(server.name, found, placed, memory, large, targets)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, a small large directory: seconds, not minutes"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument("--keys", type=int, metavar="CHUNKS", help=f"of the large directory ({FULL.large_chunks:,})")
    parser.add_argument(
        "--server",
        action="append",
        metavar="BINARY",
        help="a server to start; can be repeated (the bundled Valkey, and redis-server where it is installed)",
    )
    options = parser.parse_args()
    if options.keys is not None and options.keys < CHUNKS_MIN:
        parser.error(f"--keys must be at least {CHUNKS_MIN:,}")
    return options


if __name__ == "__main__":
    main()
