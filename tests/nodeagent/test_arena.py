import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.errors import MemoryShort, TierUnavailable
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.arena_memory import layout_within, slot_bytes_for
from nodeagent.tiers.machine_memory import HUGE_PAGE_BYTES, PAGE_BYTES, MachineMemory


@pytest.fixture
def arena():
    made = Arena(PAGE_BYTES * 5, PAGE_BYTES)
    yield made
    made.close()


@given(st.integers(1, 10**12), st.integers(1, 10**8), st.sampled_from([PAGE_BYTES, HUGE_PAGE_BYTES]))
def test_the_slots_and_their_header_fill_the_quota_in_whole_pages_and_no_more(quota_bytes, chunk_bytes, page_bytes):
    slot_bytes = slot_bytes_for(chunk_bytes)
    assert slot_bytes >= chunk_bytes
    assert slot_bytes - chunk_bytes < PAGE_BYTES
    layout = layout_within(quota_bytes, slot_bytes, page_bytes)
    assert layout.total_bytes <= quota_bytes
    assert layout.total_bytes % page_bytes == 0
    assert layout.header_bytes % PAGE_BYTES == 0
    assert layout.header_bytes >= 8 * layout.slots
    another = (layout.slots + 1) * (slot_bytes + 8)
    header_of_another = -(-8 * (layout.slots + 1) // PAGE_BYTES) * PAGE_BYTES
    assert header_of_another + another - 8 * (layout.slots + 1) > quota_bytes // page_bytes * page_bytes


def test_the_generation_is_raised_before_a_slot_is_handed_out_again(arena):
    seen = memoryview(mmap.mmap(arena.read_only_fd, arena.header_bytes, prot=mmap.PROT_READ)).cast("Q")
    slot, first = arena.take()
    assert seen[slot] == first == 1
    arena.free(slot)
    assert seen[slot] == first, "a freed slot can still be read"
    again, second = arena.take()
    assert (again, second) == (slot, first + 1)
    assert seen[slot] == second


def test_every_slot_is_handed_out_once(arena):
    taken = [arena.take() for _ in range(arena.slots)]
    assert len({slot for slot, _ in taken}) == arena.slots == 4
    assert arena.take() is None
    assert arena.used_bytes == 4 * PAGE_BYTES


def test_the_memory_can_neither_shrink_nor_grow(arena):
    for size in (PAGE_BYTES, arena.total_bytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.writable_fd, size)


def test_the_read_only_descriptor_can_not_be_written_through(arena):
    with pytest.raises(PermissionError):
        mmap.mmap(arena.read_only_fd, arena.total_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(arena.read_only_fd, b"x", 0)


def test_its_pages_are_allocated_before_it_is_offered(arena):
    assert os.fstat(arena.writable_fd).st_blocks * 512 >= arena.total_bytes


def test_a_quota_without_room_for_one_slot_is_refused():
    with pytest.raises(TierUnavailable, match="holds no slot"):
        Arena(PAGE_BYTES, PAGE_BYTES)


@pytest.mark.parametrize(
    ("total_bytes", "refusal"),
    [pytest.param(310 << 20, TierUnavailable, id="ever"), pytest.param(400 << 20, MemoryShort, id="now")],
)
def test_more_than_the_machine_has_is_refused(total_bytes, refusal):
    class Machine(MachineMemory):
        def available_bytes(self):
            return 300 << 20

        def total_bytes(self):
            return total_bytes

    with pytest.raises(TierUnavailable, match="bytes available") as raised:
        Arena(64 << 20, 1 << 20, machine=Machine())
    assert type(raised.value) is refusal


def test_closing_leaves_no_descriptor_behind():
    before = len(os.listdir("/proc/self/fd"))
    Arena(PAGE_BYTES * 5, PAGE_BYTES).close()
    assert len(os.listdir("/proc/self/fd")) <= before
