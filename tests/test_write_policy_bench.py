"""The replay behind the default write policy counts as the tiers do."""

import json
import random
import subprocess
import sys

import pytest

from bench.write_policy import Host, Request, best_of, measure, requests
from nodeagent.tiers.chunk_file import file_bytes
from nodeagent.tiers.write_policy import WRITE_POLICIES

CHUNK_BYTES = 4_096
FILE_BYTES = file_bytes(CHUNK_BYTES)
DRAM, NVME = 12, 40


@pytest.fixture
def trace_path(tmp_path):
    """Conversations that grow by turns, interleaved: prefixes come back after a while; and prompts that never do."""
    chance = random.Random(7)
    turns = dict.fromkeys(range(12), 1)
    with (tmp_path / "small.jsonl").open("w") as file:
        for at in range(300):
            number = chance.choice(sorted(turns))
            turns[number] = min(turns[number] + chance.randint(0, 2), 9)
            ids = [0, *(100 * number + 1 + each for each in range(turns[number]))]
            if at % 2:
                ids = [0, *range(10_000 + 10 * at, 10_006 + 10 * at)]
            file.write(json.dumps({"timestamp": 1_000 * at, "hash_ids": ids}) + "\n")
    return tmp_path / "small.jsonl"


@pytest.mark.parametrize("name", sorted(WRITE_POLICIES))
def test_no_tier_holds_more_than_its_chunks_and_every_hit_was_held(trace_path, name):
    host = Host(WRITE_POLICIES[name](), DRAM, NVME, FILE_BYTES, None)
    for request in requests(trace_path):
        before, count = host._dram.held | host._nvme.held, host.count
        hits = count.dram_hits + count.nvme_hits
        host.serve(request)
        run = count.dram_hits + count.nvme_hits - hits
        assert {chunk.key for chunk in request.chunks[:run]} <= before
        assert len(host._dram.held) <= DRAM
        assert len(host._nvme.held) <= NVME
    assert host.count.nvme_hits > 0
    assert host.count.requested == sum(len(request.chunks) for request in requests(trace_path))


def test_a_chunk_is_written_by_the_policies_own_moment(trace_path):
    trace = list(requests(trace_path))
    rows = {row["policy"]: row["written_bytes"] for row in measure(trace, DRAM, NVME, CHUNK_BYTES, None)}
    assert min(rows["through"], rows["demote"]) > rows["reuse"] > rows["hit"] > 0
    once = [Request(request.at_s, request.chunks[1:]) for request in trace[:1]]
    rows = {row["policy"]: row["written_bytes"] for row in measure(once, DRAM, NVME, CHUNK_BYTES, None)}
    assert rows["through"] == len(once[0].chunks) * FILE_BYTES
    assert rows["reuse"] == rows["hit"] == rows["demote"] == 0


def test_a_budget_bounds_what_is_written(trace_path):
    day_bytes = 8 * (5 * FILE_BYTES + 4_096)
    for row in measure(list(requests(trace_path)), DRAM, NVME, CHUNK_BYTES, day_bytes):
        assert 0 < row["written_bytes"] <= 5 * FILE_BYTES + day_bytes * 300 / 86_400


@pytest.mark.parametrize(
    ("hits", "best"),
    [({"a": (0, 0), "b": (100, 10), "c": (96, 2)}, "c"), ({"a": (0, 0), "b": (100, 10), "c": (94, 2)}, "b")],
    ids=["nearly as many for less", "too few"],
)
def test_the_best_policy_keeps_nearly_all_hits_for_the_fewest_bytes(hits, best):
    rows = [
        {"policy": name, "nvme_hits": count, "nvme_hits_per_gb_written": count / max(written, 1)}
        for name, (count, written) in hits.items()
    ]
    assert best_of(rows) == best


def test_the_command_prints_json(trace_path):
    sizes = ["--dram", str(DRAM), "--nvme-per-dram", "3", "--dwpd", "0,1", "--chunk-bytes", str(CHUNK_BYTES)]
    command = [sys.executable, "-m", "bench.write_policy", str(trace_path), *sizes, "--json"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    cases = json.loads(done.stdout)["cases"]
    assert [(case["trace"], case["dwpd"]) for case in cases] == [("small", 0), ("small", 1)]
    assert all(case["best"] in WRITE_POLICIES for case in cases)
    assert "hits per GB written" in done.stderr
