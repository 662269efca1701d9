"""What is under way when it is forgotten comes to nothing: puts, loads from disk, writes to it, labels that arrive."""

import asyncio
import threading

import pytest
import xxhash

from nodeagent.errors import ForgetBusy, TombstonesFull
from nodeagent.forget_request import ForgetRequest
from nodeagent.messages import PutOutcome
from nodeagent.tiers.admission import Admission
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.promotion import Promotion
from nodeagent.tiers.write_policy import WRITE_POLICIES, Pins
from tests.nodeagent.forgetful_host import HOLDER, LENGTH, data_of, forgetful_host, soon, write_file
from tests.nodeagent.running import label, storage_key

WAIT_S = 20
A = frozenset([storage_key("a")[:16]])


class GatedStore(FolderStore):
    """A folder whose reads and writes wait until they may go on; `is_waiting` is set while one does."""

    def __init__(self, path):
        super().__init__(path)
        self.may_go_on, self.is_waiting = threading.Event(), threading.Event()
        self.may_go_on.set()

    def put(self, header, payload):
        self._wait()
        return super().put(header, payload)

    def read_into(self, key, target):
        header = super().read_into(key, target)
        self._wait()
        return header

    def _wait(self):
        self.is_waiting.set()
        assert self.may_go_on.wait(WAIT_S)


def gated(host):
    store = host.nvme.drives[0].store
    store.may_go_on.clear()
    store.is_waiting.clear()
    return store


def refused(host):
    return host.metrics.registry.get_sample_value("warmroute_admission_refused_total", {"reason": "forgotten"}) or 0


def files(folder):
    return [path for path in folder.rglob("*") if len(path.name) == 64]


async def test_a_put_that_was_granted_is_refused_at_its_commit_and_leaves_no_byte(tmp_path):
    async with forgetful_host(tmp_path) as host:
        hierarchy = host.dram.hierarchy
        granted = hierarchy.reserve(label("a"), LENGTH, xxhash.xxh3_128_digest(data_of("a")), HOLDER)
        aborted = hierarchy.reserve(label("b", "a", 1), LENGTH, b"c" * 16, HOLDER)
        for each in (granted, aborted):
            with hierarchy.arena.view(each.reservation.slot, LENGTH) as view:
                view[:] = data_of("a")
        receipt = await host.forget(directory_keys=A, storage_keys=frozenset([storage_key("a")]))
        assert receipt.forgotten.puts == 2
        assert await host.dram.commit(HOLDER, granted.reservation.number) is PutOutcome.FORGOTTEN
        hierarchy.abort(HOLDER, aborted.reservation.number)
        host.dram.account()
        await soon(lambda: hierarchy.arena.used_bytes == 0)
        for each in (granted, aborted):
            with hierarchy.arena.view(each.reservation.slot, LENGTH) as view:
                assert not any(view)


async def test_a_load_under_way_lands_nowhere(tmp_path):
    write_file(tmp_path / "drive-0", "a", label("a"))
    async with forgetful_host(tmp_path, make_store=GatedStore) as host:
        store = gated(host)
        admission = Admission(WRITE_POLICIES["hit"](), Pins(), host.dram, host.nvme)
        promotion = Promotion(host.dram, host.nvme, admission, host.group, host.metrics)
        opening = asyncio.create_task(promotion.open_run([storage_key("a")], 5.0))
        await soon(store.is_waiting.is_set)
        forgetting = asyncio.create_task(host.forget(directory_keys=A))
        await soon(lambda: not host.nvme.holds(storage_key("a")))
        store.may_go_on.set()
        receipt, run = await forgetting, await opening
        assert receipt.forgotten.loads == 1
        assert (run.keys, host.is_held(storage_key("a"))) == ([], False)
        assert host.metrics.registry.get_sample_value("warmroute_put_conflicts_total") == 0
        assert refused(host) == 1
        assert (await promotion.open_run([storage_key("a")], 5.0)).keys == []
        await promotion.close()


async def test_a_write_in_hand_and_one_that_waits_leave_no_file(tmp_path):
    async with forgetful_host(tmp_path, make_store=GatedStore) as host:
        store = gated(host)
        putting = [
            asyncio.create_task(host.put(name, chunk))
            for name, chunk in (("a", label("a")), ("b", label("b", "a", 1)), ("c", label("c")))
        ]
        await soon(lambda: store.is_waiting.is_set() and host.nvme.queued_writes == 2)
        forgetting = asyncio.create_task(host.forget(directory_keys=A))
        await soon(lambda: not host.is_held(storage_key("a")))
        assert not forgetting.done(), "it waits for the write in hand"
        store.may_go_on.set()
        receipt = await forgetting
        assert (receipt.forgotten.writes, receipt.forgotten.dram.chunks) == (2, 2)
        await asyncio.gather(*putting)
        assert refused(host) == 2
        assert len(files(tmp_path)) == 1
        assert host.nvme.holds(storage_key("c"))
        drive = host.nvme.drives[0]
        assert drive.used_bytes == drive.index.get(storage_key("c")).size_bytes


async def test_a_write_that_hung_until_its_drive_was_given_up_leaves_no_file_either(tmp_path):
    may_return = asyncio.Event()
    may_return.set()
    async with forgetful_host(tmp_path, make_store=GatedStore, are_drives_back=may_return.is_set) as host:
        store, drive = gated(host), host.nvme.drives[0]
        putting = asyncio.create_task(host.put("a", label("a")))
        await soon(store.is_waiting.is_set)
        may_return.clear()
        drive.fail("told to")
        receipt = await host.forget(directory_keys=A)
        assert receipt.remains.drives_away == [drive.name]
        store.may_go_on.set()
        await putting
        await soon(lambda: not drive.has_jobs)
        assert not files(tmp_path), "the thread itself saw to it"
        may_return.set()
        await soon(lambda: drive.is_up and not drive.is_restoring)
        assert not host.is_held(storage_key("a"))


async def test_a_chunk_that_was_forgotten_as_its_write_ended_is_not_indexed(tmp_path):
    async with forgetful_host(tmp_path, make_store=GatedStore) as host:
        store, hierarchy = gated(host), host.dram.hierarchy
        putting = asyncio.create_task(host.put("a", label("a")))
        await soon(store.is_waiting.is_set)
        # Its name isn't known to the tombstones: the thread finds nothing wrong with it.
        hierarchy.forget(hierarchy.find(storage_key("a")))
        store.may_go_on.set()
        await putting
        await soon(lambda: refused(host))
        await soon(lambda: not files(tmp_path))
        await soon(lambda: not host.nvme.used_bytes)
        assert not host.nvme.holds(storage_key("a"))


async def test_a_file_that_could_not_be_removed_goes_when_it_can(tmp_path, monkeypatch):
    real, is_stuck = FolderStore.remove, [True]

    def remove(store, name):
        if is_stuck[0]:
            raise PermissionError(13, "told to")
        real(store, name)

    monkeypatch.setattr(FolderStore, "remove", remove)
    write_file(tmp_path / "drive-0", "a", label("a"))
    async with forgetful_host(tmp_path) as host:
        receipt = await host.forget(directory_keys=A)
        assert (receipt.remains.files_unremoved, receipt.forgotten.files_removed) == (1, 0)
        assert host.nvme.used_bytes > 0
        is_stuck[0] = False
        await soon(lambda: not files(tmp_path))
        await soon(lambda: not host.nvme.used_bytes)


async def test_a_put_of_what_is_forgotten_takes_no_slot(tmp_path):
    async with forgetful_host(tmp_path) as host:
        await host.forget(directory_keys=A)
        granted = host.dram.hierarchy.reserve(label("a"), LENGTH, b"c" * 16, HOLDER)
        after = host.dram.hierarchy.reserve(label("b", "a", 1), LENGTH, b"c" * 16, HOLDER)
        last = host.dram.hierarchy.reserve(label("c", "b", 2), LENGTH, b"c" * 16, HOLDER)
        assert [each.outcome for each in (granted, after, last)] == [PutOutcome.FORGOTTEN] * 3
        assert host.dram.used_bytes == 0


async def test_a_label_that_says_that_a_chunk_is_forgotten_takes_it_along(tmp_path):
    bare = label("a")
    bare = type(bare)(bare.storage_key, None, None, 0)
    async with forgetful_host(tmp_path) as host:
        assert await host.put("a", bare) is PutOutcome.STORED
        receipt = await host.forget(directory_keys=A)
        assert (receipt.forgotten.dram.chunks, receipt.remains.unlabelled) == (0, 2)
        host.dram.hierarchy.learn(label("a"))
        host.nvme.learn(label("a"))
        assert not host.is_held(storage_key("a"))
        await soon(lambda: not files(tmp_path))


async def test_too_many_at_once_are_told_to_come_again(tmp_path, monkeypatch):
    monkeypatch.setattr("nodeagent.forgetting.WAITING_MAX", 2)
    async with forgetful_host(tmp_path) as host:
        async with host.forgetter._turn:
            asked = [asyncio.create_task(host.forget(directory_keys=A)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(ForgetBusy):
                await host.forget(directory_keys=A)
        assert all(receipt.is_confirmed for receipt in await asyncio.gather(*asked))
        assert (await host.forget(directory_keys=A)).is_confirmed


async def test_whoever_asked_may_leave_and_it_is_done_all_the_same(tmp_path):
    async with forgetful_host(tmp_path) as host:
        await host.put("a", label("a"))
        asked = asyncio.create_task(host.forgetter.forget(ForgetRequest("keys", directory_keys=A)))
        await asyncio.sleep(0)
        asked.cancel()
        await soon(lambda: not host.is_held(storage_key("a")) and not files(tmp_path))


async def test_more_followers_than_can_be_remembered_are_refused_before_anything_is_done(tmp_path):
    async with forgetful_host(tmp_path) as host:
        host.tombstones._keys_max = 2
        for position, name in enumerate("abcd"):
            await host.put(name, label(name, "abcd"[position - 1] if position else None, position))
        with pytest.raises(TombstonesFull, match="identity or salt"):
            await host.forget(directory_keys=A)
        assert all(host.is_held(storage_key(name)) for name in "abcd")
        assert (len(host.tombstones), len(files(tmp_path))) == (0, 4)
        assert (await host.forget(identities=frozenset([bytes(31) + b"i"]))).is_confirmed


async def test_a_fault_is_told_and_the_next_request_is_served(tmp_path, monkeypatch):
    async with forgetful_host(tmp_path) as host:
        await host.put("a", label("a"))
        with monkeypatch.context() as patch:
            patch.setattr(host.dram, "clean", None)
            with pytest.raises(TypeError):
                await host.forget(directory_keys=A)
        assert (await host.forget(directory_keys=A)).is_confirmed


async def test_what_follows_through_a_drive_that_was_away_goes_when_it_is_back(tmp_path):
    """`c` follows `b`, which follows `a`; only `b` can tell, and is on the drive that is away."""
    chain = [("a", label("a")), ("b", label("b", "a", 1)), ("c", label("c", "b", 2))]
    for number, (name, chunk) in enumerate(chain):
        write_file(tmp_path / f"drive-{number % 2}", name, chunk)
    may_return = asyncio.Event()
    may_return.set()
    async with forgetful_host(tmp_path, drives=2, are_drives_back=may_return.is_set) as host:
        may_return.clear()
        host.nvme.drives[1].fail("told to")
        receipt = await host.forget(directory_keys=A)
        assert (receipt.forgotten.nvme.chunks, receipt.remains.unlinked) == (1, 1)
        assert host.is_held(storage_key("c"))
        may_return.set()
        await soon(lambda: host.nvme.drives[1].is_up)
        await soon(lambda: not files(tmp_path))
        assert not host.is_held(storage_key("c"))
        assert host.announced[4, storage_key("c")[:16]] is False


async def test_a_victim_that_waits_for_its_withdrawal_leaves_no_byte_either(tmp_path):
    async with forgetful_host(tmp_path) as host:
        await host.put("a", label("a"))
        hierarchy = host.dram.hierarchy
        (victim,) = hierarchy.take_victims(1)
        await host.forget(directory_keys=A)
        hierarchy.free([victim])
        host.dram.account()
        await soon(lambda: not hierarchy.arena.has_forgotten and not host.dram.used_bytes)
        with hierarchy.arena.view(victim.slot, LENGTH) as view:
            assert not any(view)


async def test_without_a_thread_slots_are_zeroed_all_the_same(tmp_path, monkeypatch):
    async with forgetful_host(tmp_path) as host:
        await host.put("a", label("a"))
        slot = host.dram.hierarchy.find(storage_key("a")).slot

        def refuse(*_, **__):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(host.dram._threads, "submit", refuse)
        assert (await host.forget(directory_keys=A)).is_confirmed
        await soon(lambda: not host.dram.used_bytes)
        with host.dram.hierarchy.arena.view(slot, LENGTH) as view:
            assert not any(view)
