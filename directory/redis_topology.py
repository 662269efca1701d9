"""Which server holds which partition: one for all, the master that sentinels name, or as a cluster has divided them."""

import asyncio
import binascii
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

from redis.exceptions import ResponseError

from directory import redis_schema as schema
from directory.errors import DirectoryError, DirectoryUnavailable
from directory.placements import PARTITIONS
from directory.redis_errors import UNREACHED
from directory.redis_node import CALL_TIMEOUT_S, RedisNode
from directory.server_url import PORT_MAX, Address, Kind, ServerUrl

SLOTS = 16384
ANSWER_TIMEOUT_S = CALL_TIMEOUT_S / 2
"""How long a search waits for those it asked at the same time, before it asks others."""

ASKED_AT_ONCE = 3
SHOWN_CHARS_MAX = 200
MASTER_BELIEVED_S = 10.0
"""How long sentinels' word is believed without asking again: an old master cut off from them never says so itself."""

Owners = tuple[Address | None, ...]
"""The server of each partition; `None` where the cluster says that nobody has its slot."""

EVERY_PARTITION = tuple(range(PARTITIONS))
PARTITION_SLOTS = tuple(binascii.crc_hqx(tag.encode(), 0) % SLOTS for tag in schema.PARTITION_TAGS)

Connect = Callable[[Address], RedisNode]
Spawn = Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]


class Topology(Protocol):
    """How the directory's servers share its partitions.

    `table_homes`: the partitions in whose slot the fleet's table is kept; `groups`: partitions whose keys one command
    may name together; `follows_redirects`: whether a server may send a caller on; `believed_s`: how long what was found
    is believed; `known`: where the partitions are, if that needs no search.
    """

    table_homes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    follows_redirects: bool
    believed_s: float
    known: Owners | None

    async def find(self, connect: Connect, spawn: Spawn, known: Collection[Address]) -> Owners:
        """Search, beginning at the URL's seeds and the servers known so far. Raises `DirectoryError`."""
        ...

    async def aclose(self) -> None:
        """Close connections of its own."""
        ...


class SingleServer:
    """Every partition is on the one server."""

    table_homes: tuple[int, ...] = (0,)
    groups: tuple[tuple[int, ...], ...] = (EVERY_PARTITION,)
    follows_redirects = False
    believed_s = float("inf")

    def __init__(self, url: ServerUrl) -> None:
        self.known: Owners | None = url.seeds * PARTITIONS

    async def find(self, connect: Connect, spawn: Spawn, known: Collection[Address]) -> Owners:
        """See `Topology`."""
        assert self.known is not None
        return self.known

    async def aclose(self) -> None:
        """See `Topology`."""


class SentinelMaster:
    """Every partition is on the master that more than half of the sentinels name.

    A sentinel that was cut off may name an old one, so they are all asked, and the first answer isn't enough; only
    where too few answer is the word of most of them taken. Of two that are named as often, the one that was asked so
    far stays, as long as it answers as a master does: writers that went to and fro would announce everything each time.
    """

    table_homes: tuple[int, ...] = (0,)
    groups: tuple[tuple[int, ...], ...] = (EVERY_PARTITION,)
    follows_redirects = False
    believed_s = MASTER_BELIEVED_S
    known: Owners | None = None

    def __init__(self, url: ServerUrl) -> None:
        self._master_name = url.master_name
        self._sentinels = [RedisNode(address, url.of_sentinel(address)) for address in url.seeds]

    async def find(self, connect: Connect, spawn: Spawn, known: Collection[Address]) -> Owners:
        """See `Topology`."""
        votes: Counter[Address] = Counter()
        trouble: object = "no sentinel answers"
        asks = [
            sentinel.execute("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master_name) for sentinel in self._sentinels
        ]
        async for reply in _arriving(asks, spawn):
            try:
                votes[_named_master(reply, self._master_name)] += 1
            except DirectoryError as error:
                trouble = error
            if votes and max(votes.values()) > len(self._sentinels) / 2:
                break
        if not votes:
            raise DirectoryUnavailable(f"the sentinels name no master: {trouble}")
        most = max(votes.values())
        named = [address for address, count in votes.items() if count == most]
        failing = {address for address in known if connect(address).has_failed}
        return (min(named, key=lambda address: (address in failing, address not in known)),) * PARTITIONS

    async def aclose(self) -> None:
        """See `Topology`."""
        await asyncio.gather(*(sentinel.aclose() for sentinel in self._sentinels))


class ClusterSlots:
    """Each partition is one slot of a cluster, and moves with it.

    The table is kept twice, half of the slots apart, so that it survives the death of a shard without replicas.
    """

    table_homes: tuple[int, ...] = schema.TABLE_HOMES_IN_A_CLUSTER
    groups: tuple[tuple[int, ...], ...] = tuple((partition,) for partition in EVERY_PARTITION)
    follows_redirects = True
    believed_s = float("inf")
    known: Owners | None = None

    def __init__(self, url: ServerUrl) -> None:
        self._seeds = url.seeds

    async def find(self, connect: Connect, spawn: Spawn, known: Collection[Address]) -> Owners:
        """See `Topology`. Those asked are drawn at random, so that not all clients ask the same one."""
        candidates = _shuffled(known) + _shuffled(set(self._seeds) - set(known))
        trouble: object = "none is known"
        for start in range(0, len(candidates), ASKED_AT_ONCE):
            asked = candidates[start : start + ASKED_AT_ONCE]
            async for reply in _arriving([_slots_of(connect(address)) for address in asked], spawn):
                if isinstance(reply, tuple):
                    return reply
                trouble = reply
        is_answered = isinstance(trouble, ResponseError | DirectoryError)
        if is_answered and not isinstance(trouble, (*UNREACHED, DirectoryUnavailable)):
            raise DirectoryError(f"the servers don't say how the cluster is divided: {trouble}")
        raise DirectoryUnavailable(f"no server of the cluster answers: {trouble}")

    async def aclose(self) -> None:
        """See `Topology`."""


TOPOLOGIES: dict[Kind, Callable[[ServerUrl], Topology]] = {
    "single": SingleServer,
    "sentinel": SentinelMaster,
    "cluster": ClusterSlots,
}


async def _slots_of(node: RedisNode) -> Owners:
    """The owner of each partition's slot, as a member of the cluster sees it."""
    ranges = await node.execute("CLUSTER", "SLOTS")  # In two words: redis-py leaves the reply as it is.
    owners: list[Address | None] = [None] * PARTITIONS
    if not isinstance(ranges, list):
        raise DirectoryError(f"{node.address} answers CLUSTER SLOTS with {_shown(ranges)}")
    for each in ranges:
        match each:
            case [int(first), int(last), [host, port, *_], *_]:
                # A server that doesn't know its own name leaves it out: it is where it was reached.
                owner = _address(host or node.address.host, port)
            case _:
                raise DirectoryError(f"{node.address} answers CLUSTER SLOTS with the range {_shown(each)}")
        for partition, slot in enumerate(PARTITION_SLOTS):
            if first <= slot <= last:
                owners[partition] = owner
    if not any(owners):
        raise DirectoryUnavailable(f"{node.address} knows no owner of any slot")
    return tuple(owners)


async def _arriving(asks: Sequence[Coroutine[Any, Any, Any]], spawn: Spawn) -> AsyncIterator[Any]:
    """What each ask gives or raises, as it arrives, for `ANSWER_TIMEOUT_S`; what is late ends by its own bound."""
    pending = {spawn(ask) for ask in asks}
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + ANSWER_TIMEOUT_S
    while pending:
        done, pending = await asyncio.wait(
            pending, timeout=max(0.0, ends_at - loop.time()), return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            yield TimeoutError("no answer in time")
            return
        for task in done:
            if task.cancelled():
                yield DirectoryUnavailable("the client was closed")
            else:
                yield task.exception() or task.result()


def _shuffled(addresses: Collection[Address]) -> list[Address]:
    return random.sample(list(addresses), len(addresses))


def _named_master(reply: Any, master_name: str) -> Address:
    match reply:
        case None:
            raise DirectoryUnavailable(f"no sentinel knows a master {master_name!r}")
        case Exception():
            raise DirectoryUnavailable(str(reply) or "no answer in time") from reply
        case [host, port]:
            return _address(host, port)
        case _:
            raise DirectoryError(f"a sentinel answers with {_shown(reply)}")


def _address(host: Any, port: Any) -> Address:
    """An address as servers name it. Raises `DirectoryError` for what can't be one."""
    try:
        address = Address(host.decode() if isinstance(host, bytes) else host, int(port))
        if address.host and address.host.isprintable() and 0 < address.port <= PORT_MAX:
            return address
    except (ValueError, TypeError, AttributeError):
        pass
    raise DirectoryError(f"the servers name one that can't be reached: {_shown((host, port))}")


def _shown(value: Any) -> str:
    """A strange reply, short enough for a log line."""
    return repr(value)[:SHOWN_CHARS_MAX]
