"""Rows in the order in which they were used: a doubly linked list in two columns of four bytes a row."""

from array import array
from collections.abc import Iterator

from nodeagent.tiers.key_table import NO_ROW


class UseOrder:
    """Rows from the oldest to the newest. A row is in it once, or not."""

    def __init__(self) -> None:
        self._older = array("I")
        self._newer = array("I")
        self.oldest = NO_ROW
        self.newest = NO_ROW

    def make_place(self) -> None:
        """One row more may be added."""
        self._older.append(NO_ROW)
        self._newer.append(NO_ROW)

    def add_newest(self, row: int) -> None:
        """Add a row that isn't in it."""
        self._older[row], self._newer[row] = self.newest, NO_ROW
        if self.newest == NO_ROW:
            self.oldest = row
        else:
            self._newer[self.newest] = row
        self.newest = row

    def add_oldest(self, row: int) -> None:
        """Add a row that isn't in it."""
        self._older[row], self._newer[row] = NO_ROW, self.oldest
        if self.oldest == NO_ROW:
            self.newest = row
        else:
            self._older[self.oldest] = row
        self.oldest = row

    def make_newest(self, row: int) -> None:
        """A row that is in it was used. As `remove` and `add_newest`, in one step: it is done most often of all."""
        older_rows, newer_rows = self._older, self._newer
        newer = newer_rows[row]
        if newer == NO_ROW:
            return
        older, newest = older_rows[row], self.newest
        if older == NO_ROW:
            self.oldest = newer
        else:
            newer_rows[older] = newer
        older_rows[newer] = older
        older_rows[row], newer_rows[row], newer_rows[newest] = newest, NO_ROW, row
        self.newest = row

    def older(self, row: int) -> int:
        """The row before one that is in it, or `NO_ROW`."""
        return self._older[row]

    def remove(self, row: int) -> None:
        """Take a row out that is in it."""
        older, newer = self._older[row], self._newer[row]
        if older == NO_ROW:
            self.oldest = newer
        else:
            self._newer[older] = newer
        if newer == NO_ROW:
            self.newest = older
        else:
            self._older[newer] = older

    def oldest_first(self) -> Iterator[int]:
        """All rows. Nothing may change meanwhile."""
        row = self.oldest
        while row != NO_ROW:
            yield row
            row = self._newer[row]
