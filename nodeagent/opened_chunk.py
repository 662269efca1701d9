"""A client's hold on a chunk: where its bytes lie, and how to know that they are still the chunk's."""

from dataclasses import dataclass, field

from nodeagent.arena_map import ArenaMap


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
