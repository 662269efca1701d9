"""How often two counts that should be equal weren't, and when that is too often. Pure: no clock, no I/O.

Comparisons fade: each one weighs `1 - 1 / answers_remembered` of the next one. What is compared is *off* once
`different_min` comparisons (faded) went wrong and they are more than `share_max` of all that are remembered. It is well
again after a run of comparisons that all went right, and then the past is forgotten. A fault that comes and goes would
turn it to and fro: each relapse doubles the run that is asked for, up to `run_max`, until `CALM_RUN` went right.
"""

from dataclasses import dataclass

CALM_RUN = 1_000


@dataclass(frozen=True, slots=True)
class Limits:
    """When differences are too many, and how long a run of equal comparisons takes that back: at first, and at most."""

    answers_remembered: float
    different_min: float
    share_max: float
    run_needed: int
    run_max: int


TOKEN_COUNTS = Limits(answers_remembered=500.0, different_min=3.0, share_max=0.01, run_needed=20, run_max=1_280)
"""Three differences of the first ones, or six in a row after thousands that were equal; one or two never."""
CHUNK_IDS = Limits(answers_remembered=50.0, different_min=5.0, share_max=0.5, run_needed=5, run_max=20)
"""Evictions and announcements that are late look like differences, so half of the looks must find nothing. A chunk that
is found proves its ids: few are needed, and of more in a row some would be evicted, so that they never came."""


class Tally:
    """The comparisons of one kind."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._weight = self._different_weight = 0.0
        self._run = self._relapses = 0
        self.is_off = False
        self.compared = self.different = 0
        """Since the beginning."""

    def add(self, is_same: bool) -> None:
        """Take another comparison into account."""
        fading = 1 - 1 / self._limits.answers_remembered
        self._weight = self._weight * fading + 1
        self._different_weight = self._different_weight * fading + (not is_same)
        self._run = self._run + 1 if is_same else 0
        self.compared += 1
        self.different += not is_same
        if self.is_off:
            if self._run >= min(self._limits.run_needed << self._relapses, self._limits.run_max):
                self._recover()
        elif self._is_too_much():
            self.is_off, self._run = True, 0
        elif self._run >= CALM_RUN:
            self._relapses = 0

    def _is_too_much(self) -> bool:
        # Fading takes a little off whole numbers: three in a row are three.
        different = self._different_weight + 0.5
        limits = self._limits
        return different >= limits.different_min and self._different_weight > limits.share_max * self._weight

    def _recover(self) -> None:
        self.is_off = False
        self._relapses = min(self._relapses + 1, self._limits.run_max.bit_length())
        self._weight = self._different_weight = 0.0
        self._run = 0
