"""Threads of a drive that the machine doesn't give: what they should have done is never done later."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nodeagent.errors import DriveAway
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.drive_threads import DriveThreads
from nodeagent.tiers.file_store import FolderStore
from tests.nodeagent.lone_drive import LENGTH, no_wait, read_back, tier_on, write
from tests.nodeagent.running import payload


@pytest.fixture
def refuse_threads(monkeypatch):
    """Every new thread of this module's pools is refused, as by a control group's pids.max, until `undo`."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    def begin():
        monkeypatch.setattr(threading.Thread, "start", refuse)

    return begin


async def test_a_job_that_was_refused_is_not_done_by_a_thread_that_comes_later(refuse_threads, monkeypatch):
    done = []
    executor = ThreadPoolExecutor(1)
    threads = DriveThreads(executor, 4)
    refuse_threads()
    with pytest.raises(DriveAway, match="no thread"):
        await threads.do(done.append, "refused")
    assert not threads.jobs
    monkeypatch.undo()
    await threads.do(done.append, "accepted")
    executor.shutdown()
    assert done == ["accepted"]


async def test_a_read_without_a_thread_is_a_miss_and_the_next_one_is_none(tmp_path, refuse_threads, monkeypatch):
    async with tier_on(FolderStore(str(tmp_path / "nvme"))) as tier:
        await write(tier, "a")
        refuse_threads()
        assert await read_back(tier, "a") is None
        monkeypatch.undo()
        assert await read_back(tier, "a") == payload("a", LENGTH)


async def test_a_drive_without_a_thread_at_the_start_begins_in_quarantine(tmp_path, refuse_threads, monkeypatch):
    store = FolderStore(str(tmp_path / "nvme"))
    drive = Drive(store, 1 << 20, lambda key, mask: None, no_wait, AgentMetrics(), min_free_bytes=0)
    refuse_threads()
    await drive.open()
    assert (drive.is_up, drive.failure.partition(":")[0]) == (False, "it can't be opened")
    monkeypatch.undo()
    await drive.reopen()
    assert drive.is_up
    for threads in (drive.reads, drive.writes, drive.listing):
        threads.executor.shutdown()
    store.close()
