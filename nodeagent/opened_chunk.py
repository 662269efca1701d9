"""A client's hold on chunks: where their bytes lie, and how to know that they are still the chunks'."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from directory.tiers import Tier
from nodeagent.arena_map import ArenaMap
from nodeagent.messages import OpenedSlot


@dataclass(frozen=True, slots=True)
class Reference:
    """One run of the agent, and the number it knows a reference by."""

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
            (Tier.NVME if each.tier == Tier.NVME else Tier.DRAM).label,
            each.length,
            Reference(life, each.reference),
            each.slot,
            each.generation,
            each.checksum,
            arena,
        )
        for key, each in zip(keys, slots, strict=False)
    ]
