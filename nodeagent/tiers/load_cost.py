"""What loading from a tier costs, learned from reads: fixed seconds, and bytes per second. Pure.

    seconds = fixed + bytes / rate

A machine that is shared makes some reads many times as long as others, and most reads may be of one size. So recent
reads are kept by size, a class for each power of two. Of a class the median counts, and until it has seen
`CLASS_READS_MIN` reads, what was believed before counts for those that are missing: one odd read changes nothing. A
line is laid through the classes (least squares of relative errors, as a read's error grows with it). Where sizes are
too much alike to tell the two apart, the fixed part is taken as believed, and all the rest is bytes.

After a change, a class follows within half of `CLASS_READS_MAX` reads; one that had none among the last
`AGE_READS_MAX` doesn't count any more.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

CLASS_READS_MAX = 9
CLASS_READS_MIN = 3
AGE_READS_MAX = 256
SIZES_RATIO_MIN = 4.0
"""Sizes that differ by less say nothing of the fixed part."""
BYTES_SHARE_MIN = 0.1
"""Of the largest reads' seconds, at least this share is their bytes': noise must not make bytes free."""
READ_S_MIN, READ_S_MAX = 1e-7, 3600.0
READ_BYTES_MAX = 10**15
FIXED_S_MAX = 60.0
BYTES_PER_S_MIN, BYTES_PER_S_MAX = 1.0, 1e13


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Seconds that any load takes, and bytes a second beyond them: both finite, the rate above zero."""

    fixed_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        """What a load of so many bytes takes."""
        return self.fixed_s + size_bytes / self.bytes_per_s


@dataclass(slots=True)
class _Class:
    """The last reads of about one size, and when the newest of them was, in reads."""

    reads: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=CLASS_READS_MAX))
    newest: int = 0


class LearnedCost:
    """The cost of loads from one tier: `believed` until reads were seen."""

    def __init__(self, believed: LoadCost) -> None:
        self._believed = believed
        self._classes: dict[int, _Class] = {}
        self._reads = 0
        self._cost: LoadCost | None = believed

    @property
    def cost(self) -> LoadCost:
        """By the newest reads."""
        if self._cost is None:
            self._cost = self._fitted()
        return self._cost

    @property
    def reads(self) -> int:
        """How many reads were seen."""
        return self._reads

    def note(self, size_bytes: float, seconds: float) -> None:
        """A read of so many bytes took so long; what no read can be is ignored."""
        if not (1 <= size_bytes <= READ_BYTES_MAX and READ_S_MIN <= seconds <= READ_S_MAX):
            return
        self._reads += 1
        kept = self._classes.setdefault(math.frexp(size_bytes)[1], _Class())
        kept.reads.append((float(size_bytes), seconds))
        kept.newest = self._reads
        self._cost = None

    def _fitted(self) -> LoadCost:
        points = [
            (*self._middle(kept), min(len(kept.reads), CLASS_READS_MIN))
            for kept in self._classes.values()
            if self._reads - kept.newest < AGE_READS_MAX
        ]
        sizes = [size for size, _, _ in points]
        if max(sizes) < SIZES_RATIO_MIN * min(sizes):
            return self._by_one(points)
        weights = [reads / seconds**2 for _, seconds, reads in points]
        total = math.fsum(weights)
        size_mean = math.fsum(w * size for w, (size, _, _) in zip(weights, points, strict=True)) / total
        seconds_mean = math.fsum(w * seconds for w, (_, seconds, _) in zip(weights, points, strict=True)) / total
        spread = math.fsum(w * (size - size_mean) ** 2 for w, (size, _, _) in zip(weights, points, strict=True))
        common = math.fsum(
            w * (size - size_mean) * (seconds - seconds_mean)
            for w, (size, seconds, _) in zip(weights, points, strict=True)
        )
        size, seconds, _ = max(points)
        slope = max(common / spread if spread > 0 else 0.0, BYTES_SHARE_MIN * seconds / size)
        fixed_s = seconds_mean - slope * size_mean
        if fixed_s < 0:
            squares = math.fsum(w * size**2 for w, (size, _, _) in zip(weights, points, strict=True))
            products = math.fsum(w * size * s for w, (size, s, _) in zip(weights, points, strict=True))
            return _bounded(0.0, squares / products)
        return _bounded(fixed_s, 1 / slope)

    def _middle(self, kept: _Class) -> tuple[float, float]:
        """The size and seconds of a class: medians, of seconds the lower one."""
        size = statistics.median_low(size for size, _ in kept.reads)
        # To compare reads of slightly different sizes, their bytes beyond the middle are taken off at their own rate.
        seconds = [seconds * size / each for each, seconds in kept.reads]
        missing = max(0, CLASS_READS_MIN - len(seconds))
        return size, statistics.median_low([*seconds, *[self._believed.seconds(size)] * missing])

    def _by_one(self, points: list[tuple[float, float, int]]) -> LoadCost:
        """Sizes that are alike: the largest class tells the rate, beside the fixed part that is believed."""
        size, seconds, _ = max(points)
        fixed_s = min(self._believed.fixed_s, seconds / 2)
        return _bounded(fixed_s, size / (seconds - fixed_s))


def _bounded(fixed_s: float, bytes_per_s: float) -> LoadCost:
    return LoadCost(min(max(fixed_s, 0.0), FIXED_S_MAX), min(max(bytes_per_s, BYTES_PER_S_MIN), BYTES_PER_S_MAX))
