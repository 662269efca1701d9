"""What encoding costs, beside plain Hugging Face `tokenizers`, and the fuzz that compares their ids.

    python -m bench.encoding [--quick] [--json] [--families llama3_1 gemma3]
    python -m bench.encoding --lag [--memory] [--backend tokenizers]
    python -m bench.encoding --fuzz [--texts 20000] [--seed 1]

The tokenizers are installed by `make test-encoding`. Costs are CPU time of this process, threads included; plain and
ours take turns, and every result's ids are compared. Never-seen text is compared with the gateway's backend alone.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from bench.encoding.costs import Cost, Setting, measure
from bench.encoding.fuzz import fuzz, load
from bench.encoding.residue import Lag, Memory, measure_lag, measure_memory
from bench.encoding.tokenizer_packages import FAMILIES, InstallationError, tokenizer_json
from gateway.encoding.tokenizer import BACKENDS

FULL, QUICK = Setting(32_768, 9), Setting(4_096, 2)
MEMORY_TOKENS, QUICK_MEMORY_TOKENS = 5_000_000, 100_000
LAG_PROMPTS, LAG_TOKENS, QUICK_LAG_PROMPTS, QUICK_LAG_TOKENS = 60, 100_000, 4, 10_000
MISMATCHES_SHOWN = 3


def main() -> int:
    options = _options()
    try:
        return _fuzz(options) if options.fuzz else _measure(options)
    except InstallationError as error:
        print(error, file=sys.stderr)
        return 1


def _fuzz(options: argparse.Namespace) -> int:
    """Not zero where ids differ."""
    reports = []
    for family in options.families:
        report = fuzz(load(family, tokenizer_json(family), options.backend), options.texts, options.seed)
        reports.append(report)
        if not options.json:
            row = f"{report.tokenizer:12} {report.backend:11} {report.texts:8} texts {report.cuts:9} cuts"
            print(f"{row} {report.told:9} told  {len(report.mismatches)} mismatches", flush=True)
            for text in report.mismatches[:MISMATCHES_SHOWN]:
                print(f"    {text!r}")
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=1))
    return 1 if any(report.mismatches for report in reports) else 0


def _measure(options: argparse.Namespace) -> int:
    costs: list[Cost] = []
    memories: list[Memory] = []
    lags: list[Lag] = []
    setting = QUICK if options.quick else FULL
    for family in options.families:
        content = tokenizer_json(family)
        tokenizer = load(family, content, options.backend)
        is_whole = not (options.lag or options.memory)
        if is_whole:
            costs += measure(tokenizer, content.decode(), setting)
        if is_whole or options.memory:
            memories.append(measure_memory(tokenizer, QUICK_MEMORY_TOKENS if options.quick else MEMORY_TOKENS))
        if is_whole or options.lag:
            prompts, tokens = (QUICK_LAG_PROMPTS, QUICK_LAG_TOKENS) if options.quick else (LAG_PROMPTS, LAG_TOKENS)
            lags.append(asyncio.run(measure_lag(tokenizer, prompts, tokens)))
        if not options.json:
            _show(
                [row for row in costs if row.tokenizer == family],
                [row for row in memories if row.tokenizer == family],
                [row for row in lags if row.tokenizer == family],
            )
    if options.json:
        rows = [
            asdict(cost)
            | {"times_cheaper": cost.times_cheaper, "times_cheaper_at_least_cost": cost.times_cheaper_at_least_cost}
            for cost in costs
        ]
        report = {
            "costs": rows,
            "memory": [asdict(memory) for memory in memories],
            "lag": [asdict(lag) for lag in lags],
        }
        print(json.dumps(report, indent=1))
    return 0


def _show(costs: Sequence[Cost], memories: Sequence[Memory], lags: Sequence[Lag]) -> None:
    for cost in costs:
        medians = f"plain {cost.plain_ms:7.2f} ms  ours {cost.ours_ms:6.2f} ms  x{cost.times_cheaper:.2f}"
        least = f"{cost.plain_least_ms:7.2f}  {cost.ours_least_ms:6.2f}  x{cost.times_cheaper_at_least_cost:.2f}"
        print(f"{cost.tokenizer:12} {cost.workload:43} {cost.tokens:6} tokens  {medians}   least: {least}", flush=True)
    for memory in memories:
        gained, budget = memory.gained_bytes / 2**20, memory.budget_bytes / 2**20
        row = f"{memory.tokens:,} fresh tokens: {gained:.0f} MiB more resident, of a budget of {budget:.0f}"
        print(
            f"{memory.tokenizer:12} {row}; {memory.backend} alone {memory.backend_gained_bytes / 2**20:.0f}", flush=True
        )
    for lag in lags:
        late = f"p50 {lag.p50_ms:.1f}, p99 {lag.p99_ms:.1f}, at most {lag.longest_ms:.1f} ms"
        held = f"it computed {lag.held_p99_ms:.1f} at a time at p99, {lag.held_longest_ms:.1f} at most"
        row = f"{lag.prompts} prompts of {lag.prompt_tokens:,} tokens with {lag.backend}: the loop was late by {late}"
        short = f"{lag.short_prompts} short ones took {lag.short_p99_ms:.1f} ms at p99"
        print(f"{lag.tokenizer:12} {row} (idle: p99 {lag.idle_p99_ms:.1f}); {held}; {short}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--quick", action="store_true", help="short prompts, few rounds: that it runs at all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--lag", action="store_true", help="only how long the event loop is held")
    parser.add_argument("--memory", action="store_true", help="only what stays in memory")
    parser.add_argument("--backend", choices=BACKENDS, help="this one; the gateway's if left out")
    parser.add_argument("--fuzz", action="store_true", help="compare ids instead of measuring")
    parser.add_argument("--texts", type=int, default=20_000, help="texts a family")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
