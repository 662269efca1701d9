"""A folder within its daily budget: the state is there before the bytes are, and nothing else changes."""

import errno
import logging
import os
import threading

import pytest
import xxhash

from nodeagent.errors import BudgetSpent, ChunkConflict, TierUnavailable
from nodeagent.tiers.budgeted_store import STATE_NAME, BudgetedStore, HostTime
from nodeagent.tiers.chunk_file import HEADER_BYTES, UNKNOWN_IDENTITY, FileHeader, file_bytes
from nodeagent.tiers.endurance import DailyBudget, Instant
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.self_test import TEST_BYTES
from tests.nodeagent.running import label, payload

LENGTH = 4_096
FILE_BYTES = file_bytes(LENGTH)
BURST_FILES = 8
DAY_BYTES = 8 * (BURST_FILES * FILE_BYTES + HEADER_BYTES)
DAY_S = 86_400.0


class SpyStore(FolderStore):
    """Notes what was saved at the moment of each write, and fails when told to."""

    error = 0

    def __init__(self, path):
        super().__init__(path)
        self.path = path
        self.saved_at_writes = []

    def put(self, header, data):
        with open(os.path.join(self.path, STATE_NAME), "rb") as file:
            self.saved_at_writes.append(file.read())
        if self.error:
            raise OSError(self.error, "told to")
        return super().put(header, data)


class Clock:
    def __init__(self):
        self.s = 10 * DAY_S

    def __call__(self):
        return Instant("boot", self.s, self.s + 1.7e9)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    """With a full bucket."""
    with opened(tmp_path, clock) as budgeted:
        clock.s += DAY_S
        yield budgeted


class opened:  # noqa: N801 - a context manager reads as a verb
    def __init__(self, tmp_path, clock):
        path = str(tmp_path / "nvme")
        self.store = BudgetedStore(SpyStore(path), path, "drive-1", DAY_BYTES, clock)

    def __enter__(self):
        self.store.open()
        return self.store

    def __exit__(self, *_):
        self.store.close()


def put(store, name, data=None):
    data = payload(name, LENGTH) if data is None else data
    return store.put(FileHeader(label(name), UNKNOWN_IDENTITY, LENGTH, xxhash.xxh3_128_digest(data)), data)


def written(store):
    return sum(found.size_bytes for found in store.listing().files)


def test_it_writes_a_burst_and_then_refuses_and_more_comes_together(store, clock):
    for number in range(BURST_FILES):
        assert store.may_write(FILE_BYTES)
        assert put(store, f"n{number}")
    assert not store.may_write(FILE_BYTES)
    with pytest.raises(BudgetSpent, match="drive-1"):
        put(store, "one more")
    assert (written(store), store.written_today_bytes) == (BURST_FILES * FILE_BYTES,) * 2
    target = bytearray(LENGTH)
    store.read_into(label("n0").storage_key, memoryview(target))
    assert target == payload("n0", LENGTH), "it is read all the while"
    store.remove(next(iter(store.listing().files)).name)
    assert not store.may_write(FILE_BYTES), "what is removed isn't unwritten"
    clock.s += DAY_S / 7
    assert store.may_write(FILE_BYTES)
    assert put(store, "one more")


def test_the_bytes_of_a_write_are_saved_as_spent_before_it_begins(store):
    for number in range(BURST_FILES):
        put(store, f"n{number}")
        saved = store._store.saved_at_writes[-1]
        left = DailyBudget(DAY_BYTES, store._now(), saved).available_bytes(store._now())
        assert left <= (BURST_FILES - number - 1) * FILE_BYTES


def test_a_process_that_is_killed_over_and_over_writes_no_more_than_the_budget(tmp_path, clock):
    with opened(tmp_path, clock):
        clock.s += DAY_S
    lives, count = [], 0
    for life in range(3 * BURST_FILES):
        store = opened(tmp_path, clock).store
        if life:
            # The killed one's lock and descriptors went with it.
            lives[-1]._store.close()
            os.close(lives[-1]._root_fd)
            lives[-1]._root_fd = -1
        store.open()
        lives.append(store)
        try:
            put(store, f"n{life}")
            count += 1
        except BudgetSpent:
            pass
    assert count == BURST_FILES
    lives[-1].close()


def test_what_was_there_already_and_what_conflicts_costs_nothing_and_a_write_that_fails_costs_all_of_it(store):
    put(store, "a")
    left = store.available_bytes
    assert not put(store, "a")
    with pytest.raises(ChunkConflict):
        put(store, "a", payload("other", LENGTH))
    assert store.available_bytes == left
    store._store.error = errno.EIO
    with pytest.raises(OSError, match="told to"):
        put(store, "b")
    assert store.available_bytes == left - FILE_BYTES


def test_a_label_is_a_write_of_a_header(store):
    put(store, "a")
    left = store.available_bytes
    store.update_label(label("a"))
    assert store.available_bytes == left - HEADER_BYTES
    while store.available_bytes >= HEADER_BYTES:
        store.update_label(label("a"))
    with pytest.raises(BudgetSpent):
        store.update_label(label("a"))


def test_where_the_state_cannot_be_saved_nothing_is_written_and_nothing_is_lost(store, tmp_path):
    left = store.available_bytes
    (tmp_path / "nvme").rename(tmp_path / "gone")
    store._store.path = str(tmp_path / "gone")
    (tmp_path / "gone" / STATE_NAME).unlink(missing_ok=True)
    (tmp_path / "gone" / STATE_NAME).mkdir()
    (tmp_path / "gone" / STATE_NAME / "in the way").touch()
    with pytest.raises(OSError, match="directory"):
        put(store, "a")
    assert (list(store.listing().files), store.available_bytes) == ([], left)
    (tmp_path / "gone" / STATE_NAME / "in the way").unlink()
    (tmp_path / "gone" / STATE_NAME).rmdir()
    assert put(store, "a")
    assert not (tmp_path / "nvme").exists(), "a folder that was moved isn't made anew"


def test_a_link_in_the_states_place_is_never_followed(tmp_path, clock):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(DailyBudget(DAY_BYTES, Instant("boot", 0, 1.7e9)).state(clock()))
    (tmp_path / "nvme").mkdir(mode=0o700)
    for name in (STATE_NAME, STATE_NAME + ".tmp"):
        (tmp_path / "nvme" / name).symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    with opened(tmp_path, clock) as store:
        assert store.available_bytes == 0
        clock.s += DAY_S
        put(store, "a")
    assert elsewhere.read_bytes() == before
    assert (tmp_path / "nvme" / STATE_NAME).is_file()


def test_a_restart_keeps_what_was_left_and_the_drive_takes_it_along(tmp_path, clock):
    with opened(tmp_path, clock) as store:
        clock.s += DAY_S
        put(store, "a")
        left, today = store.available_bytes, store.written_today_bytes
    assert left == (BURST_FILES - 1) * FILE_BYTES
    with opened(tmp_path, clock) as store:
        assert (store.available_bytes, store.written_today_bytes) == (left, today)
        assert [found.size_bytes for found in store.listing().files] == [FILE_BYTES], "the state is no chunk"


def test_several_writers_at_once_share_one_budget(store):
    outcomes = []

    def write(start):
        for number in range(start, start + BURST_FILES):
            try:
                outcomes.append(put(store, f"n{number}"))
            except BudgetSpent:
                outcomes.append(None)

    threads = [threading.Thread(target=write, args=(1_000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count(True), outcomes.count(None)) == (BURST_FILES, 3 * BURST_FILES)
    assert written(store) == BURST_FILES * FILE_BYTES


def test_a_folder_that_cannot_be_had_is_closed_again(tmp_path, clock):
    with opened(tmp_path, clock):
        other = opened(tmp_path, clock).store
        with pytest.raises(TierUnavailable, match="another agent"):
            other.open()
        other.close()


def test_the_hosts_time_runs_on_clocks_that_agree_and_names_the_boot(tmp_path):
    first, second = HostTime()(), HostTime()()
    assert first.boot_id == second.boot_id != ""
    assert 0 < first.boot_s <= second.boot_s
    missing = str(tmp_path / "none")
    assert HostTime(missing)().boot_id != HostTime(missing)().boot_id, "an unknown boot is nobody else's"


def test_a_spent_budget_is_told_once_until_half_a_burst_has_come_together(store, clock, caplog):
    caplog.set_level(logging.INFO)
    number = 0
    for _ in range(5):
        clock.s += DAY_S / 7
        while store.may_write(FILE_BYTES):
            put(store, f"n{(number := number + 1)}")
    clock.s += DAY_S
    assert store.may_write(FILE_BYTES)
    told = [record.message for record in caplog.records]
    assert [text for text in told if "half a burst" in text] == [
        "drive-1 has half a burst of its write budget again"
    ] * 5
    caplog.clear()
    for _ in range(20):
        while store.may_write(FILE_BYTES):
            put(store, f"n{(number := number + 1)}")
        clock.s += DAY_S / 50
    assert len(caplog.records) == 1, "a little at a time is no news"


def test_what_was_drawn_and_not_spent_comes_back_at_the_end(tmp_path, clock):
    path = str(tmp_path / "nvme")
    for life in range(20):
        store = BudgetedStore(FolderStore(path), path, "drive-1", 100_000 * FILE_BYTES, clock)
        store.open()
        if not life:
            clock.s += DAY_S
            left = store.available_bytes
        put(store, f"n{life}")
        store.close()
    store.open()
    assert store.available_bytes == left - 20 * (FILE_BYTES + TEST_BYTES), "a self-test at each start counts"
    store.close()


def test_a_folder_of_unknown_past_is_told_what_its_budget_waits_for(tmp_path, clock, caplog):
    caplog.set_level(logging.INFO)
    path = str(tmp_path / "nvme")
    store = BudgetedStore(FolderStore(path), path, "drive-1", 100_000 * FILE_BYTES, clock)
    store.open()
    assert not store.may_write(FILE_BYTES)
    store.close()
    begun, spent = [record.getMessage() for record in caplog.records]
    assert "so its budget begins empty" in begun
    draw_bytes = 100_000 * FILE_BYTES // 1_024
    assert spent.startswith(f"drive-1 is read only until {draw_bytes} bytes of its endurance budget have come together")
    caplog.clear()
    store = BudgetedStore(FolderStore(path), path, "drive-1", 100_000 * FILE_BYTES, clock)
    store.open()
    store.close()
    assert "begins empty" not in caplog.text


def test_a_budget_in_which_no_chunk_ever_fits_says_so(tmp_path, clock, caplog):
    path = str(tmp_path / "nvme")
    store = BudgetedStore(FolderStore(path), path, "drive-1", 7 * FILE_BYTES, clock)
    store.open()
    clock.s += 2 * DAY_S
    assert not store.may_write(FILE_BYTES)
    store.close()
    assert "drive-1 is never written" in caplog.text
    assert "capacity_gb and dwpd" in caplog.text
