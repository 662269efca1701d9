"""A client's view of the agent's arena: reads through a read-only mapping, puts through a writable one."""

import mmap
import os

from nodeagent.messages import ArenaOffer

GENERATION_BYTES = 8
COPY_BYTES = 4 << 20
"""Copies are cut into pieces, so that other threads of the engine get their turn in between."""


class ArenaMap:
    """The mapped arena of one run of the agent. It stays mapped for as long as anybody refers to it, or until `close`.

    `verify_reads`: whether the checksum is to be looked at after a copy. `is_closed`: every read fails from now on.
    """

    def __init__(self, offer: ArenaOffer, read_only_fd: int, writable_fd: int) -> None:
        """Takes the descriptors over. Raises `OSError` or `ValueError` where they can't be mapped."""
        self._offer = offer
        self.verify_reads = offer.verify_reads
        self.is_closed = False
        total_bytes = offer.header_bytes + offer.slots * offer.slot_bytes
        try:
            self._read_only = mmap.mmap(read_only_fd, total_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            self._writable = mmap.mmap(writable_fd, total_bytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(read_only_fd)
            os.close(writable_fd)
        for each in (self._read_only, self._writable):
            each.madvise(mmap.MADV_DONTFORK)  # a forked child must not write where it holds no reservation
        self._generations = memoryview(self._read_only)[: offer.slots * GENERATION_BYTES].cast("Q")

    def close(self) -> bool:
        """Unmap it, whoever refers to it. Returns `False` while bytes are being copied: close it again then."""
        self.is_closed = True
        try:
            self._generations.release()
            self._read_only.close()
            self._writable.close()
        except BufferError:
            return False
        return True

    def generation(self, slot: int) -> int:
        """The slot's generation now. Raises `ValueError` once it is closed, as reads and writes do."""
        return self._generations[slot]

    def read_into(self, slot: int, target: memoryview) -> None:
        """Copy the first bytes of a slot into `target` (contiguous bytes). Raises `IndexError` outside the arena."""
        start = self._start(slot, target.nbytes)
        with memoryview(self._read_only) as source:
            _copy(target, source[start : start + target.nbytes])

    def write(self, slot: int, payload: memoryview) -> None:
        """Copy `payload` (contiguous bytes) into a slot. Raises `IndexError` outside the arena."""
        start = self._start(slot, payload.nbytes)
        with memoryview(self._writable) as target:
            _copy(target[start : start + payload.nbytes], payload)

    def _start(self, slot: int, length: int) -> int:
        if not 0 <= slot < self._offer.slots or length > self._offer.slot_bytes:
            raise IndexError(f"slot {slot} with {length} bytes lies outside the arena")
        return self._offer.header_bytes + slot * self._offer.slot_bytes


def _copy(target: memoryview, source: memoryview) -> None:
    for start in range(0, source.nbytes, COPY_BYTES):
        target[start : start + COPY_BYTES] = source[start : start + COPY_BYTES]
