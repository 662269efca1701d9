"""What copies out of the DRAM arena cost by the kind of its pages: 2 MiB of the kernel's pool beside 4 KiB.

    sysctl -w vm.nr_hugepages=140
    python -m bench.arena_pages [--mib 256] [--slot-kib 64] [--rounds 12] [--json]

An engine's own mapping of each arena, slots in a random order into one buffer, by turns. The first round of a mapping
meets its page faults; the others don't. Microseconds of CPU a slot; the ratio is the median of rounds.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import time
from typing import Any, Literal

from nodeagent.arena_map import ArenaMap
from nodeagent.messages import ArenaOffer
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.arena_memory import ArenaWish

KINDS: tuple[Literal["on", "off"], ...] = ("on", "off")
FILLING = b"resident"


def mapped(arena: Arena) -> ArenaMap:
    offer = ArenaOffer(arena.header_bytes, arena.slot_bytes, arena.slots)
    return ArenaMap(offer, os.dup(arena.read_only_fd), os.dup(arena.writable_fd))


def measure(quota_bytes: int, slot_bytes: int, rounds: int) -> dict[str, Any]:
    target = memoryview(bytearray(slot_bytes))
    result: dict[str, Any] = {"slot_bytes": slot_bytes}
    seen: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with contextlib.ExitStack() as opened:
        arenas = {}
        for kind in KINDS:
            began = time.monotonic()
            arena = Arena(quota_bytes, slot_bytes, ArenaWish(kind))
            opened.callback(arena.close)
            result[kind] = arena.pages | {"allocated_s": time.monotonic() - began}
            for slot in range(arena.slots):
                with arena.view(slot, len(FILLING)) as view:
                    view[:] = FILLING
            engines = mapped(arena)
            opened.callback(engines.close)
            arenas[kind] = engines, arena.slots
        for number in range(rounds + 1):
            for kind, (engines, slots) in arenas.items():
                order = list(range(slots))
                random.Random(number).shuffle(order)
                began = time.process_time()
                for slot in order:
                    engines.read_into(slot, target)
                seen[kind].append((time.process_time() - began) / slots * 1e6)
    for kind in KINDS:
        first, *others = seen[kind]
        result[kind] |= {"first_us": first, "median_us": statistics.median(others)}
    result["ratio"] = statistics.median(
        small / huge for huge, small in zip(seen["on"][1:], seen["off"][1:], strict=True)
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="MiB of each arena")
    parser.add_argument("--slot-kib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.mib << 20, options.slot_kib << 10, options.rounds)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for kind in KINDS:
        row = result[kind]
        print(
            f"{row['pages']:28} allocated in {row['allocated_s']:.2f} s; "
            f"a slot costs {row['first_us']:.1f} us at first, then {row['median_us']:.1f} us"
        )
    print(f"small pages cost {result['ratio']:.2f} times as much")


if __name__ == "__main__":
    main()
