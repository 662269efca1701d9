"""The DRAM arena: anonymous shared memory in fixed-size slots that engines map and agents account for.

Layout: one u64 generation per slot (little-endian, padded to whole pages), then the slots, each a multiple of a page.
The memory has no name (memfd), so nothing is left behind whatever dies; its size is sealed, so no client can pull it
from under another; its pages are allocated before it is offered, so a put never meets a full machine.

A slot's generation is raised before the slot is handed out again. A reader who was late sees another number.
"""

import os
from typing import Any

from nodeagent.errors import TierUnavailable
from nodeagent.tiers.arena_memory import GENERATION_BYTES, ArenaWish, allocate
from nodeagent.tiers.machine_memory import PAGE_BYTES, MachineMemory


class Arena:
    """Slots in shared memory. Not thread-safe, but for `view`, which other threads may read while a slot is theirs.

    Raises what `allocate` raises, where the quota holds no slot or the machine hasn't the memory as wished. Blocks
    while the pages are allocated (about 0.3 s per GiB): construct it off the event loop.
    """

    def __init__(
        self,
        quota_bytes: int,
        slot_bytes: int,
        wish: ArenaWish | None = None,
        machine: MachineMemory | None = None,
        *,
        may_wait: bool = False,
    ) -> None:
        assert slot_bytes % PAGE_BYTES == 0, "slots are whole pages"
        self._memory = allocate(
            quota_bytes, slot_bytes, wish or ArenaWish(), machine or MachineMemory(), may_wait=may_wait
        )
        layout = self._memory.layout
        self.slot_bytes = slot_bytes
        self.slots = layout.slots
        self.header_bytes = layout.header_bytes
        self.total_bytes = layout.total_bytes
        try:
            self.read_only_fd = os.open(f"/proc/self/fd/{self._memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._memory.close()
            raise TierUnavailable(f"the arena can't be opened read-only: {error}") from error
        self._bytes = memoryview(self._memory.map)
        self._shared_generations = self._bytes[: self.slots * GENERATION_BYTES].cast("Q")
        self._generations = [0] * self.slots
        self._free = list(range(self.slots - 1, -1, -1))
        self._is_taken = bytearray(self.slots)
        self._is_stale = bytearray(self.slots)
        self._forgotten: list[int] = []

    @property
    def writable_fd(self) -> int:
        """The descriptor through which puts are written."""
        return self._memory.fd

    @property
    def pages(self) -> dict[str, Any]:
        """What `/status` says of its memory: the kind of pages, and how many bytes were really in huge ones."""
        return {"pages": self._memory.kind, "huge_bytes": self._memory.huge_bytes}

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
        os.close(self.read_only_fd)
        self._memory.close()
