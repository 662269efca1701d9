"""The encoding bench in its smallest setting, with the tokenizer that is always there."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BOUND_S = 120.0


def bench(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.encoding", "--families", "smollm2", "--json", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=BOUND_S)


def test_every_workload_is_measured_and_has_the_plain_ids() -> None:
    done = bench("--quick")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["costs"]) == 5
    assert all(row["plain_ms"] > 0 and row["ours_ms"] > 0 for row in report["costs"])
    (memory,) = report["memory"]
    assert 0 < memory["cache_bytes"] <= memory["budget_bytes"]
    (lag,) = report["lag"]
    assert lag["longest_ms"] >= lag["p99_ms"] >= lag["p50_ms"]
    assert lag["held_longest_ms"] >= lag["held_p99_ms"] > 0
    assert lag["short_prompts"] > 0


def test_the_fuzz_tells_what_it_did() -> None:
    done = bench("--fuzz", "--texts", "100")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert (report["texts"], report["mismatches"]) == (100, [])
    assert report["cuts"] > 1000
    assert report["told"] > 20
