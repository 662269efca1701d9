"""Placements: which incarnation holds a chunk in which tiers, and how far each engine's prefix reaches.

A record is a string of packed holders, 9 bytes each: the incarnation, then the tier mask (gpu 1, dram 2, nvme 4,
shared 8). Its order means nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct

from directory.members import INCARNATION_BYTES
from directory.tiers import HOST_TIERS, Tier, fastest

HOLDER_BYTES = INCARNATION_BYTES + 1
PARTITIONS = 16


def partition_of(key: bytes) -> int:
    """The partition of a directory key: the high half of its first byte."""
    return key[0] >> 4


def pack_holders(holders: Iterable[tuple[bytes, int]]) -> bytes:
    """A record's bytes from (incarnation, tier mask) pairs."""
    return b"".join(incarnation + bytes((mask,)) for incarnation, mask in holders)


def unpack_holders(record: bytes) -> list[tuple[bytes, int]]:
    """The (incarnation, tier mask) pairs of a record; a truncated last holder is left out."""
    return [(holder[:INCARNATION_BYTES], holder[INCARNATION_BYTES]) for holder in _split(record)]


@dataclass(frozen=True, slots=True)
class Reach:
    """The incarnations whose placements serve one engine: its own lives (`gpu`) and its host's (`dram`, `nvme`)."""

    engine: str
    own: frozenset[bytes]
    host: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """An engine's unbroken run of chunks from position 0: the fastest tier of each.

    `None` stands for a position whose partition didn't answer, inside the run: a later chunk is held, and its key
    names all before it, so the position very likely is as well; the score discounts it.
    """

    tiers: tuple[Tier | None, ...] = ()

    @property
    def chunks(self) -> int:
        """The run's length."""
        return len(self.tiers)


NO_MATCH = PrefixMatch()


def matched_prefixes(records: Sequence[bytes | None], reaches: Sequence[Reach]) -> dict[str, PrefixMatch]:
    """`ReachTable.match`, for a fleet that is asked about once."""
    return ReachTable(reaches).match(records)


class ReachTable:
    """Which engines each incarnation serves. Building it costs a pass over the fleet: keep it as long as the fleet.

    Decoding must not dominate a lookup, and the chunks of one prefix mostly have the same holders. So what costs is
    the *difference* between a chunk's holders and those of the chunk before: each engine has a tally of how many of
    them hold the chunk in each tier, from which holders that came or went are added or taken, and its run is kept as
    the positions where its tier changed. Engines that no holder serves are never looked at.
    """

    def __init__(self, reaches: Sequence[Reach]) -> None:
        self._serves: dict[bytes, list[tuple[str, int]]] = {}
        for reach in reaches:
            for incarnation in reach.own:
                self._serves.setdefault(incarnation, []).append((reach.engine, _OWN_TIERS))
            for incarnation in reach.host:
                self._serves.setdefault(incarnation, []).append((reach.engine, _HOST_TIERS))

    def match(self, records: Sequence[bytes | None]) -> dict[str, PrefixMatch]:
        """How far each engine reaches over the prompt's chunks, and from which tier; those without a hit are left out.

        `records` are the chunks' records in order: `b""` is held by nobody, `None` is unknown.
        """
        tallies: dict[str, int] = {}
        runs: dict[str, _Run] | None = None
        ended: dict[str, tuple[_Run, int]] = {}
        unknown: list[int] = []
        last: bytes | None = None
        held: set[bytes] = set()
        for position, record in enumerate(records):
            if record is None:
                unknown.append(position)
            elif record != last:
                last, before, held = record, held, set(_split(record))
                if held == before and runs is not None:  # the same holders in another order
                    continue
                changed = self._count(tallies, before - held, held - before)
                if runs is None:
                    runs = {engine: [(0, tier)] for engine in changed if (tier := _fastest(tallies[engine]))}
                for engine in changed & runs.keys():
                    tier = _fastest(tallies[engine])
                    if tier is None:
                        ended[engine] = runs.pop(engine), position
                    elif tier is not runs[engine][-1][1]:
                        runs[engine].append((position, tier))
                if not runs:
                    break
        ended |= {engine: (run, len(records)) for engine, run in (runs or {}).items()}
        alike: dict[tuple[int, tuple[tuple[int, Tier], ...]], PrefixMatch] = {}
        found = {}
        for engine, (run, end) in ended.items():
            key = end, tuple(run)
            match = alike.get(key)
            found[engine] = match or alike.setdefault(key, _written_out(run, end, unknown))
        return found

    def _count(self, tallies: dict[str, int], gone: set[bytes], come: set[bytes]) -> set[str]:
        """Take holders from the tallies and add others; the engines that they serve."""
        changed = set()
        for holders, sign in ((gone, -1), (come, 1)):
            for holder in holders:
                for engine, allowed in self._serves.get(holder[:INCARNATION_BYTES], ()):
                    tallies[engine] = tallies.get(engine, 0) + sign * _UNITS[holder[INCARNATION_BYTES] & allowed]
                    changed.add(engine)
        return changed


_Run = list[tuple[int, Tier]]
"""The positions from which an engine's tier holds, in order; the first is 0."""
_OWN_TIERS, _HOST_TIERS = int(Tier.GPU), int(HOST_TIERS)
_TALLY_BITS = 16
_UNITS = tuple(sum(1 << _TALLY_BITS * bit for bit in range(len(Tier)) if mask >> bit & 1) for mask in range(256))
"""One in each tier of a mask: a tally is a whole number with `_TALLY_BITS` bits a tier, the fastest lowest."""


def _fastest(tally: int) -> Tier | None:
    return fastest(1 << ((tally & -tally).bit_length() - 1) // _TALLY_BITS) if tally else None


def _split(record: bytes) -> tuple[bytes, ...]:
    """A record's holders, still packed; a truncated last one is left out."""
    return _holders_of(len(record) // HOLDER_BYTES).unpack_from(record)


@lru_cache(maxsize=256)
def _holders_of(count: int) -> Struct:
    return Struct(f"{HOLDER_BYTES}s" * count)


def _written_out(run: _Run, end: int, unknown: Sequence[int]) -> PrefixMatch:
    """A run up to `end`, which isn't held, less the unknown positions just before it."""
    tiers: list[Tier | None] = []
    for index, (start, tier) in enumerate(run, 1):
        until = run[index][0] if index < len(run) else end
        tiers += [tier] * (until - start)
    for position in unknown:
        if position < end:
            tiers[position] = None
    while tiers[-1] is None:
        tiers.pop()
    return PrefixMatch(tuple(tiers))
