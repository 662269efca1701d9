"""Which chunks of a host are forgotten: those that a tombstone names, and all that follow them in their chains. Pure.

Tiers keep no child lists, and a chain's chunks lie on any of them. So all tiers' accounts are walked together, once, by
position: when a chunk is looked at, the verdict on the chunk before it is known. It is done in a thread, over copies.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from directory.chunks import DIRECTORY_KEY_BYTES
from nodeagent.labels import ChunkLabel
from nodeagent.messages import STORAGE_KEY_BYTES
from nodeagent.tiers.sorted_runs import sorted_rows
from nodeagent.tiers.tombstones import CUT_BYTES, Tombstone, Tombstones

HAS_DIRECTORY_KEY = 1
HAS_PARENT = 2

Origin = tuple[bytes, bytes | None]
"""Whose bytes a chunk's are: the digest of its identity, and its salt's tag, where that is known."""


@dataclass(frozen=True, slots=True)
class ChainAccount:
    """A copy of what one tier knows of its chunks, in columns; rows with the serial 0 hold nothing.

    `origins` are numbers in `values`; `used_at_s` is when a chunk was last known to be used, or `inf`.
    """

    keys: bytearray
    parents: bytearray
    directory_keys: bytearray
    flags: bytearray
    positions: "array[int]"
    origins: "array[int]"
    used_at_s: "array[float]"
    serials: "array[int]"
    values: dict[int, Origin]


@dataclass(frozen=True, slots=True)
class Held:
    """What `account_of` needs of one chunk. `written_at_s` is in wall time."""

    label: ChunkLabel
    identity: bytes
    written_at_s: float


def account_of(chunks: Sequence[Held]) -> ChainAccount:
    """An account of chunks that aren't in columns; a chunk's row is its place, its serial 1."""
    origins: dict[Origin, int] = {}
    labels = [each.label for each in chunks]
    return ChainAccount(
        keys=bytearray(b"".join(label.storage_key for label in labels)),
        parents=bytearray(b"".join(label.parent or bytes(STORAGE_KEY_BYTES) for label in labels)),
        directory_keys=bytearray(b"".join(label.directory_key or bytes(DIRECTORY_KEY_BYTES) for label in labels)),
        flags=bytearray(
            (label.directory_key is not None) * HAS_DIRECTORY_KEY | (label.parent is not None) * HAS_PARENT
            for label in labels
        ),
        positions=array("Q", (label.position for label in labels)),
        origins=array("I", (origins.setdefault((each.identity, each.label.salt_tag), len(origins)) for each in chunks)),
        used_at_s=array("d", (each.written_at_s for each in chunks)),
        serials=array("I", [1]) * len(chunks),
        values={number: origin for origin, number in origins.items()},
    )


@dataclass(slots=True)
class Forgotten:
    """What was found: rows and their serials, by account.

    `followers` are storage keys (cut) of chunks that don't show by themselves what forgets them, and that. Of the
    chunks that stay, `salt_unknown` counts those of an unknown salt, `unlabelled` those without any label, `unlinked`
    those after a chunk that isn't here: whether they follow what is forgotten can't be told.
    """

    rows: list[list[tuple[int, int]]]
    followers: dict[bytes, Tombstone] = field(default_factory=dict)
    salt_unknown: int = 0
    unlabelled: int = 0
    unlinked: int = 0

    @property
    def count(self) -> int:
        """How many rows."""
        return sum(map(len, self.rows))


def find_forgotten(
    accounts: Sequence[ChainAccount], tombstones: Tombstones, links: ChainAccount | None = None
) -> Forgotten:
    """The chunks that are forgotten now.

    A chunk that is held twice is forgotten twice, though one of its copies may be known better than the other. `links`
    are chunks that aren't held, maybe, but tell what follows what; where they are forgotten they are `followers`.
    """
    found = Forgotten([[] for _ in accounts])
    walks = [_Walk(account, tombstones) for account in (*accounts, *([] if links is None else [links]))]
    matched: dict[bytes, Tombstone] = {}
    above: tuple[int, set[bytes]] = (-1, set())
    while ahead := [walk.position for walk in walks if walk.is_ahead]:
        position = min(ahead)
        level = [(number, row) for number, walk in enumerate(walks) for row in walk.take(position)]
        for number, row in level:
            walks[number].match(row, matched)
        parents = above[1] if above[0] == position - 1 else set()
        for number, row in level:
            if number < len(accounts):
                walks[number].settle(row, matched, parents, found, found.rows[number])
            else:
                walks[number].note(row, matched, found)
        above = (position, {walks[number].cut(row) for number, row in level})
    return found


class _Walk:
    """One account, by position."""

    def __init__(self, account: ChainAccount, tombstones: Tombstones) -> None:
        self._account = account
        self._tombstones = tombstones
        self._now = tombstones.now()
        self._by_origin = {number: tombstones.of_origin(*origin) for number, origin in account.values.items()}
        rows = array("I", (row for row, serial in enumerate(account.serials) if serial))
        self._rows = sorted_rows(rows, account.positions.__getitem__)
        self._place = 0

    @property
    def is_ahead(self) -> bool:
        """Whether there are rows that weren't taken."""
        return self._place < len(self._rows)

    @property
    def position(self) -> int:
        """That of the next row."""
        return self._account.positions[self._rows[self._place]]

    def take(self, position: int) -> "array[int]":
        """The rows of one position, if they are the next."""
        start, positions = self._place, self._account.positions
        while self.is_ahead and positions[self._rows[self._place]] == position:
            self._place += 1
        return self._rows[start : self._place]

    def match(self, row: int, matched: dict[bytes, Tombstone]) -> None:
        """Add a chunk to those `matched`, if it is forgotten for what it is or what it follows.

        Where an identity is forgotten that isn't needed: copies and followers show the same.
        """
        found = self._of_itself(row)
        if found is not None and found.salt_tag is None:
            return
        found = found or self._of_its_names(row, matched)
        if found is not None:
            matched[self.cut(row)] = found

    def cut(self, row: int) -> bytes:
        """A chunk's storage key, cut."""
        return self._cut(self._account.keys, row)

    def settle(
        self,
        row: int,
        matched: dict[bytes, Tombstone],
        parents: set[bytes],
        found: Forgotten,
        rows: list[tuple[int, int]],
    ) -> None:
        """Take a chunk that is forgotten; count one that isn't. `parents` are the keys one position above."""
        account, cut = self._account, self.cut(row)
        of_itself = self._of_itself(row)
        tombstone = of_itself or matched.get(cut)
        if tombstone is not None:
            rows.append((row, account.serials[row]))
            if of_itself is None:
                found.followers[cut] = tombstone
            return
        found.salt_unknown += account.values[account.origins[row]][1] is None
        found.unlabelled += not account.flags[row] & HAS_DIRECTORY_KEY
        if account.flags[row] & HAS_PARENT:
            found.unlinked += self._cut(account.parents, row) not in parents

    def note(self, row: int, matched: dict[bytes, Tombstone], found: Forgotten) -> None:
        """A chunk that needn't be held: what forgets it, if anything."""
        tombstone = matched.get(self.cut(row))
        if tombstone is not None:
            found.followers[self.cut(row)] = tombstone

    def _of_itself(self, row: int) -> Tombstone | None:
        known = self._by_origin[self._account.origins[row]]
        return known if known is not None and self._at_s(row) < known.until_s else None

    def _of_its_names(self, row: int, matched: dict[bytes, Tombstone]) -> Tombstone | None:
        account, book, names = self._account, self._tombstones, []
        if account.flags[row] & HAS_DIRECTORY_KEY:
            start = row * DIRECTORY_KEY_BYTES
            names.append(book.of_directory_key(bytes(account.directory_keys[start : start + DIRECTORY_KEY_BYTES])))
        names.append(book.of_follower(self.cut(row)))
        if account.flags[row] & HAS_PARENT:
            parent = self._cut(account.parents, row)
            names += [matched.get(parent), book.of_follower(parent)]
        at_s = self._at_s(row)
        return next((known for known in names if known is not None and at_s < known.until_s), None)

    def _at_s(self, row: int) -> float:
        return min(self._account.used_at_s[row], self._now)

    @staticmethod
    def _cut(column: bytearray, row: int) -> bytes:
        return bytes(column[row * STORAGE_KEY_BYTES : row * STORAGE_KEY_BYTES + CUT_BYTES])
