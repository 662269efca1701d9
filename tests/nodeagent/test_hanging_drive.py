"""A drive that never answers: the agent ends all the same, and no slot that a thread may still fill is given away."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from nodeagent.metrics import AgentMetrics
from nodeagent.tiers import drive as one_drive
from nodeagent.tiers import quarantine
from nodeagent.tiers.file_store import FolderStore
from tests.nodeagent.lone_drive import no_wait, soon, store_in_dram, tier_on
from tests.nodeagent.running import (
    CHUNK_BYTES,
    SLOTS,
    WAIT_S,
    connected,
    eventually,
    label,
    payload,
    running_agent,
    storage_key,
)
from tests.nodeagent.test_nvme_agent import NAMES, nvme, put_chain

AGENT = """
import sys, threading
from nodeagent.tiers import drive, promotion
from nodeagent.tiers.file_store import FolderStore
from warmroute.cli import main

def hang(*arguments):
    print("hangs", flush=True)
    threading.Event().wait()

setattr(FolderStore, sys.argv[1], hang)
drive.CLOSE_WAIT_MAX_S = promotion.CLOSE_WAIT_MAX_S = 0.1
sys.exit(main(["agent", *sys.argv[2:]]))
"""


@contextmanager
def agent_that_hangs(folder, where):
    door = str(folder / "door.sock")
    options = ["--host", "h", "--door", door, "--redis", "redis://127.0.0.1:1", "--nvme", str(folder / "nvme")]
    sizes = ["--nvme-gb", "1", "--nvme-write", "through", "--dram-gb", f"{(4_096 + SLOTS * CHUNK_BYTES) / 1e9:.12f}"]
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, where, *options, *sizes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, door
        finally:
            process.kill()


def has_spoken(process):
    return select.select([process.stdout], [], [], 0)[0]


@pytest.mark.parametrize("where", ["listing", "put", "read_into"])
def test_an_agent_whose_drive_hangs_ends_on_sigterm(tmp_path, where):
    if where == "read_into":
        with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
            put_chain(agent, client)
    with agent_that_hangs(tmp_path, where) as (process, door):
        eventually(lambda: os.path.exists(door), "the door")
        with connected(door) as client:
            if where == "put":
                client.put(label("a"), payload("a"), WAIT_S)
            if where == "read_into":
                # Until the index is there, an open finds nothing and begins no read.
                eventually(lambda: client.open([storage_key(NAMES[0])], 0.05) or has_spoken(process), "the read")
            assert process.stdout.readline() == "hangs\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert "the agent ends without them" in process.stderr.read()
        assert not os.path.exists(door)


async def test_a_tier_whose_write_hangs_says_so_and_waits_for_one_that_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(one_drive, "CLOSE_WAIT_MAX_S", 0.05)
    let_go, has_begun = threading.Event(), threading.Event()

    class Hanging(FolderStore):
        def put(self, header, data):
            has_begun.set()
            return let_go.wait(WAIT_S) and super().put(header, data)

    async with tier_on(Hanging(str(tmp_path / "nvme"))) as tier, asyncio.TaskGroup() as group:
        store_in_dram(tier, "a")
        tier.writer.offer(tier.hierarchy, storage_key("a"))
        assert await asyncio.to_thread(has_begun.wait, WAIT_S)
        # The fixture's loop ends with the tier; this one only stands for it.
        assert not await tier.close(group.create_task(asyncio.sleep(0)))
        let_go.set()
        monkeypatch.setattr(one_drive, "CLOSE_WAIT_MAX_S", WAIT_S)
        assert await tier.close(group.create_task(asyncio.sleep(0)))


async def test_a_listing_longer_than_a_hang_is_none_while_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "WATCH_S", 0.001)
    now_s, looks = [0.0], threading.Semaphore(0)

    def clock():
        if threading.current_thread() is threading.main_thread():
            looks.release()
        return now_s[0]

    class Long(FolderStore):
        def listing(self, on_step):
            for _ in range(4):
                now_s[0] += 0.9 * quarantine.HANG_S
                for _ in range(2):
                    assert looks.acquire(timeout=WAIT_S)
                on_step()
            return super().listing(on_step)

    store, metrics = Long(str(tmp_path / "nvme")), AgentMetrics()
    drive = one_drive.Drive(store, 1 << 20, lambda key, mask: None, no_wait, metrics, min_free_bytes=0, clock=clock)
    await drive.open()
    keeping = asyncio.create_task(quarantine.keep(drive, lambda keys: None, metrics))
    try:
        await soon(lambda: not (drive.is_restoring and drive.is_up))
        assert drive.is_up
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        assert await drive.close(keeping)
        store.close()
