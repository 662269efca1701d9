"""Lookups by each layout in turn: server time, the gateway's own time, and how long a client waits."""

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.directory.layouts import Layout
from bench.directory.prompts import Prompts, prompts_of
from bench.directory.server import Server
from directory.placements import Reach
from gateway.reach_matrix import ReachMatrix

PACKED_TIMES = 4
"""Lookups of the first layout for each one of the others: it takes less time, and needs more for the same accuracy."""


@dataclass(frozen=True, slots=True)
class LookupCase:
    """`prompts` of `chunks` chunks, each held by `holders` lives; `lookups` a round of every layout but the first."""

    chunks: int
    holders: int
    varied: bool
    prompts: int
    lookups: int


CASES = (
    LookupCase(128, 1, varied=False, prompts=64, lookups=16),
    LookupCase(128, 16, varied=False, prompts=64, lookups=16),
    LookupCase(128, 16, varied=True, prompts=64, lookups=16),
    LookupCase(128, 1000, varied=True, prompts=2, lookups=2),
    LookupCase(4096, 16, varied=True, prompts=2, lookups=2),
)
QUICK_CASES = tuple(replace(case, prompts=1 + case.prompts // 16, lookups=1 + case.lookups // 8) for case in CASES)


@dataclass(frozen=True, slots=True)
class LookupRow:
    """Medians over rounds, a lookup; percentiles over all lookups. `gateway_us` holds request, reply and decoding."""

    chunks: int
    holders: int
    records: str
    layout: str
    server_us: float
    command_us: float
    gateway_us: float
    p50_us: float
    p99_us: float
    server_times_ours: float
    """The median over rounds of this layout's server time divided by that of the first layout in the same round."""


@dataclass(slots=True)
class _Series:
    """What is asked for by one layout in one case, and what it cost in each round."""

    case: LookupCase
    layout: Layout
    reaches: tuple[Reach, ...]
    table: ReachMatrix
    turns: Iterator[tuple[bytes, ...]]
    server_us: list[float] = field(default_factory=list)
    command_us: list[float] = field(default_factory=list)
    gateway_us: list[float] = field(default_factory=list)
    waits_us: list[float] = field(default_factory=list)


async def measure_lookups(
    server: Server,
    loaders: Sequence[Layout],
    layouts: Sequence[Layout],
    cases: Sequence[LookupCase],
    rounds: int,
    chance: random.Random,
) -> list[LookupRow]:
    """Load every case by every one of `loaders`, then look up by all `layouts` in turn, round after round."""
    prompts = {case: prompts_of(chance, case.prompts, case.chunks, case.holders, case.varied) for case in cases}
    for each in prompts.values():
        keys, records = list(itertools.chain(*each.keys)), list(itertools.chain(*each.records))
        for loader in loaders:
            loader.load(keys, records)
    return await measure_prompts(server, layouts, prompts, rounds)


async def measure_prompts(
    server: Server, layouts: Sequence[Layout], prompts: Mapping[LookupCase, Prompts], rounds: int
) -> list[LookupRow]:
    """Look up prompts that are loaded. Exits where a layout finds something else than all of them."""
    series = {
        (case, layout.name): _Series(case, layout, each.reaches, ReachMatrix(each.reaches), itertools.cycle(each.keys))
        for case, each in prompts.items()
        for layout in layouts
    }
    for each_series in series.values():
        await _check(each_series)
    for _ in range(rounds):
        for (_, name), each_series in series.items():
            times = PACKED_TIMES if name == layouts[0].name else 1
            await _measure(server, each_series, each_series.case.lookups * times)
    return [_row(each_series, series[case, layouts[0].name]) for (case, _), each_series in series.items()]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values don't exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def _check(series: _Series) -> None:
    """Also warms connections up. A layout that answers wrongly has no cost worth telling."""
    keys = next(series.turns)
    found = await series.layout.lookup(keys, series.table)
    reached = {engine: match.chunks for engine, match in found.items()}
    if reached != {reach.engine: len(keys) for reach in series.reaches}:
        raise SystemExit(f"{series.layout.name} finds something else than what was loaded for {series.case}")


async def _measure(server: Server, series: _Series, lookups: int) -> None:
    before = server.spent()
    busy_at = time.thread_time()
    for keys in itertools.islice(series.turns, lookups):
        started_at = time.perf_counter()
        await series.layout.lookup(keys, series.table)
        series.waits_us.append((time.perf_counter() - started_at) * 1e6)
    gateway_s = time.thread_time() - busy_at
    spent = server.spent_between(before, server.spent())
    series.server_us.append(spent.cpu_s * 1e6 / lookups)
    series.command_us.append(spent.command_us[series.layout.command] / lookups)
    series.gateway_us.append(gateway_s * 1e6 / lookups)


def _row(series: _Series, ours: _Series) -> LookupRow:
    ratios = [each / reference for each, reference in zip(series.server_us, ours.server_us, strict=True)]
    return LookupRow(
        chunks=series.case.chunks,
        holders=series.case.holders,
        records="varied" if series.case.varied else "alike",
        layout=series.layout.name,
        server_us=statistics.median(series.server_us),
        command_us=statistics.median(series.command_us),
        gateway_us=statistics.median(series.gateway_us),
        p50_us=percentile(series.waits_us, 0.5),
        p99_us=percentile(series.waits_us, 0.99),
        server_times_ours=statistics.median(ratios),
    )
