"""The files that a drive held at its start: names, sizes and times in columns, some sixty bytes a file.

They are counted, and the oldest of them can go, while their headers are read: a file is *listed* until it is taken.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nodeagent.tiers.chunk_file import NAME_BYTES
from nodeagent.tiers.key_table import NO_ROW, KeyTable
from nodeagent.tiers.sorted_runs import sorted_rows


def no_step() -> None:
    """Nobody wants to hear how far it is."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that was there before: its name (32 bytes), its size, and when it was last written or read."""

    name: bytes
    size_bytes: int
    modified_s: float


class FoundFiles:
    """Files in the order in which they were found; `sort` puts the newest first."""

    def __init__(self) -> None:
        self._names = bytearray()
        self._sizes = array("Q")
        self._times = array("d")
        self._order = array("I")
        self._rows: KeyTable | None = None
        self._is_listed = bytearray()
        self._oldest = -1
        self.listed = 0
        self.total_bytes = 0

    def append(self, name: bytes, size_bytes: int, modified_s: float) -> None:
        """One file more; before `sort`."""
        self._order.append(len(self._sizes))
        self._names += name
        self._sizes.append(size_bytes)
        self._times.append(modified_s)

    def sort(self, on_step: Callable[[], None] = no_step) -> None:
        """The newest first; all of them are listed then. `on_step` is called again and again meanwhile."""
        times = self._times
        rows = self._rows = KeyTable(self._names, NAME_BYTES)
        order = array("I")
        for row in sorted_rows(self._order, times.__getitem__, reverse=True):
            on_step()
            # Where somebody put a file of one name into two folders, the newer counts.
            if rows.find(self._name(row)) == NO_ROW:
                rows.add(row)
                order.append(row)
                self.total_bytes += self._sizes[row]
        self._order = order
        self._is_listed = bytearray(b"\1") * len(self._sizes)
        self._oldest, self.listed = len(self._order) - 1, len(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def stretch(self, start: int, count_max: int) -> list[FoundFile]:
        """Some of them, in their order."""
        return [self._at(row) for row in self._order[start : start + count_max]]

    def __iter__(self) -> Iterator[FoundFile]:
        return map(self._at, self._order)

    def is_listed(self, name: bytes) -> bool:
        """Whether nobody has taken the file of this name."""
        row = self._rows.find(name) if self._rows is not None else NO_ROW
        return row != NO_ROW and bool(self._is_listed[row])

    def take(self, name: bytes) -> int:
        """The file is listed no more: its size, 0 where it wasn't listed."""
        row = self._rows.find(name) if self._rows is not None else NO_ROW
        if row == NO_ROW or not self._is_listed[row]:
            return 0
        self._is_listed[row] = 0
        self.listed -= 1
        return self._sizes[row]

    def take_oldest(self) -> tuple[bytes, int] | None:
        """The name and size of the oldest listed file, which is listed no more."""
        while self._oldest >= 0:
            row = self._order[self._oldest]
            self._oldest -= 1
            if self._is_listed[row]:
                found = self._at(row)
                return found.name, self.take(found.name)
        return None

    def _at(self, row: int) -> FoundFile:
        return FoundFile(self._name(row), self._sizes[row], self._times[row])

    def _name(self, row: int) -> bytes:
        return bytes(self._names[row * NAME_BYTES : (row + 1) * NAME_BYTES])
