"""NodeTiers: which blocks a node holds in which tiers, under the agent's own eviction and write policies.

As engine and agent do it: a prompt's blocks are in `gpu` while it runs, and stay until others take their place. What
was computed is put into `dram` as well when its prefill ends; what `gpu` lacks is opened from `dram`, and what that
lacks is read into it from `nvme`. What is written to `nvme`, and when, the write policy says; a write is done at once.
A tier's victims are gone from that tier. Blocks of running requests are held in `gpu`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from directory.tiers import Tier, fastest
from nodeagent.tiers.eviction import POLICIES, EvictionPolicy
from nodeagent.tiers.write_policy import WRITE_POLICIES, Moment
from warmroute.replay.hardware import TierBlocks

GPU, DRAM, NVME = int(Tier.GPU), int(Tier.DRAM), int(Tier.NVME)


@dataclass(slots=True)
class TierChanges:
    """Newest states to announce: (key, mask) of the engine's own tier, and of its host's."""

    own: dict[bytes, int] = field(default_factory=dict)
    host: dict[bytes, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.own or self.host)


class NodeTiers:
    """The blocks of one node. `eviction` names the policy of every tier, `write` what is written to `nvme`."""

    def __init__(self, blocks: TierBlocks, write: str = "reuse", eviction: str = "lru") -> None:
        self._limits = {GPU: blocks.gpu, DRAM: blocks.dram, NVME: blocks.nvme if blocks.dram else 0}
        self._orders = {tier: POLICIES[eviction]() for tier in self._limits}
        self._sizes = dict.fromkeys(self._limits, 0)
        self._masks: dict[bytes, int] = {}
        self._links: dict[bytes, tuple[bytes | None, int]] = {}
        self._holds: Counter[bytes] = Counter()
        self._private = 0
        self._write = WRITE_POLICIES[write]()
        self.written_blocks = 0
        """Blocks written to `nvme`."""

    def match(self, keys: Sequence[bytes]) -> list[Tier]:
        """The tiers of the unbroken run of blocks from the first: of each the fastest that holds it."""
        run = []
        for key in keys:
            tier = fastest(self._masks.get(key, 0))
            if tier is None:
                break
            run.append(tier)
        return run

    def host_holds(self, key: bytes) -> bool:
        """Whether the agent could give this block to another host."""
        return self._masks.get(key, 0) > GPU

    def size(self, tier: Tier) -> int:
        """Blocks in a tier."""
        return self._sizes[int(tier)]

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

    def open(self, keys: Sequence[bytes]) -> TierChanges:
        """A prompt begins with these blocks, all of which are held: they are loaded into `gpu` where it lacks them."""
        changes = TierChanges()
        lacking = [(key, self._masks[key]) for key in keys if not self._masks[key] & GPU]
        self._enter(NVME, keys, {key for key, mask in lacking if mask & NVME}, changes)
        self._enter(DRAM, keys, {key for key, _ in lacking}, changes)
        self._offer(Moment.HIT, [key for key, mask in lacking if mask & DRAM], changes)
        self._enter(GPU, keys, set(keys), changes)
        self._settle(changes)
        return changes

    def store(self, keys: Sequence[bytes], computed: int) -> TierChanges:
        """A prompt is prefilled: its blocks are in `gpu`, and the last `computed` of them are put into `dram`."""
        changes = TierChanges()
        new = set(keys[len(keys) - computed :])
        self._enter(GPU, keys, set(keys), changes)
        stored = [key for key in keys[len(keys) - computed :] if not self._masks[key] & DRAM]
        self._enter(DRAM, keys, new, changes)
        self._offer(Moment.STORED, stored, changes)
        self._settle(changes)
        return changes

    def receive(self, keys: Sequence[bytes], position: int) -> TierChanges:
        """A block came from another host: the one at `position` of this chain. It isn't offered to `nvme`."""
        changes = TierChanges()
        self._enter(DRAM, keys[: position + 1], {keys[position]}, changes)
        self._settle(changes)
        return changes

    def _enter(self, tier: int, chain: Sequence[bytes], wanted: set[bytes], changes: TierChanges) -> None:
        """Those of a chain that are `wanted` are in this tier from now on, the newest of all."""
        if not wanted or not self._limits[tier]:
            return
        order: EvictionPolicy = self._orders[tier]
        parent: bytes | None = None
        last = b""
        for position, key in enumerate(chain):
            if key in wanted:
                if not self._masks.get(key, 0) & tier:
                    self._links[key] = (parent, position)
                    self._set(key, tier, True, changes)
                    order.add_oldest(key, parent, position)
                last = key
            elif last:
                order.touch(last)
                last = b""
            parent = key
        if last:
            order.touch(last)  # with its ancestors after it: a whole stretch in one walk

    def _offer(self, moment: Moment, keys: Sequence[bytes], changes: TierChanges) -> None:
        """Write those to `nvme` for which it is time, and which aren't there. All are in `dram`."""
        if moment not in self._write.moments or not self._limits[NVME]:
            return
        order = self._orders[NVME]
        for key in keys:
            if self._write.is_due(moment, key) and not self._masks[key] & NVME:
                self._set(key, NVME, True, changes)
                order.add(key, *self._links[key])
                self.written_blocks += 1

    def _settle(self, changes: TierChanges) -> None:
        """Let each tier's victims go until none holds more than its limit, held blocks aside."""
        for tier, order in self._orders.items():
            limit = self._limits[tier] - (self._private if tier == GPU else 0)
            excess = self._sizes[tier] - max(0, limit)
            if excess <= 0:
                continue
            victims = order.take_victims(excess, self._is_held if tier == GPU else _nobody_holds)
            if tier == DRAM:
                self._offer(Moment.AGED, victims, changes)
            for victim in victims:
                self._set(victim, tier, False, changes)
                if not self._masks[victim]:
                    del self._masks[victim], self._links[victim]

    def _set(self, key: bytes, tier: int, is_there: bool, changes: TierChanges) -> None:
        mask = self._masks.get(key, 0)
        self._masks[key] = mask = mask | tier if is_there else mask & ~tier
        self._sizes[tier] += 1 if is_there else -1
        if tier == GPU:
            changes.own[key] = mask & GPU
        else:
            changes.host[key] = mask & ~GPU

    def _is_held(self, key: bytes) -> bool:
        return key in self._holds


def _nobody_holds(_: bytes) -> bool:
    return False
