"""Placements: which incarnation holds a chunk in which tiers, and how far each engine's prefix reaches.

A record is a string of packed holders, 9 bytes each: the incarnation, then the tier mask (gpu 1, dram 2, nvme 4,
shared 8). Its order means nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    whole = len(record) - len(record) % HOLDER_BYTES
    return [
        (record[start : start + INCARNATION_BYTES], record[start + INCARNATION_BYTES])
        for start in range(0, whole, HOLDER_BYTES)
    ]


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
    """How far each engine reaches over the prompt's chunks, and from which tier; engines without a hit are left out.

    `records` are the chunks' records in order: `b""` is held by nobody, `None` is unknown. Records with equal bytes
    are decoded once: the chunks of one prefix mostly have the same holders.
    """
    serves = _serves(reaches)
    decoded: dict[bytes, dict[str, int]] = {}
    runs: dict[str, list[Tier | None]] = {reach.engine: [] for reach in reaches}
    active = dict(runs)
    for record in records:
        if not active:
            break
        if record is None:
            for run in active.values():
                run.append(None)
            continue
        masks = decoded.get(record)
        if masks is None:
            masks = decoded[record] = _masks_by_engine(record, serves)
        ended = []
        for engine, run in active.items():
            tier = fastest(masks.get(engine, 0))
            if tier is None:
                ended.append(engine)
            else:
                run.append(tier)
        for engine in ended:
            del active[engine]
    return {engine: PrefixMatch(tuple(run)) for engine, run in runs.items() if _drop_unknown_tail(run)}


def _serves(reaches: Sequence[Reach]) -> dict[bytes, list[tuple[str, int]]]:
    serves: dict[bytes, list[tuple[str, int]]] = {}
    for reach in reaches:
        for incarnation in reach.own:
            serves.setdefault(incarnation, []).append((reach.engine, int(Tier.GPU)))
        for incarnation in reach.host:
            serves.setdefault(incarnation, []).append((reach.engine, int(HOST_TIERS)))
    return serves


def _masks_by_engine(record: bytes, serves: Mapping[bytes, list[tuple[str, int]]]) -> dict[str, int]:
    masks: dict[str, int] = {}
    for incarnation, mask in unpack_holders(record):
        for engine, allowed in serves.get(incarnation, ()):
            masks[engine] = masks.get(engine, 0) | (mask & allowed)
    return masks


def _drop_unknown_tail(run: list[Tier | None]) -> list[Tier | None]:
    while run and run[-1] is None:
        run.pop()
    return run
