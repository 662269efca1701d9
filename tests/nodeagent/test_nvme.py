"""The tier against a plain model, on a folder that fails when told: what it announces it has, what it has is right."""

import asyncio
import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nodeagent.labels import ChunkLabel
from nodeagent.tiers.chunk_file import UNKNOWN_IDENTITY, FileHeader, name_of
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.nvme_index import NvmeEntry, NvmeIndex, order_of_use
from tests.nodeagent.lone_drive import (
    FILE_BYTES,
    LENGTH,
    QUOTA_FILES,
    FaultyStore,
    count,
    read_back,
    soon,
    tier_on,
    write,
)
from tests.nodeagent.running import label, payload, storage_key


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO], ids=errno.errorcode.get)
async def test_a_drive_that_refuses_writes_pauses_them_and_they_resume(tmp_path, number):
    store = FaultyStore(str(tmp_path / "nvme"))
    async with tier_on(store) as tier:
        await write(tier, "before")
        store.write_error = number
        await write(tier, "a")
        assert tier.index.get(storage_key("a")) is None
        await write(tier, "b")
        assert count(tier, "admission_refused_total", reason="nvme_paused") >= 1
        assert count(tier, "degraded_total", reason="nvme_write_failed") == 1
        assert await read_back(tier, "before") == payload("before", LENGTH), "it is read all the while"
        store.write_error = 0
        await soon(lambda: not tier.is_paused)
        await write(tier, "a")
        assert await read_back(tier, "a") == payload("a", LENGTH)


async def test_a_drive_that_is_full_though_it_should_not_be_gives_room_and_recovers(tmp_path):
    store = FaultyStore(str(tmp_path / "nvme"))
    async with tier_on(store) as tier:
        await write(tier, "before")
        await write(tier, "after")
        store.write_error = errno.ENOSPC
        await write(tier, "a")
        assert tier.is_paused
        store.write_error = 0
        await soon(lambda: not tier.is_paused)
        await write(tier, "a")
        assert await read_back(tier, "a") == payload("a", LENGTH)
        assert await read_back(tier, "before") is None, "the oldest went"
        assert await read_back(tier, "after") == payload("after", LENGTH)


async def test_a_full_file_system_is_survived(tmp_path):
    await asyncio.to_thread((tmp_path / "nvme").mkdir)
    mounted = await asyncio.create_subprocess_exec(
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={5 * FILE_BYTES},mode=700",
        "tmpfs",
        str(tmp_path / "nvme"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    if await mounted.wait():
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        async with tier_on(FolderStore(str(tmp_path / "nvme")), files=100, write_pause_s=0.0) as tier:
            for number in range(10):
                await write(tier, f"n{number}")
            assert 1 <= len(tier.index) < 10
            assert not list((tmp_path / "nvme").rglob("*.tmp"))
            for number in range(10 - len(tier.index), 10):
                assert await read_back(tier, f"n{number}") == payload(f"n{number}", LENGTH), "the newest are there"
    finally:
        await (await asyncio.create_subprocess_exec("umount", str(tmp_path / "nvme"))).wait()


async def test_a_file_that_can_not_be_removed_is_passed_by_and_stays_counted(tmp_path):
    store = FaultyStore(str(tmp_path / "nvme"))
    async with tier_on(store) as tier:
        for number in range(QUOTA_FILES):
            await write(tier, f"n{number}")
        store.stuck = frozenset({name_of(storage_key("n0"))})
        for number in range(QUOTA_FILES, 2 * QUOTA_FILES):
            await write(tier, f"n{number}")
            assert tier.used_bytes <= tier.quota_bytes
        assert tier.index.get(storage_key("n7")) is not None
        assert tier.announced[storage_key("n0")[:16]] == 0
        assert count(tier, "degraded_total", reason="nvme_unremovable") >= 1
        store.stuck = frozenset()
        for number in range(2 * QUOTA_FILES, 3 * QUOTA_FILES):
            await write(tier, f"n{number}")
        assert not tier.room.stuck
        assert not Path(store._place(name_of(storage_key("n0")))).exists()


async def test_foreign_and_bad_files_are_removed_at_the_start_and_the_others_counted(tmp_path):
    store = FolderStore(str(tmp_path / "nvme"))
    async with tier_on(store) as tier:
        for name in "abc":
            await write(tier, name)
    for name, offset in (("a", 8), ("b", 60)):
        place = Path(store._place(name_of(storage_key(name))))
        data = bytearray(place.read_bytes())
        data[offset] ^= 4
        place.write_bytes(data)
    async with tier_on(store) as tier:
        await soon(lambda: tier.used_bytes == FILE_BYTES)
        assert len(tier.index) == 1
        assert count(tier, "evictions_total", tier="nvme", reason="foreign") == 1
        assert count(tier, "evictions_total", tier="nvme", reason="corrupt") == 1
        assert tier.announced == {storage_key("c")[:16]: 4}


@pytest.mark.parametrize("is_used", [False, True], ids=["unused", "used meanwhile"])
def test_restored_parents_are_not_evicted_before_their_children(is_used):
    """Two chains written root first; the older one may be used between reading and ordering."""
    index = NvmeIndex(lambda key, mask: None)
    names = [(chain, position) for chain in "on" for position in range(3)]
    for age, (chain, position) in reversed(list(enumerate(names))):
        parent = f"{chain}{position - 1}" if position else None
        index.restore(
            FileHeader(label(f"{chain}{position}", parent, position), UNKNOWN_IDENTITY, LENGTH, b"c" * 16), float(age)
        )
    if is_used:
        index.touch(storage_key("o2"))
    *_, account = index.account_of_use()
    index.put_in_order(order_of_use(account), 0, 100)
    order = [entry.label.storage_key for entry in index.take_victims(100 * FILE_BYTES, 100)]
    expected = ["n2", "n1", "n0", "o2", "o1", "o0"] if is_used else ["o2", "o1", "o0", "n2", "n1", "n0"]
    assert order == [storage_key(name) for name in expected]


def test_a_directory_key_is_withdrawn_with_its_last_copy():
    announced = {}
    index = NvmeIndex(announced.__setitem__)
    for name in "ab":
        index.add(NvmeEntry(ChunkLabel(storage_key(name), b"d" * 16, None, 0), UNKNOWN_IDENTITY, 1, b"c" * 16))
    index.drop(index.get(storage_key("a")))
    assert announced == {b"d" * 16: 4}
    index.drop(index.get(storage_key("b")))
    assert announced == {b"d" * 16: 0}


NAMES = st.sampled_from([f"c{number}" for number in range(7)])


class TierAgainstFolder(RuleBasedStateMachine):
    """Writes, reads, restarts and faults in any order; the model is the folder and the bytes each name stands for."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.store = FaultyStore(self.folder)
        self.damaged = set()
        self.runner = asyncio.Runner()
        self.start()

    def start(self):
        self.context = tier_on(self.store, write_pause_s=0.0)
        self.tier = self.runner.run(self.enter())

    async def enter(self):
        return await self.context.__aenter__()

    async def leave(self):
        await self.context.__aexit__(None, None, None)

    def place(self, name):
        return Path(self.store._place(name_of(storage_key(name))))

    def teardown(self):
        self.runner.run(self.leave())
        self.runner.close()
        shutil.rmtree(self.folder)

    @rule(name=NAMES)
    def write(self, name):
        was_there = self.tier.index.get(storage_key(name)) is not None
        self.runner.run(write(self.tier, name))
        if not self.store.write_error:
            assert self.tier.index.get(storage_key(name)) is not None
            if not was_there and not self.place(name).exists():
                raise AssertionError("an indexed chunk has no file")

    @rule(name=NAMES)
    def read(self, name):
        found = self.runner.run(read_back(self.tier, name))
        assert found in (None, payload(name, LENGTH))
        if found is None:
            assert self.tier.index.get(storage_key(name)) is None
        else:
            assert name not in self.damaged

    @rule(name=NAMES, offset=st.integers(0, LENGTH - 1))
    def flip_a_bit(self, name, offset):
        if self.place(name).exists() and name not in self.damaged:
            data = bytearray(self.place(name).read_bytes())
            data[4_096 + offset] ^= 1
            self.place(name).write_bytes(data)
            self.damaged.add(name)

    @rule(name=NAMES)
    def delete(self, name):
        self.place(name).unlink(missing_ok=True)

    @rule(number=st.sampled_from([0, errno.ENOSPC]))
    def fail_writes(self, number):
        self.store.write_error = number

    @rule()
    def restart(self):
        self.runner.run(self.leave())
        self.start()

    @invariant()
    def the_quota_holds_and_announced_is_indexed(self):
        self.damaged = {name for name in self.damaged if self.place(name).exists()}
        on_disk = [path for path in Path(self.folder).rglob("*") if len(path.name) == 64]
        assert len(on_disk) <= QUOTA_FILES
        assert self.tier.used_bytes <= self.tier.quota_bytes
        announced = {key for key, mask in self.tier.announced.items() if mask}
        assert announced == set(self.tier.index.directory_keys(0, 1_000))


TestTierAgainstFolder = TierAgainstFolder.TestCase
TestTierAgainstFolder.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
