"""What a drive is known to hold: by storage key and by directory key, how old, and how many bytes.

All of it runs on the event loop and never waits. A million chunks take some 170 MB: what is known of a chunk is a row
in columns, found through tables of row numbers, and no object of its own that the garbage collector would visit.

The order is the one of `eviction.Lru`: least recently used, ancestors touched after their descendants.

After a start, files are first *listed* (counted and evictable, but not found by anybody) and then *restored* from their
headers, newest first. A restored chunk is the oldest of all until `put_in_order` has seen every one: a file's time says
when it was used, but a parent was often written before its children, and must not be evicted before them.
"""

import math
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TypeVar

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.tiers import Tier
from nodeagent.labels import ChunkLabel
from nodeagent.messages import STORAGE_KEY_BYTES
from nodeagent.tiers.chains import HAS_DIRECTORY_KEY, HAS_PARENT, ChainAccount, Origin, account_in_steps
from nodeagent.tiers.chunk_file import CHECKSUM_BYTES, FileHeader, file_bytes, name_of
from nodeagent.tiers.found_files import FoundFiles, no_step
from nodeagent.tiers.interned import Interned
from nodeagent.tiers.key_table import NO_ROW, KeyTable
from nodeagent.tiers.sorted_runs import sorted_rows
from nodeagent.tiers.use_order import UseOrder

REORDER_STEP_KEYS = 1_024
COPY_STEP_ITEMS = 1 << 18
Column = TypeVar("Column", bytearray, "array[int]", "array[float]")
_SERIAL_MASK = 0xFFFF_FFFF
_USED_NOW = math.inf


@dataclass(frozen=True, slots=True)
class NvmeEntry:
    """One chunk on disk, as it was known at one moment. `identity` is the digest in its header.

    `length` and `checksum` are the payload's, `written_at_s` is as in a header; `serial` tells it from what is indexed
    under its key at another time.
    """

    label: ChunkLabel
    identity: bytes
    length: int
    checksum: bytes
    serial: int = 0
    written_at_s: float = 0.0

    @property
    def name(self) -> bytes:
        """Its file's name."""
        return name_of(self.label.storage_key)

    @property
    def size_bytes(self) -> int:
        """What its file takes."""
        return file_bytes(self.length)


@dataclass(frozen=True, slots=True)
class UseAccount:
    """A copy of what `order_of_use` needs, to be worked through elsewhere.

    `used_at_s` is `inf` for what was used since the start; rows with the serial 0 hold nothing.
    """

    table: KeyTable
    parents: bytearray
    flags: bytearray
    positions: "array[int]"
    used_at_s: "array[float]"
    serials: "array[int]"


@dataclass(frozen=True, slots=True)
class OrderOfUse:
    """Rows, newest first; and by row, when it was used, and what it held when the account was made."""

    rows: "array[int]"
    used_at_s: "array[float]"
    serials: "array[int]"


class NvmeIndex:
    """Chunks in the order in which they should go, and the bytes of all files, until they are gone from disk.

    `on_change(directory key, tier mask)` hears every newest state, as in `Hierarchy`.
    """

    def __init__(self, on_change: Callable[[bytes, int], None]) -> None:
        self.used_bytes = 0
        self._on_change = on_change
        self._keys, self._parents = bytearray(), bytearray()
        self._directory_keys, self._checksums = bytearray(), bytearray()
        self._flags = bytearray()
        self._positions, self._lengths = array("Q"), array("Q")
        self._origins, self._serials = array("I"), array("I")
        self._next_of_label = array("I")
        self._used_at_s, self._written_at_s = array("d"), array("d")
        self._table = KeyTable(self._keys, STORAGE_KEY_BYTES)
        self._labels = KeyTable(self._directory_keys, DIRECTORY_KEY_BYTES)
        self._order = UseOrder()
        self._free = array("I")
        self._known_origins: Interned[Origin] = Interned()
        self._count = 0
        self._new_serials = count(1)
        self._listed = FoundFiles()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, storage_key: bytes) -> bool:
        return self._table.find(storage_key) != NO_ROW

    @property
    def listed_files(self) -> int:
        """Files whose headers haven't been read yet."""
        return self._listed.listed

    def get(self, storage_key: bytes) -> NvmeEntry | None:
        """The chunk under this key, if a file is known to hold it."""
        row = self._table.find(storage_key)
        return self._entry(row) if row != NO_ROW else None

    def label(self, storage_key: bytes) -> ChunkLabel:
        """The label of a chunk that is there."""
        return self._label(self._table.find(storage_key))

    def storage_keys(self, directory_key: bytes) -> Sequence[bytes]:
        """The storage keys of the chunks with this label."""
        found, row = [], self._labels.find(directory_key)
        while row != NO_ROW:
            found.append(self._key(row))
            row = self._next_of_label[row]
        return found

    def has_label(self, directory_key: bytes) -> bool:
        """Whether any chunk has this label."""
        return self._labels.find(directory_key) != NO_ROW

    @property
    def rows(self) -> int:
        """Rows of the columns, be they in use or not."""
        return len(self._serials)

    def directory_keys(self, first_row: int, rows_max: int) -> list[bytes]:
        """The labels in a stretch of the columns; one that several chunks have comes several times."""
        rows = range(first_row, min(first_row + rows_max, self.rows))
        return [self._directory_key(row) for row in rows if self._flags[row] & HAS_DIRECTORY_KEY]

    def entries(self) -> Iterator[NvmeEntry]:
        """All chunks, the oldest first. Nothing may change meanwhile."""
        return map(self._entry, self._order.oldest_first())

    def list_files(self, files: FoundFiles) -> None:
        """Count files that were found, newest first. Nothing has been added before."""
        self._listed = files
        self.used_bytes = files.total_bytes

    def is_listed(self, name: bytes) -> bool:
        """Whether the file of this name is counted, but not read yet."""
        return self._listed.is_listed(name)

    def take_oldest_listed(self) -> tuple[bytes, int] | None:
        """The name and size of the oldest listed file, which is to be removed; its bytes are still counted."""
        return self._listed.take_oldest()

    def unlist(self, name: bytes) -> int:
        """A listed file is of no use: its size, still counted; 0 where it isn't listed."""
        return self._listed.take(name)

    def restore(self, header: FileHeader, used_at_s: float) -> None:
        """A listed file's header was read: index its chunk as the oldest, and announce it."""
        written_at_s = header.written_at_s or used_at_s
        entry = NvmeEntry(header.label, header.identity, header.length, header.checksum, written_at_s=written_at_s)
        self.used_bytes += entry.size_bytes - self.unlist(entry.name)
        row = self._insert(entry)
        self._used_at_s[row] = used_at_s
        self._order.add_oldest(row)

    def add(self, entry: NvmeEntry) -> None:
        """A chunk was written, over whatever file had its name: index and announce it."""
        row = self._table.find(entry.label.storage_key)
        if row != NO_ROW:
            self.used_bytes -= file_bytes(self._lengths[row])
            self._delete(row)
        self.used_bytes += entry.size_bytes - self.unlist(entry.name)
        row = self._insert(entry)
        self._order.add_newest(row)
        self._touch(row)

    def touch(self, storage_key: bytes) -> None:
        """A chunk was used, and with it its ancestors."""
        row = self._table.find(storage_key)
        if row != NO_ROW:
            self._touch(row)
            self._report(row)

    def set_label(self, entry: NvmeEntry, label: ChunkLabel) -> None:
        """A chunk's label has become known: announce it."""
        row = self._table.find(label.storage_key)
        if row == NO_ROW or self._serials[row] != entry.serial:
            return
        self._forget_label(row)
        identity, _ = self._known_origins.value(self._origins[row])
        self._known_origins.give_back(self._origins[row])
        self._origins[row] = self._known_origins.take((identity, label.salt_tag))
        self._write_label(row, label)
        self._note_label(row)
        self._touch(row)

    def drop(self, entry: NvmeEntry) -> bool:
        """Nobody finds a chunk any more; its file's bytes stay counted. Returns whether it was there."""
        row = self._table.find(entry.label.storage_key)
        if row == NO_ROW or self._serials[row] != entry.serial:
            return False
        self._delete(row)
        return True

    def drop_rows(self, rows: Sequence[tuple[int, int]]) -> list[NvmeEntry]:
        """Nobody finds these chunks (rows, and what serials they had) any more; their files' bytes stay counted."""
        dropped = []
        for row, serial in rows:
            if self._serials[row] == serial:
                dropped.append(self._entry(row))
                self._delete(row)
        return dropped

    def take_victims(self, size_bytes: int, count_max: int) -> list[NvmeEntry]:
        """Un-index the oldest chunks until their files hold `size_bytes`; report them gone. They stay counted."""
        victims: list[NvmeEntry] = []
        while size_bytes > 0 and len(victims) < count_max and self._order.oldest != NO_ROW:
            row = self._order.oldest
            victims.append(self._entry(row))
            size_bytes -= victims[-1].size_bytes
            self._delete(row)
        return victims

    def account_of_chains(self) -> Generator[None, None, ChainAccount]:
        """Makes what `find_forgotten` needs, a step at a time, and returns it."""
        columns = (self._keys, self._parents, self._directory_keys, self._flags)
        numbers = (self._positions, self._written_at_s, self._origins, self._serials)
        return account_in_steps(columns, numbers, self._known_origins)

    def account_of_use(self) -> Iterator[UseAccount]:
        """Makes what `order_of_use` needs, a step at a time: the same object each time, whole after the last.

        Things may change between steps. Serials are copied first of the columns: a row that changed meanwhile has
        another one, and `put_in_order` leaves it where it is. Rows that only the table has are never found.
        """
        rows, keys = self.rows, bytearray()
        account = UseAccount(self._table.copy(keys), bytearray(), bytearray(), array("Q"), array("d"), array("I"))
        steps = chain(
            _copy(self._serials, account.serials, rows),
            _copy(self._keys, keys, rows * STORAGE_KEY_BYTES),
            _copy(self._parents, account.parents, rows * STORAGE_KEY_BYTES),
            _copy(self._flags, account.flags, rows),
            _copy(self._positions, account.positions, rows),
            _copy(self._used_at_s, account.used_at_s, rows),
        )
        yield account
        for _ in steps:
            yield account

    def put_in_order(self, ordered: OrderOfUse, start: int, count_max: int) -> None:
        """Put restored chunks in their places: a stretch of them, from the newest on."""
        for row in ordered.rows[start : start + count_max]:
            if self._serials[row] != ordered.serials[row] or self._used_at_s[row] == _USED_NOW:
                continue
            if ordered.used_at_s[row] == _USED_NOW:
                self._touch(row)
            else:
                self._order.remove(row)
                self._order.add_oldest(row)

    def end_restoring(self) -> None:
        """All files are read and in order."""
        self._listed = FoundFiles()

    def _touch(self, row: int) -> None:
        """The walk ends where positions don't fall by one: so it ends, whatever was claimed."""
        while True:
            self._order.make_newest(row)
            self._used_at_s[row] = _USED_NOW
            if not self._flags[row] & HAS_PARENT:
                return
            above = self._table.find(self._parent(row))
            if above == NO_ROW or self._positions[above] != self._positions[row] - 1:
                return
            row = above

    def _insert(self, entry: NvmeEntry) -> int:
        """A row for a chunk, found and announced; its place in the order is the caller's."""
        row = self._free.pop() if self._free else self._new_row()
        label = entry.label
        # A column takes what it is given: other lengths would shift all that follows.
        assert label.is_sound(), "names have their lengths"
        assert len(entry.checksum) == CHECKSUM_BYTES, "and so have checksums"
        self._keys[row * STORAGE_KEY_BYTES : (row + 1) * STORAGE_KEY_BYTES] = label.storage_key
        self._checksums[row * CHECKSUM_BYTES : (row + 1) * CHECKSUM_BYTES] = entry.checksum
        self._lengths[row] = entry.length
        self._origins[row] = self._known_origins.take((entry.identity, label.salt_tag))
        self._serials[row] = next(self._new_serials) & _SERIAL_MASK
        self._used_at_s[row], self._written_at_s[row] = _USED_NOW, entry.written_at_s
        self._count += 1
        self._table.add(row)
        self._write_label(row, label)
        self._note_label(row)
        return row

    def _new_row(self) -> int:
        row = len(self._serials)
        for column, width in (
            (self._keys, STORAGE_KEY_BYTES),
            (self._parents, STORAGE_KEY_BYTES),
            (self._directory_keys, DIRECTORY_KEY_BYTES),
            (self._checksums, CHECKSUM_BYTES),
            (self._flags, 1),
        ):
            column.extend(bytes(width))
        for numbers in (self._positions, self._lengths, self._origins, self._serials):
            numbers.append(0)
        self._next_of_label.append(NO_ROW)
        self._used_at_s.append(_USED_NOW)
        self._written_at_s.append(0.0)
        self._order.make_place()
        return row

    def _delete(self, row: int) -> None:
        self._order.remove(row)
        self._forget_label(row)
        self._table.remove(row)
        self._known_origins.give_back(self._origins[row])
        self._serials[row] = 0
        self._free.append(row)
        self._count -= 1

    def _write_label(self, row: int, label: ChunkLabel) -> None:
        flags = (label.directory_key is not None) * HAS_DIRECTORY_KEY | (label.parent is not None) * HAS_PARENT
        self._flags[row] = flags
        self._positions[row] = label.position
        start = row * STORAGE_KEY_BYTES
        self._parents[start : start + STORAGE_KEY_BYTES] = label.parent or bytes(STORAGE_KEY_BYTES)
        start = row * DIRECTORY_KEY_BYTES
        self._directory_keys[start : start + DIRECTORY_KEY_BYTES] = label.directory_key or bytes(DIRECTORY_KEY_BYTES)

    def _note_label(self, row: int) -> None:
        """Rows of one label are a chain; the first of them is in the table."""
        if not self._flags[row] & HAS_DIRECTORY_KEY:
            return
        first = self._labels.find(self._directory_key(row))
        if first == NO_ROW:
            self._next_of_label[row] = NO_ROW
            self._labels.add(row)
        else:
            self._next_of_label[row] = self._next_of_label[first]
            self._next_of_label[first] = row
        self._report(row)

    def _forget_label(self, row: int) -> None:
        if not self._flags[row] & HAS_DIRECTORY_KEY:
            return
        key, following = self._directory_key(row), self._next_of_label[row]
        before = self._labels.find(key)
        if before == row:
            self._labels.remove(row)
            if following != NO_ROW:
                self._labels.add(following)
        else:
            while self._next_of_label[before] != row:
                before = self._next_of_label[before]
            self._next_of_label[before] = following
        self._flags[row] &= ~HAS_DIRECTORY_KEY
        self._on_change(key, int(Tier.NVME) if self.has_label(key) else 0)

    def _report(self, row: int) -> None:
        if self._flags[row] & HAS_DIRECTORY_KEY:
            self._on_change(self._directory_key(row), int(Tier.NVME))

    def _key(self, row: int) -> bytes:
        return bytes(self._keys[row * STORAGE_KEY_BYTES : (row + 1) * STORAGE_KEY_BYTES])

    def _parent(self, row: int) -> bytes:
        return bytes(self._parents[row * STORAGE_KEY_BYTES : (row + 1) * STORAGE_KEY_BYTES])

    def _directory_key(self, row: int) -> bytes:
        return bytes(self._directory_keys[row * DIRECTORY_KEY_BYTES : (row + 1) * DIRECTORY_KEY_BYTES])

    def _label(self, row: int) -> ChunkLabel:
        flags = self._flags[row]
        return ChunkLabel(
            self._key(row),
            self._directory_key(row) if flags & HAS_DIRECTORY_KEY else None,
            self._parent(row) if flags & HAS_PARENT else None,
            self._positions[row],
            self._known_origins.value(self._origins[row])[1],
        )

    def _entry(self, row: int) -> NvmeEntry:
        checksum = bytes(self._checksums[row * CHECKSUM_BYTES : (row + 1) * CHECKSUM_BYTES])
        identity, _ = self._known_origins.value(self._origins[row])
        written_at_s = self._written_at_s[row]
        return NvmeEntry(self._label(row), identity, self._lengths[row], checksum, self._serials[row], written_at_s)


def _copy(column: Column, copied: Column, items: int) -> Iterator[None]:
    """Fill a copy with the first `items` of a column, a stretch at a time."""
    for start in range(0, items, COPY_STEP_ITEMS):
        copied += column[start : min(start + COPY_STEP_ITEMS, items)]
        yield


def order_of_use(account: UseAccount, on_step: Callable[[], None] = no_step) -> OrderOfUse:
    """Newest first; no chunk older than a child of its. What isn't restored was used just now. `on_step` as in `sort`.

    Children come before their parents (the deepest first), and hand up when they were used. Among chunks that were
    used at the same time the ancestors are the newer ones.
    """
    positions, used = account.positions, account.used_at_s[:]
    live = array("I", (row for row, serial in enumerate(account.serials) if serial))
    rows = sorted_rows(live, positions.__getitem__)
    for row in reversed(rows):
        on_step()
        if not account.flags[row] & HAS_PARENT:
            continue
        parent = bytes(account.parents[row * STORAGE_KEY_BYTES : (row + 1) * STORAGE_KEY_BYTES])
        above = account.table.find(parent)
        if above != NO_ROW and positions[above] == positions[row] - 1:
            used[above] = max(used[above], used[row])
    return OrderOfUse(sorted_rows(rows, used.__getitem__, reverse=True), used, account.serials)
