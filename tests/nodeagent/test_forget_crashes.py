"""Killed at every step of a forget: it wasn't answered, or nothing of it is ever served again."""

import asyncio
import os
import signal

import pytest

from nodeagent.tiers.chunk_file import name_of
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.tombstone_file import NAME
from nodeagent.tiers.tombstones import Tombstone, Tombstones
from tests.nodeagent.forgetful_host import ForgetfulHost, forgetful_host, write_file
from tests.nodeagent.running import label, storage_key

CHAIN = "abcd"
FORGOTTEN = "bcd"
CALLS = ("open", "write", "fsync", "rename", "unlink")


def write_chain(folder):
    for position, name in enumerate(CHAIN):
        chunk = label(name, CHAIN[position - 1] if position else None, position)
        write_file(folder / f"drive-{position % 2}", name, chunk)


def held(host):
    return "".join(name for name in CHAIN if host.nvme.holds(storage_key(name)))


async def forget_in(folder, patch=None):
    async with forgetful_host(folder, drives=2) as host:
        assert held(host) == CHAIN
        if patch is not None:
            patch()
        receipt = await host.forget(directory_keys=frozenset([storage_key("b")[:16]]))
        (folder / "answered").touch()
        assert receipt.is_confirmed


async def held_after_a_start(folder):
    async with forgetful_host(folder, drives=2) as host:
        return held(host)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dying(call, number, *, after):
    """Killed at the `number`th call of `os.{call}` from now on, before or after it was done."""
    real, calls = getattr(os, call), []

    def last(*arguments, **options):
        calls.append(1)
        if len(calls) == number and not after:
            die()
        result = real(*arguments, **options)
        if len(calls) == number and after:
            die()
        return result

    setattr(os, call, last)


def was_killed(folder, call, number, *, after):
    """A forget in a child that dies so; `False` where it got through before that."""
    child = os.fork()
    if not child:
        status = 3
        try:
            asyncio.run(forget_in(folder, lambda: dying(call, number, after=after)))
            status = 0
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_killed_at_any_step_it_was_not_answered_or_nothing_of_it_is_served_again(tmp_path, call, after):
    found = set()
    for number in range(1, 40, 1 if call != "open" else 4):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        write_chain(folder)
        is_killed = was_killed(folder, call, number, after=after)
        is_answered = (folder / "answered").exists()
        kept = asyncio.run(held_after_a_start(folder))
        assert kept == "a" if is_answered else kept in (CHAIN, "a"), (number, kept)
        assert asyncio.run(held_after_a_start(folder)) == kept, "and so it stays"
        found.add(kept)
        if not is_killed:
            break
    else:
        pytest.fail("it never got through")
    assert "a" in found


def test_a_tombstone_is_on_every_drive_before_the_first_file_goes(tmp_path, monkeypatch):
    write_chain(tmp_path)
    seen, real = [], os.unlink

    def unlink(name, **options):
        if name in {name_of(storage_key(each)).hex() for each in FORGOTTEN}:
            places = [tmp_path / place / "warmroute.tombstones" for place in ("drive-0", "drive-1", "state")]
            seen.append([place.exists() for place in places])
        real(name, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    asyncio.run(forget_in(tmp_path))
    assert seen == [[True] * 3] * len(FORGOTTEN)


async def test_what_one_drive_says_is_known_before_another_is_indexed(tmp_path):
    """The drive that was there told it to no other place, or the others were lost."""
    (tmp_path / "drive-1").mkdir()
    book = Tombstones()
    book.add(Tombstone(b"n" * 16, book.now() + 60, directory_keys=frozenset([storage_key("b")[:16]])))
    (tmp_path / "drive-1" / NAME).write_bytes(book.dump())
    async with asyncio.TaskGroup() as group:
        host = ForgetfulHost(tmp_path, 2, group, book.now, FolderStore)
        for drive in host.nvme.drives:
            await drive.open()
        await host.keeper.read()
        assert host.tombstones.find(label("b"), bytes(32)) is not None
        assert await host.nvme.close([asyncio.create_task(host.withdrawn([])) for _ in host.nvme.drives])
        await host.dram.close()
        for drive in host.nvme.drives:
            drive.store.close()
