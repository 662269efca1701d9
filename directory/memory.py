"""MemoryDirectory: the directory's rules in plain Python. Reference, test double, and the replay's directory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from directory.errors import RegistrationRefused
from directory.interface import LOST, Batch, Lookup
from directory.members import (
    REMEMBERED_S,
    TERM_S,
    Load,
    Member,
    Registration,
    Renewal,
)
from directory.placements import pack_holders


@dataclass(slots=True)
class _Row:
    registration: Registration
    load: Load
    expires_at: float
    retired_at: float | None = None


@dataclass(slots=True)
class _Record:
    masks: dict[bytes, int] = field(default_factory=dict)
    expires_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Attempt:
    number: int
    heard_at: float
    lost_writes: bool = False

    @property
    def answer(self) -> int:
        return LOST if self.lost_writes else self.number


class MemoryDirectory:
    """Implements `DirectoryReader` and `DirectoryWriter`. `clock` gives seconds that never go backwards."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rows: dict[bytes, _Row] = {}
        self._records: dict[bytes, _Record] = {}
        self._attempts: dict[tuple[int, bytes], _Attempt] = {}

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> Lookup:
        """See `DirectoryReader`."""
        now = self._clock()
        return Lookup(tuple(self._record_bytes(key, now) for key in keys))

    async def members(self) -> tuple[Member, ...]:
        """See `DirectoryReader`."""
        now = self._clock()
        self._forget_old_rows(now)
        return tuple(
            Member(incarnation, row.registration, row.load, row.expires_at - now, row.retired_at is not None)
            for incarnation, row in self._rows.items()
        )

    async def refreshed(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """See `DirectoryReader`."""
        asked = {member.incarnation for member in members}
        return tuple(member for member in await self.members() if member.incarnation in asked)

    async def register(
        self, incarnation: bytes, registration: Registration, load: Load, term_s: float = TERM_S
    ) -> None:
        """See `DirectoryWriter`."""
        now = self._clock()
        self._forget_old_rows(now)
        if incarnation in self._rows:
            raise RegistrationRefused(f"incarnation {incarnation.hex()} is taken")
        self._rows[incarnation] = _Row(registration, load, now + term_s)

    async def renew(self, incarnation: bytes, load: Load, term_s: float = TERM_S) -> Renewal:
        """See `DirectoryWriter`."""
        now = self._clock()
        self._forget_old_rows(now)
        row = self._rows.get(incarnation)
        if row is None or row.retired_at is not None:
            return Renewal(known=False)
        lapsed_s = max(0.0, now - row.expires_at)
        row.expires_at, row.load = now + term_s, load
        return Renewal(known=True, lapsed_s=lapsed_s)

    async def retire(self, incarnation: bytes) -> None:
        """See `DirectoryWriter`."""
        self._forget_old_rows(self._clock())
        row = self._rows.get(incarnation)
        if row is not None and row.retired_at is None:
            row.retired_at = self._clock()

    async def place(self, batch: Batch) -> int:
        """See `DirectoryWriter`."""
        now = self._clock()
        held = self._attempt_of(batch.partition, batch.incarnation, now) or _Attempt(LOST, now)
        if batch.attempt <= held.number:
            return held.answer
        for key, mask in batch.states:
            self._write(key, mask, batch, now)
        held = replace(held, lost_writes=held.lost_writes or held.number < batch.acknowledged)
        self._attempts[batch.partition, batch.incarnation] = _Attempt(batch.attempt, now, held.lost_writes)
        return held.answer

    async def withdraw(self, batch: Batch) -> int:
        """See `DirectoryWriter`."""
        assert all(mask == 0 for _, mask in batch.states), "a withdrawal only removes"
        return await self.place(batch)

    def _write(self, key: bytes, mask: int, batch: Batch, now: float) -> None:
        record = self._records.get(key)
        if record is None or record.expires_at <= now:
            record = _Record()
        gone = {batch.incarnation, batch.replaces}
        masks = {
            holder: held
            for holder, held in record.masks.items()
            if holder not in gone and self._attempt_of(batch.partition, holder, now) is not None
        }
        if mask:
            masks[batch.incarnation] = mask
        if masks:
            self._records[key] = _Record(masks, max(record.expires_at, now + batch.ttl_s))
        else:
            self._records.pop(key, None)

    def _attempt_of(self, partition: int, incarnation: bytes, now: float) -> _Attempt | None:
        """The last attempt that a partition holds of a life; `None` where it hasn't heard of it for `REMEMBERED_S`."""
        held = self._attempts.get((partition, incarnation))
        if held is not None and now - held.heard_at > REMEMBERED_S:
            del self._attempts[partition, incarnation]
            return None
        return held

    def _record_bytes(self, key: bytes, now: float) -> bytes:
        record = self._records.get(key)
        if record is None or record.expires_at <= now:
            return b""
        return pack_holders(record.masks.items())

    def _forget_old_rows(self, now: float) -> None:
        """Drop rows retired, or lapsed, longer than `REMEMBERED_S` ago."""
        for incarnation, row in list(self._rows.items()):
            ended_at = row.expires_at if row.retired_at is None else row.retired_at
            if now - ended_at > REMEMBERED_S:
                del self._rows[incarnation]
