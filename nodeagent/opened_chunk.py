"""A client's hold on chunks: where their bytes lie, and how to know that they are still the chunks'."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from directory.tiers import Tier
from nodeagent.arena_map import ArenaMap
from nodeagent.messages import Close, OpenedSlot

_DRAM = Tier.DRAM.label
_NAMES = {int(Tier.NVME): Tier.NVME.label}

logger = logging.getLogger(__name__)


class Reference(NamedTuple):
    """One run of the agent, and the number it knows a reference by. A tuple: each chunk of a run hashes it."""

    life: bytes
    number: int


@dataclass(frozen=True, slots=True)
class OpenedChunk:
    """A chunk that the host holds, and goes on holding until it is closed. `length` counts bytes."""

    storage_key: bytes
    tier: str
    length: int
    reference: Reference = field(repr=False)
    slot: int = field(repr=False)
    generation: int = field(repr=False)
    checksum: bytes = field(repr=False)
    arena: ArenaMap = field(repr=False, compare=False)

    def copy_into(self, target: memoryview) -> bool:
        """Copy the chunk's bytes into `target`, which has its length. `False` is a miss: don't use the bytes.

        Generation and checksum are looked at after the copy; the checksum only where the agent wants it.
        """
        try:
            with target.cast("B") as data:
                if data.nbytes != self.length or self.arena.is_closed:
                    return False
                self.arena.read_into(self.slot, data)
                if self.arena.generation(self.slot) != self.generation:
                    return False
                return not self.arena.verify_reads or xxhash.xxh3_128_digest(data) == self.checksum
        except (TypeError, ValueError, IndexError, BufferError) as error:
            if not self.arena.is_closed:
                logger.error("a chunk can't be read: %s", error)
            return False


@dataclass(slots=True)
class Read:
    """What was read through one reference."""

    read_bytes: int = 0
    read_s: float = 0.0
    has_failed: bool = False


def close_of(reads: Sequence[tuple[int, Read]]) -> Close:
    """The message that gives references back, by number, and says what was read."""
    return Close(
        [number for number, read in reads if read.read_bytes and not read.has_failed],
        [number for number, read in reads if read.has_failed],
        sum(read.read_bytes for _, read in reads),
        sum(read.read_s for _, read in reads if read.read_bytes),
        [number for number, read in reads if not read.read_bytes and not read.has_failed],
    )


@dataclass(frozen=True, slots=True)
class OpenedPiece:
    """The leading chunks of a run. `goes_on`: more can be had once these are closed.

    `is_answered` is false where the agent said nothing in time, or there is none.
    """

    chunks: list[OpenedChunk]
    goes_on: bool = False
    is_answered: bool = True


NO_ANSWER = OpenedPiece([], is_answered=False)


def opened_chunks(
    keys: Sequence[bytes], slots: Sequence[OpenedSlot], life: bytes, arena: ArenaMap
) -> list[OpenedChunk]:
    """The chunks of an answer: the first `keys`, in the order of `slots`."""
    return [
        OpenedChunk(
            key,
            _NAMES.get(each.tier, _DRAM),
            each.length,
            Reference(life, each.reference),
            each.slot,
            each.generation,
            each.checksum,
            arena,
        )
        for key, each in zip(keys, slots, strict=False)
    ]
