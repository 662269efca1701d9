"""The names of a chunk: under what its bytes are found, and under what they are announced."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkLabel:
    """A chunk's names and its place in a chain.

    `storage_key` (32 bytes) finds the bytes. `directory_key` (16 bytes, or `None` while unknown) is announced.
    `parent` is the storage key of the chunk before it (`None` at position 0); `position` counts chunks from 0.
    """

    storage_key: bytes
    directory_key: bytes | None
    parent: bytes | None
    position: int
