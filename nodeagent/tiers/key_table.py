"""Finds rows by key in eight to twelve bytes a row, where a dict of bytes takes over two hundred.

Keys are digests, of one length, and lie in their owner's column. A key's first byte chooses one of 256 tables of row
numbers, its next eight a place in it; from there on, rows are looked at until one has the key or a place is empty
(open addressing, linear probing). A removed row leaves no mark: those behind it move up (Knuth, volume 3, 6.4,
algorithm R). A table that is two thirds full is doubled: one of 256, so that no growth takes long.
"""

from array import array

PARTS = 256
PLACES_MIN = 8
NO_ROW = 0xFFFF_FFFF


class KeyTable:
    """Row numbers (below `NO_ROW`) by key. `keys` is the owner's column, `key_bytes` a key's length, at least nine."""

    def __init__(self, keys: bytearray, key_bytes: int) -> None:
        self._keys = keys
        self._key_bytes = key_bytes
        self._parts = [array("I", [NO_ROW]) * PLACES_MIN for _ in range(PARTS)]
        self._counts = [0] * PARTS

    def copy(self, keys: bytearray) -> "KeyTable":
        """The same, over a copy of the column: for another thread."""
        copied = KeyTable(keys, self._key_bytes)
        copied._parts = [part[:] for part in self._parts]
        copied._counts = list(self._counts)
        return copied

    def find(self, key: bytes) -> int:
        """The row of a key, or `NO_ROW`."""
        part, keys, length = self._parts[key[0]], self._keys, self._key_bytes
        mask = len(part) - 1
        place = int.from_bytes(key[1:9], "little") & mask
        while (row := part[place]) != NO_ROW:
            if keys[row * length : row * length + length] == key:
                return row
            place = (place + 1) & mask
        return NO_ROW

    def add(self, row: int) -> None:
        """A row whose key isn't in the table yet."""
        number = self._keys[row * self._key_bytes]
        self._counts[number] += 1
        part = self._parts[number]
        if 3 * self._counts[number] > 2 * len(part):
            self._parts[number] = part = self._doubled(part)
        self._put(part, row)

    def remove(self, row: int) -> None:
        """A row that is in the table, whose key is still in the column."""
        number = self._keys[row * self._key_bytes]
        part = self._parts[number]
        mask = len(part) - 1
        place = self._home(row) & mask
        while part[place] != row:
            assert part[place] != NO_ROW, "only what was added is removed"
            place = (place + 1) & mask
        self._counts[number] -= 1
        empty, place = place, (place + 1) & mask
        while (other := part[place]) != NO_ROW:
            # It may fill the gap if its home isn't between the gap and itself.
            if (place - self._home(other)) & mask >= (place - empty) & mask:
                part[empty], empty = other, place
            place = (place + 1) & mask
        part[empty] = NO_ROW

    def _home(self, row: int) -> int:
        start = row * self._key_bytes
        return int.from_bytes(self._keys[start + 1 : start + 9], "little")

    def _put(self, part: "array[int]", row: int) -> None:
        mask = len(part) - 1
        place = self._home(row) & mask
        while part[place] != NO_ROW:
            place = (place + 1) & mask
        part[place] = row

    def _doubled(self, part: "array[int]") -> "array[int]":
        doubled = array("I", [NO_ROW]) * (2 * len(part))
        for row in part:
            if row != NO_ROW:
                self._put(doubled, row)
        return doubled
