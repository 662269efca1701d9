"""One partition's way to the directory: what is still to be said there, in which order, and when it may be tried again.

A partition may live on a shard of its own, so each has its own queue, its own one batch in flight, its own back-off: a
shard that is dead or slow holds up nobody else. What waits is bounded. Placements that find no room are forgotten,
because the inventory has them: the lane is *behind*, and says its whole partition again later. Removals that find no
room can't be had from anywhere, and only a new life repairs that.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from directory.interface import BATCH_PLACEMENTS_MAX, LOST
from directory.members import RENEW_INTERVAL_S
from directory.placements import PARTITIONS
from nodeagent.inventory import Walk

RETRY_MIN_S = 0.05
RETRY_MAX_S = 4.0
QUIET_S = (PARTITIONS - 1) * RENEW_INTERVAL_S
"""A partition that hasn't heard of a life for so long is sent an empty batch; they take turns, one a renewal. So during
a walk, with two lives, each is heard of every 32 s at the latest, where a partition forgets in `REMEMBERED_S`."""


@dataclass(slots=True)
class Life:
    """A life's numbers: per partition, the last attempt made, the last one acknowledged, and when that was sent."""

    incarnation: bytes
    attempts: list[int] = field(default_factory=lambda: [LOST] * PARTITIONS)
    acknowledged: list[int] = field(default_factory=lambda: [LOST] * PARTITIONS)
    heard_at: list[float] = field(default_factory=lambda: [float("-inf")] * PARTITIONS)

    def is_fate_unknown(self, partition: int) -> bool:
        """Whether a batch may still be under way that nobody waits for."""
        return self.attempts[partition] > self.acknowledged[partition]

    def has_spoken(self, partition: int) -> bool:
        """Whether a batch was ever sent there."""
        return self.attempts[partition] > LOST


class Lane:
    """The pending keys of one partition, with the time of each one's oldest change that isn't acknowledged."""

    def __init__(self, partition: int, keys_max: int) -> None:
        self.partition = partition
        self.removals: dict[bytes, float] = {}
        self.placements: dict[bytes, float] = {}
        self.walk = Walk()
        """What is announced anew, most recently used first."""
        self.in_flight: dict[bytes, float] = {}
        self.is_walking = False
        """Whether what is in flight is a walk's."""
        self.is_behind = False
        self.has_forgotten = False
        """Whether removals found no room since the life that speaks began."""
        self.heartbeat_of: Life | None = None
        """A life of which the partition is to hear: it would forget one that it never hears of."""
        self.fenced: Life | None = None
        """An earlier life with a batch of unknown fate: it must be overtaken before anything else is said."""
        self.lock = asyncio.Lock()
        self.wake = asyncio.Event()
        self.failures = 0
        self.retry_at = 0.0
        self._keys_max = keys_max

    @property
    def pending_keys(self) -> int:
        """Changes that aren't acknowledged."""
        return len(self.removals) + len(self.placements) + len(self.in_flight)

    @property
    def has_changes(self) -> bool:
        """Whether there is something more urgent than a walk."""
        return bool(self.removals or self.placements or self.fenced)

    @property
    def is_announcing(self) -> bool:
        """Whether a part of the inventory is still to be announced."""
        return bool(self.walk) or self.is_walking or self.is_behind

    def is_pending(self, key: bytes) -> bool:
        """Whether a change of `key` isn't acknowledged."""
        return key in self.removals or key in self.placements or (key in self.in_flight and not self.is_walking)

    def note(self, key: bytes, since: float, is_held: bool) -> None:
        """Note that a key changed."""
        since = min(since, self.removals.pop(key, since), self.placements.pop(key, since))
        if not is_held:
            self.removals[key] = since
        elif not self.is_behind:
            self.placements[key] = since
        self.wake.set()
        if self.pending_keys <= self._keys_max:
            return
        if self.placements:
            self.placements.clear()
            self.is_behind = True
        else:
            self.removals.clear()
            self.has_forgotten = True

    def announce(self, walk: Walk) -> None:
        """Say the whole partition by a new walk. Placements are in it."""
        self.placements.clear()
        self.is_behind = False
        self.walk = walk
        self.wake.set()

    def take_removals(self) -> dict[bytes, float]:
        """One batch of removals, oldest first."""
        return _take(self.removals)

    def take_placements(self) -> dict[bytes, float]:
        """One batch of placements, oldest first."""
        return _take(self.placements)

    def take_walk(self, now: float) -> dict[bytes, float]:
        """One batch of what is announced anew."""
        return dict.fromkeys(self.walk.take(BATCH_PLACEMENTS_MAX), now)

    def ask_for_heartbeat(self, lives: Iterable[Life], now: float) -> bool:
        """Owe the partition a heartbeat of the life of which it hasn't heard for longest, if that is `QUIET_S` or more.

        Returns whether there is one: among `lives` that it was told something under, and unless it is asked already.
        """
        if self.failures or self.heartbeat_of is not None:
            return False
        told = (life for life in lives if life.has_spoken(self.partition))
        longest = min(told, key=lambda life: life.heard_at[self.partition], default=None)
        if longest is None or now - longest.heard_at[self.partition] < QUIET_S:
            return False
        self.heartbeat_of = longest
        self.wake.set()
        return True

    def note_answer(self, now: float) -> None:
        """The partition answers."""
        self.failures, self.retry_at = 0, now

    def note_failure(self, now: float, chance: float) -> None:
        """The partition doesn't answer: wait twice as long each time, up to `RETRY_MAX_S`, with `chance` of 0 to 1."""
        pause_s = min(RETRY_MIN_S * 2 ** min(self.failures, 16), RETRY_MAX_S)
        self.failures += 1
        self.retry_at = now + pause_s * (1 - chance / 4)


def _take(pending: dict[bytes, float]) -> dict[bytes, float]:
    keys = list(islice(pending, BATCH_PLACEMENTS_MAX))
    return {key: pending.pop(key) for key in keys}
