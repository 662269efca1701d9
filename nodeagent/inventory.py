"""What one life should have announced: directory keys and their tiers, in order of use within each partition.

A million keys take some 40 MB, in columns: a key is a row, and no object of its own. All of it is announced anew by a
*walk*, which goes from a partition's newest key to its oldest and takes as much as is sent, when it is sent. Keys that
were said, or have changed since the walk began, lie before it; keys that are still to be said keep their places, even
when they are used, so none of them can get behind it unsaid.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.placements import PARTITIONS, partition_of
from nodeagent.tiers.key_table import NO_ROW, KeyTable
from nodeagent.tiers.use_order import UseOrder

MASKS = 256
ALL_TIERS = MASKS - 1
WALK_NUMBERS = 256
"""A row remembers the last of so many walks that needn't say it."""


class Inventory:
    """Directory key -> tier mask, most recently used last. At most `keys_max` keys; more are not taken."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._keys = 0
        self._partitions = [_Partition() for _ in range(PARTITIONS)]
        self._counts = [0] * MASKS

    def __len__(self) -> int:
        return self._keys

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(partition.oldest_first() for partition in self._partitions)

    def mask(self, key: bytes) -> int:
        """In which tiers `key` is; 0 for none."""
        return self._partitions[partition_of(key)].mask(key)

    def held_in(self, tier: int) -> int:
        """How many keys are in `tier`."""
        return sum(count for mask, count in enumerate(self._counts) if mask & tier)

    def keys_in(self, partition: int) -> int:
        """How many keys are of one partition."""
        return len(self._partitions[partition])

    def set(self, key: bytes, mask: int, among: int = ALL_TIERS) -> bool:
        """Note the newest state of a key, as the most recently used. Returns whether the state is new.

        What is known of other tiers than those `among` which `mask` speaks stays.
        """
        partition = self._partitions[partition_of(key)]
        row = partition.rows.find(key)
        before = partition.masks[row] if row != NO_ROW else 0
        mask |= before & ~among
        if mask == before:
            if mask:
                partition.use(row)
            return False
        if not before and self._keys >= self._keys_max:
            return False
        partition.change(row, key, mask)
        self._keys += bool(mask) - bool(before)
        self._counts[before] -= bool(before)
        self._counts[mask] += bool(mask)
        return True

    def newest_first(self, partition: int) -> list[bytes]:
        """All keys of one partition, most recently used first."""
        return list(self._partitions[partition].oldest_first())[::-1]

    def begin_walk(self, partition: int) -> "Walk":
        """All keys of one partition are to be said. An earlier walk of it has nothing to say any more."""
        return Walk(self._partitions[partition])


class Walk:
    """What of a partition is still to be said, most recently used first, with what was given back before all else."""

    def __init__(self, partition: "_Partition | None" = None) -> None:
        self._partition = partition
        self._again: dict[bytes, None] = {}
        self._number = partition.begin_walk() if partition is not None else 0

    def __len__(self) -> int:
        return len(self._again) + self._unsaid()

    def take(self, keys_max: int) -> list[bytes]:
        """Up to `keys_max` keys, which are taken as said; what was given back may be gone by now."""
        keys = list(self._again)[:keys_max]
        for key in keys:
            del self._again[key]
        if self._partition is not None and self._unsaid():
            keys += self._partition.say(keys_max - len(keys))
        return keys

    def give_back(self, keys: Sequence[bytes]) -> None:
        """These weren't said after all."""
        self._again = dict.fromkeys([*keys, *self._again])

    def _unsaid(self) -> int:
        partition = self._partition
        return partition.unsaid if partition is not None and partition.walk_number == self._number else 0


class _Partition:
    """The keys of one partition. A walk's next is the newest row that isn't said; all rows that are older aren't."""

    def __init__(self) -> None:
        self._keys, self._said_in = bytearray(), bytearray()
        self.masks = bytearray()
        self.rows = KeyTable(self._keys, DIRECTORY_KEY_BYTES)
        self._order = UseOrder()
        self._free = array("I")
        self._count = 0
        self._next = NO_ROW
        self._number = 0
        self.unsaid = 0
        self.walk_number = 0

    def __len__(self) -> int:
        return self._count

    def mask(self, key: bytes) -> int:
        row = self.rows.find(key)
        return self.masks[row] if row != NO_ROW else 0

    def oldest_first(self) -> Iterator[bytes]:
        return map(self._key, self._order.oldest_first())

    def use(self, row: int) -> None:
        """A key was used. One that is still to be said keeps its place."""
        if self._said_in[row] == self._number:
            self._order.make_newest(row)

    def change(self, row: int, key: bytes, mask: int) -> None:
        """A key's state has changed; the row is `NO_ROW` for one that is new."""
        if row == NO_ROW:
            self._add(key, mask)
            return
        self._note_said(row)
        if mask:
            self.masks[row] = mask
            self._order.make_newest(row)
        else:
            self._order.remove(row)
            self.rows.remove(row)
            self.masks[row] = 0
            self._free.append(row)
            self._count -= 1

    def begin_walk(self) -> int:
        self.walk_number += 1
        if self.walk_number % WALK_NUMBERS == 0:
            # What no walk has said for so long must not pass for said: the numbers begin anew.
            self.walk_number += 1
            self._said_in[:] = bytes(len(self._said_in))
        self._number = self.walk_number % WALK_NUMBERS
        self._next, self.unsaid = self._order.newest, self._count
        return self.walk_number

    def say(self, keys_max: int) -> list[bytes]:
        keys: list[bytes] = []
        while len(keys) < keys_max and self._next != NO_ROW:
            row = self._next
            keys.append(self._key(row))
            self._note_said(row)
        return keys

    def _add(self, key: bytes, mask: int) -> None:
        assert len(key) == DIRECTORY_KEY_BYTES, "a column takes what it is given"
        row = self._free.pop() if self._free else self._new_row()
        self._keys[row * DIRECTORY_KEY_BYTES : (row + 1) * DIRECTORY_KEY_BYTES] = key
        self.masks[row] = mask
        self._said_in[row] = self._number
        self.rows.add(row)
        self._order.add_newest(row)
        self._count += 1

    def _new_row(self) -> int:
        row = len(self.masks)
        self._keys.extend(bytes(DIRECTORY_KEY_BYTES))
        self.masks.append(0)
        self._said_in.append(0)
        self._order.make_place()
        return row

    def _note_said(self, row: int) -> None:
        if self._said_in[row] == self._number:
            return
        self._said_in[row] = self._number
        self.unsaid -= 1
        if row == self._next:
            self._next = self._order.older(row)

    def _key(self, row: int) -> bytes:
        return bytes(self._keys[row * DIRECTORY_KEY_BYTES : (row + 1) * DIRECTORY_KEY_BYTES])
