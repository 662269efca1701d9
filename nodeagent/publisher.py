"""Keeps the directory in step with an inventory: coalesces, numbers, sends, and walks when in doubt.

`record` notes the newest state of a key and never waits. A loop of its own takes what is pending, at the pace of its
own round trips: one batch in flight, removals before placements, live changes before a walk. A batch that failed has
an unknown fate: its keys become pending again and go out with their newest states under the next number.

A walk repairs everything, because it begins a new life: (1) register B beside A; (2) wait `SETTLE_S`, in which changes
still go out under A; (3) announce the whole inventory under B, most recently used first, each write removing A's entry
from the same record, with changes and removals of the meantime under B as well; (4) retire A. Reasons to walk: the
start, a partition that returned less than was acknowledged, a life that is unknown or lapsed for longer than a term,
too much pending, and the calendar.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from directory.errors import DirectoryError, DirectoryFull
from directory.interface import BATCH_PLACEMENTS_MAX, LOST, SETTLE_S, Batch, DirectoryWriter
from directory.placements import PARTITIONS, partition_of
from nodeagent.inventory import Inventory
from nodeagent.metrics import AgentMetrics
from nodeagent.registration import Clock, FleetTable, Lives, Sleep

PENDING_KEYS_MAX = 65_536
RETRY_MIN_S = 0.05
RETRY_MAX_S = 2.0
FULL_PAUSE_S = 0.5
STEP_S = 0.05
WALK_INTERVAL_S = 3600.0
WALK_KEYS_PER_S = 100.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Life:
    """A life's numbers: per partition, the last attempt made and the last one acknowledged."""

    incarnation: bytes
    attempts: list[int] = field(default_factory=lambda: [LOST] * PARTITIONS)
    acknowledged: list[int] = field(default_factory=lambda: [LOST] * PARTITIONS)


class Publisher:
    """Announces one inventory under one life at a time (two during a walk).

    `clock` and `sleep` are the only time it knows. All methods belong to the event loop.
    """

    def __init__(
        self,
        directory: DirectoryWriter,
        lives: Lives,
        inventory: Inventory,
        table: FleetTable,
        *,
        clock: Clock,
        sleep: Sleep,
        metrics: AgentMetrics,
        walk_interval_s: float = WALK_INTERVAL_S,
        pending_keys_max: int = PENDING_KEYS_MAX,
    ) -> None:
        self.inventory = inventory
        self.lives = lives
        self._directory = directory
        self._table = table
        self._clock = clock
        self._sleep = sleep
        self._metrics = metrics
        self._walk_interval_s = walk_interval_s
        self._pending_keys_max = pending_keys_max
        self._removals: list[dict[bytes, float]] = [{} for _ in range(PARTITIONS)]
        self._placements: list[dict[bytes, float]] = [{} for _ in range(PARTITIONS)]
        self._in_flight: dict[bytes, float] = {}
        self._queue: list[deque[bytes]] = [deque() for _ in range(PARTITIONS)]
        self._turn = 0
        self._life: _Life | None = None
        self._rising: _Life | None = None
        self._walk_reason: str | None = "start"
        self._walked_at = clock()
        self._full_until = clock()
        self._is_full = False
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()

    @property
    def pending_keys(self) -> int:
        """Keys whose newest state the directory hasn't acknowledged."""
        return sum(map(len, self._removals)) + sum(map(len, self._placements)) + len(self._in_flight)

    @property
    def announced_keys(self) -> int:
        """Keys that the directory is believed to hold for this inventory."""
        if self._life is None:
            return 0
        waiting = sum(map(len, self._placements)) + sum(map(len, self._queue))
        return max(0, len(self.inventory) - waiting)

    def announced_in(self, tier: int) -> int:
        """Keys of one tier that the directory is believed to hold; what is still to be sent counts as of any tier."""
        return max(0, self.announced_keys - len(self.inventory) + self.inventory.held_in(tier))

    @property
    def is_settled(self) -> bool:
        """Whether a life is established, and nothing is pending, in flight, or in doubt."""
        return self._life is not None and self._rising is None and self._walk_reason is None and not self.pending_keys

    @property
    def walk_interval_s(self) -> float:
        """How often everything is announced anew; records expire after two of these."""
        return max(self._walk_interval_s, len(self.inventory) / WALK_KEYS_PER_S)

    def record(self, key: bytes, mask: int) -> None:
        """Note in which tiers `key` is now. Never waits; a state that isn't new only counts as a use."""
        if self.inventory.set(key, mask):
            self._make_pending(key, self._clock())

    def record_in(self, tier: int, key: bytes, mask: int) -> None:
        """Note whether `key` is in one tier (`mask` is the tier's bit, or 0); what is known of others stays."""
        self.record(key, self.inventory.mask(key) & ~tier | mask)

    def record_all(self, states: Mapping[bytes, int]) -> None:
        """Note the whole inventory, least recently used first: keys that aren't in `states` are gone."""
        for key in [key for key in self.inventory if key not in states]:
            self.record(key, 0)
        for key, mask in states.items():
            self.record(key, mask)

    def doubt(self, reason: str) -> None:
        """Announce everything anew, as soon as possible."""
        self._walk_reason = self._walk_reason or reason
        self._wake.set()

    async def settled(self, keys: Iterable[bytes]) -> None:
        """Wait until nothing about `keys` is pending. The caller bounds the wait."""
        waiting = list(keys)
        while waiting := [key for key in waiting if self._is_pending(key)]:
            await self._progress.wait()

    async def run(self) -> None:
        """Publish and renew until cancelled. The directory's failures are counted, and tried again."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish())
            group.create_task(self.lives.run(self._doubt_life, self._walk_by_the_calendar))

    async def stop(self) -> None:
        """Retire every life; call it once `run` has ended."""
        for incarnation in self.lives.incarnations:
            await self.lives.end(incarnation)
        self._life = self._rising = None

    async def _publish(self) -> None:
        pause_s = RETRY_MIN_S
        while True:
            try:
                if self._walk_reason is not None:
                    await self._walk()
                elif not await self._send_pending(self._life, None):
                    await self._wake.wait()
                    self._wake.clear()
                pause_s = RETRY_MIN_S
            except DirectoryError as error:
                logger.debug("announcing failed, trying again: %s", error)
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)
            except Exception:  # the edge of the loop: whatever it was, a new life repairs it
                logger.exception("announcing met a fault; everything is announced anew")
                self.doubt("fault")
                await self._sleep(RETRY_MAX_S)

    async def _walk(self) -> None:
        """Begin a new life and leave the old one behind. What fails half way begins again with another life."""
        reason, self._walk_reason = self._walk_reason or "start", None
        self._walked_at = self._clock()
        old = self._life
        try:
            new = self._rising = _Life(await self.lives.begin())
            await self._settle(old)
            await self._announce_all(new, old)
        except Exception:
            self._walk_reason = self._walk_reason or reason
            await self._abandon()
            raise
        self._life, self._rising = new, None
        self._metrics.walks.labels(reason).inc()
        if old is not None:
            await self.lives.end(old.incarnation)

    async def _abandon(self) -> None:
        rising, self._rising = self._rising, None
        for queue in self._queue:
            queue.clear()
        if rising is not None:
            await self.lives.end(rising.incarnation)

    async def _settle(self, old: _Life | None) -> None:
        """Let every writer hear of the new life before it places anything."""
        until = self._clock() + SETTLE_S
        while (left_s := until - self._clock()) > 0:
            try:
                if old is not None and await self._send_pending(old, None):
                    continue
            except DirectoryError as error:
                logger.debug("announcing failed, trying again: %s", error)
            await self._sleep(min(STEP_S, left_s))

    async def _announce_all(self, new: _Life, old: _Life | None) -> None:
        if self._walk_reason == "overflow":
            self._walk_reason = None  # what overflowed is in the inventory that is announced now
        for key in self.inventory.newest_first():
            self._queue[partition_of(key)].append(key)
        replaces = old.incarnation if old is not None else None
        pause_s = RETRY_MIN_S
        while self._walk_reason is None:
            try:
                if not await self._send_pending(new, replaces) and not await self._send_queued(new, replaces):
                    return
                pause_s = RETRY_MIN_S
            except DirectoryError as error:
                logger.debug("a walk's batch failed, trying again: %s", error)
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)
        raise DirectoryError(f"the walk begins again: {self._walk_reason}")

    async def _send_pending(self, life: _Life | None, replaces: bytes | None) -> bool:
        """Send one batch of changes, removals first. Returns whether there is, or may soon be, more to do."""
        if life is None:
            return False
        partition = self._next_partition(self._removals)
        if partition is not None:
            await self._send(life, partition, self._take(self._removals[partition]), replaces)
            return True
        partition = self._next_partition(self._placements)
        if partition is None:
            return False
        if self._clock() < self._full_until:
            await self._sleep(STEP_S)
            return True
        await self._send(life, partition, self._take(self._placements[partition]), replaces)
        return True

    async def _send_queued(self, life: _Life, replaces: bytes | None) -> bool:
        """Send one batch of the walk; keys that are gone by now have been, or will be, sent as removals."""
        partition = self._next_partition(self._queue)
        if partition is None:
            return False
        queue, now = self._queue[partition], self._clock()
        keys = [queue.popleft() for _ in range(min(len(queue), BATCH_PLACEMENTS_MAX))]
        held = {key: now for key in keys if self.inventory.mask(key)}
        if held:
            await self._send(life, partition, held, replaces, is_walk=True)
        return True

    async def _send(
        self, life: _Life, partition: int, keys: dict[bytes, float], replaces: bytes | None, is_walk: bool = False
    ) -> None:
        """Send the newest states of `keys`, which are pending again if it fails. Raises `DirectoryError`."""
        life.attempts[partition] += 1
        attempt = life.attempts[partition]
        states = tuple((key, self.inventory.mask(key)) for key in keys)
        batch = Batch(
            incarnation=life.incarnation,
            partition=partition,
            attempt=attempt,
            states=states,
            ttl_s=2 * self.walk_interval_s,
            known=self._known(life),
            replaces=replaces,
            acknowledged=life.acknowledged[partition],
        )
        self._in_flight = keys
        is_removal = not any(mask for _, mask in states)
        try:
            held = await (self._directory.withdraw(batch) if is_removal else self._directory.place(batch))
        except BaseException as error:
            self._in_flight = {}
            for key, since in keys.items():
                self._make_pending(key, since)
            if isinstance(error, DirectoryFull):
                if not self._is_full:
                    self._is_full = True
                    self._metrics.degraded.labels("directory_full").inc()
                    logger.warning(
                        "the directory takes no more placements, trying again every %g s: %s", FULL_PAUSE_S, error
                    )
                self._full_until = self._clock() + FULL_PAUSE_S
            if isinstance(error, DirectoryError):
                self._metrics.directory_errors.labels("withdraw" if is_removal else "place").inc()
            self._note_progress()
            raise
        self._in_flight = {}
        self._is_full = self._is_full and is_removal
        if held < life.acknowledged[partition]:
            self.doubt("lost_writes")
        elif held >= attempt:
            self.doubt("overtaken")
        life.acknowledged[partition] = attempt
        if not is_walk:
            self._metrics.announce_lag.observe(max(0.0, self._clock() - min(keys.values())))
        self._note_progress()

    def _known(self, life: _Life) -> frozenset[bytes] | None:
        known = self._table.known()
        return None if known is None else known | {life.incarnation, *self.lives.incarnations}

    def _make_pending(self, key: bytes, since: float) -> None:
        partition = partition_of(key)
        removals, placements = self._removals[partition], self._placements[partition]
        since = min(since, removals.pop(key, since), placements.pop(key, since))
        side = placements if self.inventory.mask(key) else removals
        side[key] = since
        if self.pending_keys > self._pending_keys_max:
            for states in (*self._removals, *self._placements):
                states.clear()
            self.doubt("overflow")
        self._wake.set()

    def _is_pending(self, key: bytes) -> bool:
        partition = partition_of(key)
        return key in self._removals[partition] or key in self._placements[partition] or key in self._in_flight

    def _next_partition(self, work: list[dict[bytes, float]] | list[deque[bytes]]) -> int | None:
        """The next partition, in turn, that has work."""
        for step in range(PARTITIONS):
            partition = (self._turn + step) % PARTITIONS
            if work[partition]:
                self._turn = (partition + 1) % PARTITIONS
                return partition
        return None

    @staticmethod
    def _take(pending: dict[bytes, float]) -> dict[bytes, float]:
        keys = list(islice(pending, BATCH_PLACEMENTS_MAX))
        return {key: pending.pop(key) for key in keys}

    def _note_progress(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    def _doubt_life(self, incarnation: bytes, reason: str) -> None:
        """A life is in doubt; the one that a walk leaves behind anyway is no reason for another walk."""
        newest = self._rising or self._life
        if newest is not None and incarnation == newest.incarnation:
            self.doubt(reason)

    def _walk_by_the_calendar(self) -> None:
        if self._rising is None and self._clock() - self._walked_at > self.walk_interval_s:
            self.doubt("calendar")
