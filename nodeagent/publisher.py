"""Keeps the directory in step with an inventory: coalesces, numbers, sends, and walks when in doubt.

`record` notes the newest state of a key and never waits. Each partition has a lane (`lane.py`), whose loop takes what
is pending at the pace of its own round trips: one batch in flight, removals before placements. A batch that failed has
an unknown fate: its keys become pending again and go out with their newest states under the next number.
A partition that hasn't heard of a life for a while is sent an empty batch: it would forget it in time, and others prune
its holders. So a loss is noticed without traffic, too.

A walk repairs everything, because it begins a new life: (1) register B beside A; (2) where A is believed, wait until
readers have heard of B, while changes still go out under A; (3) announce the whole inventory under B, each partition's
most recently used first, each write removing A's entry from the same record, with changes and removals of the meantime
under B as well and first; (4) retire A. While a partition doesn't answer, both live on, and the others are done.
Reasons to walk: the start, a partition that returned less than was acknowledged, a life that is unknown or lapsed for
longer than a term, removals that found no room, and the calendar. A doubt during a walk begins another life only after
a pause that grows. Of a walk one batch is in flight per publisher, and then it rests (`rest_s`): fleets walk at once.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping

from directory.errors import DirectoryError, DirectoryFull
from directory.interface import Batch, DirectoryWriter
from directory.members import POLL_INTERVAL_S
from directory.placements import PARTITIONS, partition_of
from nodeagent.inventory import Inventory
from nodeagent.lane import RETRY_MAX_S, RETRY_MIN_S, Lane, Life
from nodeagent.metrics import AgentMetrics
from nodeagent.pacing import LifeSpacing, rest_s
from nodeagent.refusals import Refusals
from nodeagent.registration import Clock, Lives, Sleep

PENDING_KEYS_MAX = 65_536
STEP_S = 0.05
WALK_INTERVAL_S = 3600.0
WALK_KEYS_PER_S = 100.0
WALK_SPREAD_S = 1.0
"""Within which the walks of a fleet that lost its directory at one moment begin."""
INTERVAL_SPREAD = 0.2
"""By which share of the interval a walk by the calendar may be early: a fleet that began together drifts apart."""
READERS_HEAR_S = 2 * POLL_INTERVAL_S
"""How long a walk that leaves a believed life waits: readers that hadn't heard of the next would believe neither."""
_OF_LIVES = ("unknown", "lapsed")
_CHANCE = random.Random()
"""Not the process's own generator: whoever seeds that one would have a fleet drift alike."""

logger = logging.getLogger(__name__)


class Publisher:
    """Announces one inventory under one life at a time (two during a walk).

    `clock` and `sleep` are the only time it knows, `chance` (a number from 0 to 1 each time) what sets a fleet's
    publishers apart. All methods belong to the event loop.
    """

    def __init__(
        self,
        directory: DirectoryWriter,
        lives: Lives,
        inventory: Inventory,
        *,
        clock: Clock,
        sleep: Sleep,
        metrics: AgentMetrics,
        walk_interval_s: float = WALK_INTERVAL_S,
        pending_keys_max: int = PENDING_KEYS_MAX,
        chance: Callable[[], float] = _CHANCE.random,
    ) -> None:
        self.inventory = inventory
        self.lives = lives
        self.refusals = Refusals(lives.name, clock, metrics)
        self._directory = directory
        self._clock = clock
        self._sleep = sleep
        self._metrics = metrics
        self._walk_interval_s = walk_interval_s
        self._chance = chance
        self._lanes = tuple(Lane(each, max(1, pending_keys_max // PARTITIONS)) for each in range(PARTITIONS))
        self._walk_turn = 0
        self._beat_turn = 0
        self._life: Life | None = None
        self._rising: Life | None = None
        self._speaking: Life | None = None
        self._replaces: bytes | None = None
        self._walk_reason: str | None = "start"
        self._walk_due_at = clock() + self._next_interval_s()
        self._spacing = LifeSpacing()
        self._doubted = asyncio.Event()
        self._walkable = asyncio.Event()
        self._progress = asyncio.Event()

    @property
    def pending_keys(self) -> int:
        """Keys whose newest state the directory hasn't acknowledged, those aside that are announced anew anyway."""
        return sum(lane.pending_keys for lane in self._lanes)

    @property
    def announced_keys(self) -> int:
        """Keys that the directory is believed to hold for this inventory."""
        if self._speaking is None:
            return 0
        return max(0, len(self.inventory) - sum(map(self._unsaid_keys, self._lanes)))

    def announced_in(self, tier: int) -> int:
        """Keys of one tier that the directory is believed to hold; what is still to be sent counts as of any tier."""
        return max(0, self.announced_keys - len(self.inventory) + self.inventory.held_in(tier))

    @property
    def is_settled(self) -> bool:
        """Whether a life is established, and nothing is pending, in flight, or in doubt."""
        is_sure = self._life is not None and self._rising is None and self._walk_reason is None
        return is_sure and not any(lane.pending_keys or lane.is_announcing for lane in self._lanes)

    @property
    def trouble(self) -> str | None:
        """What the directory refuses, as a sentence; `None` for nothing that is known."""
        return self.lives.trouble or self.refusals.trouble

    @property
    def walk_interval_s(self) -> float:
        """How often everything is announced anew, at the latest; records expire after two of these."""
        return max(self._walk_interval_s, len(self.inventory) / WALK_KEYS_PER_S)

    def record(self, key: bytes, mask: int) -> None:
        """Note in which tiers `key` is now. Never waits; a state that isn't new only counts as a use."""
        if self.inventory.set(key, mask):
            self._make_pending(self._lanes[partition_of(key)], key, self._clock())

    def record_in(self, tier: int, key: bytes, mask: int) -> None:
        """Note whether `key` is in one tier (`mask` is the tier's bit, or 0); what is known of others stays."""
        if self.inventory.set(key, mask, among=tier):
            self._make_pending(self._lanes[partition_of(key)], key, self._clock())

    def record_all(self, states: Mapping[bytes, int]) -> None:
        """Note the whole inventory, least recently used first: keys that aren't in `states` are gone."""
        for key in [key for key in self.inventory if key not in states]:
            self.record(key, 0)
        for key, mask in states.items():
            self.record(key, mask)

    def doubt(self, reason: str) -> None:
        """Announce everything anew, as soon as possible. That a life isn't believed is the strongest reason."""
        if self._walk_reason is None or reason in _OF_LIVES:
            self._walk_reason = reason
        self._doubted.set()

    async def settled(self, keys: Iterable[bytes]) -> None:
        """Wait until nothing about `keys` is pending. The caller bounds the wait."""
        waiting = list(keys)
        while waiting := [key for key in waiting if self._lanes[partition_of(key)].is_pending(key)]:
            await self._progress.wait()

    async def run(self) -> None:
        """Publish and renew until cancelled. The directory's failures are counted, and tried again."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(self._serve(lane))
            group.create_task(self._announce())
            group.create_task(self._keep_true())
            group.create_task(self.lives.run(self._doubt_life, self._each_second))

    async def stop(self) -> None:
        """Retire every life; call it once `run` has ended."""
        for incarnation in self.lives.incarnations:
            await self.lives.end(incarnation)
        self._life = self._rising = self._speaking = None
        for lane in self._lanes:
            self._note_answer(lane)

    # What changes: a loop for each lane.

    async def _serve(self, lane: Lane) -> None:
        while True:
            try:
                while (left_s := lane.retry_at - self._clock()) > 0:
                    await self._sleep(left_s)
                lane.wake.clear()
                async with lane.lock:
                    is_busy = await self._send_next(lane)
                if not is_busy:
                    await lane.wake.wait()
            except DirectoryError as error:
                logger.debug("partition %d: announcing failed, trying again: %s", lane.partition, error)
            except Exception:  # the edge of the loop: whatever it was, a new life repairs it
                logger.exception("announcing met a fault; everything is announced anew")
                self.doubt("fault")
                await self._sleep(RETRY_MAX_S)

    async def _send_next(self, lane: Lane) -> bool:
        """Send one batch, the most urgent. Returns whether there is, or may soon be, more to do."""
        if self._speaking is None:
            return False
        if lane.fenced is not None:
            await self._send(lane, lane.fenced, {})
            lane.fenced = None
        elif lane.heartbeat_of is not None:  # before what may go on for ever, or wait for room in the directory
            await self._send(lane, lane.heartbeat_of, {})
        elif lane.removals:
            await self._send(lane, self._speaking, lane.take_removals())
        elif lane.placements and self.refusals.must_wait_for_room:
            await self._sleep(STEP_S)
        elif lane.placements:
            await self._send(lane, self._speaking, lane.take_placements())
        elif lane.is_behind:
            self._announce_in(lane)
        elif lane.walk and lane.failures:
            await self._send_walk(lane)  # a lane that failed last doesn't hold the walk up
        else:
            return False
        return True

    async def _send(self, lane: Lane, life: Life, keys: dict[bytes, float]) -> None:
        """Send the newest states of `keys`, which are pending again if it fails. Raises `DirectoryError`."""
        batch = self._number(lane, life, keys)
        is_removal = not any(mask for _, mask in batch.states)
        lane.in_flight, sent_at = keys, self._clock()
        if not is_removal:
            self.refusals.note_try()
        try:
            held = await (self._directory.withdraw(batch) if is_removal else self._directory.place(batch))
        except BaseException as error:
            self._note_error(lane, error, is_removal)
            lane.in_flight = {}
            if lane.is_walking:
                lane.walk.give_back(list(keys))
            else:
                for key, since in keys.items():
                    self._make_pending(lane, key, since)
            self._note_progress()
            raise
        lane.in_flight = {}
        self._note_answer(lane)
        self.refusals.note_taken(lane.partition, is_removal)
        if life is self._speaking:  # what another one lost is said under this one
            if held < life.acknowledged[lane.partition]:
                self.doubt("lost_writes")
            elif held >= batch.attempt:
                self.doubt("overtaken")
            if lane.has_forgotten:
                self.doubt("overflow")  # not sooner: as long as a partition doesn't answer, nobody believes it
        life.acknowledged[lane.partition], life.heard_at[lane.partition] = batch.attempt, sent_at
        if lane.heartbeat_of is life:
            lane.heartbeat_of = None
        if keys and not lane.is_walking:
            self._metrics.announce_lag.observe(max(0.0, self._clock() - min(keys.values())))
        self._note_progress()

    def _number(self, lane: Lane, life: Life, keys: Mapping[bytes, float]) -> Batch:
        """The next attempt, with the newest states."""
        life.attempts[lane.partition] += 1
        return Batch(
            incarnation=life.incarnation,
            partition=lane.partition,
            attempt=life.attempts[lane.partition],
            states=tuple((key, self.inventory.mask(key)) for key in keys),
            ttl_s=2 * self.walk_interval_s,
            replaces=self._replaces if life is self._speaking else None,
            acknowledged=life.acknowledged[lane.partition],
        )

    def _make_pending(self, lane: Lane, key: bytes, since: float) -> None:
        lane.note(key, since, bool(self.inventory.mask(key)))

    def _note_error(self, lane: Lane, error: BaseException, is_removal: bool) -> None:
        if isinstance(error, DirectoryError):
            self._metrics.directory_errors.labels("withdraw" if is_removal else "place").inc()
            self.refusals.note(lane.partition, error)
        if isinstance(error, DirectoryFull) and not is_removal:
            self._note_answer(lane)
        elif isinstance(error, DirectoryError):
            if not lane.failures:
                self._metrics.partitions_failing.inc()
            lane.note_failure(self._clock(), self._chance())

    def _note_answer(self, lane: Lane) -> None:
        if lane.failures:
            self._metrics.partitions_failing.dec()
        lane.note_answer(self._clock())

    def _note_progress(self) -> None:
        self._walkable.set()
        self._progress.set()
        self._progress = asyncio.Event()

    # What is announced anew: one loop for all lanes.

    async def _announce(self) -> None:
        while True:
            self._walkable.clear()
            if any(lane.walk for lane in self._lanes) and self.refusals.must_wait_for_room:
                await self._sleep(STEP_S)
                continue
            lane = self._next_to_walk()
            if lane is None:
                await self._walkable.wait()
                continue
            began_at = self._clock()
            try:
                async with lane.lock:
                    await self._send_walk(lane)
            except DirectoryError as error:
                logger.debug("partition %d: a walk's batch failed: %s", lane.partition, error)
                lane.wake.set()
            except Exception:  # the edge of the loop: whatever it was, a new life repairs it
                logger.exception("announcing met a fault; everything is announced anew")
                self.doubt("fault")
                await self._sleep(RETRY_MAX_S)
            await self._sleep(rest_s(self._clock() - began_at))

    def _next_to_walk(self) -> Lane | None:
        """The next lane, in turn, that is well and has nothing more urgent to say."""
        for step in range(PARTITIONS):
            lane = self._lanes[(self._walk_turn + step) % PARTITIONS]
            if lane.walk and not (lane.has_changes or lane.failures or lane.lock.locked()):
                self._walk_turn = (lane.partition + 1) % PARTITIONS
                return lane
        return None

    async def _send_walk(self, lane: Lane) -> None:
        """Send one batch of the walk; keys that are gone by now have been, or will be, sent as removals."""
        keys = {key: since for key, since in lane.take_walk(self._clock()).items() if self.inventory.mask(key)}
        if not keys or self._speaking is None:
            return
        lane.is_walking = True
        try:
            await self._send(lane, self._speaking, keys)
        finally:
            lane.is_walking = False

    def _announce_in(self, lane: Lane) -> None:
        lane.announce(self.inventory.begin_walk(lane.partition))
        self._walkable.set()

    def _unsaid_keys(self, lane: Lane) -> int:
        if lane.is_behind:
            return self.inventory.keys_in(lane.partition)
        return len(lane.placements) + len(lane.walk)

    # Lives.

    async def _keep_true(self) -> None:
        pause_s = RETRY_MIN_S
        while True:
            try:
                self._doubted.clear()
                if self._walk_reason is None:
                    await self._doubted.wait()
                else:
                    await self._walk()
                    pause_s = RETRY_MIN_S
            except DirectoryError:
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)
            except Exception:  # the edge of the loop: another life is begun
                logger.exception("beginning a life met a fault; trying again")
                self.doubt("fault")
                await self._sleep(RETRY_MAX_S)

    async def _walk(self) -> None:
        """Begin a new life and leave the old one behind. Raises `DirectoryError` where it can't be begun."""
        if self._life is not None:
            spread_s = self._chance() * WALK_SPREAD_S
            await self._sleep(max(self._spacing.next_at - self._clock(), spread_s))
        old, rising = self._life, Life(await self.lives.begin())
        reason, self._walk_reason = self._walk_reason, None
        self._rising = rising
        self._spacing.note_begun(self._clock())
        logger.info("%s begins the life %s, reason: %s", self.lives.name, rising.incarnation.hex(), reason)
        self._walk_due_at = self._clock() + self._next_interval_s()
        if old is not None and reason not in _OF_LIVES:
            await self._sleep(READERS_HEAR_S)
        if self._walk_reason not in _OF_LIVES:
            self._walk_reason = None  # whatever else it is, announcing everything is the answer
            self._speak_as(rising, old)
            for lane in self._lanes:
                lane.has_forgotten = False
                self._announce_in(lane)
            if await self._is_announced():
                self._metrics.walks.labels(reason).inc()
                await self._leave(old, rising)
                return
        await self._leave_unfinished(old, rising)

    async def _is_announced(self) -> bool:
        """Wait until everything is announced; `False` where another life is due before that."""
        while any(lane.is_announcing for lane in self._lanes):
            if self._walk_reason is not None and self._clock() >= self._spacing.next_at:
                return False
            await self._sleep(STEP_S)
        return True

    async def _leave_unfinished(self, old: Life | None, rising: Life) -> None:
        """Go on under the life that has said more, until another one has said everything."""
        unsaid = sum(map(self._unsaid_keys, self._lanes))
        if old is None or (self._speaking is rising and 2 * unsaid <= len(self.inventory)):
            self._speak_as(rising, old)
            await self._leave(old, rising)
            return
        self._speak_as(old, rising)
        await self._leave(rising, old)

    async def _leave(self, left: Life | None, kept: Life) -> None:
        self._life, self._rising = kept, None
        for lane in self._lanes:
            if lane.heartbeat_of is left:
                lane.heartbeat_of = None
        if left is not None:
            await self.lives.end(left.incarnation)

    def _speak_as(self, life: Life, replaced: Life | None) -> None:
        """Say everything from now on under `life`.

        An earlier life's batch of unknown fate may still arrive. It could bring back what is taken back meanwhile, or
        take away what this life said, if it replaced it: so it is overtaken by an empty one before anything else is
        said there.
        """
        before, self._speaking = self._speaking, life
        self._replaces = replaced.incarnation if replaced is not None else None
        for lane in self._lanes:
            if before is not None and before is not life and before.is_fate_unknown(lane.partition):
                lane.fenced = lane.fenced or before
            lane.wake.set()

    def _doubt_life(self, incarnation: bytes, reason: str) -> None:
        """A life is in doubt; the one that a walk leaves behind anyway is no reason for another walk."""
        newest = self._rising or self._life
        if newest is not None and incarnation == newest.incarnation:
            self.doubt(reason)

    def _each_second(self) -> None:
        if self._clock() > self._walk_due_at:
            self.doubt("calendar")  # an unfinished walk as well: what it said expires, while a partition is away
        self._beat()

    def _beat(self) -> None:
        """Let one partition hear of a life that it hasn't heard of lately, and say what it holds of it.

        The life that a walk leaves behind is one as well: until the walk is over, it holds what wasn't said anew.
        """
        lives = [life for life in (self._life, self._rising) if life is not None]
        for step in range(PARTITIONS):
            lane = self._lanes[(self._beat_turn + step) % PARTITIONS]
            if lane.ask_for_heartbeat(lives, self._clock()):
                self._beat_turn = (lane.partition + 1) % PARTITIONS
                return

    def _next_interval_s(self) -> float:
        return self.walk_interval_s * (1 - INTERVAL_SPREAD * self._chance())
