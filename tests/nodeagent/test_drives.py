"""Several drives as one tier: chunks are spread, one drive's fault costs its own chunks, and they come back."""

import asyncio
import errno
from collections import Counter

import pytest
import xxhash

from nodeagent.tiers import drive as one_drive
from nodeagent.tiers import quarantine
from nodeagent.tiers.drives import cost
from tests.nodeagent.lone_drive import LENGTH, soon
from tests.nodeagent.running import label, open_fds, payload, storage_key
from tests.nodeagent.several_drives import SickStore, drives_on

NAMES = [f"n{number}" for number in range(24)]
KEYS = [storage_key(f"k{number}") for number in range(4_000)]


def chosen(weights):
    return {key: min(weights, key=lambda name: cost(key, name, weights[name])) for key in KEYS}


def stores_in(tmp_path, count=2):
    return [SickStore(tmp_path / f"drive-{number}") for number in range(count)]


def test_drives_get_chunks_in_proportion_to_their_quotas():
    shares = Counter(chosen({"a": 1.0, "b": 1.0, "c": 2.0}).values())
    assert shares["a"] == pytest.approx(1_000, rel=0.15)
    assert shares["b"] == pytest.approx(1_000, rel=0.15)
    assert shares["c"] == pytest.approx(2_000, rel=0.15)


def test_a_drive_more_takes_chunks_from_all_and_moves_no_other():
    before, after = chosen({"a": 1.0, "b": 1.0}), chosen({"a": 1.0, "b": 1.0, "c": 1.0})
    moved = [key for key in KEYS if before[key] != after[key]]
    assert all(after[key] == "c" for key in moved)
    assert len(moved) == pytest.approx(len(KEYS) / 3, rel=0.15)


async def test_chunks_are_spread_and_found_again_after_a_restart(tmp_path):
    stores = stores_in(tmp_path)
    async with drives_on(stores) as drives:
        await drives.write(*NAMES)
        places = {name: drives.where(name) for name in NAMES}
        assert {tuple(place) for place in places.values()} == {(0,), (1,)}
        assert drives.nvme.used_bytes == sum(drive.used_bytes for drive in drives.drives)
    async with drives_on(stores) as drives:
        assert {name: drives.where(name) for name in NAMES} == places
        assert all([await drives.read(name) == payload(name, LENGTH) for name in NAMES])


async def test_a_chunk_that_lies_on_another_drive_than_its_own_is_found(tmp_path):
    stores = stores_in(tmp_path)
    async with drives_on(stores[:1]) as drives:
        await drives.write(*NAMES)
    async with drives_on(stores) as drives:
        await drives.write(*NAMES)
        assert len(drives.drives[1].index) == 0, "what is held is not written again"
        assert all([await drives.read(name) == payload(name, LENGTH) for name in NAMES])


async def test_a_drive_that_fails_reads_is_quarantined_and_its_chunks_come_back(tmp_path):
    stores = stores_in(tmp_path)
    async with drives_on(stores) as drives:
        await drives.write(*NAMES)
        lost = [name for name in NAMES if drives.where(name) == [0]]
        stores[0].error = errno.EIO
        for name in lost[:3]:
            assert await drives.read(name) is None
        assert not drives.drives[0].is_up
        assert drives.nvme.status()["drives"][0]["failure"].startswith("it can't be read")
        assert drives.count("nvme_drive_up", drive="drive-0") == 0
        await soon(lambda: not any(drives.is_announced(name) for name in lost))
        for name in NAMES:
            assert await drives.read(name) == (None if name in lost else payload(name, LENGTH))
            assert drives.is_announced(name) == (name not in lost)
        stores[0].error = 0
        await soon(lambda: drives.drives[0].is_up and not drives.drives[0].is_restoring)
        back = lost[3:]
        assert all([await drives.read(name) == payload(name, LENGTH) for name in back]), "but for those that failed"
        assert all(drives.is_announced(name) for name in back)
        assert drives.count("nvme_drive_up", drive="drive-0") == 1


async def test_one_file_that_can_not_be_read_costs_one_chunk(tmp_path):
    stores = stores_in(tmp_path)
    async with drives_on(stores) as drives:
        await drives.write(*NAMES)
        mine = [name for name in NAMES if drives.where(name) == [0]]
        for number in range(6):
            stores[0].error = errno.EIO if number % 2 else 0
            await drives.read(mine[number])
        assert drives.drives[0].is_up, "errors in a row are a drive's end, not errors"


async def test_too_many_open_files_are_a_miss_and_no_chunk_goes(tmp_path):
    stores = stores_in(tmp_path)
    async with drives_on(stores) as drives:
        await drives.write(*NAMES)
        for store in stores:
            store.error = errno.EMFILE
        assert [await drives.read(name) for name in NAMES] == [None] * len(NAMES)
        for store in stores:
            store.error = 0
        assert all([await drives.read(name) == payload(name, LENGTH) for name in NAMES])


async def test_chunks_of_a_drive_that_is_away_are_written_to_the_next(tmp_path):
    stores = stores_in(tmp_path)
    async with drives_on(stores) as drives:
        stores[0].error = errno.EIO
        drives.drives[0].fail("told to")
        await drives.write(*NAMES)
        assert {tuple(drives.where(name)) for name in NAMES} == {(1,)}


async def test_a_chunk_on_two_drives_is_withdrawn_with_the_last(tmp_path):
    stores = stores_in(tmp_path)
    async with drives_on(stores[:1]) as drives:
        await drives.write("n0")
    async with drives_on(stores[1:]) as drives:
        await drives.write("n0")
    async with drives_on(stores) as drives:
        assert drives.where("n0") == [0, 1]
        stores[0].error = stores[1].error = errno.EIO
        drives.drives[0].fail("told to")
        await soon(lambda: drives.drives[0]._lost is None)
        assert drives.is_announced("n0")
        drives.drives[1].fail("told to")
        await soon(lambda: not drives.is_announced("n0"))


async def test_a_drive_that_hangs_costs_its_own_threads_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "HANG_S", 0.05)
    monkeypatch.setattr(quarantine, "WATCH_S", 0.01)
    stores = stores_in(tmp_path)
    async with drives_on(stores) as drives, asyncio.TaskGroup() as group:
        await drives.write(*NAMES)
        mine = [name for name in NAMES if drives.where(name) == [0]]
        stores[0].answers.clear()
        hanging = [group.create_task(drives.read(name)) for name in mine[:6]]
        await soon(lambda: not drives.drives[0].is_up)
        assert "hangs" in drives.drives[0].failure
        await soon(lambda: sum(task.done() for task in hanging) == 2)
        assert [task.result() for task in hanging if task.done()] == [None] * 2, "those that no thread had begun"
        for name in NAMES:
            assert await drives.read(name) == (None if name in mine else payload(name, LENGTH))
        stores[0].answers.set()
        await soon(lambda: drives.drives[0].is_up and not drives.drives[0].is_restoring)
        assert all([await drives.read(name) == payload(name, LENGTH) for name in mine])


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENODEV], ids=errno.errorcode.get)
async def test_a_drive_that_fails_at_the_start_is_tried_again_while_the_others_serve(tmp_path, number):
    stores = stores_in(tmp_path)
    async with drives_on(stores) as drives:
        await drives.write(*NAMES)
        mine = [name for name in NAMES if drives.where(name) == [0]]
    stores[0].error = number
    async with drives_on(stores) as drives:
        assert [drive.is_up for drive in drives.drives] == [False, True]
        assert await drives.read(next(name for name in NAMES if name not in mine)) is not None
        stores[0].error = 0
        await soon(lambda: len(drives.drives[0].index) == len(mine))
        assert await drives.read(mine[0]) == payload(mine[0], LENGTH)


async def test_a_drive_that_hangs_at_the_start_does_not_hold_it_up_and_comes_later(tmp_path, monkeypatch):
    stores = stores_in(tmp_path)
    async with drives_on(stores) as drives:
        await drives.write(*NAMES)
        mine = [name for name in NAMES if drives.where(name) == [0]]
    before = open_fds()
    monkeypatch.setattr(one_drive, "OPEN_WAIT_MAX_S", 0.5)
    stores[0].answers.clear()
    async with drives_on(stores) as drives:
        assert [(drive.is_up, drive.failure) for drive in drives.drives] == [(False, "it hangs"), (True, "")]
        assert await drives.read(next(name for name in NAMES if name not in mine)) is not None
        stores[0].answers.set()
        await soon(lambda: len(drives.drives[0].index) == len(mine))
    assert open_fds() == before


async def test_a_folder_that_goes_is_not_replaced_by_another_and_comes_back_with_its_chunks(tmp_path):
    stores = stores_in(tmp_path)
    async with drives_on(stores) as drives:
        await drives.write(*NAMES)
        mine = [name for name in NAMES if drives.where(name) == [0]]
        (tmp_path / "drive-0").rename(tmp_path / "away")
        drives.drives[0].fail("its folder is gone")
        await soon(lambda: not drives.is_announced(mine[0]))
        (tmp_path / "drive-0").mkdir(mode=0o700)
        refused = drives.count("degraded_total", reason="nvme_unavailable")
        await soon(lambda: drives.count("degraded_total", reason="nvme_unavailable") >= refused + 3)
        assert not drives.drives[0].is_up
        assert list((tmp_path / "drive-0").iterdir()) == []
        (tmp_path / "drive-0").rmdir()
        (tmp_path / "away").rename(tmp_path / "drive-0")
        await soon(lambda: len(drives.drives[0].index) == len(mine))
        assert await drives.read(mine[0]) == payload(mine[0], LENGTH)


@pytest.mark.parametrize("is_read", [False, True], ids=["written", "read"])
async def test_what_was_written_or_read_leaves_no_parent_older_than_its_child_on_any_drive(tmp_path, is_read):
    """Chunks are written and read from the root on, each later than its parent: once it rests, that is set right."""
    chain = [f"c{position}" for position in range(24)]
    stores = stores_in(tmp_path)
    async with drives_on(stores) as drives:
        for position, name in enumerate(chain):
            store_chunk(drives, label(name, chain[position - 1] if position else None, position), name)
        await soon(lambda: len(drives.nvme) == len(chain))
        for name in chain if is_read else ():
            assert await drives.read(name) is not None
        for drive in drives.drives:
            ages = [entry.label.position for entry in drive.index.take_victims(1 << 30, 100)]
            assert len(ages) > 4
            assert ages == sorted(ages, reverse=True)


async def test_what_waits_for_a_drive_that_fails_is_refused_at_once(tmp_path):
    stores = stores_in(tmp_path, 1)
    async with drives_on(stores) as drives:
        for name in NAMES[:6]:
            store_chunk(drives, label(name), name)
        assert drives.nvme.queued_writes == 6
        stores[0].error = errno.EIO
        drives.drives[0].fail("told to")
        assert drives.nvme.queued_writes == 0
        assert drives.count("admission_refused_total", reason="nvme_quarantined") == 6


def store_chunk(drives, chunk, name):
    data = payload(name, LENGTH)
    granted = drives.hierarchy.reserve(chunk, LENGTH, xxhash.xxh3_128_digest(data), "p")
    with drives.arena.view(granted.reservation.slot, LENGTH) as slot:
        slot[:] = data
    drives.hierarchy.begin_commit("p", granted.reservation.number)
    drives.hierarchy.finish_commit(granted.reservation, granted.reservation.checksum)
    drives.nvme.offer(drives.hierarchy, storage_key(name))
