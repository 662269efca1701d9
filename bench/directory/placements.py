"""Placements by batches of 64: how many of them one core of a server takes in a second."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.directory.layouts import PackedRecords
from bench.directory.lookups import percentile
from bench.directory.prompts import random_keys
from bench.directory.server import Server
from directory.interface import BATCH_PLACEMENTS_MAX, LOST, Batch
from directory.members import INCARNATION_BYTES
from directory.placements import PARTITIONS, pack_holders
from directory.tiers import Tier

TTL_S = 7200.0


@dataclass(frozen=True, slots=True)
class PlacementCase:
    """A writer that places chunks beside `others` holders, in a fleet of `lives` that its partitions hear of.

    Round after round it places chunks that are new to it (`new`), says of the same chunks what it said (`again`), or
    that they moved to another tier (`moved`). Where there are several holders, they stand in another order in each
    record, unless `alike`.
    """

    name: str
    others: int
    lives: int
    kind: str
    alike: bool = False


CASES = (
    PlacementCase("a new chunk", others=0, lives=64, kind="new"),
    PlacementCase("a new chunk, 1,000 lives", others=0, lives=1000, kind="new"),
    PlacementCase("beside 1 holder, moved", others=1, lives=64, kind="moved"),
    PlacementCase("beside 15 holders, moved", others=15, lives=64, kind="moved"),
    PlacementCase("beside 15 holders alike, again", others=15, lives=64, kind="again", alike=True),
)


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """Medians over rounds, a placement; percentiles over all batches."""

    case: str
    server_us: float
    command_us: float
    writer_us: float
    placements_per_core_s: float
    batch_p50_us: float
    batch_p99_us: float


@dataclass(slots=True)
class _Writer:
    """One life's batches, partition after partition."""

    case: PlacementCase
    chance: random.Random
    lives: list[bytes] = field(default_factory=list)
    keys: list[tuple[bytes, ...]] = field(default_factory=list)
    attempt: int = 0
    server_us: list[float] = field(default_factory=list)
    command_us: list[float] = field(default_factory=list)
    writer_us: list[float] = field(default_factory=list)
    waits_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lives = [self.chance.randbytes(INCARNATION_BYTES) for _ in range(self.case.lives)]
        self.keys = self._drawn()

    def batches(self) -> list[Batch]:
        """A batch for each partition, with the next attempt's number."""
        self.attempt += 1
        if self.case.kind == "new":
            self.keys = self._drawn()
        tier = Tier.NVME if self.case.kind == "moved" and self.attempt % 2 else Tier.DRAM
        return [
            Batch(
                incarnation=self.lives[0],
                partition=partition,
                attempt=self.attempt,
                states=tuple((key, int(tier)) for key in keys),
                ttl_s=TTL_S,
                acknowledged=LOST if self.attempt == 1 else self.attempt - 1,
            )
            for partition, keys in enumerate(self.keys)
        ]

    def others(self) -> bytes:
        """What a record holds beside this life; empty where there is nobody else."""
        lives = self.lives[1 : 1 + self.case.others]
        if not self.case.alike:
            self.chance.shuffle(lives)
        return pack_holders((life, int(Tier.DRAM)) for life in lives)

    def _drawn(self) -> list[tuple[bytes, ...]]:
        drawn = random_keys(self.chance, BATCH_PLACEMENTS_MAX * PARTITIONS)
        return [
            tuple(
                bytes((partition << 4 | key[0] & 15,)) + key[1:]
                for key in drawn[partition * BATCH_PLACEMENTS_MAX : (partition + 1) * BATCH_PLACEMENTS_MAX]
            )
            for partition in range(PARTITIONS)
        ]


async def measure_placements(
    server: Server, packed: PackedRecords, cases: Sequence[PlacementCase], rounds: int, chance: random.Random
) -> list[PlacementRow]:
    """Every case in turn, a batch for each partition, round after round."""
    writers = [_Writer(case, chance) for case in cases]
    for writer in writers:
        packed.hear_of(writer.lives[1:])
        if writer.case.others:
            keys = [key for part in writer.keys for key in part]
            packed.load(keys, [writer.others() for _ in keys])
        for batch in writer.batches():
            await packed.directory.place(batch)
    for _ in range(rounds):
        for writer in writers:
            await _measure(server, packed, writer)
    return [_row(writer) for writer in writers]


async def _measure(server: Server, packed: PackedRecords, writer: _Writer) -> None:
    batches = writer.batches()
    packed.hear_of(writer.lives[1:])
    before = server.spent()
    busy_at = time.thread_time()
    for batch in batches:
        started_at = time.perf_counter()
        held = await packed.directory.place(batch)
        writer.waits_us.append((time.perf_counter() - started_at) * 1e6)
        if held != batch.acknowledged:
            raise SystemExit(f"the server held attempt {held}, not {batch.acknowledged}: a batch wasn't applied")
    writer_s = time.thread_time() - busy_at
    spent = server.spent_between(before, server.spent())
    placements = BATCH_PLACEMENTS_MAX * len(batches)
    writer.server_us.append(spent.cpu_s * 1e6 / placements)
    writer.command_us.append(spent.command_us["fcall"] / placements)
    writer.writer_us.append(writer_s * 1e6 / placements)


def _row(writer: _Writer) -> PlacementRow:
    server_us = statistics.median(writer.server_us)
    return PlacementRow(
        case=writer.case.name,
        server_us=server_us,
        command_us=statistics.median(writer.command_us),
        writer_us=statistics.median(writer.writer_us),
        placements_per_core_s=1e6 / server_us,
        batch_p50_us=percentile(writer.waits_us, 0.5),
        batch_p99_us=percentile(writer.waits_us, 0.99),
    )
