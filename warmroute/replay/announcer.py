"""Announcer: the replayed fleet's placements in a real MemoryDirectory, read and written without an event loop."""

from collections.abc import Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from directory.interface import BATCH_PLACEMENTS_MAX, LOST, Batch
from directory.members import INCARNATION_BYTES, REMEMBERED_S
from directory.memory import MemoryDirectory
from directory.placements import PrefixMatch, Reach, ReachTable, partition_of
from warmroute.replay.node_tiers import TierChanges
from warmroute.replay.trace import block_key

PARTITION = partition_of(block_key(0))
TTL_S = 1e9
"""Records outlive the replay: no walk renews them here."""
Result = TypeVar("Result")


class Announcer:
    """Writes what nodes hold, and says how far each engine's prefix reaches. Engines are named by their number."""

    def __init__(self, directory: MemoryDirectory, engines: Sequence[str]) -> None:
        self._directory = directory
        self._own = [_life(2 * number) for number in range(len(engines))]
        self._hosts = [_life(2 * number + 1) for number in range(len(engines))]
        self._attempts: dict[bytes, int] = {}
        self._spoke_at: dict[bytes, float] = {}
        lives = list(zip(engines, self._own, self._hosts, strict=True))
        self._reach = ReachTable([Reach(engine, frozenset({own}), frozenset({host})) for engine, own, host in lives])
        self._host_reach = ReachTable([Reach(engine, frozenset(), frozenset({host})) for engine, _, host in lives])

    def announce(self, number: int, changes: TierChanges, now: float) -> None:
        """Place what changed on a node. Lives that were silent for long speak up before, or they would be forgotten."""
        if now - min(self._spoke_at.values(), default=now) > REMEMBERED_S / 2:
            for life, spoke_at in list(self._spoke_at.items()):
                if now - spoke_at > REMEMBERED_S / 4:
                    self._send(life, (), now)
        self._place(self._own[number], changes.own, now)
        self._place(self._hosts[number], changes.host, now)

    def matches(self, keys: Sequence[bytes]) -> dict[str, PrefixMatch]:
        """How far each engine reaches over these keys; those without a hit are left out."""
        return self._match(self._reach, keys)

    def host_matches(self, keys: Sequence[bytes]) -> dict[str, PrefixMatch]:
        """How far each engine's host reaches with its own tiers: what others may fetch from it."""
        return self._match(self._host_reach, keys)

    def _match(self, reach: ReachTable, keys: Sequence[bytes]) -> dict[str, PrefixMatch]:
        return reach.match(_at_once(self._directory.lookup(keys, deadline_s=1.0)).records) if keys else {}

    def _place(self, life: bytes, states: Mapping[bytes, int], now: float) -> None:
        left = iter(states.items())
        while batch := tuple(islice(left, BATCH_PLACEMENTS_MAX)):
            self._send(life, batch, now)

    def _send(self, life: bytes, states: tuple[tuple[bytes, int], ...], now: float) -> None:
        last = self._attempts.get(life, LOST)
        attempt = self._attempts[life] = last + 1
        self._spoke_at[life] = now
        _at_once(self._directory.place(Batch(life, PARTITION, attempt, states, TTL_S, acknowledged=last)))


def _life(number: int) -> bytes:
    """An incarnation that differs from all others of this replay; drawn ones would make records differ by run."""
    return (number + 1).to_bytes(INCARNATION_BYTES, "big")


def _at_once(step: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that never waits, as a MemoryDirectory's don't."""
    try:
        step.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("a directory in memory never waits")
