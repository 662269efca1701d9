"""Digests of chunks that prompts had before, where hashing them again would cost much.

SGLang chains page by page: with pages of one token, 256 digests a chunk. A conversation's next turn has all of its
chunks but the last ones. Names hold the very tokens, so no two chunks can be taken for each other.
"""

from directory.schemes import ChunkName

CHUNKS_MAX = 16_384
"""About 20 MiB with chunks of 256 tokens, four million tokens."""


class KnownChunks:
    """The newest `chunks_max` or half as many: two generations, as in `PieceCache`."""

    def __init__(self, chunks_max: int = CHUNKS_MAX) -> None:
        self._generation_max = chunks_max // 2
        self._young: dict[ChunkName, bytes] = {}
        self._old: dict[ChunkName, bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, chunk: ChunkName) -> bytes | None:
        """The chunk's digest, if it is known."""
        digest = self._young.get(chunk)
        if digest is None:
            digest = self._old.get(chunk)
            if digest is not None:
                self.put(chunk, digest)
        return digest

    def put(self, chunk: ChunkName, digest: bytes) -> bytes:
        """Keep a digest, and give it back."""
        if len(self._young) >= self._generation_max:
            self._old, self._young = self._young, {}
        self._young[chunk] = digest
        return digest
