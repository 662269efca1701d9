"""Connections: the servers behind one directory, and which of them is asked for a partition.

Nothing is sent twice by itself, but for two cases in which the server says that it did nothing: a call that is
redirected is sent on, once, and a function that is missing is loaded and called again. A server that can't be reached,
or says that it isn't the one to ask, starts a search for where the partitions are now; the call itself fails, and the
next one goes to the right place.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import AskError, ClusterCrossSlotError, MovedError, RedisError, ResponseError, TryAgainError

from directory.errors import DirectoryError, DirectoryUnavailable
from directory.redis_errors import MISPLACED, ONE_OF_A_CLUSTER, UNREACHED, map_redis_errors
from directory.redis_node import ASKING, Command, RedisNode
from directory.redis_topology import PARTITION_SLOTS, TOPOLOGIES, Owners, Topology
from directory.server_url import Address, ServerUrl

SEARCH_INTERVAL_MIN_S, SEARCH_INTERVAL_MAX_S = 0.1, 2.0
"""How far apart searches for where the partitions are must be, however many calls fail: further each time in vain."""

PROBE_INTERVAL_S = 0.1
"""How long after a silent server was asked in vain it is asked again, where somebody wants it."""

MGET_KEYS_MAX = 16
"""Keys of one MGET, of which several are sent together: a Valkey from version 9 on fetches the keys of so many commands
into its caches while it reads on. That takes a quarter of a lookup's time there, and adds nothing elsewhere."""

HOPS_MAX = 3
"""Times that a read is sent on: to where its slot has moved, key by key while the slot moves, and to its new home."""

CLOSE_TIMEOUT_S = 1.0

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shard:
    """Partitions that one server holds, as far as is known; keys of a group may stand in one command."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def partition(self) -> int:
        """One of its partitions."""
        return self.groups[0][0]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a read came to: the value of each key, `b""` for one that doesn't exist, and `None` for what didn't arrive,
    because of `errors`.
    """

    records: list[bytes | None]
    errors: list[Exception]

    @classmethod
    def failed(cls, keys: int, *errors: Exception) -> "Reading":
        """Nothing has arrived."""
        return cls([None] * keys, list(errors))

    def fill(self, places: range, reply: Any) -> None:
        """Put in what came of an MGET of the keys in these places."""
        error = reply if isinstance(reply, Exception) else _oddity_of(reply, len(places))
        if error is not None:
            self.errors.append(error)
        else:
            self.records[places.start : places.stop] = [value or b"" for value in reply]


@dataclass(frozen=True, slots=True)
class _Ask:
    """Keys of one MGET, and where their answers belong."""

    keys: Sequence[bytes]
    places: range

    def singly(self) -> list["_Ask"]:
        return [_Ask((key,), range(place, place + 1)) for key, place in zip(self.keys, self.places, strict=True)]


class Connections:
    """Clients of a directory's servers. Belongs to the event loop that first uses it.

    Raises what redis-py raises, and `DirectoryUnavailable`; its caller translates, and bounds each call in time.
    """

    def __init__(self, url: ServerUrl, loads_functions: bool = True) -> None:
        """Raises `DirectoryError` for what is wrong with the URL; connects when first used."""
        self._url, self._loads_functions = url, loads_functions
        self._topology: Topology = TOPOLOGIES[url.kind](url)
        self._nodes: dict[Address, RedisNode] = {}
        if url.kind != "sentinel":
            self._nodes = {address: self._made(address) for address in url.seeds}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._search: asyncio.Task[Any] | None = None
        self._probing: set[Address] = set()
        self._search_error: DirectoryError | None = None
        self._search_interval_s = SEARCH_INTERVAL_MIN_S
        self._searched_at = float("-inf")
        self._closed = self._is_cluster_told = False
        self._owners: Owners | None = None
        self._shards: tuple[Shard, ...] = ()
        if self._topology.known is not None:
            self._adopt(self._topology.known)

    @property
    def table_homes(self) -> tuple[int, ...]:
        """The partitions in whose slot the fleet's table is kept."""
        return self._topology.table_homes

    @property
    def shards(self) -> tuple[Shard, ...]:
        """How the partitions are divided, as far as is known; empty before the first search."""
        return self._shards

    async def find_shards(self) -> tuple[Shard, ...]:
        """How the partitions are divided, after a search where nothing is known yet."""
        await self._find_owners()
        return self._shards

    async def call_function(self, partition: int, *call: bytes | str | int) -> Any:
        """Call a function whose keys are all of one partition."""
        return await self._followed(partition, lambda node, asking: node.call_function(*call, asking=asking))

    async def read_together(self, partition: int, *commands: Command) -> list[Any]:
        """The replies to commands whose keys are all of one partition, from one server in one round trip."""
        return await self._followed(partition, lambda node, asking: node.read_together(*commands, asking=asking))

    async def _followed(self, partition: int, call: Callable[[RedisNode, bool], Coroutine[Any, Any, _T]]) -> _T:
        """What a call comes to at the server of a partition, or where that one sends it, once."""
        await self._find_owners()
        node = self._node_of(partition)
        try:
            return await self._watch(call(node, False))
        except AskError as redirect:
            if not self._topology.follows_redirects:
                self._tell_of_cluster(node.address)
                raise
            target = self._node(self._follow(redirect, node.address))
            must_ask = not isinstance(redirect, MovedError)
        try:
            return await self._watch(call(target, must_ask))
        except AskError as second:
            raise TryAgainError(f"the slot is moving: {second}") from second

    def name_of(self, partition: int) -> str:
        """The address of the server that holds a partition, as far as is known."""
        if self._owners is None:
            return f"whoever has partition {partition}"
        return str(self._owners[partition] or f"nobody (partition {partition})")

    async def execute(self, partition: int, *command: bytes | str | int) -> Any:
        """A command's reply from the server that holds a partition; redirects are errors."""
        await self._find_owners()
        return await self._watch(self._node_of(partition).execute(*command))

    async def read(self, groups: Sequence[Sequence[bytes]], partition: int) -> Reading:
        """The values of keys, one after the other.

        Keys of a group may stand in one command; all are asked in one round trip to the server of `partition`, which
        they share as far as is known.
        """
        await self._find_owners()
        asks: list[_Ask] = []
        begun = 0
        for group in groups:
            for start in range(0, len(group), MGET_KEYS_MAX):
                keys = group[start : start + MGET_KEYS_MAX]
                asks.append(_Ask(keys, range(begun, begun + len(keys))))
                begun += len(keys)
        reading = Reading.failed(begun)
        await self._ask(self._node_of(partition).address, asks, reading)
        return reading

    async def aclose(self) -> None:
        """Close every connection; used ones are cut."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closing = [node.aclose() for node in self._nodes.values()]
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await asyncio.gather(self._topology.aclose(), *closing)

    async def _ask(
        self, address: Address, asks: Sequence[_Ask], reading: Reading, asking: bool = False, hops: int = HOPS_MAX
    ) -> None:
        """Fill `reading`. What is sent on goes to each server at the same time; who fails, fails for its keys only."""
        try:
            replies = await self._watch(_mget(self._node(address), asks, asking))
        except (RedisError, OSError, DirectoryError) as error:
            replies = [error] * len(asks)
        onward: dict[tuple[Address, bool], list[_Ask]] = {}
        for ask, reply in zip(asks, replies, strict=True):
            if self._topology.follows_redirects and isinstance(reply, AskError | TryAgainError):
                if not hops:
                    reading.fill(ask.places, TryAgainError(f"the slot is moving: {reply}"))
                    continue
                place, parts = self._sent_on(ask, reply, address, asking)
                onward.setdefault(place, []).extend(parts)
                continue
            if isinstance(reply, MISPLACED):
                self._suspect()
            elif isinstance(reply, AskError | ClusterCrossSlotError):
                self._tell_of_cluster(address)
            reading.fill(ask.places, reply)
        if onward:
            await asyncio.gather(
                *(self._ask(target, parts, reading, must_ask, hops - 1) for (target, must_ask), parts in onward.items())
            )

    def _sent_on(
        self, ask: _Ask, reply: AskError | TryAgainError, address: Address, asking: bool
    ) -> tuple[tuple[Address, bool], list[_Ask]]:
        """Where to ask next, whether as ASKING, and in which parts.

        A slot that is on its way has some keys here and some there. Here an MGET of both kinds answers TRYAGAIN, one
        of keys that aren't here ASK; there it answers TRYAGAIN unless all its keys are there, so keys are asked singly.
        """
        if isinstance(reply, TryAgainError):
            return (address, asking), ask.singly()
        if isinstance(reply, MovedError):
            return (self._follow(reply, address), False), [ask]
        return (self._follow(reply, address), True), ask.singly()

    def _tell_of_cluster(self, address: Address) -> None:
        """Say once that the URL is of the wrong kind: some calls work all the same, those of this member's slots."""
        if not self._is_cluster_told:
            self._is_cluster_told = True
            _logger.warning("%s: %s", address, ONE_OF_A_CLUSTER)

    def _follow(self, redirect: AskError, address: Address) -> Address:
        """Where a redirect points to. That a slot has moved is noted, and others that did are looked for."""
        target = Address(redirect.host or address.host, redirect.port)
        if isinstance(redirect, MovedError) and self._owners is not None and redirect.slot_id in PARTITION_SLOTS:
            partition = PARTITION_SLOTS.index(redirect.slot_id)
            self._adopt((*self._owners[:partition], target, *self._owners[partition + 1 :]))
            self._suspect()
        return target

    async def _watch(self, call: Coroutine[Any, Any, _T]) -> _T:
        """The call's result; one that says, or lets suspect, that another server is to be asked begins a search."""
        try:
            return await call
        except (*UNREACHED, *MISPLACED, asyncio.CancelledError):
            self._suspect()
            raise

    def _node_of(self, partition: int) -> RedisNode:
        """Where a partition is. A silent server isn't waited for where others serve their part meanwhile."""
        assert self._owners is not None
        address = self._owners[partition]
        if address is None:
            self._suspect()
            raise DirectoryUnavailable(f"no server of the cluster has partition {partition}")
        node = self._node(address)
        if node.is_silent and len(self._shards) > 1:
            self._suspect()
            if address not in self._probing:
                self._probing.add(address)
                self._spawn(self._probe(node))
            raise DirectoryUnavailable(f"{address} has fallen silent")
        return node

    def _node(self, address: Address) -> RedisNode:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._made(address)
        return node

    def _made(self, address: Address) -> RedisNode:
        return RedisNode(address, self._url.of_server(address), self._loads_functions)

    async def _probe(self, node: RedisNode) -> None:
        try:
            await node.probe()
        except (*UNREACHED, ResponseError):
            await asyncio.sleep(PROBE_INTERVAL_S)
        finally:
            self._probing.discard(node.address)

    async def _find_owners(self) -> None:
        """Know where the partitions are, or raise; what is known but old is looked for beside the call."""
        now = asyncio.get_running_loop().time()
        if self._owners is not None:
            if now - self._searched_at > self._topology.believed_s:
                self._suspect()
            return
        if self._search_error is not None and now - self._searched_at < SEARCH_INTERVAL_MIN_S:
            raise DirectoryUnavailable(str(self._search_error)) from self._search_error
        await asyncio.shield(self._search or self._begin_search())

    def _suspect(self) -> None:
        """Begin a search, unless one is running or was lately; they are further apart while they find nothing new."""
        since_s = asyncio.get_running_loop().time() - self._searched_at
        if since_s > 2 * SEARCH_INTERVAL_MAX_S:
            self._search_interval_s = SEARCH_INTERVAL_MIN_S
        if not self._closed and self._search is None and since_s >= self._search_interval_s:
            self._begin_search()

    def _begin_search(self) -> "asyncio.Task[None]":
        self._search = self._spawn(self._run_search())
        return self._search

    async def _run_search(self) -> None:
        try:
            with map_redis_errors():
                owners = await self._topology.find(self._node, self._spawn, set(filter(None, self._owners or ())))
        except DirectoryError as error:
            _logger.debug("the partitions can't be found: %s", error)
            self._search_error = error
            raise
        else:
            self._search_error = None
            has_changed = owners != self._owners
            self._search_interval_s = (
                SEARCH_INTERVAL_MIN_S if has_changed else min(2 * self._search_interval_s, SEARCH_INTERVAL_MAX_S)
            )
            if has_changed:
                self._adopt(owners)
            self._close_unused()
        finally:
            self._searched_at = asyncio.get_running_loop().time()
            self._search = None

    def _adopt(self, owners: Owners) -> None:
        """Ask these from now on."""
        self._owners = owners
        groups: dict[Address | None, list[tuple[int, ...]]] = {}
        for group in self._topology.groups:
            groups.setdefault(owners[group[0]], []).append(group)
        self._shards = tuple(Shard(tuple(each)) for each in groups.values())

    def _close_unused(self) -> None:
        """Close the clients of servers that hold nothing any more, when they are idle."""
        for address in set(self._nodes) - set(self._owners or ()) - set(self._url.seeds):
            if self._nodes[address].is_idle:
                self._spawn(self._nodes.pop(address).aclose())

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever waited for it knows; where nobody did, asyncio must not report it.


async def _mget(node: RedisNode, asks: Sequence[_Ask], asking: bool) -> list[Any]:
    """Each ask's reply or the error that it was answered with, in one round trip."""
    commands: list[Command] = []
    for ask in asks:
        commands += ([ASKING] if asking else []) + [("MGET", *ask.keys)]
    replies = await node.pipeline(commands)
    return replies[1::2] if asking else replies


_VALUE_TYPES = frozenset((bytes, type(None)))


def _oddity_of(reply: Any, keys: int) -> Exception | None:
    """What is wrong with a reply to an MGET of so many keys."""
    if not isinstance(reply, list) or len(reply) != keys:
        return TypeError("no list of records")
    return None if _VALUE_TYPES.issuperset(map(type, reply)) else TypeError("no records")
