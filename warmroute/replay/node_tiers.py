"""NodeTiers: which blocks a node holds in which tier, under the agent's own eviction policy.

A block is in one tier. What a prompt uses or computes goes to `gpu`; a tier's victims go to the next one that has room
at all; the last tier's are gone. Blocks of running requests are held in `gpu`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from directory.tiers import TIERS, Tier
from nodeagent.tiers.eviction import POLICIES
from warmroute.replay.hardware import TierBlocks


@dataclass(slots=True)
class TierChanges:
    """Newest states to announce: (key, mask) of the engine's own tier, and of its host's."""

    own: dict[bytes, int] = field(default_factory=dict)
    host: dict[bytes, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.own or self.host)


class NodeTiers:
    """The blocks of one node. `eviction` names the policy of every tier."""

    def __init__(self, blocks: TierBlocks, eviction: str = "lru") -> None:
        self._limits = (blocks.gpu, blocks.dram, blocks.nvme)
        self._orders = tuple(POLICIES[eviction]() for _ in TIERS)
        self._sizes = [0] * len(TIERS)
        self._level: dict[bytes, int] = {}
        self._links: dict[bytes, tuple[bytes | None, int]] = {}
        self._holds: Counter[bytes] = Counter()
        self._private = 0

    def match(self, keys: Sequence[bytes]) -> list[Tier]:
        """The tiers of the unbroken run of blocks from the first."""
        run = []
        for key in keys:
            level = self._level.get(key)
            if level is None:
                break
            run.append(TIERS[level])
        return run

    def size(self, tier: Tier) -> int:
        """Blocks in a tier."""
        return self._sizes[TIERS.index(tier)]

    def hold(self, keys: Iterable[bytes]) -> None:
        """A request runs on these blocks; each `hold` is undone by a `release` of as many."""
        self._holds.update(keys)

    def release(self, keys: Iterable[bytes]) -> None:
        """The request is over."""
        for key in keys:
            if self._holds[key] <= 1:
                del self._holds[key]
            else:
                self._holds[key] -= 1

    def reserve_private(self, blocks: int) -> None:
        """`gpu` blocks go to a reply, or (negative) come back from it; no cached block can be there meanwhile."""
        self._private += blocks

    def use(self, keys: Sequence[bytes]) -> TierChanges:
        """A chain of blocks from the root was used or computed: all of it is in `gpu` now, the newest of all."""
        changes = TierChanges()
        if not keys:
            return changes
        parent: bytes | None = None
        for position, key in enumerate(keys):
            if self._level.get(key) != 0:
                self._links[key] = (parent, position)
                self._move(key, 0, changes)
                self._orders[0].add_oldest(key, parent, position)
            parent = key
        self._orders[0].touch(keys[-1])  # with its ancestors after it: the whole chain, in one walk
        self._settle(changes)
        return changes

    def _settle(self, changes: TierChanges) -> None:
        """Let each tier's victims fall until none holds more than its limit, held blocks aside."""
        for level, order in enumerate(self._orders):
            limit = self._limits[level] - (self._private if level == 0 else 0)
            excess = self._sizes[level] - max(0, limit)
            if excess <= 0:
                continue
            below = next((each for each in range(level + 1, len(TIERS)) if self._limits[each]), None)
            for victim in order.take_victims(excess, self._is_held if level == 0 else _nobody_holds):
                self._move(victim, below, changes, is_ordered=False)
                if below is None:
                    del self._links[victim]
                else:
                    self._orders[below].add(victim, *self._links[victim])

    def _move(self, key: bytes, to: int | None, changes: TierChanges, is_ordered: bool = True) -> None:
        before = self._level.pop(key, None)
        if before is not None:
            self._sizes[before] -= 1
            if is_ordered:
                self._orders[before].remove(key)
        if to is not None:
            self._level[key] = to
            self._sizes[to] += 1
        if 0 in (before, to):
            changes.own[key] = int(Tier.GPU) if to == 0 else 0
        if (before or 0) > 0 or (to or 0) > 0:
            changes.host[key] = int(TIERS[to]) if to else 0

    def _is_held(self, key: bytes) -> bool:
        return key in self._holds


def _nobody_holds(_: bytes) -> bool:
    return False
