"""Finds rows by key in some eight bytes a row, where a dict of bytes takes over a hundred.

Keys are digests, of one length, and lie in their owner's column. A key's first bits choose one of many small tables of
row numbers, its last ones of the first eight bytes a place in it; from there on, rows are looked at until one has the
key or a place is empty (open addressing, linear probing). A removed row leaves no mark: those behind it move up (Knuth,
volume 3, 6.4, algorithm R).

A table that is full enough is doubled, and one that is large enough is split in two by the next bit (extendible
hashing: Fagin and others, 1979). So no growth takes longer than a millisecond or two, however many rows there are. Each
table is full enough at a point of its own, or all of them would grow at one time.
"""

from array import array
from dataclasses import dataclass

PLACES_MIN = 8
PLACES_MAX = 1_024
BITS_MAX = 16
"""More tables than two to this power aren't made; from there on they grow."""
NO_ROW = 0xFFFF_FFFF
_HASH_BYTES = 8
_SPREAD = 0x9E37_79B1
"""Knuth's multiplier: numbers that follow one another come to lie far apart."""


@dataclass(slots=True)
class _Fill:
    """How many rows a table holds, and at how many it grows; it has the keys with `bits` first bits in common."""

    bits: int
    rows_max: int
    rows: int = 0


class KeyTable:
    """Row numbers (below `NO_ROW`) by key. `keys` is the owner's column, `key_bytes` a key's length, at least eight."""

    def __init__(self, keys: bytearray, key_bytes: int) -> None:
        self._keys = keys
        self._key_bytes = key_bytes
        self._bits = 0
        self._shift = 8 * _HASH_BYTES
        # By a key's first bits; those of a table with fewer bits in common name it several times.
        self._tables = [_empty(PLACES_MIN)]
        self._fills = [_Fill(0, _rows_max(0, PLACES_MIN))]

    def copy(self, keys: bytearray) -> "KeyTable":
        """The same, over a copy of the column: for finding, in another thread."""
        copied = KeyTable(keys, self._key_bytes)
        copied._bits, copied._shift = self._bits, self._shift
        copies = {id(table): table[:] for table in self._tables}
        copied._tables = [copies[id(table)] for table in self._tables]
        copied._fills = []
        return copied

    def find(self, key: bytes) -> int:
        """The row of a key, or `NO_ROW`."""
        start = int.from_bytes(key[:_HASH_BYTES], "big")
        table, keys, length = self._tables[start >> self._shift], self._keys, self._key_bytes
        mask = len(table) - 1
        place = start & mask
        while (row := table[place]) != NO_ROW:
            if keys[row * length : row * length + length] == key:
                return row
            place = (place + 1) & mask
        return NO_ROW

    def add(self, row: int) -> None:
        """A row whose key isn't in the table yet."""
        home = self._home(row)
        fill = self._fills[home >> self._shift]
        while fill.rows >= fill.rows_max:
            self._grow(home >> self._shift)
            fill = self._fills[home >> self._shift]
        fill.rows += 1
        _put(self._tables[home >> self._shift], home, row)

    def remove(self, row: int) -> None:
        """A row that is in the table, whose key is still in the column."""
        home = self._home(row)
        table = self._tables[home >> self._shift]
        mask = len(table) - 1
        place = home & mask
        while table[place] != row:
            assert table[place] != NO_ROW, "only what was added is removed"
            place = (place + 1) & mask
        self._fills[home >> self._shift].rows -= 1
        empty, place = place, (place + 1) & mask
        while (other := table[place]) != NO_ROW:
            # It may fill the gap if its home isn't between the gap and itself.
            if (place - self._home(other)) & mask >= (place - empty) & mask:
                table[empty], empty = other, place
            place = (place + 1) & mask
        table[empty] = NO_ROW

    def _home(self, row: int) -> int:
        start = row * self._key_bytes
        return int.from_bytes(self._keys[start : start + _HASH_BYTES], "big")

    def _grow(self, number: int) -> None:
        """Double a table, or split it."""
        table, fill = self._tables[number], self._fills[number]
        if len(table) < PLACES_MAX or fill.bits >= BITS_MAX:
            doubled = _empty(2 * len(table))
            for row in table:
                if row != NO_ROW:
                    _put(doubled, self._home(row), row)
            fill.rows_max = _rows_max(number, len(doubled))
            self._place(number, fill.bits, doubled, fill)
            return
        if fill.bits == self._bits:
            self._tables = [each for each in self._tables for _ in range(2)]
            self._fills = [each for each in self._fills for _ in range(2)]
            self._bits, self._shift, number = self._bits + 1, self._shift - 1, 2 * number
        self._split(number >> (self._bits - fill.bits), table, fill)

    def _split(self, prefix: int, table: "array[int]", fill: _Fill) -> None:
        bits = fill.bits + 1
        halves = (_empty(len(table)), _empty(len(table)))
        counts = [0, 0]
        for row in table:
            if row != NO_ROW:
                home = self._home(row)
                half = home >> (8 * _HASH_BYTES - bits) & 1
                counts[half] += 1
                _put(halves[half], home, row)
        for half in (0, 1):
            number = (2 * prefix + half) << (self._bits - bits)
            placed = halves[half] if counts[half] else _empty(PLACES_MIN)
            self._place(number, bits, placed, _Fill(bits, _rows_max(number, len(placed)), counts[half]))

    def _place(self, number: int, bits: int, table: "array[int]", fill: _Fill) -> None:
        """Let every name of a table lead to it."""
        names = 1 << (self._bits - bits)
        first = number & -names
        self._tables[first : first + names] = [table] * names
        self._fills[first : first + names] = [fill] * names


def _empty(places: int) -> "array[int]":
    return array("I", [NO_ROW]) * places


def _rows_max(number: int, places: int) -> int:
    """From a half to three quarters of the places, by the table's number."""
    return places // 2 + (places // 4 * (number * _SPREAD & 0xFFFF) >> 16)


def _put(table: "array[int]", home: int, row: int) -> None:
    mask = len(table) - 1
    place = home & mask
    while table[place] != NO_ROW:
        place = (place + 1) & mask
    table[place] = row
