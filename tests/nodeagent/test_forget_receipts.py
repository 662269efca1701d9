"""A receipt says what is so: what is kept where, which files are still there, what wasn't understood."""

import asyncio
import errno
import threading
from types import SimpleNamespace

import pytest

from nodeagent.errors import TombstonesFull
from nodeagent.tiers import room
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.tombstone_file import NAME
from nodeagent.tiers.tombstones import Tombstone, Tombstones
from nodeagent.tombstone_keeper import STATE, TombstoneKeeper
from tests.nodeagent.forgetful_host import forgetful_host, soon
from tests.nodeagent.running import label, storage_key

A = frozenset([storage_key("a")[:16]])
CHAIN = [("a", label("a")), ("b", label("b", "a", 1)), ("c", label("c", "b", 2))]


def files(folder):
    return [path for path in folder.rglob("*") if len(path.name) == 64]


def refusing(*arguments):
    raise OSError(errno.EROFS, "told to")


@pytest.mark.parametrize(
    ("drives", "kept_in", "is_safe"),
    [
        ([], [STATE], True),
        ([], [], False),
        (["one", "two"], [STATE], True),
        (["one", "two"], ["one", "two"], True),
        (["one", "two"], ["one"], False),
        (["one", "two"], [], False),
    ],
)
def test_it_is_kept_where_any_next_life_must_find_it(drives, kept_in, is_safe):
    keeper = TombstoneKeeper(Tombstones(), None, [SimpleNamespace(name=name) for name in drives], None)
    assert keeper.is_safe(kept_in) == is_safe


async def test_where_one_drive_is_away_and_the_state_folder_refuses_it_is_not_confirmed(tmp_path, monkeypatch):
    """The next life may see the drive that was away, and not the one that knows."""
    async with forgetful_host(tmp_path, drives=2) as host:
        await host.put(*CHAIN[0])
        with monkeypatch.context() as patch:
            patch.setattr("nodeagent.tiers.tombstone_file.write_tombstones", refusing)
            host.nvme.drives[1].fail("told to")
            receipt = await host.forget(directory_keys=A)
            assert (receipt.kept_in, receipt.is_confirmed) == (["drive-0"], False)
        assert (await host.forget(directory_keys=A)).is_confirmed, "and is, once it is asked again"


async def test_every_file_that_is_still_there_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "STUCK_FILES_MAX", 1)
    async with forgetful_host(tmp_path) as host:
        for name, chunk in CHAIN:
            await host.put(name, chunk)
        monkeypatch.setattr(FolderStore, "remove", refusing)
        receipt = await host.forget(directory_keys=A)
        assert (receipt.forgotten.files_removed, receipt.remains.files_unremoved) == (0, len(files(tmp_path)))
        assert len(files(tmp_path)) == 3


async def test_files_that_no_thread_could_be_had_for_are_counted_and_go_later(tmp_path, monkeypatch):
    monkeypatch.setattr("nodeagent.forgetting.RETRY_S", 2.0)
    async with forgetful_host(tmp_path) as host:
        for name, chunk in CHAIN:
            await host.put(name, chunk)
        threads = host.nvme.drives[0].writes
        jobs_max, threads._jobs_max = threads._jobs_max, 0
        receipt = await host.forget(directory_keys=A)
        assert (receipt.forgotten.files_removed, receipt.remains.files_unremoved) == (0, 3)
        threads._jobs_max = jobs_max
        await soon(lambda: not files(tmp_path))
        await soon(lambda: not host.nvme.used_bytes)


async def test_a_request_can_be_asked_again_as_often_as_it_takes(tmp_path):
    async with forgetful_host(tmp_path) as host:
        host.tombstones._keys_max = 4
        for name, chunk in CHAIN:
            await host.put(name, chunk)
        for _ in range(3):
            assert (await host.forget(directory_keys=A)).is_confirmed
        assert (len(host.tombstones), host.tombstones.keys) == (1, 4)
        with pytest.raises(TombstonesFull):
            await host.forget(directory_keys=frozenset([b"x" * 16]))


async def test_a_drive_that_says_more_than_can_be_remembered_is_left_alone(tmp_path):
    book = Tombstones()
    book.add(Tombstone(b"n" * 16, book.now() + 60, directory_keys=A | {b"x" * 16}))
    (tmp_path / "drive-0").mkdir()
    (tmp_path / "drive-0" / NAME).write_bytes(book.dump())
    async with forgetful_host(tmp_path, drives=2) as host:
        await host.put(*CHAIN[1])
        host.tombstones._keys_max = 1
        host.tombstones.remove(host.tombstones.of_directory_key(b"x" * 16))
        drive = host.nvme.drives[0]
        drive.fail("told to")
        await soon(lambda: not drive.is_up and "remembered" in drive.failure)
        await host.forget(identities=frozenset([b"i" * 32]))
        assert (tmp_path / "drive-0" / NAME).read_bytes() == book.dump(), "and not told otherwise"


@pytest.mark.parametrize("is_given_up", [False, True], ids=["hangs", "given up"])
async def test_a_drive_that_hangs_keeps_nobody_from_forgetting(tmp_path, monkeypatch, is_given_up):
    may_go_on, hangs, real = threading.Event(), threading.Event(), FolderStore.remove

    def remove(store, name):
        hangs.set()
        assert may_go_on.wait(20)
        real(store, name)

    monkeypatch.setattr("nodeagent.forgetting.REMOVE_WAIT_S", 0.1)
    async with forgetful_host(tmp_path) as host:
        for name, chunk in CHAIN:
            await host.put(name, chunk)
        monkeypatch.setattr(FolderStore, "remove", remove)
        asked = asyncio.create_task(host.forget(directory_keys=A))
        await soon(hangs.is_set)
        if is_given_up:
            host.nvme.drives[0].fail("told to")
        try:
            receipt = await asked
        finally:
            may_go_on.set()
        away = ["drive-0"] if is_given_up else []
        assert (receipt.remains.drives_away, receipt.forgotten.files_removed) == (away, 0)
        assert receipt.remains.files_unremoved == (0 if is_given_up else 3)
