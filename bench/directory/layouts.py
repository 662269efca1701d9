"""Three ways to keep and read who holds a chunk: ours, and the two that are used elsewhere; and the floor of ours.

The hashes get the same short names of lives (8 bytes) and tier masks (1 byte) as our records; elsewhere a field is a
pod's name and a tier spelled out, which costs more.
"""

import itertools
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import hiredis
import redis.asyncio

from bench.directory.server import Server
from directory import redis_schema
from directory.chunks import DIRECTORY_KEY_BYTES
from directory.placements import PARTITIONS, PrefixMatch
from directory.redis_directory import RedisDirectory
from gateway.reach_matrix import ReachMatrix

DEADLINE_S = TIMEOUT_S = 30.0
READ_BYTES = 1 << 18
TTL_MS = 7_200_000
LOAD_CHUNKS_MAX = 20_000
"""Chunks in one call of a loader: the server does nothing else for some tens of milliseconds."""

SETTLE_KEYS_MAX = 5_000

_LOADER = """
local keys, records, record_bytes, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
for index = 0, #keys / 16 - 1 do
  local key = string.sub(keys, index * 16 + 1, index * 16 + 16)
  local record = string.sub(records, index * record_bytes + 1, (index + 1) * record_bytes)
  key = ARGV[5 + math.floor(string.byte(key) / 16)] .. key
  %s
end
"""
_LOAD_RECORDS = _LOADER % "redis.call('SET', key, record, 'PX', ttl_ms)"
_LOAD_HASHES = (
    _LOADER
    % """
  for start = 1, record_bytes, 9 do
    redis.call('HSET', key, string.sub(record, start, start + 7), string.sub(record, start + 8, start + 8))
  end
  redis.call('PEXPIRE', key, ttl_ms)
"""
)
_READ_HASHES = """
local found = {}
for index, key in ipairs(KEYS) do
  local holders = redis.call('HGETALL', key)
  if #holders == 0 then
    break
  end
  found[index] = holders
end
return found
"""


class Layout(Protocol):
    """A way to keep and read holders. `command` is what the server's statistics call a lookup."""

    name: str
    command: str

    def load(self, keys: Sequence[bytes], records: Sequence[bytes]) -> None:
        """Write what `records` (packed holders, all of one length) say of `keys`, to expire in two hours."""
        ...

    def settle(self, keys: Sequence[bytes], lookups: int) -> None:
        """Ask whether `keys`, which are loaded, exist, `lookups` times in all.

        A server moves its tables into larger ones bit by bit, whenever it looks something up; after as many lookups
        as it has chunks it is done, and the smaller tables are freed.
        """
        ...

    async def lookup(self, keys: Sequence[bytes], reaches: ReachMatrix) -> dict[str, PrefixMatch]:
        """Read the holders of a prompt's chunks, and how far each engine reaches."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class PackedRecords:
    """Ours: a string of packed holders a chunk, read by MGET through the gateway's own client."""

    name = "packed, MGET"
    command = "mget"

    def __init__(self, server: Server) -> None:
        self._server = server
        self.directory = RedisDirectory.connect(server.url)

    def load(self, keys: Sequence[bytes], records: Sequence[bytes]) -> None:
        _load(self._server, _LOAD_RECORDS, redis_schema.record_key, keys, records)

    def hear_of(self, lives: Sequence[bytes]) -> None:
        """Let every partition have heard of these lives just now: holders of others would go."""
        seconds, _ = self._server.client.time()
        attempts: dict[Any, Any] = dict.fromkeys(lives, f"0:{seconds * 1000}")
        for partition in range(PARTITIONS):
            self._server.client.hset(redis_schema.attempts_key(partition), mapping=attempts)

    def settle(self, keys: Sequence[bytes], lookups: int) -> None:
        _settle(self._server, redis_schema.record_key, keys, lookups)

    async def lookup(self, keys: Sequence[bytes], reaches: ReachMatrix) -> dict[str, PrefixMatch]:
        found = await self.directory.lookup(keys, DEADLINE_S)
        return reaches.match(found.records)

    async def aclose(self) -> None:
        await self.directory.aclose()


class BareMget:
    """The floor: the same records read by one MGET on a socket that waits, with nothing around it but decoding.

    What `PackedRecords` takes less of the server's time is what several MGETs of a few keys are worth.
    """

    name = "the same, one bare MGET"
    command = "mget"

    def __init__(self, server: Server) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()

    def load(self, keys: Sequence[bytes], records: Sequence[bytes]) -> None:
        """`PackedRecords` has loaded them."""

    def settle(self, keys: Sequence[bytes], lookups: int) -> None:
        """The same."""

    async def lookup(self, keys: Sequence[bytes], reaches: ReachMatrix) -> dict[str, PrefixMatch]:
        names = redis_schema.DEFAULT_KEYSPACE.records(keys)
        self._socket.sendall(hiredis.pack_command(("MGET", *names)))  # type: ignore[arg-type]  # It says: of one.
        while not (reply := self._reader.gets()):
            self._reader.feed(self._socket.recv(READ_BYTES))
        return reaches.match(reply)

    async def aclose(self) -> None:
        self._socket.close()


class _Hashes:
    """A hash a chunk, a field a holder."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = redis.asyncio.Redis(port=server.port, protocol=2)

    def load(self, keys: Sequence[bytes], records: Sequence[bytes]) -> None:
        _load(self._server, _LOAD_HASHES, _hash_key, keys, records)

    def settle(self, keys: Sequence[bytes], lookups: int) -> None:
        _settle(self._server, _hash_key, keys, lookups)

    async def aclose(self) -> None:
        await self._client.aclose()


class HashPipeline(_Hashes):
    """An HGETALL a chunk, all in one pipeline."""

    name = "hash, HGETALL pipeline"
    command = "hgetall"

    async def lookup(self, keys: Sequence[bytes], reaches: ReachMatrix) -> dict[str, PrefixMatch]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.execute_command("HGETALL", _hash_key(key))
        hashes: list[dict[bytes, bytes]] = await pipeline.execute()
        return reaches.match([_packed(each.items()) for each in hashes])


class HashLoop(_Hashes):
    """One script that reads chunk after chunk in the server, and stops at the first that nobody holds."""

    name = "hash, Lua loop"
    command = "evalsha"

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._script = server.client.script_load(_READ_HASHES)

    async def lookup(self, keys: Sequence[bytes], reaches: ReachMatrix) -> dict[str, PrefixMatch]:
        call: Any = self._client.evalsha(self._script, len(keys), *map(_hash_key, keys))
        rows: list[list[bytes]] = await call
        return reaches.match([_packed(zip(row[::2], row[1::2], strict=True)) for row in rows])


def _hash_key(key: bytes) -> bytes:
    """As long as our key of the same chunk."""
    return redis_schema.record_key(key).replace(b"wr:v1:", b"wr:h1:", 1)


def _packed(holders: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([incarnation + mask for incarnation, mask in holders])


def _load(
    server: Server, script: str, name: Callable[[bytes], bytes], keys: Sequence[bytes], records: Sequence[bytes]
) -> None:
    """By a script in the server, whose writes are the same commands as those of `wr_v1_place`: seconds for millions."""
    assert all(len(record) == len(records[0]) for record in records), "records are cut apart by their length"
    first_keys = [bytes((partition << 4,)).ljust(DIRECTORY_KEY_BYTES, b"\0") for partition in range(PARTITIONS)]
    prefixes = [name(key)[:-DIRECTORY_KEY_BYTES] for key in first_keys]
    for start in range(0, len(keys), LOAD_CHUNKS_MAX):
        part = slice(start, start + LOAD_CHUNKS_MAX)
        packed = (b"".join(keys[part]), b"".join(records[part]), len(records[0]), TTL_MS)
        server.client.eval(script, 0, *packed, *prefixes)


def _settle(server: Server, name: Callable[[bytes], bytes], keys: Sequence[bytes], lookups: int) -> None:
    turns = itertools.cycle(keys)
    for start in range(0, lookups, SETTLE_KEYS_MAX):
        server.client.exists(*map(name, itertools.islice(turns, min(SETTLE_KEYS_MAX, lookups - start))))
