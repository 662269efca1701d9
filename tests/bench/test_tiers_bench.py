"""The bench of the NVMe tier, small: what it measures is really passed, indexed and compared."""

import asyncio
import shutil

import pytest

from bench.tiers import beside_fio, fio, index, start, throughput
from nodeagent.tiers.machine_memory import PAGE_BYTES

LENGTH = 2 * PAGE_BYTES


def test_a_start_indexes_every_file_that_was_made(tmp_path):
    start.make_files(tmp_path / "files", 40)
    measured = asyncio.run(start.start(tmp_path / "files", rate=1e9))
    assert measured["chunks"] == measured["announcements"] == 40
    assert 0 < measured["opened_s"] <= measured["listed_s"] <= measured["indexed_s"]


def test_files_that_the_drive_has_no_room_for_are_not_made(tmp_path):
    with pytest.raises(SystemExit, match="need"):
        start.check_room(tmp_path, 1 << 40)


def test_the_index_is_measured_by_chunk():
    measured = index.index(500)
    assert measured["chunks"] == 500
    assert measured["get_us"] > 0


def test_the_store_is_compared_with_bare_calls_at_every_depth(tmp_path):
    rows = throughput.throughput(tmp_path, 1 << 20, 1)
    assert [(row["what"], row["threads"]) for row in rows] == [
        (what, depth) for depth in throughput.DEPTHS for what in ("write", "read")
    ]
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio isn't here")
def test_the_store_is_compared_with_fio(tmp_path, monkeypatch):
    monkeypatch.setattr(beside_fio, "DEPTHS", (2,))
    measured = beside_fio.large(tmp_path / "large", LENGTH, 1)
    assert {(row["what"], row["depth"], row["fio"]) for row in measured["rows"]} == {
        (what, depth, engine) for what in ("read", "write") for depth in (2,) for engine in ("psync", "libaio")
    }
    small = beside_fio.small(tmp_path / "small", 4, 1)
    assert [row["what"] for row in small["rows"]] == ["write", "read"]
    assert all(row["ratio"] > 0 and row["cpu_s_per_gb"] > 0 for row in [*measured["rows"], *small["rows"]])


def test_without_fio_the_bench_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fio.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="apt-get install fio"):
        fio.require()
