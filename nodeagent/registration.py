"""Who this agent is in the directory: lives that are registered, renewed and retired."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from directory.errors import DirectoryError, RegistrationRefused
from directory.interface import DirectoryWriter
from directory.members import (
    RENEW_INTERVAL_S,
    TERM_S,
    Load,
    Registration,
    draw_incarnation,
    name_of,
)
from nodeagent.metrics import AgentMetrics

DRAWS_MAX = 3
RETIRE_S = 1.0
"""How long ending a life may take; after that it ends by itself, a term later."""

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


class Lives:
    """The lives of one host or engine: one as a rule, two during a walk. Renews them with the newest load."""

    def __init__(
        self,
        directory: DirectoryWriter,
        registration: Registration,
        load: Callable[[], Load],
        sleep: Sleep,
        metrics: AgentMetrics,
    ) -> None:
        self.registration = registration
        self.trouble: str | None = None
        """Why the directory didn't take the last registration or renewal; `None` where it did."""
        self._directory = directory
        self._load = load
        self._sleep = sleep
        self._metrics = metrics
        self._incarnations: list[bytes] = []
        self._unanswered: bytes | None = None
        self._is_reachable = True

    @property
    def name(self) -> str:
        """Of the host or engine."""
        return name_of(self.registration)

    @property
    def incarnations(self) -> tuple[bytes, ...]:
        """The lives that are renewed, oldest first."""
        return tuple(self._incarnations)

    async def begin(self) -> bytes:
        """Register a new life and return its name. Raises `DirectoryError`.

        A name whose registration had no answer is tried again: a server that is slow and well would else be given
        another row with each try, and remember them all.
        """
        for _ in range(DRAWS_MAX):
            incarnation, is_retry = self._unanswered or draw_incarnation(), self._unanswered is not None
            try:
                await self._directory.register(incarnation, self.registration, self._load())
            except RegistrationRefused:
                is_ours = is_retry and (await self._directory.renew(incarnation, self._load())).known
                self._unanswered = None
                if not is_ours:
                    continue
            except DirectoryError as error:
                self._unanswered = incarnation
                self._note_failure("register", error)
                raise
            self._note_answer()
            self._unanswered = None
            self._incarnations.append(incarnation)
            return incarnation
        refused = RegistrationRefused(f"{DRAWS_MAX} random incarnations in a row were taken")
        self._note_failure("register", refused)
        raise refused

    async def end(self, incarnation: bytes) -> None:
        """Retire a life. Where the directory can't be reached, the life lapses by itself within a term."""
        if incarnation in self._incarnations:
            self._incarnations.remove(incarnation)
        try:
            async with asyncio.timeout(RETIRE_S):
                await self._directory.retire(incarnation)
        except (DirectoryError, TimeoutError) as error:
            self._metrics.directory_errors.labels("retire").inc()
            logger.info("a life could not be retired and will lapse: %s", error)

    async def renew(self, on_doubt: Callable[[bytes, str], None]) -> None:
        """Renew each life once. `on_doubt(life, reason)` hears of one that is unknown or lapsed longer than a term."""
        for incarnation in self.incarnations:
            try:
                renewal = await self._directory.renew(incarnation, self._load())
            except DirectoryError as error:
                self._note_failure("renew", error)
                continue
            self._note_answer()
            if incarnation not in self._incarnations:
                continue
            if not renewal.known:
                on_doubt(incarnation, "unknown")
            elif renewal.lapsed_s > TERM_S:
                on_doubt(incarnation, "lapsed")

    async def run(self, on_doubt: Callable[[bytes, str], None], each_time: Callable[[], None]) -> None:
        """Renew every second until cancelled."""
        while True:
            try:
                await self.renew(on_doubt)
            except Exception:  # the edge of the loop: a life that isn't renewed lapses, and is begun anew
                logger.exception("renewing met a fault")
            each_time()
            await self._sleep(RENEW_INTERVAL_S)

    def _note_answer(self) -> None:
        self.trouble = None
        if not self._is_reachable:
            self._is_reachable = True
            logger.info("the directory takes the registration of %s again", self.name)

    def _note_failure(self, op: str, error: DirectoryError) -> None:
        self.trouble = f"can't {op}: {error}"
        self._metrics.directory_errors.labels(op).inc()
        if self._is_reachable:
            self._is_reachable = False
            self._metrics.degraded.labels("directory").inc()
            logger.warning(
                "the directory doesn't take the registration of %s; serving on, and trying again: %s", self.name, error
            )
