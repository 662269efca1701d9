"""From DRAM to NVMe: at every moment of a chunk's life, asks the write policy and the pins, and offers it to the tier.

Nothing here waits. What is offered is written by the tier in its turn, or counted as refused, with one reason. A chunk
that is to be written before it is evicted is offered while it is among the oldest: it is found and served until then,
and an eviction never waits for a drive. Where the drive is slower than what comes in, chunks are gone before their
turn (`nvme_evicted_first`).
"""

from collections.abc import Iterable, Sequence

from nodeagent.labels import ChunkLabel
from nodeagent.tiers.dram import FREE_SLOTS_FRACTION, DramTier
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.hierarchy import Hierarchy
from nodeagent.tiers.write_policy import Ageing, Moment, Pins, WritePolicy


class Admission:
    """What one host writes to NVMe. `pins` may change at any time."""

    def __init__(self, policy: WritePolicy, pins: Pins, dram: DramTier, nvme: NvmeTier) -> None:
        self.policy = policy
        self.pins = pins
        self._dram = dram
        self._nvme = nvme
        self._ageing: Ageing | None = None

    def note_stored(self, key: bytes) -> None:
        """This chunk was put into DRAM."""
        self._offer(Moment.STORED, [key])

    def note_hit(self, keys: Sequence[bytes]) -> None:
        """These chunks were opened from DRAM."""
        self._offer(Moment.HIT, keys)

    def note_slot_taken(self) -> None:
        """A slot is about to be taken, so a chunk may be about to go."""
        hierarchy = self._dram.hierarchy
        if hierarchy is None or not (Moment.AGED in self.policy.moments or self.pins):
            return
        arena = hierarchy.arena
        if self._ageing is None:
            self._ageing = Ageing(arena.slots)
        if arena.free_slots > arena.slots // FREE_SLOTS_FRACTION + self._ageing.ahead:
            return
        if self._ageing.is_time():
            self._offer(Moment.AGED, self._ageing.take_aged(hierarchy.oldest(self._ageing.ahead)))

    def _offer(self, moment: Moment, keys: Iterable[bytes]) -> None:
        hierarchy = self._dram.hierarchy
        is_asked = moment in self.policy.moments
        if hierarchy is None or not (is_asked or self.pins):
            return
        for key in keys:
            is_due = is_asked and self.policy.is_due(moment, key)
            if is_due or (self.pins and not self._nvme.holds(key) and self._is_pinned(hierarchy, key)):
                self._nvme.offer(hierarchy, key)

    def _is_pinned(self, hierarchy: Hierarchy, key: bytes) -> bool:
        def find(wanted: bytes) -> ChunkLabel | None:
            held = hierarchy.find(wanted) or self._nvme.find(wanted)
            return held.label if held is not None else None

        return self.pins.covers(find(key), find)
