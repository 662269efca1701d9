"""What was forgotten, and until when it must not come back.

A tombstone says what a forget named: identities, a salt's tag, directory keys; and the storage keys of chunks that
follow what it named, as far as they are known. A chunk that was written before the tombstone's end and matches it, or
whose parent does, is forgotten wherever it turns up: in a put of an engine that still had it, in a write or read that
was under way, in a file that is found at a later start. What matches is never let in before the end, so whatever is
older than that is the forgotten bytes, and what is written later is new.

The book is kept on every drive and in the state folder, in this form. It holds digests only: no salt, no token id.

    "WRTOMB" | version, 2 bytes | xxh3-128 of the rest, 16 bytes | msgpack

Wall time, because it outlives the process and compares with files' times.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import xxhash

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.identity import SALT_TAG_BYTES
from nodeagent.errors import TombstonesFull, TombstonesUnreadable
from nodeagent.labels import ChunkLabel
from nodeagent.tiers.chunk_file import IDENTITY_BYTES, UNKNOWN_IDENTITY

NUMBER_BYTES = 16
CUT_BYTES = 16
"""How much of a storage key is kept: enough to name it, of no use for finding its bytes."""
KEEP_S = 30 * 86_400.0
"""How long after its end a tombstone still meets files of before: a drive may have been away."""
TOMBSTONES_MAX = 16_384
KEYS_MAX = 262_144
"""Directory and storage keys in all tombstones: 4 MiB in each file, some 50 MB of memory."""
BOOK_BYTES_MAX = 64 << 20
_MAGIC = b"WRTOMB\0\1"
_CHECKSUM_BYTES = 16

Key = TypeVar("Key")
Names = tuple[frozenset[bytes], bytes | None, frozenset[bytes]]


@dataclass(eq=False, slots=True)
class Tombstone:
    """One forget. `until_s` is when it ends, in wall time; `number` (16 random bytes) is its receipt's.

    Identities (32 bytes) and a salt's tag (16) narrow each other where both are given; keys (16 bytes) stand for
    themselves. `followers` are storage keys, cut, of chunks that were found to follow what was named.
    """

    number: bytes
    until_s: float
    identities: frozenset[bytes] = frozenset()
    salt_tag: bytes | None = None
    directory_keys: frozenset[bytes] = frozenset()
    followers: set[bytes] = field(default_factory=set)

    @property
    def keys(self) -> int:
        """How many keys it holds."""
        return len(self.directory_keys) + len(self.followers)

    @property
    def names(self) -> "Names":
        """All that it was told; one that was told the same later takes its place."""
        return self.identities, self.salt_tag, self.directory_keys

    def names_origin(self, identity: bytes, salt_tag: bytes | None) -> bool:
        """Whether it is of all chunks of this identity and salt."""
        if self.salt_tag is not None and self.salt_tag != salt_tag:
            return False
        return identity in self.identities if self.identities else self.salt_tag is not None


class _Saved(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    number: bytes
    until_s: float
    identities: list[bytes]
    salt_tag: bytes | None
    directory_keys: bytes
    followers: bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[_Saved])


class Tombstones:
    """All tombstones of a host. Threads may ask `find`; everything else belongs to the event loop.

    `revision` changes with every change. `is_grown` is set where what is indexed already may be forgotten by now:
    another copy of the book told more, or a put, a label or a file that was found told what follows what.
    """

    def __init__(self, clock: Callable[[], float] = time.time, keys_max: int = KEYS_MAX) -> None:
        self.now = clock
        self.revision = 0
        self.is_grown = False
        self._keys_max = keys_max
        self._keys = 0
        self._all: dict[bytes, Tombstone] = {}
        self._by_names: dict[Names, Tombstone] = {}
        self._by_origin: dict[tuple[bytes | None, bytes | None], Tombstone] = {}
        self._by_directory_key: dict[bytes, Tombstone] = {}
        self._by_follower: dict[bytes, Tombstone] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def keys(self) -> int:
        """Keys in all of them."""
        return self._keys

    @property
    def has_names(self) -> bool:
        """Whether any key is named."""
        return bool(self._by_directory_key or self._by_follower)

    def find(self, label: ChunkLabel, identity: bytes, written_at_s: float | None = None) -> Tombstone | None:
        """What forgets a chunk that was, or began to be, written then; now, if nothing is said.

        Nothing was written in the future: a clock was set back meanwhile.
        """
        if not self._all:
            return None
        now = self.now()
        at_s = now if written_at_s is None else min(written_at_s, now)
        for known in (
            self.of_origin(identity, label.salt_tag),
            self._by_directory_key.get(label.directory_key) if label.directory_key is not None else None,
            self._by_follower.get(label.storage_key[:CUT_BYTES]),
            self._by_follower.get(label.parent[:CUT_BYTES]) if label.parent is not None else None,
        ):
            if known is not None and at_s < known.until_s:
                return known
        return None

    def meet(self, label: ChunkLabel, identity: bytes, written_at_s: float | None = None) -> bool:
        """Whether a chunk is forgotten. If so, and it doesn't show that by itself, so is what follows, from now on.

        What follows may be indexed already: the next search finds it.
        """
        found = self.find(label, identity, written_at_s)
        if found is not None and not found.names_origin(identity, label.salt_tag):
            revision = self.revision
            self.follow(found, label.storage_key[:CUT_BYTES])
            self.is_grown |= self.revision != revision
        return found is not None

    def of_origin(self, identity: bytes, salt_tag: bytes | None) -> Tombstone | None:
        """What forgets all chunks of an identity and a salt; the one that ends last."""
        origins: list[tuple[bytes | None, bytes | None]] = [(identity, None)]
        if salt_tag is not None:
            origins += [(identity, salt_tag), (None, salt_tag)]
        found = [known for origin in origins if (known := self._by_origin.get(origin)) is not None]
        return max(found, key=lambda each: each.until_s, default=None)

    def of_directory_key(self, key: bytes) -> Tombstone | None:
        """What names this directory key."""
        return self._by_directory_key.get(key)

    def of_follower(self, cut: bytes) -> Tombstone | None:
        """What the chunk under this storage key (cut) follows."""
        return self._by_follower.get(cut)

    def add(self, tombstone: Tombstone) -> Tombstone | None:
        """One more, which takes the place of an earlier one of the same names, and knows what follows that.

        Returns the one replaced, for `remove`. Raises `TombstonesFull`; old ones go first.
        """
        self.sweep()
        replaced = self._by_names.get(tombstone.names)
        if replaced is not None and replaced.until_s > tombstone.until_s:
            replaced = None  # the clock was set back
        self._check_fits(tombstone, replaced)
        self._take_in(tombstone, replaced)
        return replaced

    def check_room(self, keys: int) -> None:
        """Raises `TombstonesFull` where so many keys more can't be remembered."""
        if self._keys + keys > self._keys_max:
            raise TombstonesFull(
                f"{keys:,} keys would have to be remembered, with {self._keys:,} of at most {self._keys_max:,} there "
                "already; forget by identity or salt instead, which need none, or fewer keys at a time"
            )

    def is_new(self, cut: bytes, tombstone: Tombstone) -> bool:
        """Whether `follow` would have to remember one key more."""
        known = self._by_follower.get(cut)
        return (known is None or known.until_s < tombstone.until_s) and cut not in tombstone.followers

    def follow(self, tombstone: Tombstone, cut: bytes) -> bool:
        """A chunk (its storage key, cut) was found to follow what a tombstone names: what follows it does, too.

        Returns whether that is remembered; one too many isn't.
        """
        known = self._by_follower.get(cut)
        if known is not None and known.until_s >= tombstone.until_s:
            return True
        if self._keys >= self._keys_max:
            return False
        self._keys += cut not in tombstone.followers
        tombstone.followers.add(cut)
        self._by_follower[cut] = tombstone
        self.revision += 1
        return True

    def remove(self, tombstone: Tombstone, replaced: Tombstone | None = None) -> None:
        """One that was added, and came to nothing: what it `replaced` is back."""
        if self._all.pop(tombstone.number, None) is not None:
            if replaced is not None:
                self._all[replaced.number] = replaced
            self._rebuild()

    def sweep(self) -> None:
        """Let go of those that ended long ago."""
        now = self.now()
        old = [number for number, each in self._all.items() if each.until_s + KEEP_S < now]
        for number in old:
            del self._all[number]
        if old:
            self._rebuild()

    def merge(self, others: Iterable[Tombstone]) -> int:
        """Take over what another copy of the book says; returns of how many it said more.

        Raises `TombstonesFull` where it says more than can be remembered; what could be is.
        """
        more, full, now = 0, None, self.now()
        for other in sorted(others, key=lambda each: each.until_s, reverse=True):
            if other.until_s + KEEP_S < now:
                continue
            known = self._all.get(other.number) or self._by_names.get(other.names)
            try:
                if known is None or known.until_s < other.until_s:
                    self._check_fits(other, known)
                    self._take_in(other, known)
                    more += 1
                elif new := other.followers - known.followers:
                    self.check_room(len(new))
                    for cut in new:
                        self.follow(known, cut)
                    more += 1
            except TombstonesFull as error:
                full = error
        self.is_grown = self.is_grown or more > 0
        if full is not None:
            raise full
        return more

    def dump(self) -> bytes:
        """All of them, to be kept. In no order: to sort them would take most of the time, for which all wait."""
        body = _ENCODER.encode(
            [
                _Saved(
                    each.number,
                    each.until_s,
                    list(each.identities),
                    each.salt_tag,
                    b"".join(each.directory_keys),
                    b"".join(each.followers),
                )
                for each in self._all.values()
            ]
        )
        return _MAGIC + xxhash.xxh3_128_digest(body) + body

    def _check_fits(self, tombstone: Tombstone, replaced: Tombstone | None) -> None:
        followers, gone = tombstone.followers, 0
        if replaced is not None:
            followers, gone = followers | replaced.followers, replaced.keys
        self.check_room(len(tombstone.directory_keys) + len(followers) - gone)
        if replaced is None and len(self._all) >= TOMBSTONES_MAX:
            raise TombstonesFull(
                f"{TOMBSTONES_MAX:,} different forgets are remembered already; the oldest go after 30 days"
            )

    def _take_in(self, tombstone: Tombstone, replaced: Tombstone | None) -> None:
        """Whatever led to the one replaced leads to this one, which names all of it and ends no earlier."""
        if replaced is not None:
            self._keys -= replaced.keys
            del self._all[replaced.number]
            tombstone.followers |= replaced.followers
        self._all[tombstone.number] = tombstone
        self._index(tombstone)
        self.revision += 1

    def _index(self, tombstone: Tombstone) -> None:
        self._keys += tombstone.keys
        _keep_later(self._by_names, tombstone.names, tombstone)
        origins: list[tuple[bytes | None, bytes | None]] = []
        if tombstone.identities:
            origins = [(identity, tombstone.salt_tag) for identity in tombstone.identities]
        elif tombstone.salt_tag is not None:
            origins = [(None, tombstone.salt_tag)]
        for origin in origins:
            _keep_later(self._by_origin, origin, tombstone)
        for key in tombstone.directory_keys:
            _keep_later(self._by_directory_key, key, tombstone)
        for cut in tombstone.followers:
            _keep_later(self._by_follower, cut, tombstone)

    def _rebuild(self) -> None:
        self._keys = 0
        self._by_names, self._by_origin, self._by_directory_key, self._by_follower = {}, {}, {}, {}
        for each in self._all.values():
            self._index(each)
        self.revision += 1


def load_tombstones(data: bytes) -> list[Tombstone]:
    """What `dump` gave. Raises `TombstonesUnreadable`."""
    start = len(_MAGIC) + _CHECKSUM_BYTES
    if not data.startswith(_MAGIC):
        raise TombstonesUnreadable("they don't begin as tombstones of this release do")
    if xxhash.xxh3_128_digest(memoryview(data)[start:]) != data[len(_MAGIC) : start]:
        raise TombstonesUnreadable("they don't match their checksum")
    try:
        saved = _DECODER.decode(memoryview(data)[start:])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TombstonesUnreadable(f"they can't be read: {error}") from error
    if not all(map(_is_sound, saved)):
        raise TombstonesUnreadable("they hold names that are none")
    return [
        Tombstone(
            each.number,
            each.until_s,
            frozenset(each.identities),
            each.salt_tag,
            frozenset(_split(each.directory_keys, DIRECTORY_KEY_BYTES)),
            set(_split(each.followers, CUT_BYTES)),
        )
        for each in saved
    ]


def _is_sound(saved: _Saved) -> bool:
    return (
        len(saved.number) == NUMBER_BYTES
        and all(len(each) == IDENTITY_BYTES and each != UNKNOWN_IDENTITY for each in saved.identities)
        and (saved.salt_tag is None or len(saved.salt_tag) == SALT_TAG_BYTES)
        and len(saved.directory_keys) % DIRECTORY_KEY_BYTES == 0
        and len(saved.followers) % CUT_BYTES == 0
    )


def _split(joined: bytes, length: int) -> list[bytes]:
    return [joined[start : start + length] for start in range(0, len(joined), length)]


def _keep_later(known: dict[Key, Tombstone], key: Key, tombstone: Tombstone) -> None:
    other = known.get(key)
    if other is None or other.until_s <= tombstone.until_s:
        known[key] = tombstone
