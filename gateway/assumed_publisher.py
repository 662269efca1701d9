"""AssumedPublisher: tells the other gateways what this one assumes engines without an agent to hold.

Each such engine has lives in the directory that belong to this gateway, and are written as an agent writes its own
(`directory.interface`). What is assumed is forgotten within minutes anyway, so all repair is one and the same thing: a
life ends after `LIFE_S`, or with any doubt (a lost write, a lapse, a batch of unknown fate), and all that is assumed is
announced anew under the next. So nothing has to be asked again, and no partition forgets a life. What can't be told is
known here nevertheless: it costs the other gateways hits, and nothing else.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from directory.errors import DirectoryError
from directory.interface import BATCH_PLACEMENTS_MAX, LOST, Batch, DirectoryWriter
from directory.members import GatewayRegistration, Load, draw_incarnation
from directory.placements import PARTITIONS, partition_of
from directory.tiers import Tier
from gateway.fleet import FleetTable
from gateway.routing.assumed import AssumedPlacements

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
LIFE_S = 300.0
"""Less than the time after which a partition forgets a life that it doesn't hear of."""
TERM_S, RENEW_S = 15.0, 4.0
BATCHES_MAX = 32
"""Batches sent in one interval, one after the other: what is assumed isn't urgent."""
RETRY_S = 5.0
RETIRE_S = 1.0
"""How long ending all lives may take at the end; after that they end by themselves, a term later."""
ENGINES_MAX = 256
"""Engines of which the others are told."""
PENDING_MAX = 16_384
"""Keys of an engine that wait to be told, beyond those it holds; with more of them all is told anew."""


@dataclass(eq=False, slots=True)
class _Life:
    incarnation: bytes
    begun_at: float
    renewed_at: float
    attempts: list[int] = field(default_factory=lambda: [LOST] * PARTITIONS)


@dataclass(eq=False, slots=True)
class _Told:
    """What is told of one engine: `pending` keys, the oldest first, whose newest state wasn't. `left` is the life that
    is believed until all is told under `life`."""

    life: _Life | None = None
    left: bytes | None = None
    pending: dict[bytes, None] = field(default_factory=dict)
    is_doubtful: bool = False
    is_overfull: bool = False


class AssumedPublisher:
    """Tells until cancelled; then ends its lives. `gateway` names this one, whose own lives are in `own_lives`."""

    def __init__(
        self,
        directory: DirectoryWriter,
        gateway: GatewayRegistration,
        assumed: AssumedPlacements,
        table: Callable[[], FleetTable],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_error: Callable[[str], None] = lambda op: None,
    ) -> None:
        self._directory, self._gateway, self._assumed, self._table = directory, gateway, assumed, table
        self._clock, self._sleep, self._on_error = clock, sleep, on_error
        self._told: dict[str, _Told] = {}
        self._own: dict[bytes, float] = {}
        self._retry_at = float("-inf")
        self._is_reachable = True
        assumed.on_change = self.note

    @property
    def own_lives(self) -> Collection[bytes]:
        """This gateway's lives: what it assumes itself it needn't ask for."""
        return self._own.keys()

    def note(self, engine: str, key: bytes, is_there: bool) -> None:
        """What is assumed has changed. Never waits, and remembers at most `PENDING_MAX` keys beyond those assumed."""
        told = self._told.get(engine)
        if told is None:
            if not is_there or len(self._told) >= ENGINES_MAX:
                return
            told = self._told.setdefault(engine, _Told())
        told.pending[key] = None
        if len(told.pending) > PENDING_MAX + self._assumed.count(engine):
            told.pending.clear()
            told.is_overfull = True

    async def run(self) -> None:
        """Tell until cancelled; then end this gateway's lives."""
        try:
            while True:
                try:
                    await self.tell()
                except Exception:  # the edge of the loop: what is assumed is worth less than the requests it came of
                    logger.exception("telling what is assumed met a fault")
                    self._doubt_all()
                await self._sleep(INTERVAL_S)
        finally:
            await self._retire_all()

    async def tell(self) -> None:
        """Tell what has changed, at most `BATCHES_MAX` batches of it; renew lives, and begin those that are due."""
        now = self._clock()
        self._assumed.expire(now)
        if now < self._retry_at:
            return
        try:
            left = BATCHES_MAX
            holding = self._assumed.engines()
            for engine in list(self._told):
                left -= await self._tell_of(engine, engine in holding, left)
        except DirectoryError as error:
            self._note_failure(error)
            return
        if not self._is_reachable:
            self._is_reachable = True
            logger.info("the other gateways are told again what is assumed of engines without an agent")

    async def _tell_of(self, engine: str, is_holding: bool, batches_max: int) -> int:
        """Tell of one engine, and say how many batches that took. Raises `DirectoryError`."""
        told, now = self._told[engine], self._clock()
        view = self._table().engines.get(engine)
        if not is_holding or view is None or view.registration is not None:
            await self._end(engine)
            return 0
        is_over = told.life is None or now - told.life.begun_at >= LIFE_S
        if is_over or told.is_doubtful or told.is_overfull:
            await self._begin(engine, view.url, told)
        assert told.life is not None
        if now - told.life.renewed_at >= RENEW_S:
            renewal = await self._directory.renew(told.life.incarnation, Load(), TERM_S)
            told.is_doubtful |= not renewal.known or renewal.lapsed_s > 0
            told.life.renewed_at = now
        sent = 0
        while told.pending and sent < batches_max:
            await self._send(engine, told, told.life)
            sent += 1
        if not told.pending and told.left is not None:
            left, told.left = told.left, None
            await self._directory.retire(left)
        return sent

    async def _begin(self, engine: str, url: str, told: _Told) -> None:
        """Begin a life and announce everything under it, the most recently used first. Raises `DirectoryError`."""
        now, life = self._clock(), draw_incarnation()
        self._own = {each: until for each, until in self._own.items() if until > now}
        self._own[life] = now + 2 * LIFE_S + TERM_S
        row = GatewayRegistration(self._gateway.gateway, self._gateway.url, engine, url)
        await self._directory.register(life, row, Load(), TERM_S)
        if told.life is not None:
            if told.left is not None:
                await self._directory.retire(told.left)
            told.left = told.life.incarnation
        told.life, told.is_doubtful, told.is_overfull = _Life(life, now, now), False, False
        told.pending = {**dict.fromkeys(reversed(self._assumed.held(engine))), **told.pending}

    async def _send(self, engine: str, told: _Told, life: _Life) -> None:
        """Send the oldest pending keys of one partition. A batch that isn't answered leaves the life in doubt."""
        partition = partition_of(next(iter(told.pending)))
        keys = [key for key in told.pending if partition_of(key) == partition][:BATCH_PLACEMENTS_MAX]
        acknowledged = life.attempts[partition]
        life.attempts[partition] += 1
        batch = Batch(
            incarnation=life.incarnation,
            partition=partition,
            attempt=life.attempts[partition],
            states=tuple((key, int(Tier.GPU) if self._assumed.holds(engine, key) else 0) for key in keys),
            ttl_s=2 * LIFE_S,
            replaces=told.left,
            acknowledged=acknowledged,
        )
        was_doubtful, told.is_doubtful = told.is_doubtful, True
        before = await self._directory.place(batch)
        told.is_doubtful = was_doubtful or before < acknowledged
        for key, mask in batch.states:
            if self._assumed.holds(engine, key) == bool(mask):  # else it has changed meanwhile
                told.pending.pop(key, None)

    async def _end(self, engine: str) -> None:
        told = self._told[engine]
        if told.left is not None:
            await self._directory.retire(told.left)
        if told.life is not None:
            await self._directory.retire(told.life.incarnation)
        del self._told[engine]

    async def _retire_all(self) -> None:
        try:
            async with asyncio.timeout(RETIRE_S):
                for engine in list(self._told):
                    await self._end(engine)
        except (DirectoryError, TimeoutError) as error:
            logger.info("what is assumed could not be withdrawn and will lapse: %s", error)

    def _doubt_all(self) -> None:
        for told in self._told.values():
            told.is_doubtful = True

    def _note_failure(self, error: DirectoryError) -> None:
        self._retry_at = self._clock() + RETRY_S
        self._on_error("assume")
        if self._is_reachable:
            self._is_reachable = False
            logger.warning("the other gateways aren't told what is assumed of engines without an agent: %s", error)
