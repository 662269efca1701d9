"""`warmroute up --engine-kind vllm`, as a user runs it: the demo with its kill -9, and a clean end."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.engines.vllm.launch import SHARED_MEMORY
from tests.free_port import free_port
from tests.vllm.engines import installation
from tests.warmroute.fleets import left_behind

DEMO_BOUND_S = 780
pytestmark = pytest.mark.timeout(900)


def staging_files() -> set[Path]:
    return set(SHARED_MEMORY.glob("vllm_offload_engine-1-*"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """As short as users' folders for temporary files: a socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="up-") as name:
        yield Path(name)


def test_the_demo_hits_what_its_killed_engine_had_computed_and_leaves_nothing(folder: Path) -> None:
    """One engine: where requests go is the other tests' matter."""
    installation()
    before = staging_files()
    port = str(free_port())
    words = ("--engine-kind", "vllm", "--engines", "1", "--port", port, "--demo", "--exit", "--json")
    process = subprocess.run(
        [sys.executable, "-m", "warmroute.cli", "up", *words],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=DEMO_BOUND_S,
    )
    assert process.returncode == 0, process.stderr
    first, second, other_reader, restarted = json.loads(process.stdout)
    assert first["cached_tokens"] == 0
    for row in (second, other_reader, restarted):
        assert row["cached_tokens"] >= 2_048, row
    assert restarted["tier_tokens"].startswith("dram=")
    assert left_behind(folder) == []
    assert staging_files() == before
