"""The directory's promises: what a reader may believe, and what a writer must keep.

The directory holds digests and places, never prompt text, token ids or KV bytes. It may be stale, and converges by
itself as long as writers keep these rules:

- *State, not events.* A placement says in which tiers an incarnation now holds a key; zero removes. Repeating it is
  harmless, so a batch whose fate is unknown is sent again, with the newest state and the next attempt number.
- *Ordered per partition.* One batch is in flight per (partition, incarnation); an attempt that isn't higher than the
  last is ignored, so a resend overtaken by its successor changes nothing.
- *Random incarnations.* One life, one name; a name that exists is refused.
- *A walk is a new life.* To repair anything, a writer registers a second incarnation, announces its whole inventory
  under it (each write removes the first one's entry), and retires the first.
- *Forgotten by the partition.* A partition judges by its own clock whom it hasn't heard of for `REMEMBERED_S`, and
  drops such holders from the records that a batch touches, whoever sent it and however late it arrives. So a writer
  lets each partition that it told something under a life hear of that life, by empty batches if need be, as long as it
  wants to be believed; one that was silent for longer is told `LOST`, and walks.
- *Overtaken before replaced.* Where a batch of an incarnation has an unknown fate, its writer sends an empty one under
  it before it speaks under the next: a late one would bring back what was removed since.
- *Asked when quiet.* An empty batch tells a writer what a partition holds of it: a loss is noticed without traffic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from directory.members import TERM_S, Load, Member, Registration, Renewal
from directory.placements import partition_of

BATCH_PLACEMENTS_MAX = 64
LOST = -1
"""What a partition returns that holds no attempt of an incarnation, or hasn't heard of it for `REMEMBERED_S`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Newest states of keys of one partition, sent by one incarnation.

    `states` are (directory key, tier mask) pairs, each key once, at most `BATCH_PLACEMENTS_MAX`; a mask of zero
    removes. `replaces`: the life that a walk leaves behind; its entries go from the same records. `ttl_s`: the records'
    expiry is raised to this, never lowered. `acknowledged`: the last number that this partition acknowledged to this
    incarnation, by which the server itself notices that it lost writes.
    """

    incarnation: bytes
    partition: int
    attempt: int
    states: tuple[tuple[bytes, int], ...]
    ttl_s: float
    replaces: bytes | None = None
    acknowledged: int = LOST

    def __post_init__(self) -> None:
        assert len(self.states) <= BATCH_PLACEMENTS_MAX, "a batch is bounded"
        assert len(dict(self.states)) == len(self.states), "a batch says one thing of a key"
        assert all(partition_of(key) == self.partition for key, _ in self.states), "a batch is for one partition"


@dataclass(frozen=True, slots=True)
class Lookup:
    """Records of the keys asked for, in order. `b""`: held by nobody; `None`: unknown, its partition didn't answer.

    Where a long prompt is asked in steps, later steps than the first key that nobody holds aren't asked: `b""`.
    """

    records: tuple[bytes | None, ...]

    @property
    def is_partial(self) -> bool:
        """Whether a partition didn't answer."""
        return None in self.records


class DirectoryReader(Protocol):
    """What a gateway needs."""

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> Lookup:
        """The holders of each directory key, in one round trip where possible; may be stale.

        Raises `DirectoryUnavailable` when nothing arrived within `deadline_s`; callers then route without it. Where
        the keys' partitions are only a part of the servers it is `PartitionUnavailable`: others may well answer.
        """
        ...

    async def members(self) -> tuple[Member, ...]:
        """All hosts and engines that are live, or were retired or lapsed within ten minutes.

        Rows that can't be read are left out. Raises `DirectoryUnavailable`.
        """
        ...

    async def refreshed(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """These lives with what they report now, for much less than the whole table; forgotten ones are left out.

        One whose report can't be read has an empty load. Raises `DirectoryUnavailable`.
        """
        ...


class DirectoryWriter(Protocol):
    """What an agent needs. One writer per incarnation; every method raises `DirectoryUnavailable`."""

    async def register(
        self, incarnation: bytes, registration: Registration, load: Load, term_s: float = TERM_S
    ) -> None:
        """Begin a life. Raises `RegistrationRefused` when the incarnation exists, even lapsed or retired."""
        ...

    async def renew(self, incarnation: bytes, load: Load, term_s: float = TERM_S) -> Renewal:
        """Extend a life by a term and report its load. A lapsed life may be renewed, a retired one is unknown."""
        ...

    async def retire(self, incarnation: bytes) -> None:
        """End a life; its placements are no longer believed. An unknown one is ignored."""
        ...

    async def place(self, batch: Batch) -> int:
        """Apply a batch, unless its attempt isn't higher than the last one held; return the number held before.

        Holders that the partition hasn't heard of for `REMEMBERED_S` go from the records touched; one that is applied
        counts as heard of, an empty one too.

        A return below the last number that was acknowledged means that this partition lost writes: walk it.
        `LOST` means that it holds none, or that it lost writes since: a loss is remembered for the incarnation's
        life, because the attempt that met it may be one whose answer never arrived. (Interleaving: 7 is
        acknowledged, the server is flushed, 8 is applied and its answer lost; 9 would be told "8".) Raises
        `DirectoryFull` when the server is out of memory.
        """
        ...

    async def withdraw(self, batch: Batch) -> int:
        """`place` for batches that only remove: runs even when the server is out of memory."""
        ...
