"""Huge pages and nodes: what is asked for is had, or refused in a sentence that says what to do, and never assumed."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from nodeagent.client import PutResult
from nodeagent.errors import MemoryShort, TierUnavailable
from nodeagent.tiers import arena_memory, numa
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.arena_memory import HUGE_ARENA_BYTES_MIN, ArenaWish
from nodeagent.tiers.machine_memory import HUGE_PAGE_BYTES, HugePool, MachineMemory
from tests.nodeagent.running import (
    CHUNK_BYTES,
    WAIT_S,
    connected,
    label,
    open_fds,
    payload,
    read,
    running_agent,
    storage_key,
)

SLOT_BYTES = 12_288
QUOTA_BYTES = 2 * HUGE_PAGE_BYTES + 100_000


class Machine(MachineMemory):
    """This machine, but for what a test says of it."""

    def __init__(self, pool: HugePool | None = None, setting: str | None = None, nodes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._pool, self._setting, self._nodes = pool, setting, nodes

    def huge_pool(self, node=None):
        return self._pool if self._pool is not None else super().huge_pool(node)

    def transparent_setting(self):
        return self._setting or super().transparent_setting()

    def nodes(self):
        return self._nodes or super().nodes()


EMPTY = HugePool(0, 0)


@pytest.fixture
def pool():
    """Pages of the kernel's pool, where somebody has reserved some: `sysctl -w vm.nr_hugepages=64`."""
    free_bytes = MachineMemory().huge_pool().free_bytes
    if free_bytes < 2 * HUGE_PAGE_BYTES:
        pytest.skip("the kernel has no free huge pages (vm.nr_hugepages)")
    return free_bytes


def made(wish: ArenaWish, machine: MachineMemory | None = None, quota_bytes: int = QUOTA_BYTES, **options) -> Arena:
    return Arena(quota_bytes, SLOT_BYTES, wish, machine, **options)


def test_pages_of_the_pool_are_had_whole_sealed_and_given_back(pool):
    arena = made(ArenaWish("on"))
    try:
        assert arena.pages == {"pages": "2 MiB from the kernel's pool", "huge_bytes": 2 * HUGE_PAGE_BYTES}
        assert arena.total_bytes == 2 * HUGE_PAGE_BYTES
        assert MachineMemory().huge_pool().free_bytes == pool - arena.total_bytes
        for size in (HUGE_PAGE_BYTES, 4 * HUGE_PAGE_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.writable_fd, size)
        with pytest.raises(PermissionError):
            mmap.mmap(arena.read_only_fd, arena.total_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        arena.close()
    assert MachineMemory().huge_pool().free_bytes == pool


def test_engines_read_and_write_in_huge_pages_and_leave_nothing_mapped(pool, tmp_path):
    quota_bytes = 2 * HUGE_PAGE_BYTES
    nvme = {"nvme_path": str(tmp_path / "nvme"), "nvme_bytes": 1 << 30, "nvme_write": "through"}
    with running_agent(tmp_path, dram_bytes=quota_bytes, dram_more={"huge_pages": "on"}, **nvme) as agent:
        with connected(agent.config.door) as client:
            slots = agent.tier()["slots"]
            assert slots > 500
            names = [f"{number}" for number in range(slots)]
            for name in names:
                assert client.put(label(name), payload(name), WAIT_S) is PutResult.STORED
            assert all(read(client, name) == payload(name) for name in names)
            for number in range(8):
                assert client.put(label(f"more {number}"), payload(f"more {number}"), WAIT_S) is PutResult.STORED
            assert read(client, "0") == payload("0"), "from its file, straight into a huge page"
            assert agent.tier()["huge_bytes"] == quota_bytes
        # A map of 2 MiB pages ends only if whole ones are unmapped.
        assert Path("/proc/self/maps").read_text().count("warmroute-arena") == 1, "the agent's own"
    assert MachineMemory().huge_pool().free_bytes == pool


def test_without_a_pool_on_is_refused_and_told_how_many_pages_to_have():
    with pytest.raises(
        TierUnavailable, match=r"2 pages of 2 MiB are needed, of which 0 are free: raise vm.nr_huge"
    ) as it:
        made(ArenaWish("on"), Machine(EMPTY, "never"))
    assert not isinstance(it.value, MemoryShort)


def test_the_number_of_pages_to_have_counts_those_that_others_use():
    pool = HugePool(100 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
    with pytest.raises(TierUnavailable, match=r"raise vm.nr_hugepages to 101, or set dram.huge_pages to auto"):
        made(ArenaWish("on"), Machine(pool, "never"))


def test_pages_that_the_kernel_promised_and_did_not_give_are_not_reported_as_huge():
    machine = Machine(EMPTY, "advise")
    if MachineMemory().transparent_setting() != "never":
        pytest.skip("this kernel does give transparent huge pages to shared memory")
    arena = made(ArenaWish("auto"), machine, HUGE_ARENA_BYTES_MIN)
    assert arena.pages == {"pages": "2 MiB transparent", "huge_bytes": 0}
    assert os.fstat(arena.writable_fd).st_blocks * 512 >= arena.total_bytes
    arena.close()
    before = open_fds()
    with pytest.raises(TierUnavailable, match=r"raise vm\.nr_hugepages"):
        made(ArenaWish("on"), machine)
    assert open_fds() == before


def test_auto_goes_without_where_a_pool_shrinks_at_the_wrong_moment():
    claims = HugePool(10**12, 10**12)
    arena = made(
        ArenaWish("auto"), Machine(claims, "never"), HUGE_ARENA_BYTES_MIN + MachineMemory().huge_pool().free_bytes
    )
    assert arena.pages == {"pages": "4 KiB", "huge_bytes": 0}
    arena.close()


def test_off_takes_none_and_a_small_arena_isnt_rounded_for_them():
    for wish, quota_bytes in ((ArenaWish("off"), HUGE_ARENA_BYTES_MIN), (ArenaWish("auto"), HUGE_ARENA_BYTES_MIN - 1)):
        arena = made(wish, Machine(HugePool(10**12, 10**12), "always"), quota_bytes)
        assert arena.pages["pages"] == "4 KiB"
        assert quota_bytes - arena.total_bytes < SLOT_BYTES + 4_096
        arena.close()


def test_huge_pages_that_others_hold_are_waited_for_by_who_asks_again_and_done_without_in_the_end():
    machine = Machine(HugePool(10**12, 0), "never")
    with pytest.raises(MemoryShort, match="waits for huge pages"):
        made(ArenaWish("auto"), machine, HUGE_ARENA_BYTES_MIN, may_wait=True)
    arena = made(ArenaWish("auto"), machine, HUGE_ARENA_BYTES_MIN)
    assert arena.pages["pages"] == "4 KiB"
    arena.close()


def test_memory_of_a_node_is_had_and_lies_there():
    node = MachineMemory().nodes()[0]
    arena = made(ArenaWish("off", numa_node=node))
    with arena.view(0, 1):
        assert numa.node_of(arena._memory._address + arena.header_bytes) == node
    arena.close()


def test_the_whole_mapping_is_bound_before_a_page_of_it_is_there(monkeypatch):
    calls = []
    bind, allocate = numa.bind, os.posix_fallocate
    monkeypatch.setattr(numa, "bind", lambda *call: calls.append(("bind", call[1])) or bind(*call))
    monkeypatch.setattr(os, "posix_fallocate", lambda *call: calls.append(("allocate", call[2])) or allocate(*call))
    arena = made(ArenaWish("off", numa_node=0))
    assert calls[-2:] == [("bind", arena.total_bytes), ("allocate", arena.total_bytes)]
    arena.close()


def test_a_node_that_is_not_there_is_refused_by_name():
    with pytest.raises(TierUnavailable, match=r"numa_node: this machine has no memory on node 900; there is 0"):
        made(ArenaWish("off", numa_node=900), Machine(nodes=(0,)))


def test_a_node_that_may_not_be_used_is_refused_with_the_kernels_word():
    with pytest.raises(TierUnavailable, match=r"memory can't be bound to node 900: .*Invalid argument"):
        made(ArenaWish("off", numa_node=900), Machine(nodes=(0, 900)))


def test_a_node_without_the_memory_is_refused(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(machine, "available_on", lambda node: 100 << 20)
    with pytest.raises(MemoryShort, match="NUMA node 0 has 104,857,600 bytes available"):
        made(ArenaWish("off", numa_node=0), machine)


def test_memory_that_is_found_on_another_node_is_refused_and_given_back(monkeypatch):
    before = open_fds()
    monkeypatch.setattr(numa, "node_of", lambda address: 1)
    with pytest.raises(TierUnavailable, match="bound to node 0 lies on node 1"):
        made(ArenaWish("off", numa_node=0))
    assert open_fds() == before


@pytest.mark.parametrize(
    ("code", "nodes", "is_had"),
    [
        pytest.param(errno.ENOSYS, (0,), True, id="a kernel without NUMA"),
        pytest.param(errno.EPERM, (0,), True, id="a container that may not, with one node"),
        pytest.param(errno.EPERM, (0, 1), False, id="a container that may not, with two"),
    ],
)
def test_where_nodes_can_not_be_chosen_only_the_one_there_is_can_be_had(monkeypatch, code, nodes, is_had):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(numa, "bind", refuse)
    monkeypatch.setattr(numa, "node_of", refuse)
    if is_had:
        made(ArenaWish("off", numa_node=0), Machine(nodes=nodes)).close()
        return
    with pytest.raises(TierUnavailable, match="SYS_NICE"):
        made(ArenaWish("off", numa_node=0), Machine(nodes=nodes))


def test_the_status_says_what_was_wished_and_what_was_had(tmp_path):
    with running_agent(tmp_path, dram_more={"huge_pages": "off", "numa_node": 0, "verify_reads": False}) as agent:
        assert "pages" not in agent.tier()
        with connected(agent.config.door) as client:
            assert client.put(label("a"), payload("a"), WAIT_S) is PutResult.STORED
            status = agent.tier()
    wished = {"numa_node": 0, "verify_reads": False}
    assert {name: status[name] for name in (*wished, "pages", "huge_bytes")} == wished | {
        "pages": "4 KiB",
        "huge_bytes": 0,
    }


def test_without_verification_the_checksum_is_left_out_and_the_generation_is_not(tmp_path):
    for verify in (True, False):
        with running_agent(tmp_path, dram_more={"verify_reads": verify}) as agent:
            with connected(agent.config.door) as client:
                client.put(label("a"), payload("a"), WAIT_S)
                chunk = client.open([storage_key("a")], WAIT_S)[0]
                target = memoryview(bytearray(CHUNK_BYTES))
                arena = agent.agent._tier.hierarchy.arena
                with arena.view(chunk.slot, 1) as slot:
                    slot[0] ^= 1
                assert client.read_into(chunk, target) is not verify
                with arena.view(chunk.slot, 1) as slot:
                    slot[0] ^= 1
                assert client.read_into(chunk, target)
                arena._shared_generations[chunk.slot] += 1
                assert not client.read_into(chunk, target), "the slot is another chunk's"
                client.close([chunk])


def test_the_kernels_account_of_this_mapping_is_what_is_reported():
    arena = made(ArenaWish("off"))
    assert arena_memory._huge_bytes(arena._memory._address) == 0
    arena.close()
