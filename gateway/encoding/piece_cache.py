"""Token ids of pieces of text seen before, within a budget of bytes.

Two generations: what is new or asked for goes into the young one; when that has half of the budget, it becomes the old
one and the former old one is dropped. A hit costs one or two looks into a dict, and no order is kept. Keys are the very
texts, so no two texts can be taken for each other.
"""

import threading
from sys import getsizeof

ENTRY_BYTES = 100
"""About what a dict's row costs beside its key and value."""
ENTRY_SHARE_MAX = 0.25
"""An entry larger than this share of a generation isn't kept: it would push out all else."""


class PieceCache:
    """Ids (little-endian u32) by text, and by whether the text is encoded as the first after a tokenizer's start.

    For several threads.
    """

    def __init__(self, bytes_max: int) -> None:
        self._generation_bytes_max = bytes_max // 2
        self._entry_bytes_max = int(self._generation_bytes_max * ENTRY_SHARE_MAX)
        self._young: tuple[dict[str, bytes], dict[str, bytes]] = ({}, {})
        self._old: tuple[dict[str, bytes], dict[str, bytes]] = ({}, {})
        self._young_bytes = self._old_bytes = 0
        self._putting = threading.Lock()

    @property
    def bytes_used(self) -> int:
        """What its entries take, about."""
        return self._young_bytes + self._old_bytes

    def get(self, piece: str, is_first: bool) -> bytes | None:
        """The piece's ids, if they are known."""
        ids = self._young[is_first].get(piece)
        if ids is None:
            ids = self._old[is_first].get(piece)
            if ids is not None:
                self.put(piece, is_first, ids)
        return ids

    def put(self, piece: str, is_first: bool, ids: bytes) -> None:
        """Keep a piece's ids."""
        size = getsizeof(piece) + getsizeof(ids) + ENTRY_BYTES
        if size > self._entry_bytes_max or piece in self._young[is_first]:
            return
        with self._putting:
            if self._young_bytes + size > self._generation_bytes_max:
                self._old, self._old_bytes = self._young, self._young_bytes
                self._young, self._young_bytes = ({}, {}), 0
            self._young[is_first][piece] = ids
            self._young_bytes += size
