"""The names of a chunk: under what its bytes are found, and under what they are announced."""

import msgspec

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.identity import SALT_TAG_BYTES
from nodeagent.messages import STORAGE_KEY_BYTES


class ChunkLabel(msgspec.Struct, frozen=True, gc=False):
    """A chunk's names and its place in a chain.

    `storage_key` (32 bytes) finds the bytes. `directory_key` (16 bytes, or `None` while unknown) is announced.
    `parent` is the storage key of the chunk before it (`None` at position 0); `position` counts chunks from 0.
    `salt_tag` (16 bytes, or `None` while unknown) says of which salt it is, or that it is of none.

    It is in no cycle, so the garbage collector, which stops everything, needn't look at each of a million of them.
    """

    storage_key: bytes
    directory_key: bytes | None
    parent: bytes | None
    position: int
    salt_tag: bytes | None = None

    def adds_to(self, known: "ChunkLabel") -> bool:
        """Whether this label says more of its chunk than `known`, and nothing else."""
        if self.directory_key is None or known.directory_key not in (None, self.directory_key):
            return False
        return known.directory_key is None or (known.salt_tag is None and self.salt_tag is not None)

    def is_sound(self) -> bool:
        """Whether the names have their lengths, and the place is one that a chunk can have."""
        storage_keys = [self.storage_key, *([] if self.parent is None else [self.parent])]
        has_lengths = all(len(key) == STORAGE_KEY_BYTES for key in storage_keys) and (
            self.directory_key is None or len(self.directory_key) == DIRECTORY_KEY_BYTES
        )
        has_lengths = has_lengths and (self.salt_tag is None or len(self.salt_tag) == SALT_TAG_BYTES)
        return has_lengths and self.position >= 0 and self.parent != self.storage_key
