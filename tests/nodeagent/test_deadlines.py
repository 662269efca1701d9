"""One file on a slow path among fast ones: late is a miss to who asked, the bytes land in DRAM, others don't wait."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from nodeagent.client import PutResult
from nodeagent.tiers.chunk_file import file_bytes
from nodeagent.tiers.drive import READ_THREADS
from nodeagent.tiers.file_store import FolderStore
from tests.nodeagent.running import (
    CHUNK_BYTES,
    WAIT_S,
    connected,
    eventually,
    label,
    make_hello,
    payload,
    running_agent,
    storage_key,
)

TOKENS = 16
NAMES = [f"d{number}" for number in range(10)]
SLOW = 4
FAST = NAMES[:SLOW] + NAMES[SLOW + 1 :]
DEADLINE_S = 0.2
"""For what a slow read keeps from coming: what has to come is waited for `WAIT_S`."""
ENOUGH_S = 1.5
"""For the files before a slow one, whose reader waits to the end."""
ENGINES = 3


class SlowPath:
    """Reads of one chunk begin, and end once they are let go."""

    def __init__(self, monkeypatch, name: str) -> None:
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Event()
        real, slow = FolderStore.read_into, storage_key(name)

        def read_into(store, key, target):
            if key == slow:
                self.begun.release()
                assert self.let_go.wait(WAIT_S)
            return real(store, key, target)

        monkeypatch.setattr(FolderStore, "read_into", read_into)


def place(name, *, is_chain):
    position = NAMES.index(name) if is_chain else 0
    return label(name, NAMES[position - 1] if position else None, position)


@contextmanager
def slow_host(folder, monkeypatch, *, is_chain):
    """An agent whose ten chunks are on disk only, one of them on a slow path; and engines."""
    options = {
        "nvme_path": str(folder / "nvme"),
        "nvme_bytes": 100 * file_bytes(CHUNK_BYTES),
        "nvme_write": "through",
        "dram_bytes": 4_096 + 2 * len(NAMES) * CHUNK_BYTES,
    }
    with running_agent(folder, **options) as agent, connected(agent.config.door) as client:
        for name in NAMES:
            assert client.put(place(name, is_chain=is_chain), payload(name), WAIT_S) is PutResult.STORED
        eventually(lambda: agent.status()["tiers"]["nvme"]["chunks"] == len(NAMES), "the files")
    with running_agent(folder, **options) as agent, ExitStack() as stack:
        eventually(lambda: agent.status()["tiers"]["nvme"]["chunks"] == len(NAMES), "the index")
        engines = [
            stack.enter_context(connected(agent.config.door, make_hello(f"engine-{number}")))
            for number in range(ENGINES)
        ]
        path = SlowPath(monkeypatch, NAMES[SLOW])
        try:
            yield agent, engines, path
        finally:
            path.let_go.set()


def opened(client, names, wait_s):
    """The tiers of the run that was opened in time; its bytes are looked at."""
    chunks = client.open([storage_key(name) for name in names], wait_s)
    for name, chunk in zip(names, chunks, strict=False):
        target = bytearray(chunk.length)
        assert client.read_into(chunk, memoryview(target))
        assert target == payload(name)
    client.close(chunks)
    return [chunk.tier for chunk in chunks]


def late(agent):
    return agent.metric("warmroute_deadline_misses_total")


def test_a_slow_file_is_a_miss_to_every_engine_that_asks_and_none_waits_for_it_that_does_not(tmp_path, monkeypatch):
    with slow_host(tmp_path, monkeypatch, is_chain=False) as (agent, engines, path), ThreadPoolExecutor(16) as threads:
        patient = threads.submit(opened, engines[0], [NAMES[SLOW]], WAIT_S)
        assert path.begun.acquire(timeout=WAIT_S)
        # Eighteen opens of nine files by two engines end while the slow one is under way.
        asked = [threads.submit(opened, engine, [name], WAIT_S) for name in FAST for engine in engines[1:]]
        assert all(len(each.result(WAIT_S)) == 1 for each in asked)
        assert not patient.done()
        assert [opened(engine, [NAMES[SLOW]], DEADLINE_S) for engine in engines[1:]] == [[], []]
        eventually(lambda: late(agent) == 2, "two who asked and didn't get it in time")
        assert agent.metric("warmroute_tier_missed_tokens_total") == 2 * TOKENS
        assert not path.begun.acquire(blocking=False), "all share one read"
        path.let_go.set()
        assert patient.result(WAIT_S) == ["nvme"], "who waits long enough has it"
        for engine in engines:
            assert opened(engine, [NAMES[SLOW]], WAIT_S) == ["dram"], "late bytes are in DRAM for the next"
        assert late(agent) == 2


def test_a_slow_file_within_a_run_ends_it_there_and_what_was_read_ahead_is_kept(tmp_path, monkeypatch):
    with slow_host(tmp_path, monkeypatch, is_chain=True) as (agent, engines, path):
        assert opened(engines[0], NAMES, ENOUGH_S) == ["nvme"] * SLOW
        eventually(lambda: late(agent) == 1, "the miss")
        eventually(lambda: agent.tier()["chunks"] == len(FAST), "what was read ahead of the slow one")
        assert opened(engines[1], NAMES, DEADLINE_S) == ["dram"] * SLOW
        eventually(lambda: late(agent) == 2, "the other miss")
        path.let_go.set()
        eventually(lambda: agent.tier()["chunks"] == len(NAMES), "the late bytes")
        assert opened(engines[2], NAMES, WAIT_S) == ["dram"] * len(NAMES)
        eventually(lambda: agent.tier()["references"] == 0, "the closes")
        hits = sum(
            agent.metric("warmroute_tier_hit_tokens_total", tier=tier, source="local") for tier in ("dram", "nvme")
        )
        missed = agent.metric("warmroute_tier_missed_tokens_total")
        assert hits == (2 * SLOW + len(NAMES)) * TOKENS
        assert missed == 2 * (len(NAMES) - SLOW) * TOKENS
        assert agent.metric("warmroute_tier_tokens_requested_total") == hits + missed


@pytest.mark.parametrize("is_let_go", [True, False], ids=["in time", "late"])
def test_an_agent_with_a_slow_read_under_way_serves_dram_and_takes_puts(tmp_path, monkeypatch, is_let_go):
    with slow_host(tmp_path, monkeypatch, is_chain=False) as (agent, engines, path), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(opened, engines[0], [NAMES[SLOW]], WAIT_S if is_let_go else DEADLINE_S)
        assert path.begun.acquire(timeout=WAIT_S)
        # From the same engine, whose open is being read for.
        for number in range(2 * READ_THREADS):
            name = f"new {number}"
            assert engines[0].put(label(name), payload(name), WAIT_S) is PutResult.STORED
            assert opened(engines[0], [name], WAIT_S) == ["dram"]
        if is_let_go:
            path.let_go.set()
        assert waiting.result(WAIT_S) == (["nvme"] if is_let_go else [])
        eventually(lambda: late(agent) == (0 if is_let_go else 1), "the account")
