"""Refusals: what the directory refuses of a publisher's batches, and how that is said without flooding the log.

A server that is full refuses placements only: they wait, and one of them tries now and then. Any other refusal is one
partition's, which tries again at its own pace; it is said once for each cause, as is its end. A publisher says no more
than `SAID_MAX` such things in `SAID_SPAN_S`. A directory that can't be reached isn't told of here: its registrations
are (`registration.py`), and a server that lacks the functions is by its client.
"""

import logging
from collections import deque

from directory.errors import DirectoryError, DirectoryFull, DirectoryUnavailable, FunctionsMissing
from nodeagent.metrics import AgentMetrics
from nodeagent.registration import Clock

FULL_PAUSE_S = 0.5
FULL_KNOWN_S = 5.0
"""How long after the last try, which was refused, a directory counts as full."""
SAID_MAX = 6
SAID_SPAN_S = 60.0

logger = logging.getLogger(__name__)


class Refusals:
    """The refusals of one publisher's batches; `name` is its host's or engine's."""

    def __init__(self, name: str, clock: Clock, metrics: AgentMetrics) -> None:
        self._name, self._clock, self._metrics = name, clock, metrics
        self._is_full = self._is_full_said = False
        self._full_until = clock()
        self._causes: dict[int, str] = {}
        self._said: dict[int, str] = {}
        self._said_at: deque[float] = deque(maxlen=SAID_MAX)

    @property
    def is_full(self) -> bool:
        """Whether the directory has no room for placements; nothing is known of it where none are tried any more."""
        return self._is_full and self._clock() < self._full_until + FULL_KNOWN_S

    @property
    def trouble(self) -> str | None:
        """What is refused now, as a sentence; `None` for nothing."""
        if self.is_full:
            return "the directory is full: placements are refused"
        return next((f"partition {partition} refuses: {cause}" for partition, cause in self._causes.items()), None)

    @property
    def must_wait_for_room(self) -> bool:
        """Whether placements had better not be tried yet."""
        return self._clock() < self._full_until

    def note_try(self) -> None:
        """Placements are sent: where there was no room lately, the others wait for what becomes of them."""
        if self._is_full:
            self._full_until = self._clock() + FULL_PAUSE_S

    def note_taken(self, partition: int, is_removal: bool) -> None:
        """A batch was taken."""
        if self._is_full and not is_removal:
            self._is_full, self._full_until = False, self._clock()
            if self._is_full_said:
                self._is_full_said = False
                logger.info("%s: the directory has room again", self._name)
        if self._causes.pop(partition, "") and self._said.pop(partition, ""):
            logger.info("%s: partition %d takes batches again", self._name, partition)

    def note(self, partition: int, error: DirectoryError) -> None:
        """A batch was refused, or its fate is unknown."""
        if isinstance(error, DirectoryFull):
            self._note_full(error)
        elif not isinstance(error, DirectoryUnavailable | FunctionsMissing):
            cause = self._causes[partition] = str(error)
            if self._said.get(partition) != cause and self._may_say():
                self._said[partition] = cause
                logger.warning("%s: partition %d refuses batches, trying again: %s", self._name, partition, cause)

    def _note_full(self, error: DirectoryFull) -> None:
        self._full_until = self._clock() + FULL_PAUSE_S
        if not self._is_full:
            self._is_full = True
            self._metrics.degraded.labels("directory_full").inc()
        if not self._is_full_said and self._may_say():
            self._is_full_said = True
            logger.warning("%s: the directory is full, trying again every %g s: %s", self._name, FULL_PAUSE_S, error)

    def _may_say(self) -> bool:
        now = self._clock()
        if len(self._said_at) == SAID_MAX and now - self._said_at[0] < SAID_SPAN_S:
            return False
        self._said_at.append(now)
        return True
