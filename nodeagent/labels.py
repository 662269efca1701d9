"""The names of a chunk: under what its bytes are found, and under what they are announced."""

import msgspec

from directory.chunks import DIRECTORY_KEY_BYTES
from nodeagent.messages import STORAGE_KEY_BYTES


class ChunkLabel(msgspec.Struct, frozen=True, gc=False):
    """A chunk's names and its place in a chain.

    `storage_key` (32 bytes) finds the bytes. `directory_key` (16 bytes, or `None` while unknown) is announced.
    `parent` is the storage key of the chunk before it (`None` at position 0); `position` counts chunks from 0.

    It is in no cycle, so the garbage collector, which stops everything, needn't look at each of a million of them.
    """

    storage_key: bytes
    directory_key: bytes | None
    parent: bytes | None
    position: int

    def is_sound(self) -> bool:
        """Whether the names have their lengths, and the place is one that a chunk can have."""
        storage_keys = [self.storage_key, *([] if self.parent is None else [self.parent])]
        has_lengths = all(len(key) == STORAGE_KEY_BYTES for key in storage_keys) and (
            self.directory_key is None or len(self.directory_key) == DIRECTORY_KEY_BYTES
        )
        return has_lengths and self.position >= 0 and self.parent != self.storage_key
