"""When a chunk was written decides whether it is what was forgotten: not when it was read, nor what a clock said."""

import asyncio
import os

import pytest

from nodeagent.messages import PutOutcome
from nodeagent.tiers.admission import Admission
from nodeagent.tiers.promotion import Promotion
from nodeagent.tiers.write_policy import WRITE_POLICIES, Pins
from tests.nodeagent.forgetful_host import TERM_S, forgetful_host, soon, write_file
from tests.nodeagent.running import label, storage_key

A = frozenset([storage_key("a")[:16]])
CHAIN = [("a", label("a")), ("b", label("b", "a", 1)), ("c", label("c", "b", 2))]
KEYS = [storage_key(name) for name, _ in CHAIN]


class Wall:
    """A clock that is set."""

    def __init__(self, now_s):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


def date(folder, now_s):
    for path in folder.rglob("*"):
        if len(path.name) == 64:
            os.utime(path, (now_s, now_s))


async def forget_with_the_link_away(host, may_return):
    """`c` follows `b`, which follows `a`; only `b` could tell, and is on the drive that is away."""
    may_return.clear()
    host.nvme.drives[1].fail("told to")
    await host.forget(directory_keys=A)
    assert host.is_held(KEYS[2])


@pytest.mark.parametrize("use", ["touched", "loaded", "loaded, and the host restarts"])
async def test_what_was_used_after_the_term_is_as_old_as_it_is(tmp_path, use):
    wall, may_return = Wall(1e9), asyncio.Event()
    may_return.set()
    async with forgetful_host(tmp_path, drives=2, now=wall, are_drives_back=may_return.is_set) as host:
        for number, (name, chunk) in enumerate(CHAIN):
            host.nvme.choose = lambda _, drive=number % 2: drive
            assert await host.put(name, chunk) is PutOutcome.STORED
            host.evict(storage_key(name))
        await forget_with_the_link_away(host, may_return)
        wall.now_s += TERM_S + 60
        if use == "touched":
            host.nvme.touch(KEYS[2])
        else:
            policy, pins = WRITE_POLICIES["hit"](), Pins()
            promotion = Promotion(
                host.dram, host.nvme, Admission(policy, pins, host.dram, host.nvme), host.group, host.metrics
            )
            run = await promotion.open_run([KEYS[2]], 10.0)
            assert run.keys == [KEYS[2]]
            run.let_go()
            assert host.dram.hierarchy.find(KEYS[2]) is not None
            date(tmp_path, wall.now_s)
        if "restarts" not in use:
            may_return.set()
            await soon(lambda: not any(map(host.is_held, KEYS)))
    async with forgetful_host(tmp_path, drives=2, now=wall) as host:
        await soon(lambda: not any(map(host.is_held, KEYS)))
        assert await host.put(*CHAIN[0]) is PutOutcome.STORED, "what is new is let in"


async def test_a_file_without_a_date_is_as_old_as_its_last_use(tmp_path):
    wall = Wall(1e9)
    write_file(tmp_path / "drive-0", "a", label("a"))
    date(tmp_path, wall.now_s)
    async with forgetful_host(tmp_path, drives=0, now=wall) as host:
        await host.forget(directory_keys=A)
    async with forgetful_host(tmp_path, now=wall) as host:
        assert not host.is_held(KEYS[0])


async def test_what_was_written_in_the_future_is_forgotten_as_well(tmp_path):
    """The clock was a day ahead, and is set right before it is forgotten."""
    wall = Wall(1e9 + 86_400)
    async with forgetful_host(tmp_path, now=wall) as host:
        await host.put("a", label("a"))
        await host.put("b", label("b"))
        host.evict(KEYS[0])
        wall.now_s -= 86_400
        receipt = await host.forget(directory_keys=A)
        assert (receipt.forgotten.nvme.chunks, host.is_held(KEYS[0])) == (1, False)
    write_file(tmp_path / "drive-0", "a", label("a"))
    date(tmp_path, wall.now_s + 86_400)
    async with forgetful_host(tmp_path, now=wall) as host:
        assert not host.is_held(KEYS[0])
        assert host.is_held(KEYS[1])
