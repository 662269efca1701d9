"""Room on a drive: quotas, watermarks, and what the file system must keep, whoever fills it."""

import logging
import os

import pytest

from nodeagent.errors import TierUnavailable
from nodeagent.labels import ChunkLabel
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.chunk_file import UNKNOWN_IDENTITY, file_bytes
from nodeagent.tiers.drive_threads import DriveThreads
from nodeagent.tiers.file_store import FolderStore, Space
from nodeagent.tiers.nvme_index import NvmeEntry, NvmeIndex
from nodeagent.tiers.room import LOOK_S, ROOM_FRACTION, Room
from tests.nodeagent.lone_drive import no_wait, tier_on, write
from tests.nodeagent.mounts import image_mounted
from tests.nodeagent.running import storage_key
from tests.nodeagent.tiers_by_hand import ByHand
from warmroute.cli import main

LENGTH = 4_096
SIZE = file_bytes(LENGTH)
PLENTY = 1 << 40
FOLDERS_BYTES = 2 * 4_096
"""Those on the way to a chunk's place, made with it: seen at the next look at the file system."""


class CountedStore:
    """A file system on which files are only counted; `others` take some of it as well."""

    def __init__(self, total_bytes):
        self.total_bytes = total_bytes
        self.others_bytes = 0
        self.files = {}

    def space(self):
        return Space(self.total_bytes - self.others_bytes - sum(self.files.values()), self.total_bytes)

    def remove(self, name):
        self.files.pop(name, None)


class Drive:
    """A room and its index; `write` is what a writer does with them."""

    def __init__(self, *, quota, total=PLENTY, min_free=0):
        self.now_s = 0.0
        self.store = CountedStore(total)
        self.index = NvmeIndex(lambda key, mask: None)
        threads = DriveThreads(ByHand(is_inline=True), 10)
        self.room = Room(self.store, threads, quota, min_free, no_wait, AgentMetrics(), lambda: self.now_s)

    async def write(self, name):
        if not await self.room.make(SIZE, self.index):
            return False
        key = storage_key(name)
        entry = NvmeEntry(ChunkLabel(key, key[:16], None, 0), UNKNOWN_IDENTITY, LENGTH, b"c" * 16)
        self.store.files[entry.name] = SIZE
        self.room.note_written(entry.name, SIZE, self.index)
        self.index.add(entry)
        return True


async def test_work_ahead_keeps_used_bytes_between_the_watermarks():
    files = 4 * ROOM_FRACTION
    drive = Drive(quota=files * SIZE)
    for number in range(files - 4):
        assert await drive.write(f"n{number}")
        assert not await drive.room.work_ahead(drive.index), "nothing goes below the upper watermark"
    assert await drive.write("one more")
    assert await drive.room.work_ahead(drive.index)
    assert not await drive.room.work_ahead(drive.index)
    assert drive.index.used_bytes == (files - 8) * SIZE, "the lower one: two parts in ROOM_FRACTION below the quota"


async def test_a_quota_too_small_for_watermarks_is_used_whole():
    drive = Drive(quota=3 * SIZE)
    for number in range(6):
        assert await drive.write(f"n{number}")
        assert not await drive.room.work_ahead(drive.index)
        assert min(number + 1, 2) * SIZE <= drive.index.used_bytes <= 3 * SIZE


@pytest.mark.parametrize("quota_files", [2, 4 * ROOM_FRACTION], ids=["without watermarks", "with watermarks"])
async def test_files_from_before_beyond_the_quota_go_without_a_write(quota_files):
    before = Drive(quota=(quota_files + 3) * SIZE)
    for number in range(quota_files + 3):
        assert await before.write(f"n{number}")
    drive = Drive(quota=quota_files * SIZE)
    drive.index = before.index
    while await drive.room.work_ahead(drive.index):
        pass
    assert 0 < drive.index.used_bytes <= quota_files * SIZE


async def test_the_file_system_keeps_its_minimum_though_the_quota_allows_more():
    drive = Drive(quota=100 * SIZE, total=20 * SIZE, min_free=5 * SIZE)
    for number in range(40):
        assert await drive.write(f"n{number}")
        assert drive.store.space().free_bytes >= 5 * SIZE
        drive.now_s += LOOK_S / 3


async def test_the_tier_gives_way_to_others_without_a_write():
    drive = Drive(quota=100 * SIZE, total=30 * SIZE, min_free=5 * SIZE)
    for number in range(20):
        assert await drive.write(f"n{number}")
    drive.store.others_bytes = 10 * SIZE
    drive.now_s += LOOK_S
    assert await drive.room.work_ahead(drive.index)
    assert drive.store.space().free_bytes >= 5 * SIZE
    assert len(drive.index) >= 13


async def test_where_others_take_all_nothing_is_written_and_nothing_is_left():
    drive = Drive(quota=100 * SIZE, total=20 * SIZE, min_free=5 * SIZE)
    for number in range(10):
        assert await drive.write(f"n{number}")
    drive.store.others_bytes = 20 * SIZE - 10 * SIZE
    drive.now_s += LOOK_S
    drive.store.others_bytes += 7 * SIZE
    while await drive.room.work_ahead(drive.index):
        pass
    assert not await drive.write("n10") or drive.store.space().free_bytes >= 5 * SIZE
    assert drive.store.space().free_bytes >= 3 * SIZE


async def test_a_file_system_that_others_fill_is_told_once_until_there_is_room_again(caplog):
    caplog.set_level(logging.INFO)
    drive = Drive(quota=100 * SIZE, total=20 * SIZE, min_free=5 * SIZE)
    assert await drive.write("n0")
    assert not drive.room.is_crowded
    drive.store.others_bytes = 19 * SIZE
    for number in range(1, 4):
        drive.now_s += LOOK_S
        assert not await drive.write(f"n{number}")
        assert drive.room.is_crowded
    drive.store.others_bytes = 0
    drive.now_s += LOOK_S
    assert await drive.write("n4")
    assert not drive.room.is_crowded
    crowded, roomy = [record.getMessage() for record in caplog.records]
    assert "others fill its file system" in crowded
    assert "nvme.min_free_gb" in crowded
    assert "there is room" in roomy


async def test_a_chunk_larger_than_the_quota_is_not_called_a_full_file_system():
    drive = Drive(quota=SIZE - 1)
    assert not await drive.write("n0")
    assert not drive.room.is_crowded


async def test_a_drive_that_says_it_is_full_is_given_room_whatever_it_says_is_free():
    drive = Drive(quota=100 * SIZE)
    for number in range(10):
        await drive.write(f"n{number}")
    drive.room.note_full(SIZE)
    assert await drive.room.work_ahead(drive.index)
    assert len(drive.index) < 10
    assert drive.room.owed_bytes == 0


async def test_a_full_drive_without_a_file_of_ours_is_asked_again_at_the_next_write():
    drive = Drive(quota=100 * SIZE)
    drive.room.note_full(SIZE)
    assert not await drive.room.work_ahead(drive.index)
    assert await drive.write("n0")


@pytest.mark.parametrize(("min_free", "fits"), [(0, 100), (30, 70), (None, 95)], ids=["none", "said", "a share"])
def test_a_quota_that_the_file_system_can_not_hold_is_refused(min_free, fits):
    for files, is_fine in ((fits, True), (fits + 1, False)):
        room = Drive(quota=files * SIZE, min_free=None if min_free is None else min_free * SIZE).room
        space = Space(0, 100 * SIZE)
        if is_fine:
            room.check_fits("here", space)
        else:
            with pytest.raises(TierUnavailable, match=r"an nvme quota of .* at here is refused"):
                room.check_fits("here", space)


def test_what_must_stay_free_may_be_more_than_there_is_and_is_named():
    room = Drive(quota=SIZE, min_free=200 * SIZE).room
    with pytest.raises(TierUnavailable, match="give less min_free_gb"):
        room.check_fits("here", Space(0, 100 * SIZE))


def test_an_agent_refuses_such_a_quota_in_one_sentence(tmp_path, capsys):
    arguments = ["--host", "h", "--door", str(tmp_path / "door.sock"), "--redis", "redis://127.0.0.1:1"]
    assert main(["agent", *arguments, "--nvme", str(tmp_path / "nvme"), "--nvme-gb", "900000"]) == 2
    assert "an nvme quota of 900,000,000,000,000 bytes at" in capsys.readouterr().err.strip().splitlines()[-1]


async def test_a_real_file_system_keeps_its_minimum(tmp_path):
    """Twelve MiB of ext4, a quota that would fill it: a twentieth stays free, and the newest chunks are there."""
    with image_mounted(tmp_path / "small", 12 << 20) as small:
        status = os.statvfs(small)
        total, free = (status.f_frsize * blocks for blocks in (status.f_blocks, status.f_bavail))
        (small / "ballast").write_bytes(bytes(free - total // 20 - 20 * SIZE))
        store = FolderStore(str(small))
        async with tier_on(store, files=100_000, slots=64) as tier:
            for number in range(40):
                await write(tier, f"n{number}")
            assert store.space().free_bytes >= total // 20 - 40 * FOLDERS_BYTES
            assert storage_key("n39") in tier.index
            assert storage_key("n0") not in tier.index
            assert not tier.is_paused, "the drive never had to say that it is full"
