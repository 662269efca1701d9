"""How `warmroute directory` and `forget` show their answers to people: aligned columns, and a page of statistics.

What is too wide for the terminal is wrapped in its last column, or else shown as a block of lines for each row. Where
the output isn't a terminal, a row stays a line.
"""

import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from directory.server_report import ServerReport
from directory.statistics import DirectoryStatistics, RecordStatistics

_NO_SHARES = "-"
UNKNOWN = "unknown"
LAST_COLUMN_CHARS_MIN = 24
"""Narrower than that, a last column isn't wrapped: rows become blocks."""


def terminal_chars() -> int | None:
    """The width of the terminal that is printed to; `None` where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def printable(text: str) -> str:
    """`text` without what would move a terminal's cursor or colour it: others chose the names."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def as_table(rows: list[dict[str, Any]], if_empty: str, width: int | None = None) -> str:
    """Rows under their columns' names; lists and holders in a cell. `width` is the terminal's, in characters."""
    if not rows:
        return if_empty
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    cells = [[printable(cell) for cell in line] for line in cells]
    if width is None or min(_last_chars(cells), LAST_COLUMN_CHARS_MIN) <= width - _margin_chars(cells):
        return _aligned(cells, width)
    blocks = ([list(pair) for pair in zip(columns, line, strict=True)] for line in cells[1:])
    return "\n\n".join(_aligned(block, width) for block in blocks)


def as_page(statistics: DirectoryStatistics, width: int | None = None) -> str:
    """Statistics, a line each; what is estimated says `about`."""
    lines = [line for server in statistics.servers for line in _server_lines(server)]
    lines += _record_lines(statistics.records)
    lives = (f"{role} {_counts(counts)}" for role, counts in (statistics.lives or {}).items())
    lines.append(["lives", "; ".join(lives) or UNKNOWN])
    about, are_keys_known = (
        "" if statistics.records.is_exact else "about ",
        statistics.records.about_records is not None,
    )
    versions = ", ".join(
        f"{version}: {f'{about}{count:,} keys' if are_keys_known else 'keys unknown'}"
        for version, count in statistics.schema_versions.items()
    )
    lines.append(["schema", versions or ("nothing is stored" if are_keys_known else UNKNOWN)])
    lines.append(["lookup", _lookup_times(statistics)])
    lines += [["refused", text] for text in statistics.refused]
    return _aligned([[printable(cell) for cell in line] for line in lines], width)


def _lookup_times(statistics: DirectoryStatistics) -> str:
    if statistics.lookup_median_s is None or statistics.lookup_max_s is None:
        return UNKNOWN
    median, most = statistics.lookup_median_s * 1000, statistics.lookup_max_s * 1000
    return f"{statistics.lookup_keys} keys: median {median:.2f} ms, at most {most:.2f} ms"


def _server_lines(server: ServerReport) -> list[list[str]]:
    if server.error is not None:
        return [["server", f"{server.name}: {server.error}"]]
    limit = f"of {_megabytes(server.memory_limit_bytes)}" if server.memory_limit_bytes else "without a limit"
    if server.memory_limit_bytes is None:
        limit = "of an unknown limit"
    facts = [
        server.version or "version unknown",
        f"{server.role or 'role unknown'} with {server.replicas if server.replicas is not None else '?'} replicas",
        f"{_megabytes(server.memory_used_bytes)} used {limit} ({server.eviction_policy or 'policy unknown'})",
        f"{server.keys:,} keys" if server.keys is not None else "keys unknown",
        f"functions {server.functions or 'unknown'}",
    ]
    return [["server", f"{server.name}: {', '.join(facts)}"], *(["warning", text] for text in server.warnings())]


def _record_lines(records: RecordStatistics) -> list[list[str]]:
    if records.about_records is None or records.about_records_by_partition is None:
        return [["records", UNKNOWN], ["balance", UNKNOWN], ["holders", UNKNOWN]]
    about = "" if records.is_exact else "about "
    size = "" if records.bytes_mean is None else f", {records.bytes_mean:.0f} bytes each"
    mean = records.about_records / len(records.about_records_by_partition)
    balance = _NO_SHARES
    if mean:
        fullest, emptiest = max(records.about_records_by_partition), min(records.about_records_by_partition)
        balance = f"partitions hold {emptiest / mean:.0%} to {fullest / mean:.0%} of their mean ({about}{mean:,.0f})"
    if records.holders_mean is None:  # there are none, or none could be read
        holders = [["holders", UNKNOWN if records.about_records else _NO_SHARES]]
    else:
        holders = [
            ["holders", f"mean {records.holders_mean:.1f}, p99 {records.holders_p99}, at most {records.holders_max}"],
            ["", f"who: {_shares(records.holder_share_by_state)}"],
            ["", f"where: {_shares(records.holder_share_by_tier)}"],
        ]
    return [
        ["records", f"{about}{records.about_records:,}{size} ({records.sampled:,} sampled)"],
        ["balance", balance],
        *holders,
    ]


def _shares(shares: Mapping[str, float] | None) -> str:
    if shares is None:
        return UNKNOWN
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _megabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e6:,.1f} MB"


def _aligned(cells: list[list[str]], width: int | None) -> str:
    widths, margin = _widths(cells), _margin_chars(cells)
    rest = _last_chars(cells) if width is None else max(width - margin, LAST_COLUMN_CHARS_MIN)
    lines = []
    for *firsts, last in cells:
        head = "".join(f"{cell:<{chars}}  " for cell, chars in zip(firsts, widths, strict=False))
        first, *others = textwrap.wrap(last, rest, break_on_hyphens=False) if len(last) > rest else [last]
        lines += [head + first, *(" " * margin + other for other in others)]
    return "\n".join(line.rstrip() for line in lines)


def _widths(cells: list[list[str]]) -> list[int]:
    return [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]


def _margin_chars(cells: list[list[str]]) -> int:
    return sum(chars + 2 for chars in _widths(cells)[:-1])


def _last_chars(cells: list[list[str]]) -> int:
    return _widths(cells)[-1]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "-"
    if isinstance(value, dict):
        return f"{value['holder']} ({value['state']}): {'+'.join(value['tiers'])}"
    return "-" if value is None else str(value)
