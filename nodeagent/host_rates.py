"""What this host's tiers cost to load from, as it is published: learned from its engines' reads and its drives'.

An engine has a cost of DRAM of its own (its cores, its node of memory), and begins with the host's. The fixed part of
a load from DRAM is what its reads show beside their bytes, and what the agent takes to open a run. A chunk on NVMe is
read into DRAM first, and from there by the engine: both costs are paid.

Before any engine has read, the machine's own memory was timed (`time_memory`) and the drives' self-tests said what
they can. So an idle host publishes its own figures, too.
"""

import mmap
import statistics
import time
from collections import deque
from collections.abc import Callable

import xxhash

from directory.costs import Rates
from directory.members import NUMBER_MAX
from directory.tiers import Tier
from nodeagent.tiers.load_cost import LearnedCost, LoadCost

BELIEVED_DRAM = LoadCost(0.0005, 3e9)
"""Until the machine's memory was timed."""
TEST_BYTES = 8 << 20
TEST_ROUNDS = 3
OPENS_MAX = 64
"""Opens of which the middle one is counted."""
DOOR_S = 0.0001
"""What a request takes through the door and back, beside what the agent does: nobody can time it from one side."""


class HostRates:
    """One host's costs. `nvme` says what reads from its drives cost, where there are any."""

    def __init__(self, believed: LoadCost = BELIEVED_DRAM, nvme: Callable[[], LoadCost] | None = None) -> None:
        self._dram = LearnedCost(believed)
        self._nvme = nvme
        self._open_s: deque[float] = deque(maxlen=OPENS_MAX)

    def for_engine(self) -> "EngineRates":
        """Of an engine that is new."""
        return EngineRates(self, LearnedCost(self._dram.cost))

    def note_open(self, seconds: float) -> None:
        """The agent took so long to answer an open of chunks that were all in DRAM."""
        self._open_s.append(seconds)

    def note_read(self, read_bytes: int, read_s: float) -> None:
        """An engine has copied and checked so many bytes."""
        self._dram.note(read_bytes, read_s)

    def costs(self, dram: LoadCost | None = None) -> dict[Tier, LoadCost]:
        """By tier, what an engine pays whose own cost of DRAM is given, or any of the host's."""
        read = dram or self._dram.cost
        open_s = DOOR_S + (statistics.median_low(self._open_s) if self._open_s else 0.0)
        costs = {Tier.DRAM: LoadCost(read.fixed_s + open_s, read.bytes_per_s)}
        if self._nvme is not None:
            drive = self._nvme()
            rate = 1 / (1 / drive.bytes_per_s + 1 / read.bytes_per_s)
            costs[Tier.NVME] = LoadCost(drive.fixed_s + read.fixed_s + open_s, rate)
        return costs

    def rates(self, flops: float) -> Rates | None:
        """The host's own, `flops` being its engines' together; `None` while it has none, which computes nothing."""
        return _rates(min(flops, NUMBER_MAX), self.costs()) if flops > 0 else None

    def status(self) -> dict[str, dict[str, float]]:
        """What the agent's `/status` shows."""
        return {
            tier.label: {"bytes_per_s": round(cost.bytes_per_s), "fixed_s": round(cost.fixed_s, 6)}
            for tier, cost in self.costs().items()
        }


class EngineRates:
    """One engine's costs, on its host."""

    def __init__(self, host: HostRates, dram: LearnedCost) -> None:
        self._host = host
        self._dram = dram

    def note_read(self, read_bytes: int, read_s: float) -> None:
        """The engine has copied and checked so many bytes from DRAM."""
        self._dram.note(read_bytes, read_s)
        self._host.note_read(read_bytes, read_s)

    def note_open(self, seconds: float) -> None:
        """See `HostRates.note_open`."""
        self._host.note_open(seconds)

    def rates(self, flops: float) -> Rates:
        """What its renewals say."""
        return _rates(flops, self._host.costs(self._dram.cost))


def time_memory() -> LoadCost:
    """What it costs here to copy a chunk out of shared memory and check it: the best of a few times. Blocks for ms."""
    with mmap.mmap(-1, TEST_BYTES) as shared, memoryview(shared) as source:
        target = bytearray(source)
        seconds = min(_copy_and_check_s(source, memoryview(target)) for _ in range(TEST_ROUNDS))
    return LoadCost(BELIEVED_DRAM.fixed_s - DOOR_S, TEST_BYTES / max(seconds, 1e-6))


def _copy_and_check_s(source: memoryview, target: memoryview) -> float:
    began = time.perf_counter()
    target[:] = source
    xxhash.xxh3_128_digest(target)
    return time.perf_counter() - began


def _rates(flops: float, costs: dict[Tier, LoadCost]) -> Rates:
    return Rates(
        flops,
        {tier: cost.bytes_per_s for tier, cost in costs.items()},
        {tier: cost.fixed_s for tier, cost in costs.items()},
    )
