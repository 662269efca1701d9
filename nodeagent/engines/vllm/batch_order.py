"""The order of an engine's batches: which is next, which was seen, which tells of another process. Pure.

vLLM numbers its batches from 0 and says nothing else about its life. A number that was seen with other bytes is
another life's, whichever way it arrives: live, or when the batch before the next one is asked for again.
"""

from collections import OrderedDict
from enum import Enum, auto

import xxhash

REMEMBERED_BATCHES_MAX = 2**14
SEQUENCE_MAX = 2**63 - 2
"""vLLM numbers by 8 bytes with a sign; larger ones are no batch's, and wouldn't fit into a saved table."""


class Place(Enum):
    """Where a batch stands."""

    NEXT = auto()
    AHEAD = auto()
    SEEN = auto()
    OTHER_LIFE = auto()


def payload_digest(payload: bytes) -> bytes:
    """8 bytes that tell batches of equal number apart (xxh3-64). Batches carry the time, so no two are equal."""
    return xxhash.xxh3_64_digest(payload)


class BatchOrder:
    """Expects the batch `next_sequence`; remembers the digests of the last `REMEMBERED_BATCHES_MAX` batches."""

    def __init__(self, next_sequence: int = 0, last_digest: bytes = b"") -> None:
        self.next_sequence = next_sequence
        self._digests: OrderedDict[int, bytes] = OrderedDict()
        if next_sequence:
            self._digests[next_sequence - 1] = last_digest

    @property
    def last_digest(self) -> bytes:
        """The digest of the batch before the next one; empty where there is none."""
        return self._digests.get(self.next_sequence - 1, b"")

    @property
    def remembered(self) -> int:
        """How many batches are remembered."""
        return len(self._digests)

    def place(self, sequence: int, payload: bytes) -> Place:
        """Where this batch stands; a number too long ago to be remembered is taken for another life's."""
        if sequence == self.next_sequence:
            return Place.NEXT
        if sequence > self.next_sequence:
            return Place.AHEAD
        return Place.SEEN if self._digests.get(sequence) == payload_digest(payload) else Place.OTHER_LIFE

    def advance(self, payload: bytes) -> None:
        """The next batch was taken in."""
        self._digests[self.next_sequence] = payload_digest(payload)
        if len(self._digests) > REMEMBERED_BATCHES_MAX:
            self._digests.popitem(last=False)
        self.next_sequence += 1

    def restart(self, next_sequence: int) -> None:
        """Expect `next_sequence`, and forget what was before."""
        self._digests.clear()
        self.next_sequence = next_sequence
