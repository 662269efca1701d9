"""When a drive refuses to be written: how long it is left alone, and what an error says. It is read all the while."""

import logging
import time
from collections.abc import Callable

from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.drive_faults import Fault

WRITE_PAUSE_S = 10.0

logger = logging.getLogger(__name__)


class WritePause:
    """The state of writing to the drive `name`: on, or paused for `pause_s` after an error that isn't one chunk's."""

    def __init__(
        self, name: str, pause_s: float, metrics: AgentMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._pause_s = pause_s
        self._metrics = metrics
        self._clock = clock
        self._until_s = 0.0
        self._is_failing = False
        self._is_strange_told = False

    @property
    def is_on(self) -> bool:
        """Whether nothing is written for the moment."""
        return self._clock() < self._until_s

    def begin(self) -> None:
        """Write nothing for a while."""
        self._until_s = self._clock() + self._pause_s

    def note_failure(self, error: OSError, fault: Fault) -> str:
        """A write failed: pause, where the drive is at fault. Returns the reason to count a chunk under."""
        if fault is Fault.PLACE:
            if not self._is_strange_told:
                self._is_strange_told = True
                logger.warning("a chunk can't be written, for what stands at its place; others are written: %s", error)
            return "nvme_strange"
        self.begin()
        self._metrics.degraded.labels("nvme_write_failed").inc()
        if not self._is_failing:
            self._is_failing = True
            logger.error("the drive %s refuses to be written; it is read only until it recovers: %s", self._name, error)
        return "nvme_error"

    def note_success(self) -> None:
        """A write went well."""
        self._is_strange_told = False
        if self._is_failing:
            self._is_failing = False
            logger.info("the drive %s takes writes again", self._name)
