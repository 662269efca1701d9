"""RedisNode: one server's client. It never retries by itself, and knows when its server has fallen silent."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hiredis
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.typing import EncodableT

from directory import redis_schema as schema
from directory.bounded_parser import BoundedParser
from directory.errors import DirectoryError, DirectoryUnavailable, FunctionsMissing
from directory.redis_errors import MISPLACED
from directory.server_url import Address

CALL_TIMEOUT_S = 1.0
"""The most that one call may take, connecting included; a lookup's deadline usually ends its wait sooner."""

SILENT_AFTER_S = CALL_TIMEOUT_S * 0.9
"""A server is silent when a call has ended without an answer and none had come for this long."""

CONNECTIONS_MAX = 64
CONNECTIONS_KEPT_MAX = 8
"""Of these, the ones that pipelines keep at hand: redis-py's pool takes 20 us to give one and take it back."""

CALLS_IN_FLIGHT_MAX = 1024
"""Calls of one server begun and not ended, those included that their callers no longer wait for."""

ASKING = ("ASKING",)
Command = Sequence[bytes | str | int]

_logger = logging.getLogger(__name__)


class RedisNode:
    """A pool of connections to one server. Raises what redis-py raises, and `DirectoryUnavailable` when overfull."""

    def __init__(self, address: Address, url: str, loads_functions: bool = True) -> None:
        """Raises `DirectoryError` for a URL that redis-py can't use; connects when first used."""
        self.address = address
        self._loads_functions, self._is_refusal_told = loads_functions, False
        pool = _connection_pool(url)
        self._client = Redis(connection_pool=pool)
        self._client.response_callbacks.clear()  # Replies as they came: redis-py stumbles over strange ones.
        self._execute: Callable[..., Awaitable[Any]] = self._client.execute_command
        self._get_connection: Callable[[], Awaitable[AbstractConnection]] = pool.get_connection
        self._ensure_connection: Callable[[AbstractConnection], Awaitable[None]] = pool.ensure_connection
        self._kept: list[AbstractConnection] = []
        self._calls = 0
        self._asked_at: float | None = None
        self.is_silent = False
        self.has_failed = False
        """Whether the last call had no answer, or one that says that another server is to be asked."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for it."""
        return not self._calls

    async def execute(self, *command: bytes | str | int, asking: bool = False) -> Any:
        """A command's reply; `asking`: of a slot that is still on its way to this server."""
        if asking:
            _, reply = await self.pipeline([ASKING, command])
            if isinstance(reply, Exception):
                raise reply
            return reply
        with self._listening():
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await self._execute(*command)

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Each command's reply as the server words it, or the error that it was answered with, in one round trip.

        A connection is used by itself, which takes half the time that redis-py's pipeline does.
        """
        with self._listening():
            async with asyncio.timeout(CALL_TIMEOUT_S):
                connection = await self._take_connection()
                try:
                    await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
                    return [await _reply_on(connection) for _ in commands]
                finally:
                    if connection.is_connected and len(self._kept) < CONNECTIONS_KEPT_MAX:
                        self._kept.append(connection)
                    else:
                        await self._client.connection_pool.release(connection)

    async def read_together(self, *commands: Command, asking: bool = False) -> list[Any]:
        """Each command's reply, in one round trip; the first error that one was answered with is raised."""
        asked = [part for command in commands for part in ((ASKING, command) if asking else (command,))]
        replies = (await self.pipeline(asked))[1 if asking else 0 :: 2 if asking else 1]
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def call_function(self, *call: bytes | str | int, asking: bool = False) -> Any:
        """A function's reply, after loading the library where the server hasn't got it (started afresh, flushed).

        A library that is there is replaced only where it lacks the function: it is an older release's. A fleet that
        finds its server empty thus has it read the library once, not once a caller. Raises `FunctionsMissing` where
        it may not be loaded; that is logged once, until the server has it.
        """
        for load in (self._load_where_missing, self._replace_functions):
            try:
                reply = await self.execute(*call, asking=asking)
            except ResponseError as error:
                if not _is_missing(error):
                    raise
                await load()
            else:
                self._is_refusal_told = False
                return reply
        return await self.execute(*call, asking=asking)

    async def _load_where_missing(self) -> None:
        try:
            await self._load_functions()
        except ResponseError as error:
            if "already exists" not in str(error):
                raise

    async def _replace_functions(self) -> None:
        _logger.info("%s has another release's functions, which lack one: they are replaced", self.address)
        await self._load_functions("REPLACE")

    async def _load_functions(self, *how: str) -> None:
        missing = f"{self.address} lacks the directory's functions"
        if not self._loads_functions:
            raise FunctionsMissing(f"{missing}: run `warmroute directory load` as a user that may load them")
        try:
            await self.execute("FUNCTION LOAD", *how, schema.functions_source())
        except NoPermissionError as error:
            sentence = f"{missing}, and this user may not load them: run `warmroute directory load` as the operator"
            if not self._is_refusal_told:
                self._is_refusal_told = True
                _logger.warning("%s", sentence)
            raise FunctionsMissing(sentence) from error

    async def probe(self) -> None:
        """Ask a silent server whether it is there; `is_silent` says what came of it."""
        await self.execute("PING")

    async def aclose(self) -> None:
        """Close every connection, used or not."""
        pool = self._client.connection_pool
        while self._kept:
            await pool.release(self._kept.pop())
        await pool.disconnect()

    async def _take_connection(self) -> AbstractConnection:
        if not self._kept:
            return await self._get_connection()
        connection = self._kept.pop()
        try:
            await self._ensure_connection(connection)  # As the pool does: connects again where the server has hung up.
        except BaseException:
            await self._client.connection_pool.release(connection)
            raise
        return connection

    @contextmanager
    def _listening(self) -> Iterator[None]:
        if self._calls >= CALLS_IN_FLIGHT_MAX:
            raise DirectoryUnavailable(f"too many calls of {self.address} are in flight")
        now = asyncio.get_running_loop().time
        asked_at = self._asked_at = now() if self._asked_at is None else self._asked_at
        self._calls += 1
        try:
            yield
        except ResponseError as error:
            self._heard()
            self.has_failed = isinstance(error, MISPLACED)
            raise
        except BaseException:
            self.has_failed = True
            self.is_silent = self.is_silent or now() - (self._asked_at or asked_at) >= SILENT_AFTER_S
            raise
        else:
            self._heard()
            self.has_failed = False
        finally:
            self._calls -= 1

    def _heard(self) -> None:
        self.is_silent = False
        self._asked_at = asyncio.get_running_loop().time() if self._calls > 1 else None


def _is_missing(error: ResponseError) -> bool:
    return "function not found" in str(error).lower()


class _Packing(AbstractConnection):
    """Packs commands in C: lookups name hundreds of keys. Only a command's name may be of several words.

    Its parser bounds what comes back of all that was sent at once.
    """

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        assert isinstance(self._parser, BoundedParser)
        self._parser.begin()
        await super().send_packed_command(command, check_health)

    def pack_command(self, *args: EncodableT) -> list[bytes]:
        name, *rest = args
        assert isinstance(name, str), "a command has a name"
        return [hiredis.pack_command((*name.split(), *rest))]  # type: ignore[arg-type]  # It says: tuples of one.


class _PlainConnection(_Packing, Connection):
    pass


class _TlsConnection(_Packing, SSLConnection):
    pass


class _LocalConnection(_Packing, UnixDomainSocketConnection):
    pass


_CONNECTION_CLASSES: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _PlainConnection,
    SSLConnection: _TlsConnection,
    UnixDomainSocketConnection: _LocalConnection,
}


async def _reply_on(connection: AbstractConnection) -> Any:
    """The next reply, or the error that it is. Whatever else is raised has broken the connection."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _connection_pool(url: str) -> BlockingConnectionPool:
    """A pool that connects when it must and never retries by itself: writers number their attempts.

    Its connections know no timeouts of their own but for connecting: a node's calls have one, which covers it all.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            protocol=2,
            max_connections=CONNECTIONS_MAX,
            timeout=CALL_TIMEOUT_S,
            socket_timeout=None,
            socket_connect_timeout=CALL_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            parser_class=BoundedParser,
        )
        pool.connection_class = _CONNECTION_CLASSES[pool.connection_class]
        pool.connection_class(**pool.connection_kwargs)  # No I/O: tells now what would be wrong with each connection.
    except (ValueError, RedisError) as error:
        raise DirectoryError("the directory's URL can't be read; redis://host:6379 is one that can") from error
    return pool
