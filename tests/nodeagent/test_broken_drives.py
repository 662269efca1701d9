"""Real faults of real file systems: the tier lives, says so, goes on with what is left, and recovers."""

import asyncio
import errno
import os
import resource
import shutil

import pytest

from nodeagent.tiers.chunk_file import name_of
from nodeagent.tiers.file_store import FolderStore
from tests.nodeagent.lone_drive import LENGTH, soon
from tests.nodeagent.mounts import command, image_mounted
from tests.nodeagent.running import open_fds, payload, storage_key
from tests.nodeagent.several_drives import SickStore, drives_on

NAMES = [f"n{number}" for number in range(24)]
IMAGE_BYTES = 12 << 20


@pytest.fixture
def image(tmp_path):
    with image_mounted(tmp_path / "drive-0", IMAGE_BYTES) as folder:
        yield folder


def stores_on(tmp_path):
    return [SickStore(tmp_path / "drive-0"), SickStore(tmp_path / "drive-1")]


def is_ours(drives, name):
    return drives.where(name) == [0]


async def test_a_device_that_returns_io_errors_is_quarantined_and_comes_back(tmp_path, image):
    """The image under the file system is cut short: what lies behind its end is an EIO of the block device.

    It still takes what is written, so each time the drive is tried it passes the self-test, and fails at its files.
    """
    backing = image.with_suffix(".img")
    async with drives_on(stores_on(tmp_path)) as drives:
        await drives.write(*NAMES)
        mine = [name for name in NAMES if is_ours(drives, name)]
        assert command("sync", "-f", str(image))
        await asyncio.to_thread(shutil.copyfile, backing, backing.with_suffix(".saved"))
        os.truncate(backing, 0)
        for name in mine[:3]:
            assert await drives.read(name) is None
        assert not drives.drives[0].is_up
        assert f"Errno {errno.EIO}" in drives.drives[0].failure
        others = [name for name in NAMES if name not in mine]
        assert all([await drives.read(name) == payload(name, LENGTH) for name in others])
        await soon(lambda: drives.count("degraded_total", reason="nvme_quarantined") >= 3)
        await asyncio.to_thread(write_back, backing)
        await soon(lambda: drives.drives[0].is_up and not drives.drives[0].is_restoring)
        for name in mine:
            assert await drives.read(name) in (payload(name, LENGTH), None)
        assert await drives.read(mine[-1]) == payload(mine[-1], LENGTH)


def write_back(backing):
    with backing.with_suffix(".saved").open("rb") as saved, backing.open("r+b") as file:
        shutil.copyfileobj(saved, file)


async def test_a_file_system_that_turns_read_only_is_read_and_written_again_later(tmp_path, image):
    async with drives_on([SickStore(image)]) as drives:
        await drives.write(*NAMES[:8])
        assert command("mount", "-o", "remount,ro", str(image))
        await drives.write(*NAMES[8:12])
        assert drives.count("degraded_total", reason="nvme_write_failed") >= 1
        assert drives.drives[0].is_up
        assert all([await drives.read(name) == payload(name, LENGTH) for name in NAMES[:8]])
        assert command("mount", "-o", "remount,rw", str(image))
        await soon(lambda: not drives.drives[0].is_paused)
        await drives.write(*NAMES[12:16])
        assert await drives.read(NAMES[12]) == payload(NAMES[12], LENGTH)


async def test_a_drive_that_others_fill_says_so_makes_room_and_is_written_again(tmp_path, image):
    async with drives_on([SickStore(image)], files=1_300) as drives:
        await drives.write(*NAMES[:12])
        (image / "ballast").write_bytes(bytes(os.statvfs(image).f_bavail * os.statvfs(image).f_frsize - 1_024))
        await drives.write(*NAMES[12:])
        assert drives.count("degraded_total", reason="nvme_write_failed") >= 1
        assert drives.count("evictions_total", tier="nvme", reason="quota") >= 1
        (image / "ballast").unlink()
        await soon(lambda: not drives.drives[0].is_paused)
        await drives.write("last")
        assert await drives.read("last") == payload("last", LENGTH)
        assert not list(image.rglob("*.tmp"))


async def test_too_many_open_files_cost_a_miss_and_a_pause_and_no_chunk(tmp_path):
    async with drives_on([SickStore(tmp_path / "drive-0")]) as drives:
        await drives.write(*NAMES[:8])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_fds() - 1, hard))
        try:
            found = [await drives.read(name) for name in NAMES[:8]]
            await drives.write("more")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert found == [None] * 8
        assert drives.count("degraded_total", reason="nvme_read_failed") == 8
        assert drives.drives[0].is_up
        await soon(lambda: not drives.drives[0].is_paused)
        await drives.write("more")
        assert all([await drives.read(name) == payload(name, LENGTH) for name in [*NAMES[:8], "more"]])


async def test_a_file_that_the_system_keeps_from_being_removed_stays_counted_and_stops_nobody(tmp_path):
    store = SickStore(tmp_path / "drive-0")
    async with drives_on([store], files=6) as drives:
        await drives.write(*NAMES[:6])
        kept = store._place(name_of(storage_key(NAMES[0])))
        if not command("chattr", "+i", kept):
            pytest.skip("chattr +i needs privileges that aren't here")
        try:
            await drives.write(*NAMES[6:18])
            assert os.path.exists(kept)
            assert drives.nvme.used_bytes <= drives.nvme.quota_bytes
            assert drives.count("degraded_total", reason="nvme_unremovable") >= 1
            assert await drives.read(NAMES[17]) == payload(NAMES[17], LENGTH)
        finally:
            assert command("chattr", "-i", kept)
        await drives.write(*NAMES[18:])
        await soon(lambda: not os.path.exists(kept))
        assert not drives.drives[0].room.stuck


async def test_a_drive_that_is_not_mounted_any_more_is_not_written_to_the_disk_below_it(tmp_path):
    with image_mounted(tmp_path / "drive-0", IMAGE_BYTES) as image:
        async with drives_on(stores_on(tmp_path)) as drives:
            await drives.write(*NAMES)
            mine = [name for name in NAMES if is_ours(drives, name)]
            # What keeps a drive busy is let go of in quarantine, but for its folder's descriptor.
            assert command("umount", "--lazy", str(image))
            drives.drives[0].fail("told to")
            await soon(lambda: drives.count("degraded_total", reason="nvme_unavailable") >= 2)
            assert os.listdir(image) == []
            assert command("mount", "-o", "loop", str(image.with_suffix(".img")), str(image))
            await soon(lambda: len(drives.drives[0].index) == len(mine))
            assert await drives.read(mine[0]) == payload(mine[0], LENGTH)


def test_a_folder_of_ours_that_others_opened_to_themselves_is_refused_when_it_comes_back(tmp_path):
    store = FolderStore(str(tmp_path / "drive-0"))
    store.open()
    store.close()
    (tmp_path / "drive-0" / "warmroute.lock").write_bytes(b"another")
    with pytest.raises(Exception, match="another folder stands at"):
        store.open()
