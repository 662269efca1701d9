"""RedisDirectory: the directory's rules over one standalone Redis 7+ or Valkey 8+, atomically, in few round trips.

Reading is one MGET of packed records; every write is one call of a function that lives in the server
(`functions.lua`, loaded on demand). Keys, tags and names are spelled in `redis_schema.py`.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from directory import redis_schema as schema
from directory.errors import DirectoryError, DirectoryFull, DirectoryUnavailable, RegistrationRefused, SchemaMismatch
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
from directory.statistics import ServerNode

CALL_TIMEOUT_S = 1.0
"""The most that one call may take, connecting included; a lookup's deadline usually ends its wait sooner."""

FIRST_STEP_KEYS = 256
"""A lookup of more keys asks in steps that double from here, and stops at the first key that nobody holds."""

CONNECTIONS_MAX = 64
CALLS_IN_FLIGHT_MAX = 1024
"""Calls begun and not ended, those included that their callers no longer wait for."""

_URL_SCHEMES = ("redis", "rediss", "unix")
_URL_OPTIONS = {"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
_TRANSIENT = (ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError)
_TRANSIENT_PREFIXES = ("BUSY ", "NOREPLICAS ")
"""Answers of a server that is failing over, or at work on something long: redis-py has no class for these."""

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class RedisDirectory:
    """Implements `DirectoryReader` and `DirectoryWriter`. Belongs to the event loop that first uses it.

    A call runs in a task of its own, bounded by `CALL_TIMEOUT_S`; a caller that stops waiting leaves it to end
    there. So a short deadline never cuts a connection in the middle of a reply, connecting may take longer than a
    lookup's deadline, and a server that hangs costs each caller its deadline and nothing more.
    """

    def __init__(self, client: Redis, clock: Callable[[], float]) -> None:
        self._client = client
        self._execute: Callable[..., Awaitable[Any]] = client.execute_command
        self._clock = clock
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._unreadable: set[bytes] = set()

    @classmethod
    def connect(cls, url: str, *, clock: Callable[[], float] = time.monotonic) -> "RedisDirectory":
        """A directory on the server at `url` (redis://, rediss:// or unix://); connects when first used.

        `clock` gives monotonic seconds. Raises `DirectoryError` for a malformed URL.
        """
        pool = _connection_pool(url)
        return cls(Redis(connection_pool=pool), clock)

    async def aclose(self) -> None:
        """End what is in flight and close every connection; later calls raise `DirectoryUnavailable`."""
        self._closed = True
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        with map_redis_errors():
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._client.connection_pool.disconnect()

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> Lookup:
        """See `DirectoryReader`; waits `CALL_TIMEOUT_S` for a step at most, whatever the deadline."""
        now = asyncio.get_running_loop().time
        ends_at = now() + deadline_s
        records: list[bytes | None] = []
        step_keys = FIRST_STEP_KEYS
        while len(records) < len(keys):
            asked = keys[len(records) : len(records) + step_keys]
            try:
                answered = await self._within(self._records_of(asked), ends_at - now())
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
        keys = (schema.REGISTRATIONS_KEY, schema.VERSIONS_KEY)
        call = self._call_function(schema.MEMBERS, keys, (schema.REMEMBERED_MS, schema.VERSION), verb="FCALL_RO")
        reply = await self._within(call)
        with map_redis_errors():
            other_version, rows = reply
            if not isinstance(other_version, bytes | None):
                raise TypeError("no version")
            if other_version:
                raise SchemaMismatch(
                    f"the fleet on this server registers under schema {other_version.decode(errors='replace')}, "
                    f"and this reader knows {schema.VERSION} only"
                )
            elapsed_s = self._clock() - sent_at
            return self._readable(rows, elapsed_s)

    async def register(
        self, incarnation: bytes, registration: Registration, load: Load, term_s: float = TERM_S
    ) -> None:
        """See `DirectoryWriter`."""
        keys = (schema.REGISTRATIONS_KEY, schema.VERSIONS_KEY)
        row = (incarnation, encode_registration(registration), encode_load(load))
        terms = (_ms(term_s), schema.REMEMBERED_MS, schema.VERSION)
        if not await self._within(self._call_function(schema.REGISTER, keys, row + terms)):
            raise RegistrationRefused(f"incarnation {incarnation.hex()} is taken")

    async def renew(self, incarnation: bytes, load: Load, term_s: float = TERM_S) -> Renewal:
        """See `DirectoryWriter`."""
        args = (incarnation, encode_load(load), _ms(term_s), schema.REMEMBERED_MS)
        call = self._call_function(schema.RENEW, (schema.REGISTRATIONS_KEY,), args)
        reply = await self._within(call)
        with map_redis_errors():
            known, lapsed_ms = reply
            return Renewal(known=bool(known), lapsed_s=lapsed_ms / 1000)

    async def retire(self, incarnation: bytes) -> None:
        """See `DirectoryWriter`."""
        args = (incarnation, schema.REMEMBERED_MS)
        await self._within(self._call_function(schema.RETIRE, (schema.REGISTRATIONS_KEY,), args))

    async def place(self, batch: Batch) -> int:
        """See `DirectoryWriter`."""
        return await self._apply(schema.PLACE, batch)

    async def withdraw(self, batch: Batch) -> int:
        """See `DirectoryWriter`."""
        assert all(mask == 0 for _, mask in batch.states), "a withdrawal only removes"
        return await self._apply(schema.WITHDRAW, batch)

    async def nodes(self) -> tuple[ServerNode, ...]:
        """The servers that hold the records, for statistics: one."""
        settings = self._client.connection_pool.connection_kwargs
        name = settings.get("path") or f"{settings.get('host')}:{settings.get('port')}"

        async def execute(*command: Any) -> Any:
            return await self._within(self._command(*command))

        return (ServerNode(name, execute),)

    async def _command(self, *command: Any) -> Any:
        return await self._execute(*command)

    async def _apply(self, function: str, batch: Batch) -> int:
        keys = [schema.attempts_key(batch.partition, batch.incarnation)]
        keys += [schema.record_key(key) for key, _ in batch.states]
        masks = bytes(mask for _, mask in batch.states)
        prune = b"0" if batch.known is None else b"1"
        args = (
            batch.incarnation,
            batch.attempt,
            _ms(batch.ttl_s),
            masks,
            batch.replaces or b"",
            prune,
            b"".join(batch.known or ()),
            batch.acknowledged,
        )
        held = await self._within(self._call_function(function, keys, args))
        with map_redis_errors():
            if not isinstance(held, int):
                raise TypeError("no number")
            return held

    async def _records_of(self, keys: Sequence[bytes]) -> list[bytes]:
        values = await self._execute("MGET", *map(schema.record_key, keys))
        if not isinstance(values, list) or len(values) != len(keys):
            raise TypeError("no list of records")
        if not all(value is None or isinstance(value, bytes) for value in values):
            raise TypeError("no records")
        return [value or b"" for value in values]

    async def _call_function(
        self, name: str, keys: Sequence[bytes], args: Sequence[bytes | str | int], verb: str = "FCALL"
    ) -> Any:
        """Call a function, loading the library where the server hasn't got it (started afresh, flushed)."""
        try:
            return await self._execute(verb, name, len(keys), *keys, *args)
        except ResponseError as error:
            if "function not found" not in str(error).lower():
                raise
        await self._execute("FUNCTION LOAD", "REPLACE", schema.functions_source())
        return await self._execute(verb, name, len(keys), *keys, *args)

    async def _within(self, call: Coroutine[Any, Any, _T], wait_s: float = CALL_TIMEOUT_S) -> _T:
        """The result of a call, or `DirectoryUnavailable` after `wait_s`; the call itself goes on to its own bound."""
        if self._closed or len(self._calls) >= CALLS_IN_FLIGHT_MAX:
            call.close()
            raise DirectoryUnavailable("the client is closed" if self._closed else "too many calls are in flight")
        task = asyncio.create_task(_bounded(call))
        self._calls.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: call.close())  # Cancelled before it began, it would be reported as forgotten.
        done, _ = await asyncio.wait((task,), timeout=max(0.0, wait_s))
        if not done:
            raise DirectoryUnavailable(f"no answer within {max(0.0, wait_s) * 1000:.0f} ms")
        if task.cancelled():
            raise DirectoryUnavailable("the client was closed")
        return task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # Seen by the caller, or by nobody any more: then asyncio must not report it.

    def _readable(self, rows: Sequence[Any], elapsed_s: float) -> tuple[Member, ...]:
        """The rows that can be read, counted down from when the poll was sent; others are said once and left out.

        A load that can't be read costs its rates only: the engine itself may serve.
        """
        members, unreadable = [], set()
        for incarnation, registration, load, remaining_ms, retired in rows:
            try:
                decoded = decode_registration(registration)
                remaining_s = remaining_ms / 1000 - elapsed_s
                members.append(Member(incarnation, decoded, Load(), remaining_s, bool(retired)))
                members[-1] = replace(members[-1], load=decode_load(load))
            except UnreadableMember as error:
                unreadable.add(incarnation)
                if incarnation not in self._unreadable:
                    _logger.warning("incarnation %s: %s", incarnation.hex(), error)
        self._unreadable = unreadable
        return tuple(members)


@contextmanager
def map_redis_errors() -> Iterator[None]:
    """Translate what redis-py and the sockets raise into the directory's errors, once."""
    try:
        yield
    except (RedisTimeoutError, TimeoutError) as error:
        raise DirectoryUnavailable(f"no answer from the server: {error or 'timed out'}") from error
    except (RedisConnectionError, OSError) as error:
        raise DirectoryUnavailable(f"the server can't be reached: {error}") from error
    except _TRANSIENT as error:
        raise DirectoryUnavailable(f"the server isn't ready: {error}") from error
    except OutOfMemoryError as error:
        raise DirectoryFull(f"the server is out of memory: {error}") from error
    except ResponseError as error:
        message = str(error)
        if message.startswith(_TRANSIENT_PREFIXES):
            raise DirectoryUnavailable(f"the server isn't ready: {message}") from error
        if message.startswith("WRONGTYPE"):
            raise SchemaMismatch(f"a key holds something of another schema: {message}") from error
        raise DirectoryError(f"the server refused a call: {message}") from error
    except (RedisError, TypeError, ValueError, AttributeError) as error:
        raise DirectoryError(f"the server answered with something unexpected: {error}") from error


async def _bounded(call: Coroutine[Any, Any, _T]) -> _T:
    with map_redis_errors():
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await call


def _ms(span_s: float) -> int:
    assert span_s > 0, "a term has a length"
    return math.ceil(span_s * 1000)


def _connection_pool(url: str) -> BlockingConnectionPool:
    """A pool that connects when it must and never retries by itself: writers number their attempts."""
    fault = _fault_of(url)
    if fault:
        raise DirectoryError(f"the directory's URL {fault}")
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            protocol=2,
            max_connections=CONNECTIONS_MAX,
            timeout=CALL_TIMEOUT_S,
            socket_timeout=CALL_TIMEOUT_S,
            socket_connect_timeout=CALL_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        pool.connection_class(**pool.connection_kwargs)  # No I/O: tells now what would be wrong with each connection.
    except (ValueError, RedisError) as error:
        raise DirectoryError("the directory's URL can't be read; redis://host:6379 is one that can") from error
    return pool


def _fault_of(url: str) -> str | None:
    """What is wrong with the URL, without repeating it: it may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "has a host or port that can't be read"
    if parts.scheme not in _URL_SCHEMES:
        return f"must begin with {', '.join(f'{scheme}://' for scheme in _URL_SCHEMES)}"
    if parts.scheme == "unix" and not parts.path.strip("/"):
        return "must name a socket, as in unix:///run/redis.sock"
    if parts.scheme != "unix" and (not parts.hostname or port == 0):
        return "must name a host, as in redis://host:6379"
    if parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdigit():
        return "may name a database by its number only, as in redis://host:6379/0"
    options = parse_qs(parts.query, keep_blank_values=True)
    unknown = sorted(set(options) - _URL_OPTIONS)
    if unknown:
        return f"has an unknown option {unknown[0]!r}; known are {', '.join(sorted(_URL_OPTIONS))}"
    if not all(value.isdigit() for value in options.get("db", ())):
        return "has a db that isn't a number"
    return None
