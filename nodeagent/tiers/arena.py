"""The DRAM arena: anonymous shared memory in fixed-size slots that engines map and agents account for.

Layout: one u64 generation per slot (little-endian, padded to a page), then the slots, each a multiple of a page. The
memory has no name (memfd), so nothing is left behind whatever dies; its size is sealed, so no client can pull it from
under another; its pages are allocated before it is offered, so a put never meets a full machine.

A slot's generation is raised before the slot is handed out again. A reader who was late sees another number.
"""

import fcntl
import mmap
import os
from pathlib import Path

from nodeagent.errors import TierUnavailable

PAGE_BYTES = 4096
GENERATION_BYTES = 8
MEMORY_RESERVE_BYTES = 256 << 20
"""What an arena leaves to the rest of the machine, at least."""


def slot_bytes_for(chunk_bytes: int) -> int:
    """The slot size for chunks of `chunk_bytes`: rounded up to whole pages."""
    return -(-chunk_bytes // PAGE_BYTES) * PAGE_BYTES


def header_bytes_for(slots: int) -> int:
    """The size of the generations' table, in whole pages."""
    return slot_bytes_for(slots * GENERATION_BYTES)


def slots_within(quota_bytes: int, slot_bytes: int) -> int:
    """How many slots and their generations fit into `quota_bytes`; 0 where not even one does."""
    slots = quota_bytes // (slot_bytes + GENERATION_BYTES)
    while slots > 0 and header_bytes_for(slots) + slots * slot_bytes > quota_bytes:
        slots -= 1
    return slots


class Arena:
    """Slots in shared memory. Not thread-safe, but for `view`, which other threads may read while a slot is theirs.

    Raises `TierUnavailable` where the quota holds no slot or the machine hasn't the memory. Blocks while the pages are
    allocated (about 0.3 s per GiB): construct it off the event loop.
    """

    def __init__(self, quota_bytes: int, slot_bytes: int) -> None:
        assert slot_bytes % PAGE_BYTES == 0, "slots are whole pages"
        self.slot_bytes = slot_bytes
        self.slots = slots_within(quota_bytes, slot_bytes)
        if self.slots < 1:
            raise TierUnavailable(
                f"the dram quota of {quota_bytes:,} bytes holds no slot of {slot_bytes:,} bytes; give more dram.gb"
            )
        self.header_bytes = header_bytes_for(self.slots)
        self.total_bytes = self.header_bytes + self.slots * slot_bytes
        self._fd = _allocate(self.total_bytes)
        try:
            self.read_only_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self._fd)
            raise TierUnavailable(f"the arena can't be opened read-only: {error}") from error
        self._map = mmap.mmap(self._fd, self.total_bytes, flags=mmap.MAP_SHARED)
        self._bytes = memoryview(self._map)
        self._shared_generations = self._bytes[: self.slots * GENERATION_BYTES].cast("Q")
        self._generations = [0] * self.slots
        self._free = list(range(self.slots - 1, -1, -1))
        self._is_taken = bytearray(self.slots)
        self._is_stale = bytearray(self.slots)
        self._forgotten: list[int] = []

    @property
    def writable_fd(self) -> int:
        """The descriptor through which puts are written."""
        return self._fd

    @property
    def free_slots(self) -> int:
        """How many slots can be taken."""
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes in slots that are taken."""
        return (self.slots - len(self._free)) * self.slot_bytes

    def take(self) -> tuple[int, int] | None:
        """A free slot and its new generation, or `None`. The generation is raised before anybody learns of the slot."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._is_taken[slot] = self._is_stale[slot] = 1
        generation = self._generations[slot] + 1
        self._generations[slot] = generation
        self._shared_generations[slot] = generation
        return slot, generation

    def free(self, slot: int, *, is_forgotten: bool = False) -> None:
        """Give a slot back. Its bytes stay until it is taken again; a forgotten chunk's are zeroed before that."""
        assert self._is_taken[slot], "a slot is freed once"
        if is_forgotten:
            self._forgotten.append(slot)
            return
        self._is_taken[slot] = 0
        self._free.append(slot)

    @property
    def has_forgotten(self) -> bool:
        """Whether slots of forgotten chunks wait to be zeroed."""
        return bool(self._forgotten)

    def take_forgotten(self, count_max: int) -> list[int]:
        """Up to `count_max` slots of forgotten chunks, to be zeroed and given back by `free_cleaned`."""
        taken, self._forgotten = self._forgotten[:count_max], self._forgotten[count_max:]
        return taken

    def take_stale(self, count_max: int) -> list[int]:
        """The same, of free slots that still hold what was in them."""
        stale = [slot for slot in self._free if self._is_stale[slot]][:count_max]
        if stale:
            taken = set(stale)
            self._free = [slot for slot in self._free if slot not in taken]
            for slot in stale:
                self._is_taken[slot] = 1
        return stale

    def free_cleaned(self, slot: int) -> None:
        """Give a slot back whose bytes are zero."""
        self._is_stale[slot] = 0
        self.free(slot)

    def view(self, slot: int, length: int) -> memoryview:
        """The first `length` bytes of a slot; release it before `close`."""
        assert 0 <= slot < self.slots, "slots are the arena's own"
        assert 0 <= length <= self.slot_bytes, "a chunk fits its slot"
        start = self.header_bytes + slot * self.slot_bytes
        return self._bytes[start : start + length]

    def close(self) -> None:
        """Unmap and close; clients keep their own mappings. Nobody may hold a `view` any more."""
        self._shared_generations.release()
        self._bytes.release()
        self._map.close()
        os.close(self.read_only_fd)
        os.close(self._fd)


def _allocate(total_bytes: int) -> int:
    """A sealed memfd with all its pages. Raises `TierUnavailable`."""
    available = available_memory_bytes()
    if total_bytes > available - MEMORY_RESERVE_BYTES:
        raise TierUnavailable(
            f"a dram tier of {total_bytes:,} bytes is refused: this machine has {available:,} bytes available, "
            f"of which {MEMORY_RESERVE_BYTES:,} are left to others; give less dram.gb"
        )
    fd = os.memfd_create("warmroute-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total_bytes)
        os.posix_fallocate(fd, 0, total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise TierUnavailable(f"a dram tier of {total_bytes:,} bytes is refused: {error}") from error
    return fd


def available_memory_bytes() -> int:
    """What the kernel says can still be allocated, within the control group's limit where there is one."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used)
