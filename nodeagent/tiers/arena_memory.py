"""The memory under the DRAM arena: a sealed memfd with all its pages, in huge ones and on one NUMA node where asked.

Huge pages come from the kernel's pool (`vm.nr_hugepages`) where that has enough of them free, or else as transparent
ones where the kernel gives those to shared memory. What was asked for isn't taken for what there is: how many bytes
are huge is read from the mapping's own account, and the node is asked for page by page, of a sample.

A mapping of the pool's pages must be whole ones, also at the engines. So a layout for huge pages pads the table of
generations until the arena is a multiple of 2 MiB; engines map what the offer says, as they always did.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Literal

from nodeagent.errors import MemoryShort, TierUnavailable
from nodeagent.tiers import numa
from nodeagent.tiers.machine_memory import HUGE_PAGE_BYTES, PAGE_BYTES, TRANSPARENT_SETTINGS, MachineMemory

GENERATION_BYTES = 8
MEMORY_RESERVE_BYTES = 256 << 20
"""What an arena leaves to the rest of the machine, at least."""
HUGE_ARENA_BYTES_MIN = 64 << 20
"""A smaller arena isn't worth huge pages: rounding to 2 MiB takes more of it than they give."""
SAMPLED_PAGES = 64
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23

HugePages = Literal["auto", "on", "off"]
PageKind = Literal["2 MiB from the kernel's pool", "2 MiB transparent", "4 KiB"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class ArenaWish:
    """What kind of memory is wanted. `numa_node`: the only node it may come from; `None` for any."""

    huge_pages: HugePages = "auto"
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where an arena's parts lie: the table of generations in `header_bytes`, then the slots."""

    header_bytes: int
    slot_bytes: int
    slots: int

    @property
    def total_bytes(self) -> int:
        """Header and slots; a multiple of the page that it was laid out for."""
        return self.header_bytes + self.slots * self.slot_bytes


def slot_bytes_for(chunk_bytes: int) -> int:
    """The slot size for chunks of `chunk_bytes`: rounded up to whole pages of 4 KiB."""
    return _whole(chunk_bytes, PAGE_BYTES)


def layout_within(quota_bytes: int, slot_bytes: int, page_bytes: int = PAGE_BYTES) -> ArenaLayout:
    """As many slots, with their generations, as fit into whole pages within `quota_bytes`; perhaps none."""
    room_bytes = quota_bytes // page_bytes * page_bytes
    slots = room_bytes // (slot_bytes + GENERATION_BYTES)
    while slots > 0 and _whole(slots * GENERATION_BYTES, PAGE_BYTES) + slots * slot_bytes > room_bytes:
        slots -= 1
    total_bytes = _whole(_whole(slots * GENERATION_BYTES, PAGE_BYTES) + slots * slot_bytes, page_bytes)
    return ArenaLayout(total_bytes - slots * slot_bytes, slot_bytes, slots)


class ArenaMemory:
    """A sealed memfd of `layout`, mapped and with all its pages. `close` gives it back.

    `huge_bytes` are those that this process's mapping really has in pages of 2 MiB, when it was made. Raises
    `TierUnavailable` where the memory isn't on its node, and `OSError` where it can't be had.
    """

    def __init__(self, layout: ArenaLayout, kind: PageKind, node: int | None) -> None:
        self.layout = layout
        self.kind = kind
        total_bytes = layout.total_bytes
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if kind == "2 MiB from the kernel's pool":
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
        self.fd = os.memfd_create("warmroute-arena", flags)
        try:
            os.ftruncate(self.fd, total_bytes)
            self.map = mmap.mmap(self.fd, total_bytes, flags=mmap.MAP_SHARED)
        except (OSError, ValueError):
            os.close(self.fd)
            raise
        try:
            # Bound before a page is there: pages aren't moved afterwards.
            if node is not None:
                numa.bind(self._address, total_bytes, node)
            if kind == "2 MiB transparent":
                self._advise(MADV_HUGEPAGE)
                self._advise(MADV_POPULATE_WRITE)
            os.posix_fallocate(self.fd, 0, total_bytes)
            if kind == "2 MiB from the kernel's pool":
                self._advise(MADV_POPULATE_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.huge_bytes = 0 if kind == "4 KiB" else _huge_bytes(self._address)
            if node is not None:
                self._check_node(node)
        except (OSError, TierUnavailable):
            self.close()
            raise

    def close(self) -> None:
        """Unmap and close; nobody may hold a view of `map` any more."""
        self.map.close()
        os.close(self.fd)

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def _advise(self, advice: int) -> None:
        """Ask for something without which it works as well; of huge pages, what came of it is seen in the end."""
        _libc.madvise(self._address, self.layout.total_bytes, advice)

    def _check_node(self, node: int) -> None:
        step = max(HUGE_PAGE_BYTES, self.layout.total_bytes // SAMPLED_PAGES)
        for offset in range(0, self.layout.total_bytes, step):
            lies_on = numa.node_of(self._address + offset)
            if lies_on != node:
                raise TierUnavailable(f"dram.numa_node: memory bound to node {node} lies on node {lies_on}")


def allocate(
    quota_bytes: int, slot_bytes: int, wish: ArenaWish, machine: MachineMemory, *, may_wait: bool = False
) -> ArenaMemory:
    """Memory for as many slots as fit into `quota_bytes`, as wished. Blocks: about 0.3 s per GiB.

    Raises `TierUnavailable` where it can't be had, and `MemoryShort` where this machine has it, but others hold it at
    the moment. With `may_wait`, whoever asks will ask again: then huge pages that others hold are `MemoryShort`, too.
    """
    small = layout_within(quota_bytes, slot_bytes)
    huge = layout_within(quota_bytes, slot_bytes, HUGE_PAGE_BYTES)
    if small.slots < 1:
        raise TierUnavailable(
            f"the dram quota of {quota_bytes:,} bytes holds no slot of {slot_bytes:,} bytes; give more dram.gb"
        )
    node = _checked_node(wish.numa_node, machine)
    is_worth_it = huge.slots and huge.total_bytes >= HUGE_ARENA_BYTES_MIN
    if wish.huge_pages == "on" or (wish.huge_pages == "auto" and is_worth_it):
        memory = _huge(huge, node, machine, may_wait)
        if memory is not None and (wish.huge_pages == "auto" or memory.huge_bytes >= huge.total_bytes):
            return memory
        if memory is not None:
            memory.close()
        if wish.huge_pages == "on":
            raise TierUnavailable(_how_to_have_huge_pages(huge, node, machine))
    return _ordinary(small, "4 KiB", node, machine)


def check(quota_bytes: int, wish: ArenaWish, machine: MachineMemory) -> None:
    """Raise what `allocate` would, as far as it can be known before an engine says how large a slot is.

    Nothing is allocated, so what passes may still be refused: memory can go meanwhile.
    """
    node = _checked_node(wish.numa_node, machine)
    pages = ArenaLayout(0, HUGE_PAGE_BYTES, quota_bytes // HUGE_PAGE_BYTES)
    if wish.huge_pages != "off" and pages.slots and machine.huge_pool(node).free_bytes >= pages.total_bytes:
        return
    if wish.huge_pages == "on" and machine.transparent_setting() not in TRANSPARENT_SETTINGS:
        raise TierUnavailable(_how_to_have_huge_pages(pages, node, machine))
    _check_available(quota_bytes, node, machine)


def _huge(layout: ArenaLayout, node: int | None, machine: MachineMemory, may_wait: bool) -> ArenaMemory | None:
    """The kernel's own pages, or transparent ones of which some may turn out small; `None` where there are neither."""
    if layout.slots < 1:
        return None
    pool = machine.huge_pool(node)
    if pool.free_bytes >= layout.total_bytes:
        # Another may have been quicker, or a control group allows less.
        with contextlib.suppress(OSError):
            return ArenaMemory(layout, "2 MiB from the kernel's pool", node)
    elif may_wait and pool.total_bytes >= layout.total_bytes:
        raise MemoryShort(
            f"a dram tier of {layout.total_bytes:,} bytes waits for huge pages: {pool.free_bytes:,} bytes of the "
            f"kernel's pool of {pool.total_bytes:,} are free"
        )
    if machine.transparent_setting() in TRANSPARENT_SETTINGS:
        return _ordinary(layout, "2 MiB transparent", node, machine)
    return None


def _ordinary(layout: ArenaLayout, kind: PageKind, node: int | None, machine: MachineMemory) -> ArenaMemory:
    total_bytes = layout.total_bytes
    _check_available(total_bytes, node, machine)
    try:
        return ArenaMemory(layout, kind, node)
    except OSError as error:
        kind_of = MemoryShort if error.errno in (errno.ENOMEM, errno.ENOSPC) else TierUnavailable
        raise kind_of(f"a dram tier of {total_bytes:,} bytes is refused: {error}") from error


def _check_available(total_bytes: int, node: int | None, machine: MachineMemory) -> None:
    where = "this machine" if node is None else f"NUMA node {node}"
    available = machine.available_bytes() if node is None else machine.available_on(node)
    if total_bytes > available - MEMORY_RESERVE_BYTES:
        has_it = total_bytes <= machine.total_bytes() - MEMORY_RESERVE_BYTES
        raise (MemoryShort if has_it else TierUnavailable)(
            f"a dram tier of {total_bytes:,} bytes is refused: {where} has {available:,} bytes available, "
            f"of which {MEMORY_RESERVE_BYTES:,} are left to others; give less dram.gb or dram.share"
        )


def _checked_node(node: int | None, machine: MachineMemory) -> int | None:
    """The node to bind to. Raises `TierUnavailable` for one that isn't there, or that can't be bound to."""
    if node is None:
        return None
    nodes = machine.nodes()
    if node not in nodes:
        there = ", ".join(map(str, nodes))
        raise TierUnavailable(f"dram.numa_node: this machine has no memory on node {node}; there is {there}")
    with mmap.mmap(-1, PAGE_BYTES) as probe:
        try:
            numa.bind(ctypes.addressof(ctypes.c_char.from_buffer(probe)), PAGE_BYTES, node)
        except OSError as error:
            if nodes == (node,) and error.errno in (errno.ENOSYS, errno.EPERM):
                return None  # all memory is there anyway
            hint = "; give the container the capability SYS_NICE" if error.errno == errno.EPERM else ""
            raise TierUnavailable(f"dram.numa_node: memory can't be bound to node {node}: {error}{hint}") from error
    return node


def _how_to_have_huge_pages(layout: ArenaLayout, node: int | None, machine: MachineMemory) -> str:
    pool = machine.huge_pool(node)
    pages = layout.total_bytes // HUGE_PAGE_BYTES
    lacking = max(0, pages - pool.free_bytes // HUGE_PAGE_BYTES)
    place = "vm.nr_hugepages" if node is None else f"/sys/devices/system/node/node{node}/hugepages/…/nr_hugepages"
    return (
        f"dram.huge_pages is on, and {pages:,} pages of 2 MiB are needed, of which "
        f"{pool.free_bytes // HUGE_PAGE_BYTES:,} are free: raise {place} to "
        f"{pool.total_bytes // HUGE_PAGE_BYTES + lacking:,}, or set dram.huge_pages to auto"
    )


def _huge_bytes(address: int) -> int:
    """Bytes of the mapping at `address` that this process has in huge pages, as the kernel accounts for them."""
    total, is_ours = 0, False
    with open("/proc/self/smaps") as rows:
        for row in rows:
            name, _, rest = row.partition(" ")
            if not name.endswith(":"):
                if is_ours:
                    break
                is_ours = int(name.partition("-")[0], 16) == address
            elif is_ours and name in ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
                total += int(rest.split()[0]) * 1024
    return total


def _whole(size_bytes: int, page_bytes: int) -> int:
    return -(-size_bytes // page_bytes) * page_bytes
