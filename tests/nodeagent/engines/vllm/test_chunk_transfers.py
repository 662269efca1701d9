"""The engine's side of the host's tiers, without vLLM: what the scheduler is told, and what happens when the host is
slow, gone, or hands out damaged bytes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from nodeagent.engines.vllm import chunk_transfers
from nodeagent.engines.vllm.chunk_transfers import ChunkRow, ChunkTransfers, FinishedJob
from nodeagent.engines.vllm.promises import Verdict
from tests.nodeagent.engines.vllm.fake_host import WAIT_S, FakeHost

CHUNK, ROW, ROWS = 64, 80, 8


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def area() -> bytearray:
    return bytearray(ROW * ROWS)


@pytest.fixture
def transfers(host: FakeHost, area: bytearray) -> Iterator[ChunkTransfers]:
    made = ChunkTransfers(host, memoryview(area), ROW, CHUNK, lambda key: b"s" + key, 0.01)
    yield made
    host.gate.set()
    made.close()
    assert host.references == set(), "nothing is held at the end"


def eventually(holds: Callable[[], Any]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if holds():
            return
        pause.wait(0.005)
    raise AssertionError("it did not come true")


def look_up(transfers: ChunkTransfers, keys: Sequence[bytes], request: str = "r") -> list[Verdict]:
    """As the scheduler does: step after step until nothing is to be asked again."""
    verdicts: list[Verdict] = []

    def is_settled() -> bool:
        verdicts[:] = [transfers.look_up(key, request) for key in keys]
        if Verdict.RETRY not in verdicts:
            return True  # what was a hit is loaded before the step ends
        transfers.flush()
        return False

    eventually(is_settled)
    return verdicts


def finish(transfers: ChunkTransfers) -> FinishedJob:
    finished: list[FinishedJob] = []
    eventually(lambda: finished.extend(transfers.take_finished()) or finished)
    assert not transfers.has_jobs
    return finished[0]


def payload(number: int) -> bytes:
    return bytes([number + 1]) * CHUNK


def test_what_was_stored_is_found_and_loaded_into_another_row(
    transfers: ChunkTransfers, host: FakeHost, area: bytearray
) -> None:
    for row in range(3):
        area[row * ROW : row * ROW + CHUNK] = payload(row)
    transfers.store(1, [ChunkRow(b"%d" % row, row, row) for row in range(3)])
    stored = finish(transfers)
    assert (stored.job, stored.is_complete, stored.moved_bytes) == (1, True, 3 * CHUNK)
    assert look_up(transfers, [b"0", b"1", b"2", b"3"]) == [Verdict.HIT] * 3 + [Verdict.MISS]
    transfers.load(2, [ChunkRow(b"2", 5), ChunkRow(b"0", 6)])
    loaded = finish(transfers)
    assert (loaded.is_complete, loaded.moved) == (True, (b"2", b"0"))
    assert area[5 * ROW : 5 * ROW + CHUNK] == payload(2)
    assert area[6 * ROW : 6 * ROW + CHUNK] == payload(0)
    assert area[5 * ROW + CHUNK : 6 * ROW] == bytes(ROW - CHUNK), "a row's end isn't the chunk's"


def test_a_prompts_keys_are_asked_for_as_one_run(transfers: ChunkTransfers, host: FakeHost) -> None:
    host.chunks = {b"sa": payload(0), b"sc": payload(1)}
    assert look_up(transfers, [b"a", b"b", b"c"]) == [Verdict.HIT, Verdict.MISS, Verdict.MISS]
    assert host.asked == [[b"sa", b"sb", b"sc"]]


def test_the_scheduler_is_never_made_to_wait(transfers: ChunkTransfers, host: FakeHost) -> None:
    host.gate.clear()
    assert transfers.look_up(b"a", "r") is Verdict.RETRY
    transfers.flush()
    transfers.store(1, [ChunkRow(b"x", 0)])
    transfers.load(2, [ChunkRow(b"z", 1)])
    assert transfers.look_up(b"a", "r") is Verdict.RETRY
    assert transfers.has_jobs


def test_references_of_a_finished_request_are_given_back(transfers: ChunkTransfers, host: FakeHost) -> None:
    host.chunks = {b"sa": payload(0)}
    assert look_up(transfers, [b"a"], "one") == [Verdict.HIT]
    assert look_up(transfers, [b"a"], "two") == [Verdict.HIT]
    transfers.forget("one")
    assert len(host.references) == 1, "another request waits for it"
    transfers.forget("two")
    eventually(lambda: not host.references)


def test_an_answer_that_comes_after_its_request_holds_nothing(transfers: ChunkTransfers, host: FakeHost) -> None:
    host.chunks = {b"sa": payload(0)}
    host.gate.clear()
    transfers.look_up(b"a", "r")
    transfers.flush()
    eventually(lambda: host.asked)
    transfers.forget("r")
    host.gate.set()
    eventually(lambda: host.lent and not host.references)


def test_damaged_bytes_are_a_miss_from_then_on(transfers: ChunkTransfers, host: FakeHost) -> None:
    host.chunks = {b"sa": payload(0), b"sb": payload(1)}
    host.damaged = {b"sb"}
    assert look_up(transfers, [b"a", b"b"]) == [Verdict.HIT, Verdict.HIT]
    transfers.load(1, [ChunkRow(b"a", 0), ChunkRow(b"b", 1)])
    finished = finish(transfers)
    assert (finished.is_complete, finished.moved) == (False, (b"a",))
    assert transfers.look_up(b"b", "r") is Verdict.MISS, "or the scheduler would try for ever"
    transfers.forget("r")
    assert transfers.look_up(b"b", "later") is Verdict.RETRY


def test_a_chunk_of_another_size_is_no_hit(transfers: ChunkTransfers, host: FakeHost) -> None:
    host.chunks = {b"sa": b"short"}
    assert look_up(transfers, [b"a"]) == [Verdict.MISS]
    assert host.references == set()


def test_without_an_agent_everything_fails_at_once(transfers: ChunkTransfers, host: FakeHost) -> None:
    host.is_connected = False
    assert transfers.look_up(b"a", "r") is Verdict.MISS
    transfers.store(1, [ChunkRow(b"a", 0)])
    assert finish(transfers) == FinishedJob(1, False, (), 0.0, 0)
    assert host.asked == []


def test_requests_behind_a_silent_agent_do_not_wait_as_well(transfers: ChunkTransfers, host: FakeHost) -> None:
    host.is_silent = True
    assert look_up(transfers, [b"a"], "first") == [Verdict.MISS]
    assert transfers.look_up(b"b", "second") is Verdict.MISS
    assert len(host.asked) == 1


def test_a_host_that_breaks_is_a_miss_and_a_failed_job(
    transfers: ChunkTransfers, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a fault")

    monkeypatch.setattr(host, "open_piece", broken)
    monkeypatch.setattr(host, "put", broken)
    assert look_up(transfers, [b"a"]) == [Verdict.MISS]
    transfers.store(1, [ChunkRow(b"a", 0)])
    assert not finish(transfers).is_complete


def test_a_load_of_what_is_no_hit_fails(transfers: ChunkTransfers) -> None:
    transfers.load(1, [ChunkRow(b"a", 0)])
    assert finish(transfers).moved == ()


def test_draining_ends_copies_and_fails_stores_that_have_not_begun(transfers: ChunkTransfers, host: FakeHost) -> None:
    host.gate.clear()
    transfers.store(1, [ChunkRow(b"a", 0), ChunkRow(b"b", 1)])
    transfers.store(2, [ChunkRow(b"c", 2)])
    draining = threading.Thread(target=transfers.drain)
    draining.start()
    eventually(lambda: transfers._is_draining)
    assert draining.is_alive()
    host.gate.set()
    draining.join(WAIT_S)
    assert not draining.is_alive()
    ended = {finished.job: finished.moved for finished in transfers.take_finished()}
    assert ended == {1: (b"a",), 2: ()}


def test_too_many_stores_fail_rather_than_queue(
    transfers: ChunkTransfers, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_transfers, "STORES_QUEUED_MAX", 2)
    host.gate.clear()
    for job in range(3):
        transfers.store(job, [ChunkRow(b"%d" % job, job)])
    assert [finished.job for finished in transfers.take_finished()] == [2]
