"""Which chunks of a host are forgotten: those that a tombstone names, and all that follow them in their chains. Pure.

Tiers keep no child lists, and a chain's chunks lie on any of them. So all tiers' accounts are walked together, once, by
position: when a chunk is looked at, the verdict on the chunk before it is known. It is done in a thread, over copies.
"""

from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from directory.chunks import DIRECTORY_KEY_BYTES
from nodeagent.labels import ChunkLabel
from nodeagent.messages import STORAGE_KEY_BYTES
from nodeagent.tiers.interned import Interned
from nodeagent.tiers.tombstones import CUT_BYTES, Tombstone, Tombstones

HAS_DIRECTORY_KEY = 1
HAS_PARENT = 2
COPY_STEP_BYTES = 8 << 20
"""What is copied of a column between two turns of the event loop."""

Origin = tuple[bytes, bytes | None]
"""Whose bytes a chunk's are: the digest of its identity, and its salt's tag, where that is known."""


@dataclass(frozen=True, slots=True)
class ChainAccount:
    """A copy of what one tier knows of its chunks, in columns; rows with the serial 0 hold nothing.

    `origins` are numbers in `values`; `written_at_s` is when a chunk was put, in wall time.
    """

    keys: bytes
    parents: bytes
    directory_keys: bytes
    flags: bytes
    positions: "array[int]"
    origins: "array[int]"
    written_at_s: "array[float]"
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
        keys=b"".join(label.storage_key for label in labels),
        parents=b"".join(label.parent or bytes(STORAGE_KEY_BYTES) for label in labels),
        directory_keys=b"".join(label.directory_key or bytes(DIRECTORY_KEY_BYTES) for label in labels),
        flags=bytes(
            (label.directory_key is not None) * HAS_DIRECTORY_KEY | (label.parent is not None) * HAS_PARENT
            for label in labels
        ),
        positions=array("Q", (label.position for label in labels)),
        origins=array("I", (origins.setdefault((each.identity, each.label.salt_tag), len(origins)) for each in chunks)),
        written_at_s=array("d", (each.written_at_s for each in chunks)),
        serials=array("I", [1]) * len(chunks),
        values={number: origin for origin, number in origins.items()},
    )


def account_in_steps(
    columns: tuple[bytearray, bytearray, bytearray, bytearray],
    numbers: tuple["array[int]", "array[float]", "array[int]", "array[int]"],
    origins: Interned[Origin],
) -> Generator[None, None, ChainAccount]:
    """Copies a tier's columns, in the order of the account's fields, a stretch at a time, and returns the account.

    Rows may change between steps. Those whose serial isn't what it was in the beginning hold nothing in the account.
    """
    positions, written_at_s, live_origins, live_serials = numbers
    serials = live_serials[:]
    rows = len(serials)
    copies: list[bytes] = []
    sizes = [len(column) for column in columns]  # before anything is added
    for column, size in zip(columns, sizes, strict=True):
        copied = bytearray()
        for start in range(0, size, COPY_STEP_BYTES):
            copied += column[start : min(start + COPY_STEP_BYTES, size)]
            yield
        copies.append(bytes(copied))
    now = live_serials[:rows]
    if serials != now:
        for row in range(rows):
            serials[row] *= serials[row] == now[row]
    values = {number: origin for origin, number in origins.items()}
    keys, parents, directory_keys, flags = copies
    return ChainAccount(
        keys,
        parents,
        directory_keys,
        flags,
        positions[:rows],
        live_origins[:rows],
        written_at_s[:rows],
        serials,
        values,
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
    before, parents = -1, set[bytes]()
    for position in sorted({position for walk in walks for position in walk.levels}):
        cuts = [walk.cuts_at(position) for walk in walks]
        for walk, own in zip(walks, cuts, strict=True):
            walk.match(position, own, matched)
        if before != position - 1:
            parents = set()
        for number, (walk, own) in enumerate(zip(walks, cuts, strict=True)):
            if number < len(accounts):
                walk.settle(position, own, matched, parents, found, found.rows[number])
            else:
                found.followers.update((cut, matched[cut]) for cut in own if cut in matched)
        before, parents = position, set().union(*cuts)
    return found


class _Walk:
    """One account, by position. Loops over many rows, so that names are looked up once."""

    def __init__(self, account: ChainAccount, tombstones: Tombstones) -> None:
        self._account = account
        self._tombstones = tombstones
        self._now = tombstones.now()
        self._by_origin = {number: tombstones.of_origin(*origin) for number, origin in account.values.items()}
        self.levels: dict[int, array[int]] = {}
        levels, positions = self.levels, account.positions
        for row, serial in enumerate(account.serials):
            if serial:
                level = levels.get(positions[row])
                if level is None:
                    level = levels[positions[row]] = array("I")
                level.append(row)

    def cuts_at(self, position: int) -> list[bytes]:
        """The storage keys of one position, cut."""
        keys = self._account.keys
        starts = (row * STORAGE_KEY_BYTES for row in self.levels.get(position, ()))
        return [keys[start : start + CUT_BYTES] for start in starts]

    def match(self, position: int, cuts: Sequence[bytes], matched: dict[bytes, Tombstone]) -> None:
        """Add the chunks of one position to those `matched` that are forgotten for what they are or what they follow.

        Where an identity is forgotten that isn't needed: copies and followers show the same.
        """
        has_names = bool(matched) or self._tombstones.has_names
        for row, cut in zip(self.levels.get(position, ()), cuts, strict=True):
            found = self._of_itself(row)
            if found is not None and found.salt_tag is None:
                continue
            if found is None and has_names:
                found = self._of_its_names(row, cut, matched)
            if found is not None:
                matched[cut] = found

    def settle(
        self,
        position: int,
        cuts: Sequence[bytes],
        matched: dict[bytes, Tombstone],
        parents: set[bytes],
        found: Forgotten,
        rows: list[tuple[int, int]],
    ) -> None:
        """Take the chunks of one position that are forgotten; count the others. `parents` are the keys above."""
        account = self._account
        for row, cut in zip(self.levels.get(position, ()), cuts, strict=True):
            of_itself = self._of_itself(row)
            tombstone = of_itself or matched.get(cut)
            flags = account.flags[row]
            if tombstone is not None:
                rows.append((row, account.serials[row]))
                if of_itself is None:
                    found.followers[cut] = tombstone
                continue
            found.salt_unknown += account.values[account.origins[row]][1] is None
            found.unlabelled += not flags & HAS_DIRECTORY_KEY
            if flags & HAS_PARENT:
                start = row * STORAGE_KEY_BYTES
                found.unlinked += account.parents[start : start + CUT_BYTES] not in parents

    def _of_itself(self, row: int) -> Tombstone | None:
        known = self._by_origin[self._account.origins[row]]
        return known if known is not None and self._at_s(row) < known.until_s else None

    def _of_its_names(self, row: int, cut: bytes, matched: dict[bytes, Tombstone]) -> Tombstone | None:
        account, book = self._account, self._tombstones
        names = [book.of_follower(cut)]
        if account.flags[row] & HAS_DIRECTORY_KEY:
            start = row * DIRECTORY_KEY_BYTES
            names.append(book.of_directory_key(account.directory_keys[start : start + DIRECTORY_KEY_BYTES]))
        if account.flags[row] & HAS_PARENT:
            start = row * STORAGE_KEY_BYTES
            parent = account.parents[start : start + CUT_BYTES]
            names += [matched.get(parent), book.of_follower(parent)]
        for known in names:
            if known is not None and self._at_s(row) < known.until_s:
                return known
        return None

    def _at_s(self, row: int) -> float:
        return min(self._account.written_at_s[row], self._now)
