"""LoadPublisher: tells the other gateways what this one has booked, by its registration in the directory.

What has changed is told at once, but for the time that must be between two reports (`EngineLoads.interval_s`). A life
of its own begins with the first report, and each later one is its renewal. Where the directory can't be written,
everybody routes by what they know themselves, and `state` says so.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from directory.errors import DirectoryError
from directory.interface import DirectoryWriter
from directory.members import RENEW_INTERVAL_S, GatewayRegistration, Load, draw_incarnation
from gateway.ledger import Ledger
from gateway.shared_load import EngineLoads, published

RETIRE_S = 1.0
"""How long ending a life may take; after that it ends by itself, a term later."""

logger = logging.getLogger(__name__)


class LoadPublisher:
    """Reports the ledger, whose changes it hears of, until cancelled. `on_error(op)` hears of every failed call."""

    def __init__(
        self,
        directory: DirectoryWriter,
        registration: GatewayRegistration,
        ledger: Ledger,
        loads: EngineLoads,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_error: Callable[[str], None] = lambda op: None,
    ) -> None:
        self._directory, self._registration, self._ledger, self._loads = directory, registration, ledger, loads
        self._clock, self._sleep, self._on_error = clock, sleep, on_error
        self._life: bytes | None = None
        self._reported = -1
        self._due_at = float("-inf")
        self._has_changed = asyncio.Event()
        ledger.on_change = self._has_changed.set
        self.state = "not reported yet"
        """`ok`, or why the other gateways don't hear of this one."""

    async def run(self) -> None:
        """Report until cancelled; then end this gateway's life."""
        try:
            while True:
                try:
                    await self.report()
                except Exception:  # the edge of the loop: a report is worth less than the requests it tells of
                    logger.exception("reporting what is booked met a fault")
                    self.state = "unavailable: it met a fault of the gateway's own"
                await self._sleep(self._loads.interval_s)
                await self._await_news()
        finally:
            await self._retire()

    async def report(self) -> None:
        """Report now, if a report is due: what has changed, or a renewal."""
        now, changes = self._clock(), self._ledger.changes
        if now < self._due_at and not self._has_news():
            return
        self._due_at = now + RENEW_INTERVAL_S
        load = Load(booked=published(self._ledger, now))
        try:
            if self._life is None or not (await self._directory.renew(self._life, load)).known:
                await self._begin(load)
        except DirectoryError as error:
            self._note_failure(error)
            return
        if self.state.startswith("unavailable"):
            logger.info("the directory takes this gateway's reports again")
        self._reported, self.state = changes, "ok"

    def _has_news(self) -> bool:
        """Whether the others should hear more than they do. Who can't be heard tries again with the renewals only."""
        return self._reported != self._ledger.changes and self.state == "ok" and bool(self._loads.gateways)

    async def _await_news(self) -> None:
        """Wait until there is news, or a renewal is due. Nobody to tell, or no way to: the next turn looks again."""
        if self._has_news() or self.state != "ok" or not self._loads.gateways:
            return
        self._has_changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._due_at - self._clock())):
                await self._has_changed.wait()

    async def _begin(self, load: Load) -> None:
        """Begin a life. It is this gateway's own before it is registered: no answer may come, and it exist."""
        self._life = None
        life = draw_incarnation()
        self._loads.disregard(life)
        await self._directory.register(life, self._registration, load)
        self._life = life

    async def _retire(self) -> None:
        if self._life is None:
            return
        try:
            async with asyncio.timeout(RETIRE_S):
                await self._directory.retire(self._life)
        except (DirectoryError, TimeoutError) as error:
            logger.info("this gateway's life could not be retired and will lapse: %s", error)

    def _note_failure(self, error: DirectoryError) -> None:
        self._on_error("register" if self._life is None else "renew")
        if not self.state.startswith("unavailable"):
            logger.warning("the other gateways aren't told what this one has booked: %s", error)
        self.state = f"unavailable: {error}"
