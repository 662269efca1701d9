"""Which chunks are written to NVMe, and when. Pure: no clock, no I/O.

A drive wears by what is written to it, and most chunks never come back. A chunk's life in DRAM has three moments at
which it may be written, and a policy chooses among them:

    through  as soon as it is stored: all of it survives a restart, at the price of every byte
    hit      when it is first hit in DRAM: what was asked for twice may be asked for again
    demote   when it is about to be evicted from DRAM: the drive holds what DRAM can't
    reuse    when it was asked for twice, whether DRAM still had it or not: when it is hit, or stored again. It misses
             once what `demote` would have hit, and writes a fifth to two fifths of it (bench/RESULTS.md)

A chunk of a *pinned* prefix (its directory key is pinned, or that of a chunk before it) is written at the first of
these moments that comes, whatever the policy.
"""

import enum
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from nodeagent.errors import PinsFull
from nodeagent.labels import ChunkLabel

PINS_MAX = 65_536
REMEMBERED_PLACES = 2**20
"""Stored chunks that are remembered at most: 4 MiB of memory."""
BUCKET_PLACES = 4
AHEAD_FRACTION = 16
"""One slot in so many is looked at ahead of its eviction; of a small tier more, but at most half."""
AHEAD_MIN = 4
AHEAD_MAX = 256


class Moment(enum.Enum):
    """When a chunk in DRAM that isn't on disk may be written."""

    STORED = "stored"
    HIT = "hit"
    AGED = "aged"
    """It is among the oldest, and will be evicted soon."""


class WritePolicy(Protocol):
    """Says at which moment chunks are written."""

    @property
    def moments(self) -> frozenset[Moment]:
        """When it wants to be asked; at others nothing is due."""
        ...

    def is_due(self, moment: Moment, key: bytes) -> bool:
        """Whether a chunk for which this moment has come is written now. A policy may remember that it was asked."""
        ...


@dataclass(frozen=True, slots=True)
class WriteAt:
    """Writes every chunk at one moment."""

    moment: Moment

    @property
    def moments(self) -> frozenset[Moment]:
        """See `WritePolicy`."""
        return frozenset({self.moment})

    def is_due(self, moment: Moment, key: bytes) -> bool:
        """See `WritePolicy`."""
        return moment is self.moment


class Reuse:
    """Writes what was asked for twice, as far as it is remembered: a hit, or a chunk that is stored again.

    What was stored is remembered as four bytes of its key, in a bucket of four that the next bytes name, from which
    the oldest goes. So memory is fixed, old ones fade, and one in 2^30 is mistaken for another, which costs a write.
    Keys are digests: their bytes are as good as random.
    """

    def __init__(self, places: int = REMEMBERED_PLACES) -> None:
        self._seen = array("I", bytes(array("I").itemsize * places))

    @property
    def moments(self) -> frozenset[Moment]:
        """See `WritePolicy`."""
        return frozenset({Moment.STORED, Moment.HIT})

    def is_due(self, moment: Moment, key: bytes) -> bool:
        """See `WritePolicy`."""
        if moment is not Moment.STORED:
            return moment is Moment.HIT
        mark = int.from_bytes(key[:4], "little") or 1
        start = int.from_bytes(key[4:8], "little") % (len(self._seen) // BUCKET_PLACES) * BUCKET_PLACES
        bucket = self._seen[start : start + BUCKET_PLACES].tolist()
        is_again = mark in bucket
        bucket.remove(mark if is_again else bucket[-1])
        self._seen[start : start + BUCKET_PLACES] = array("I", [mark, *bucket])
        return is_again


WRITE_POLICIES: dict[str, Callable[[], WritePolicy]] = {
    "through": partial(WriteAt, Moment.STORED),
    "hit": partial(WriteAt, Moment.HIT),
    "demote": partial(WriteAt, Moment.AGED),
    "reuse": Reuse,
}


class Pins:
    """Directory keys whose chunks, with all that follow them, are worth writing. At most `PINS_MAX`."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._keys: set[bytes] = set()
        self.add(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, directory_key: bytes | None) -> bool:
        return directory_key in self._keys

    def add(self, keys: Iterable[bytes]) -> None:
        """Pin all of these keys, or none: raises `PinsFull`."""
        pinned = self._keys.union(keys)
        if len(pinned) > PINS_MAX:
            raise PinsFull(f"no more than {PINS_MAX:,} keys can be pinned; {len(self._keys):,} are")
        self._keys = pinned

    def remove(self, keys: Iterable[bytes]) -> None:
        """Unpin keys. One that isn't pinned is ignored; chunks that were written stay."""
        self._keys.difference_update(keys)

    def covers(self, label: ChunkLabel | None, find: Callable[[bytes], ChunkLabel | None]) -> bool:
        """Whether this chunk belongs to a pinned prefix. `find` gives the label of a storage key that is held.

        The walk to the root ends where a chunk isn't held any more: what is pinned before it isn't known then. It ends
        where positions don't fall by one, too: so it ends, whatever was claimed.
        """
        while label is not None and self._keys:
            if label.directory_key in self._keys:
                return True
            above = find(label.parent) if label.parent is not None else None
            label = above if above is not None and above.position == label.position - 1 else None
        return False


class Ageing:
    """Names chunks of a tier of `slots` slots shortly before they are evicted, each once while it stays that old.

    Where it is asked at every slot that is taken, it looks at the oldest once for every half of what it looks at: so
    no chunk is evicted unseen, though some of the older ones are held, and a slot that is taken costs two steps.
    """

    def __init__(self, slots: int) -> None:
        self.ahead = min(max(slots // AHEAD_FRACTION, AHEAD_MIN), max(slots // 2, 1), AHEAD_MAX)
        self._taken = 0
        self._seen: frozenset[bytes] = frozenset()

    def is_time(self) -> bool:
        """A slot is about to be taken: whether to call `take_aged`."""
        self._taken += 1
        return self._taken >= self.ahead // 2

    def take_aged(self, oldest: Sequence[bytes]) -> list[bytes]:
        """Which of the `ahead` oldest chunks are new among them, oldest first."""
        self._taken = 0
        aged = [key for key in oldest if key not in self._seen]
        self._seen = frozenset(oldest)
        return aged
