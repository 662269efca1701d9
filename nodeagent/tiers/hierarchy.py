"""The index of what the host holds: found under storage keys, announced under directory keys.

All of it runs on the event loop and never waits; bytes are checked elsewhere (`dram.py`) and the verdict brought here.
A slot has exactly one owner at any time: the free list, a reservation, an entry, or an entry that is dropped but still
referenced. It changes hands only here.

    reserve -> (client fills) -> begin_commit -> (bytes are checked) -> finish_commit -> indexed, announced
    open -> (client copies, checks generation and checksum) -> close

A reference ends with `close` or when its holder is known to be gone (`release_holder`): no clock ends it. The same is
true of a reservation, whose late writer could still write: after `RESERVATION_S`, or when its connection is lost, it
only stops keeping others from putting the same key.
"""

import enum
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import msgspec

from directory.tiers import Tier
from nodeagent.labels import ChunkLabel
from nodeagent.messages import OpenedSlot, PutOutcome
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.chunk_file import UNKNOWN_IDENTITY
from nodeagent.tiers.eviction import EvictionPolicy
from nodeagent.tiers.tombstones import Tombstones

DRAM_BIT, NVME_BIT = int(Tier.DRAM), int(Tier.NVME)  # flags are slow, and a long prefix is opened chunk by chunk
RESERVATION_S = 30.0
"""How long an unfinished put keeps others from putting the same key."""


class Source(enum.Enum):
    """Who brought a chunk to this host: one of its engines, or another host's agent. A metric's label."""

    LOCAL = "local"
    PEER = "peer"


class Entry(msgspec.Struct, eq=False, gc=False):
    """One stored chunk. `is_indexed` ends when it is evicted or dropped; its slot goes with the last reference.

    `identity` is the digest of the identity whose bytes these are; `written_at_s` is the wall time at which its put
    began. `source` turns to LOCAL with the first hit. A forgotten chunk's slot is zeroed before it is used again.
    Many, and in no cycle: as with labels, the garbage collector leaves them alone.
    """

    label: ChunkLabel
    slot: int
    generation: int
    length: int
    checksum: bytes
    identity: bytes = UNKNOWN_IDENTITY
    references: int = 0
    is_indexed: bool = True
    source: Source = Source.LOCAL
    written_at_s: float = 0.0
    is_forgotten: bool = False


@dataclass(eq=False, slots=True)
class Reservation:
    """A slot handed out to be filled. `is_verifying` once its bytes are being checked."""

    number: int
    label: ChunkLabel
    slot: int
    generation: int
    length: int
    checksum: bytes
    holder: Hashable
    made_at: float
    identity: bytes = UNKNOWN_IDENTITY
    is_verifying: bool = False
    is_quarantined: bool = False
    source: Source = Source.LOCAL
    written_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer to a reservation; `reservation` is there where the outcome is GRANTED."""

    outcome: PutOutcome
    reservation: Reservation | None = None
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """A reference: the chunk, and the tier from which it was delivered."""

    entry: Entry
    tier: Tier


@dataclass(slots=True)
class _Holds:
    """What one client process holds."""

    references: dict[int, HeldChunk] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)


class Hierarchy:
    """Stored chunks, references and reservations of a host's DRAM arena.

    `on_change(directory key, tier mask)` hears every newest state, and hears it again when a chunk was used: it must
    not wait. A mask of zero is heard before the bytes go. What `tombstones` forget isn't let in.
    """

    def __init__(
        self,
        arena: Arena,
        policy: EvictionPolicy,
        on_change: Callable[[bytes, int], None],
        clock: Callable[[], float],
        tombstones: Tombstones | None = None,
    ) -> None:
        self.arena = arena
        self.tombstones = tombstones if tombstones is not None else Tombstones()
        self._policy = policy
        self._on_change = on_change
        self._clock = clock
        self._entries: dict[bytes, Entry] = {}
        self._copies: dict[bytes, list[bytes]] = {}
        self._puts: dict[bytes, Reservation] = {}
        self._holds: dict[Hashable, _Holds] = {}
        self._numbers = count(1)
        self._held_entries = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def open_references(self) -> int:
        """References that are not closed."""
        return sum(len(holds.references) for holds in self._holds.values())

    @property
    def open_reservations(self) -> int:
        """Reservations that are neither committed nor aborted."""
        return sum(len(holds.reservations) for holds in self._holds.values())

    @property
    def takeable_slots(self) -> int:
        """Slots that are free, or whose chunk nobody holds: what can be had without waiting for anybody."""
        return self.arena.free_slots + len(self._entries) - self._held_entries

    def contains_run(self, keys: Sequence[bytes]) -> int:
        """How many leading `keys` are held now. It promises nothing about bytes a moment later."""
        run = 0
        for key in keys:
            if key not in self._entries:
                break
            run += 1
        return run

    def find(self, key: bytes) -> Entry | None:
        """The chunk under this storage key."""
        return self._entries.get(key)

    def storage_keys(self, directory_key: bytes) -> Sequence[bytes]:
        """The storage keys of the chunks with this label."""
        return tuple(self._copies.get(directory_key, ()))

    def oldest(self, count_max: int) -> list[bytes]:
        """The storage keys of up to `count_max` chunks that will be evicted first, oldest first."""
        return list(islice(self._policy.oldest_first(), count_max))

    def open_run(self, keys: Sequence[bytes], holder: Hashable, from_nvme: Collection[bytes] = ()) -> list[OpenedSlot]:
        """References to the leading run of `keys` that is held; the run and its ancestors are touched.

        Those in `from_nvme` were read from disk for this very call.
        """
        entries = [self._entries[key] for key in keys[: self.contains_run(keys)]]
        holds = self._holds.setdefault(holder, _Holds()) if entries else _Holds()
        opened = []
        for entry in entries:
            number = next(self._numbers)
            is_read = entry.label.storage_key in from_nvme
            holds.references[number] = HeldChunk(entry, Tier.NVME if is_read else Tier.DRAM)
            self.hold(entry)
            bit = NVME_BIT if is_read else DRAM_BIT
            opened.append(OpenedSlot(number, entry.slot, entry.generation, entry.length, entry.checksum, bit))
        for entry in reversed(entries):
            self._report(entry.label.directory_key)
        if entries:
            self._policy.touch(entries[-1].label.storage_key)
        return opened

    def touch_run(self, keys: Sequence[bytes]) -> None:
        """These chunks, in the order of a chain, are about to be used: what must go meanwhile, others go first."""
        is_known_below = False
        for key in reversed(keys):
            is_known = key in self._entries
            if is_known and not is_known_below:
                # The deepest of an unbroken stretch: its ancestors are touched after it.
                self._policy.touch(key)
            is_known_below = is_known

    def hold(self, entry: Entry) -> None:
        """Keep an indexed chunk's slot for the agent's own use, until `let_go`."""
        assert entry.is_indexed, "only what is found is held"
        self._held_entries += entry.references == 0
        entry.references += 1

    def let_go(self, entry: Entry) -> None:
        """End a `hold`."""
        entry.references -= 1
        if entry.references:
            return
        if entry.is_indexed:
            self._held_entries -= 1
        else:
            self.arena.free(entry.slot, is_forgotten=entry.is_forgotten)

    def close(self, holder: Hashable, references: Sequence[int]) -> list[HeldChunk]:
        """End references; those that are unknown or ended are ignored. Returns those that ended."""
        holds = self._holds.get(holder)
        closed = []
        for number in references:
            held = holds.references.pop(number, None) if holds is not None else None
            if held is not None:
                self.let_go(held.entry)
                closed.append(held)
        self._forget_if_empty(holder)
        return closed

    def reserve(
        self,
        label: ChunkLabel,
        length: int,
        checksum: bytes,
        holder: Hashable,
        identity: bytes = UNKNOWN_IDENTITY,
        source: Source = Source.LOCAL,
    ) -> Granted:
        """A slot to fill, or why not. Evicts one chunk where no slot is free; never waits."""
        if length > self.arena.slot_bytes:
            return Granted(PutOutcome.REFUSED)
        if self.tombstones.meet(label, identity):
            return Granted(PutOutcome.FORGOTTEN)
        known = self._entries.get(label.storage_key)
        if known is not None:
            return Granted(self._meet(known, label, length, checksum))
        earlier = self._puts.get(label.storage_key)
        if earlier is not None and not self._is_stale(earlier):
            return Granted(PutOutcome.BUSY)
        taken, victims = self.arena.take(), []
        if taken is None:
            victims = self.take_victims(1)
            self.free(victims)
            taken = self.arena.take()
        if taken is None:
            return Granted(PutOutcome.FULL)
        slot, generation = taken
        reservation = Reservation(
            next(self._numbers),
            label,
            slot,
            generation,
            length,
            checksum,
            holder,
            self._clock(),
            identity,
            source=source,
        )
        reservation.written_at_s = self.tombstones.now()
        self._holds.setdefault(holder, _Holds()).reservations[reservation.number] = reservation
        self._puts[label.storage_key] = reservation
        return Granted(PutOutcome.GRANTED, reservation, len(victims))

    def begin_commit(self, holder: Hashable, number: int) -> Reservation | None:
        """The reservation whose bytes are to be checked now; `None` where there is none, or it is being checked."""
        holds = self._holds.get(holder)
        reservation = holds.reservations.get(number) if holds is not None else None
        if reservation is None or reservation.is_verifying:
            return None
        reservation.is_verifying = True
        return reservation

    def finish_commit(self, reservation: Reservation, checksum: bytes) -> PutOutcome:
        """Index and announce the chunk, if its slot holds what was promised (`checksum` is of the slot itself)."""
        self._end_reservation(reservation)
        label = reservation.label
        if self.tombstones.meet(label, reservation.identity, reservation.written_at_s):
            self.arena.free(reservation.slot, is_forgotten=True)
            return PutOutcome.FORGOTTEN
        if checksum != reservation.checksum:
            self.arena.free(reservation.slot)
            return PutOutcome.CORRUPT
        known = self._entries.get(label.storage_key)
        if known is not None:
            self.arena.free(reservation.slot)
            return self._meet(known, label, reservation.length, checksum)
        entry = Entry(
            label,
            reservation.slot,
            reservation.generation,
            reservation.length,
            checksum,
            reservation.identity,
            source=reservation.source,
        )
        entry.written_at_s = reservation.written_at_s
        self._entries[label.storage_key] = entry
        self._policy.add(label.storage_key, label.parent, label.position)
        self._count_copy(label)
        return PutOutcome.STORED

    def learn(self, label: ChunkLabel) -> None:
        """A chunk's label has become known: it takes its place in its chain, and is announced.

        Or it is forgotten, where that is what its label says.
        """
        entry = self._entries.get(label.storage_key)
        if entry is None or not label.adds_to(entry.label):
            return
        if self.tombstones.meet(label, entry.identity, entry.written_at_s):
            self.forget(entry)
            return
        is_announced = entry.label.directory_key is not None
        entry.label = label
        if is_announced:
            return
        self._policy.add(label.storage_key, label.parent, label.position)
        self._count_copy(label)

    def abort(self, holder: Hashable, number: int) -> None:
        """Free a reservation's slot. Only its writer may say so, when it won't write any more."""
        holds = self._holds.get(holder)
        reservation = holds.reservations.get(number) if holds is not None else None
        if reservation is not None and not reservation.is_verifying:
            self._end_reservation(reservation)
            is_forgotten = self.tombstones.meet(reservation.label, reservation.identity, reservation.written_at_s)
            self.arena.free(reservation.slot, is_forgotten=is_forgotten)

    def quarantine(self, holder: Hashable) -> None:
        """A holder's connection is lost: its slots stay, but its unfinished puts don't keep others away."""
        holds = self._holds.get(holder)
        for reservation in holds.reservations.values() if holds is not None else ():
            reservation.is_quarantined = True

    def keep_only(self, holder: Hashable, references: Sequence[int], reservations: Sequence[int]) -> int:
        """A holder says what it still holds; the rest is given back. Returns how many references that ended."""
        holds = self._holds.get(holder)
        if holds is None:
            return 0
        for number in set(holds.reservations).difference(reservations):
            self.abort(holder, number)
        return len(self.close(holder, list(set(holds.references).difference(references))))

    def release_holder(self, holder: Hashable) -> int:
        """A holder's process is gone: end its references and free its reservations. Returns how many references."""
        return self.keep_only(holder, (), ())

    def take_victims(self, slots: int) -> list[Entry]:
        """Un-index up to `slots` chunks that nobody holds, oldest first, and report them gone; then `free` them."""
        if self._held_entries >= len(self._entries):
            return []
        victims = self._policy.take_victims(slots, lambda key: self._entries[key].references > 0)
        entries = [self._entries[key] for key in victims]
        for entry in entries:
            self._unindex(entry)
        return entries

    def free(self, victims: Sequence[Entry]) -> None:
        """Give the slots of taken victims back."""
        for entry in victims:
            assert not entry.is_indexed, "only a chunk that nobody finds is freed"
            assert not entry.references, "and that nobody reads"
            is_forgotten = self.tombstones.find(entry.label, entry.identity, entry.written_at_s) is not None
            self.arena.free(entry.slot, is_forgotten=is_forgotten)

    def drop(self, entry: Entry) -> None:
        """Stop serving a chunk at once (its bytes are bad); its slot goes with its last reference."""
        if not entry.is_indexed:
            return
        self._policy.remove(entry.label.storage_key)
        self._unindex(entry)
        if entry.references:
            self._held_entries -= 1
        else:
            self.arena.free(entry.slot, is_forgotten=entry.is_forgotten)

    def forget(self, entry: Entry) -> None:
        """As `drop`; its slot is zeroed once nobody reads it, before it is used again."""
        entry.is_forgotten = True
        self.drop(entry)

    def entries(self) -> list[Entry]:
        """All chunks."""
        return list(self._entries.values())

    def reservations(self) -> list[Reservation]:
        """Puts and reads under way."""
        return [each for holds in self._holds.values() for each in holds.reservations.values()]

    def _meet(self, known: Entry, label: ChunkLabel, length: int, checksum: bytes) -> PutOutcome:
        """A put of a key that is held: the same bytes are welcome (and may bring the label), others are refused."""
        if (known.length, known.checksum) != (length, checksum):
            return PutOutcome.CONFLICT
        is_announced = known.label.directory_key is not None
        self.learn(label)
        if is_announced or known.label.directory_key is None:
            self._report(known.label.directory_key)
            self._policy.touch(known.label.storage_key)
        return PutOutcome.HAVE

    def _is_stale(self, reservation: Reservation) -> bool:
        return reservation.is_quarantined or self._clock() - reservation.made_at > RESERVATION_S

    def _end_reservation(self, reservation: Reservation) -> None:
        holds = self._holds.get(reservation.holder)
        if holds is not None:
            holds.reservations.pop(reservation.number, None)
        if self._puts.get(reservation.label.storage_key) is reservation:
            del self._puts[reservation.label.storage_key]
        self._forget_if_empty(reservation.holder)

    def _unindex(self, entry: Entry) -> None:
        entry.is_indexed = False
        del self._entries[entry.label.storage_key]
        key = entry.label.directory_key
        if key is None:
            return
        copies = self._copies[key]
        copies.remove(entry.label.storage_key)
        if not copies:
            del self._copies[key]
        self._report(key)

    def _count_copy(self, label: ChunkLabel) -> None:
        if label.directory_key is not None:
            self._copies.setdefault(label.directory_key, []).append(label.storage_key)
            self._report(label.directory_key)

    def _report(self, key: bytes | None) -> None:
        if key is not None:
            self._on_change(key, DRAM_BIT if key in self._copies else 0)

    def _forget_if_empty(self, holder: Hashable) -> None:
        holds = self._holds.get(holder)
        if holds is not None and not holds.references and not holds.reservations:
            del self._holds[holder]
