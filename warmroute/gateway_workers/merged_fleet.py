"""What several gateway processes say at `/fleet`, as one: their work is added, the rest is as one sees it."""

from collections.abc import Sequence
from typing import Any

ADDED = ("inflight_requests", "booked_seconds")


def merged_fleet(said: Sequence[dict[str, Any]], own_names: frozenset[str]) -> dict[str, Any]:
    """`said` is what each worker says, at least one; `own_names` are theirs among the gateways."""
    merged = dict(said[0])
    engines = [{row["engine"]: row for row in each["engines"]} for each in said]
    merged["engines"] = [_engine_row([rows[name] for rows in engines if name in rows]) for name in engines[0]]
    merged["other_gateways"] = [row for row in merged["other_gateways"] if row["gateway"] not in own_names]
    merged["lookup_pauses"] = sum(each["lookup_pauses"] for each in said)
    for state in ("directory", "lookups", "reports"):  # what is wrong with one of them is said
        merged[state] = next((each[state] for each in said if each[state] != "ok"), "ok")
    return merged


def _engine_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged = dict(rows[0])
    for name in ADDED:
        own = sum(row[name] for row in rows)
        seen = max(row[name] + row[f"others_{name}"] for row in rows)
        merged[name], merged[f"others_{name}"] = round(own, 4), round(max(0, seen - own), 4)
    return merged
