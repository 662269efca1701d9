"""RedisDirectory: the directory's rules over Redis 7+ or Valkey 8+, atomically, in few round trips.

Reading is MGETs of packed records, one round trip to each server that holds some; every write is one call of a function
that lives in the server (`functions.lua`, loaded on demand). Keys, tags and names are spelled in `redis_schema.py`;
which server is asked is the business of `redis_connections.py`.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn, TypeVar

from directory import redis_schema as schema
from directory.errors import (
    DirectoryError,
    DirectoryUnavailable,
    PartitionUnavailable,
    RegistrationRefused,
    SchemaMismatch,
)
from directory.fleet_table import Row, fields_of, load_or_empty, newer_version, rows_of, unhurried
from directory.interface import Batch, Lookup
from directory.members import (
    TERM_S,
    Load,
    Member,
    Registration,
    Renewal,
    UnreadableMember,
    decode_load,
    decode_registration,
    encode_load,
    encode_registration,
)
from directory.placements import PARTITIONS, partition_of
from directory.redis_connections import Connections, Reading, Shard
from directory.redis_errors import map_redis_errors
from directory.redis_node import CALL_TIMEOUT_S, CONNECTIONS_MAX
from directory.server_url import check_server_url
from directory.statistics import ServerNode

__all__ = ["CALL_TIMEOUT_S", "CONNECTIONS_MAX", "FIRST_STEP_KEYS", "RedisDirectory"]

LATE_S, LATE_GRACE_S_MAX = 0.002, 0.02
"""A deadline that is noticed so late says that this process had no turn: an answer may lie unread in its socket. The
lookup waits once more for as long as it was late, at most the second: routed blindly, a request loses far more.
"""
FIRST_STEP_KEYS = 256
"""A lookup of more keys asks in steps that double from here, and stops at the first key that nobody holds."""

TASKS_MAX = 16384
"""Calls begun and not ended, of all servers together; each server has a bound of its own as well."""

SERVERS = "the directory's servers"

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class RedisDirectory:
    """Implements `DirectoryReader` and `DirectoryWriter`. Belongs to the event loop that first uses it.

    A call runs in a task of its own, bounded by `CALL_TIMEOUT_S`; a caller that stops waiting leaves it to end
    there. So a short deadline never cuts a connection in the middle of a reply, connecting may take longer than a
    lookup's deadline, and a server that hangs costs each caller its deadline and nothing more.
    """

    def __init__(self, connections: Connections, keys: schema.Keyspace, clock: Callable[[], float]) -> None:
        self._connections, self._keys, self._clock = connections, keys, clock
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._unreadable: dict[bytes, str] = {}
        self._loads: dict[bytes, Load] = {}
        """The last table's, decoded: most of them are as they were half a second ago."""
        self._refreshed_loads: dict[bytes, Load] = {}
        """The same of the lives that were asked for last, by themselves."""
        self._failing_homes: frozenset[int] = frozenset()

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        key_prefix: str = schema.KEY_PREFIX,
        clock: Callable[[], float] = time.monotonic,
        loads_functions: bool = True,
    ) -> "RedisDirectory":
        """A directory on the servers at `url` (see `server_url.py`); connects when first used.

        `key_prefix` begins every key; `clock` gives monotonic seconds. Without `loads_functions` a server that lacks
        the functions is left as it is: its calls raise `FunctionsMissing`. Raises `DirectoryError` for a malformed URL
        or prefix.
        """
        return cls(Connections(check_server_url(url), loads_functions), schema.Keyspace(key_prefix), clock)

    async def aclose(self) -> None:
        """End what is in flight and close every connection; later calls raise `DirectoryUnavailable`."""
        self._closed = True
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        with map_redis_errors():
            await self._connections.aclose()

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> Lookup:
        """See `DirectoryReader`; waits `CALL_TIMEOUT_S` for a step at most, whatever the deadline."""
        now = asyncio.get_running_loop().time
        ends_at = now() + deadline_s
        records: list[bytes | None] = []
        step_keys = FIRST_STEP_KEYS
        while len(records) < len(keys):
            asked = keys[len(records) : len(records) + step_keys]
            try:
                answered = await self._records_of(asked, ends_at)
            except DirectoryUnavailable:
                if not records:
                    raise
                records += [None] * (len(keys) - len(records))
                break
            records += answered
            if b"" in answered:
                records += [b""] * (len(keys) - len(records))
            step_keys *= 2
        return Lookup(tuple(records))

    async def members(self) -> tuple[Member, ...]:
        """See `DirectoryReader`. Raises `SchemaMismatch` where only a newer version's fleet is registered."""
        sent_at = self._clock()
        replies = await self._at_homes(self._read_table)
        elapsed_s = self._clock() - sent_at
        rows: list[Row] = []
        with map_redis_errors():
            for (seconds, microseconds), fields in replies:
                rows += rows_of(_paired(fields), int(seconds) * 1000 + int(microseconds) // 1000)
        if not rows:
            await self._check_versions()
        return _united(await self._readable(rows, elapsed_s))

    async def refreshed(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """See `DirectoryReader`. One command, and no function: who may read the table by fields may do this."""
        if not members:
            return ()
        sent_at = self._clock()
        fields = [field for member in members for field in fields_of(member.incarnation)]
        replies = await self._at_homes(lambda home: self._read_fields(home, fields))
        elapsed_s = self._clock() - sent_at
        rows: list[Row] = []
        with map_redis_errors():
            for (seconds, microseconds), values in replies:
                held = _paired(
                    [part for each in zip(fields, values, strict=True) if each[1] is not None for part in each]
                )
                rows += rows_of(held, int(seconds) * 1000 + int(microseconds) // 1000)
        known = {member.incarnation: member for member in members}
        found: list[Member] = []
        loads: dict[bytes, Load] = {}
        async for row in unhurried(rows):
            loads[row.load] = loads.get(row.load) or self._refreshed_loads.get(row.load) or load_or_empty(row.load)
            member = replace(known[row.incarnation], load=loads[row.load], retired=row.retired)
            found.append(replace(member, remaining_s=row.remaining_ms / 1000 - elapsed_s))
        self._refreshed_loads = loads
        return _united(found)

    async def register(
        self, incarnation: bytes, registration: Registration, load: Load, term_s: float = TERM_S
    ) -> None:
        """See `DirectoryWriter`. Where the table is kept twice, one home is enough, and refused in one is refused."""
        row = (incarnation, encode_registration(registration), encode_load(load))
        terms = (_ms(term_s), schema.REMEMBERED_MS, schema.VERSION)

        def register(home: int) -> Coroutine[Any, Any, Any]:
            keys = (self._keys.registrations(home), self._keys.versions(home))
            return self._call_function(home, schema.REGISTER, keys, row + terms)

        if not all(await self._at_homes(register)):
            raise RegistrationRefused(f"incarnation {incarnation.hex()} is taken")

    async def renew(self, incarnation: bytes, load: Load, term_s: float = TERM_S) -> Renewal:
        """See `DirectoryWriter`. Unknown in one of the table's homes is unknown: that server lost what it held."""
        args = (incarnation, encode_load(load), _ms(term_s), schema.REMEMBERED_MS)
        replies = await self._at_homes(lambda home: self._call_on_table(home, schema.RENEW, args))
        with map_redis_errors():
            renewals = [Renewal(known=bool(known), lapsed_s=lapsed_ms / 1000) for known, lapsed_ms in replies]
            # It was believed as long as one of them had it.
            return min(renewals, key=lambda renewal: (renewal.known, renewal.lapsed_s))

    async def retire(self, incarnation: bytes) -> None:
        """See `DirectoryWriter`."""
        args = (incarnation, schema.REMEMBERED_MS)
        await self._at_homes(lambda home: self._call_on_table(home, schema.RETIRE, args))

    async def place(self, batch: Batch) -> int:
        """See `DirectoryWriter`."""
        return await self._apply(schema.PLACE, batch)

    async def withdraw(self, batch: Batch) -> int:
        """See `DirectoryWriter`."""
        assert all(mask == 0 for _, mask in batch.states), "a withdrawal only removes"
        return await self._apply(schema.WITHDRAW, batch)

    @property
    def keys(self) -> schema.Keyspace:
        """How this fleet's keys are named."""
        return self._keys

    @property
    def unreadable(self) -> Mapping[bytes, str]:
        """Rows of the last table that can't be read, by incarnation: why. Nobody routes to these."""
        return self._unreadable

    async def nodes(self) -> tuple[ServerNode, ...]:
        """The servers that hold records, as far as they are known: every master of a cluster, or the only one."""
        shards = await self._within(self._connections.find_shards())

        def asker(shard: Shard) -> Callable[..., Awaitable[Any]]:
            async def execute(*command: Any) -> Any:
                return await self._within(self._connections.execute(shard.partition, *command), of=shard.partition)

            return execute

        return tuple(ServerNode(self._connections.name_of(shard.partition), asker(shard)) for shard in shards)

    async def _apply(self, function: str, batch: Batch) -> int:
        keys = [self._keys.attempts(batch.partition)]
        keys += [self._keys.record(key) for key, _ in batch.states]
        masks = bytes(mask for _, mask in batch.states)
        args = (
            batch.incarnation,
            batch.attempt,
            _ms(batch.ttl_s),
            masks,
            batch.replaces or b"",
            schema.REMEMBERED_MS,
            batch.acknowledged,
        )
        call = self._call_function(batch.partition, function, keys, args)
        held = await self._within(call, of=batch.partition)
        with map_redis_errors():
            if not isinstance(held, int):
                raise TypeError("no number")
            return held

    async def _records_of(self, keys: Sequence[bytes], ends_at: float) -> list[bytes | None]:
        """The records that arrived in time, `None` for the others; raises where none did."""
        now = asyncio.get_running_loop().time
        began_at = now()
        shards = self._connections.shards
        if not shards:
            shards = await self._within(self._connections.find_shards(), ends_at - now())
        reads = {}
        for groups in _divided(keys, shards):
            names = [self._keys.records(map(keys.__getitem__, group)) for group in groups]
            reads[self._begin(self._connections.read(names, partition_of(keys[groups[0][0]])))] = groups
        await asyncio.wait(reads, timeout=max(0.0, ends_at - now()))
        if (late_s := now() - ends_at) >= LATE_S:
            await asyncio.wait(reads, timeout=min(late_s, LATE_GRACE_S_MAX))
        records: list[bytes | None] = [None] * len(keys)
        errors: list[Exception] = []
        for task, groups in reads.items():
            reading = _reading_of(task, sum(map(len, groups)), ends_at - began_at)
            errors += reading.errors
            if len(reading.records) == len(keys) and len(groups) == 1:
                records = reading.records
            else:
                for place, record in zip(chain.from_iterable(groups), reading.records, strict=True):
                    records[place] = record
        if records.count(None) == len(keys):
            _raise_for(errors[0], asked_all=len(reads) == len(shards))
        return records

    async def _at_homes(self, call: Callable[[int], Coroutine[Any, Any, Any]]) -> list[Any]:
        """What the homes of the fleet's table that answer say to a call; raises where none does."""
        homes = self._connections.table_homes
        calls = [self._begin(call(home)) for home in homes]
        await asyncio.wait(calls, timeout=CALL_TIMEOUT_S)
        name_of = self._connections.name_of
        outcomes = [_outcome_of(call, CALL_TIMEOUT_S, name_of(home)) for home, call in zip(homes, calls, strict=True)]
        failed = {home: each for home, each in zip(homes, outcomes, strict=True) if isinstance(each, DirectoryError)}
        if len(failed) == len(homes):
            raise failed[homes[0]]
        self._tell_of(failed)
        return [outcome for outcome in outcomes if not isinstance(outcome, DirectoryError)]

    def _tell_of(self, failed: dict[int, DirectoryError]) -> None:
        """Say once that the table is read and written in one place only, and when that is over."""
        if failed.keys() != self._failing_homes:
            self._failing_homes = frozenset(failed)
            for home, error in failed.items():
                _logger.warning("the fleet's table in partition %d fails, the other one is used: %s", home, error)
            if not failed:
                _logger.warning("the fleet's table is kept twice again")

    async def _read_table(self, home: int) -> list[Any]:
        """One key only: of several, some may be elsewhere while their slot moves, and would look empty."""
        return await self._connections.read_together(home, ("TIME",), ("HGETALL", self._keys.registrations(home)))

    async def _read_fields(self, home: int, fields: Sequence[bytes]) -> list[Any]:
        return await self._connections.read_together(
            home, ("TIME",), ("HMGET", self._keys.registrations(home), *fields)
        )

    async def _check_versions(self) -> None:
        """Raise `SchemaMismatch` where a fleet of another version registered after the last one of this."""
        replies = await self._at_homes(
            lambda home: self._connections.read_together(home, ("HGETALL", self._keys.versions(home)))
        )
        with map_redis_errors():
            newer = [newer_version(_paired(versions), schema.VERSION) for (versions,) in replies]
        for version in filter(None, newer):
            raise SchemaMismatch(
                f"the fleet on this server registers under schema {version}, "
                f"and this reader knows {schema.VERSION} only"
            )

    async def _call_on_table(self, home: int, name: str, args: Sequence[bytes | str | int]) -> Any:
        return await self._call_function(home, name, (self._keys.registrations(home),), args)

    async def _call_function(
        self, partition: int, name: str, keys: Sequence[bytes], args: Sequence[bytes | str | int]
    ) -> Any:
        return await self._connections.call_function(partition, "FCALL", name, len(keys), *keys, *args)

    async def _within(self, call: Coroutine[Any, Any, _T], wait_s: float = CALL_TIMEOUT_S, of: int | None = None) -> _T:
        """The result of a call, or `DirectoryUnavailable` after `wait_s`; the call itself goes on to its own bound.

        `of`: the partition whose server is asked.
        """
        task = self._begin(call)
        await asyncio.wait((task,), timeout=max(0.0, wait_s))
        return _result_of(task, wait_s, SERVERS if of is None else self._connections.name_of(of))

    def _begin(self, call: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        if self._closed or len(self._calls) >= TASKS_MAX:
            call.close()
            raise DirectoryUnavailable("the client is closed" if self._closed else "too many calls are in flight")
        task = asyncio.create_task(_bounded(call))
        self._calls.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: call.close())  # Cancelled before it began, it would be reported as forgotten.
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # Seen by the caller, or by nobody any more: then asyncio must not report it.

    async def _readable(self, rows: Sequence[Row], elapsed_s: float) -> tuple[Member, ...]:
        """The rows that can be read, counted down from when the poll was sent; others are said once and left out.

        A load that can't be read costs its rates only: the engine itself may serve. Lookups go on meanwhile.
        """
        members: list[Member] = []
        unreadable: dict[bytes, str] = {}
        loads: dict[bytes, Load] = {}
        async for row in unhurried(rows):
            try:
                registration = decode_registration(row.registration)
                remaining_s = row.remaining_ms / 1000 - elapsed_s
                load = loads.get(row.load, self._loads.get(row.load))
                members.append(Member(row.incarnation, registration, load or Load(), remaining_s, row.retired))
                loads[row.load] = load or decode_load(row.load)
                if load is None:
                    members[-1] = replace(members[-1], load=loads[row.load])
            except UnreadableMember as error:
                unreadable[row.incarnation] = str(error)
                if row.incarnation not in self._unreadable:
                    _logger.warning("incarnation %s: %s", row.incarnation.hex(), error)
        self._unreadable, self._loads = unreadable, loads
        return tuple(members)


def _paired(flat: Any) -> dict[bytes, bytes]:
    """A hash, from HGETALL's reply as it came."""
    if not isinstance(flat, list) or len(flat) % 2 or not all(isinstance(each, bytes) for each in flat):
        raise TypeError("no hash")
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _result_of(task: "asyncio.Task[_T]", waited_s: float, who: str) -> _T:
    if not task.done():
        raise DirectoryUnavailable(f"no answer from {who} within {max(0.0, waited_s) * 1000:.0f} ms")
    if task.cancelled():
        raise DirectoryUnavailable("the client was closed")
    return task.result()


def _outcome_of(task: "asyncio.Task[_T]", waited_s: float, who: str = SERVERS) -> _T | DirectoryError:
    try:
        return _result_of(task, waited_s, who)
    except DirectoryError as error:
        return error


def _reading_of(task: "asyncio.Task[Reading]", keys: int, waited_s: float) -> Reading:
    """What a read came to; nothing at all where it failed."""
    outcome = _outcome_of(task, waited_s)
    return Reading.failed(keys, outcome) if isinstance(outcome, DirectoryError) else outcome


def _divided(keys: Sequence[bytes], shards: Sequence[Shard]) -> list[list[Sequence[int]]]:
    """For each shard that holds some of the keys: their places, one group a command."""
    if len(shards) == 1 and len(shards[0].groups) == 1:
        return [[range(len(keys))]]
    by_partition: list[list[int]] = [[] for _ in range(PARTITIONS)]
    for place, key in enumerate(keys):
        by_partition[partition_of(key)].append(place)
    divided: list[list[Sequence[int]]] = []
    for shard in shards:
        groups = ([place for partition in group for place in by_partition[partition]] for group in shard.groups)
        divided.append([group for group in groups if group])
    return [groups for groups in divided if groups]


def _raise_for(error: Exception, asked_all: bool) -> NoReturn:
    """Raise what a lookup failed with. One that asked a part of the servers says so."""
    try:
        with map_redis_errors():
            raise error
    except DirectoryUnavailable as unavailable:
        if asked_all:
            raise
        raise PartitionUnavailable(str(unavailable)) from error


def _united(rows: Sequence[Member]) -> tuple[Member, ...]:
    """One row an incarnation: the one renewed last, and retired where any of them is."""
    united: dict[bytes, Member] = {}
    for row in rows:
        other = united.get(row.incarnation, row)
        latest = max(row, other, key=lambda member: member.remaining_s)
        united[row.incarnation] = replace(latest, retired=row.retired or other.retired)
    return tuple(united.values())


async def _bounded(call: Coroutine[Any, Any, _T]) -> _T:
    with map_redis_errors():
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await call


def _ms(span_s: float) -> int:
    assert span_s > 0, "a term has a length"
    return math.ceil(span_s * 1000)
