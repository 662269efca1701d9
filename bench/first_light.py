"""Time to the first token with and without a warm prefix, on the local fleet: plays the demo, prints ratios of medians.

    python -m bench.first_light [--runs 3] [--json]

Every run is a fresh fleet, so that each first turn is cold; a ratio is taken within its run (machines are noisy).
"""

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

REQUESTS = ("second turn, gpu", "second reader, gpu", "after the restart, dram")


def play() -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "warmroute.cli", "up", "--demo", "--exit", "--json"]
    rows: list[dict[str, Any]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = [play() for _ in range(options.runs)]
    cold = [run[0]["ttft_s"] for run in runs]
    result: dict[str, Any] = {
        "runs": options.runs,
        "prompt_tokens": runs[0][0]["prompt_tokens"],
        "cold_ttft_s": statistics.median(cold),
        "cold_prompt_tokens_per_s": runs[0][0]["prompt_tokens"] / statistics.median(cold),
        "ratio_to_cold": {},
    }
    for place, name in enumerate(REQUESTS, 1):
        ratios = [run[place]["ttft_s"] / run[0]["ttft_s"] for run in runs]
        result["ratio_to_cold"][name] = {
            "median": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
            "cached_tokens": runs[0][place]["cached_tokens"],
            "prompt_tokens": runs[0][place]["prompt_tokens"],
        }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"cold: {result['prompt_tokens']} tokens, first token after {result['cold_ttft_s']:.2f} s (median)")
    for name, row in result["ratio_to_cold"].items():
        spread = f"{row['min']:.3f} to {row['max']:.3f}"
        print(f"{name}: {row['cached_tokens']} of {row['prompt_tokens']} tokens cached, {row['median']:.3f} ({spread})")


if __name__ == "__main__":
    main()
