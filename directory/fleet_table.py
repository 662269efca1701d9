"""The fleet's table as a server keeps it: one hash, of which each incarnation has three fields.

It is read whole, by HGETALL, and taken apart here: a server has one thread, and a function that did it there took it
seven times as long, 85 ms for nine thousand lives. What lives say of themselves is left as it is.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from directory.members import INCARNATION_BYTES, REMEMBERED_S, Load, UnreadableMember, decode_load

ROWS_AT_ONCE, ROW_LOAD_BYTES = 64, 512
"""Rows of the fleet's table that are decoded before the event loop may do something else; a busy gateway's, whose load
report is longer, counts for several."""

_TIMES = re.compile(rb"([0-9]{1,15}):([0-9]{1,15})")
_TIMES_FIELD_BYTES = 1 + INCARNATION_BYTES
_REMEMBERED_MS = round(REMEMBERED_S * 1000)


@dataclass(frozen=True, slots=True)
class Row:
    """A life: its registration and load as JSON, and what is left of its term by the server's clock."""

    incarnation: bytes
    registration: bytes
    load: bytes
    remaining_ms: int
    retired: bool


def fields_of(incarnation: bytes) -> tuple[bytes, bytes]:
    """Where a life's times and its load are."""
    return b"t" + incarnation, b"l" + incarnation


def rows_of(fields: Mapping[bytes, bytes], now_ms: int) -> list[Row]:
    """The lives of a table that stands so at the server's `now_ms`, without those that ended too long ago."""
    rows = []
    for field, packed in fields.items():
        if len(field) != _TIMES_FIELD_BYTES or field[0] != ord("t"):
            continue
        times = _TIMES.fullmatch(packed)
        if times is None:
            continue
        expires_ms, retired_ms = int(times[1]), int(times[2])
        if now_ms - (retired_ms or expires_ms) <= _REMEMBERED_MS:
            life = field[1:]
            registration, load = fields.get(b"r" + life, b""), fields.get(b"l" + life, b"")
            rows.append(Row(life, registration, load, expires_ms - now_ms, retired_ms > 0))
    return rows


def load_or_empty(data: bytes) -> Load:
    """A load report, or an empty one where it can't be read: the poll of the whole table tells of that."""
    try:
        return decode_load(data)
    except UnreadableMember:
        return Load()


async def unhurried(rows: Sequence[Row]) -> AsyncIterator[Row]:
    """The rows, with room for what else there is to do after every `ROWS_AT_ONCE`."""
    at_once = 0
    for row in rows:
        at_once += 1 + len(row.load) // ROW_LOAD_BYTES
        if at_once >= ROWS_AT_ONCE:
            at_once = 0
            await asyncio.sleep(0)
        yield row


def newer_version(versions: Mapping[bytes, bytes], version: str) -> str | None:
    """The schema's version that registered somebody after this one last did, if there is one."""
    at_ms = {name.decode(errors="replace"): int(at) if at.isdigit() else 0 for name, at in versions.items()}
    latest = max(at_ms, key=lambda name: (at_ms[name], name == version), default=version)
    return latest if at_ms.get(latest, 0) > at_ms.get(version, 0) else None
