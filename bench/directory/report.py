"""What was measured, against the targets, as JSON's shapes and as tables for people."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bench.directory.lookups import LookupRow
from bench.directory.memory import LargeDirectory, MemoryRow
from bench.directory.placements import PlacementRow

SERVER_US_MAX = 100.0
GATEWAY_US_MAX = 400.0
PLACEMENTS_PER_CORE_S_MIN = 150_000.0
BYTES_PER_CHUNK_MAX = 165.0
TIMES_OURS_MIN = 5.0

LOOKUP_HEAD = (
    *("chunks", "holders", "records", "layout", "server / ours"),
    *("server us", "in command", "gateway us", "p50", "p99"),
)
PLACEMENT_HEAD = (
    *("placements", "/s of a core"),
    *("server us", "in command", "writer us", "batch p50", "batch p99"),
)
MEMORY_HEAD = ("layout", "holders", "bytes a chunk")
TARGET_HEAD = ("target", "limit", "measured", "")


@dataclass(frozen=True, slots=True)
class Target:
    """A promise, what was measured, and whether it was kept."""

    name: str
    limit: str
    measured: float
    met: bool


@dataclass(frozen=True, slots=True)
class ServerReport:
    """All that was measured on one server."""

    server: str
    lookups: Sequence[LookupRow]
    placements: Sequence[PlacementRow]
    memory: Sequence[MemoryRow]
    large: LargeDirectory
    targets: Sequence[Target]


def targets_of(
    lookups: Sequence[LookupRow],
    placements: Sequence[PlacementRow],
    memory: Sequence[MemoryRow],
    ours: str,
    hashes: Collection[str],
) -> tuple[Target, ...]:
    """The targets for 128 chunks of 16 holders in the harder kind of records, a new chunk, and one holder's bytes.

    `ours` and `hashes` name layouts.
    """
    asked = [row for row in lookups if (row.chunks, row.holders, row.records) == (128, 16, "varied")]
    (packed,) = (row for row in asked if row.layout == ours)
    least_times = min(row.server_times_ours for row in asked if row.layout in hashes)
    (one,) = (row.bytes_per_chunk for row in memory if row.layout == ours and row.holders == 1)
    rate = placements[0].placements_per_core_s
    return (
        _at_most("server us a lookup, 128 chunks x 16 holders", packed.server_us, SERVER_US_MAX),
        _at_most("gateway CPU us a lookup, the same", packed.gateway_us, GATEWAY_US_MAX),
        _at_least(f"placements/s of a server core, {placements[0].case}", rate, PLACEMENTS_PER_CORE_S_MIN),
        _at_most("bytes a chunk with one holder", one, BYTES_PER_CHUNK_MAX),
        _at_least("server time of hashes / ours, the better of the two", least_times, TIMES_OURS_MIN),
    )


def as_text(report: ServerReport) -> str:
    """Tables for people."""
    large, asked = report.large, report.large.lookups
    parts = [
        [report.server],
        _table(LOOKUP_HEAD, map(_lookup_cells, report.lookups)),
        _table(PLACEMENT_HEAD, map(_placement_cells, report.placements)),
        _table(MEMORY_HEAD, ((row.layout, row.holders, f"{row.bytes_per_chunk:.0f}") for row in report.memory)),
        [
            f"{large.chunks:,} chunks of one holder: {large.used_gb:.2f} GB, {large.bytes_per_chunk:.0f} bytes a chunk "
            f"({large.bytes_per_chunk_least:.0f} to {large.bytes_per_chunk_most:.0f} while it grew);",
            f"a lookup of {asked.chunks} takes {_us(asked.server_us)} us of server time, "
            f"p50 {_us(asked.p50_us)}, p99 {_us(asked.p99_us)} us.",
        ],
        _table(TARGET_HEAD, map(_target_cells, report.targets)),
    ]
    return "\n".join("\n".join([*part, ""]) for part in parts)


def _lookup_cells(row: LookupRow) -> tuple[object, ...]:
    times = (row.server_us, row.command_us, row.gateway_us, row.p50_us, row.p99_us)
    return (row.chunks, row.holders, row.records, row.layout, f"{row.server_times_ours:.1f}", *map(_us, times))


def _placement_cells(row: PlacementRow) -> tuple[object, ...]:
    times = (f"{us:.2f}" for us in (row.server_us, row.command_us, row.writer_us))
    return (row.case, f"{row.placements_per_core_s:,.0f}", *times, _us(row.batch_p50_us), _us(row.batch_p99_us))


def _target_cells(target: Target) -> tuple[object, ...]:
    return (target.name, target.limit, f"{target.measured:,.1f}", "met" if target.met else "MISSED")


def _at_most(name: str, measured: float, limit: float) -> Target:
    return Target(name, f"<= {limit:,.0f}", measured, measured <= limit)


def _at_least(name: str, measured: float, limit: float) -> Target:
    return Target(name, f">= {limit:,.0f}", measured, measured >= limit)


def _us(value: float) -> str:
    return f"{value:,.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    texts = [tuple(head), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in texts]
    return [lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]]
