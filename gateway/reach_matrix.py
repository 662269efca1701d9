"""ReachMatrix: how far each engine's prefix reaches, as a `ReachTable` says it, where most records differ.

A `ReachTable` looks at each holder that came or went, which takes half a microsecond of Python. That is nothing where
records are alike, and 50 ms of the event loop for 128 chunks of 1,000 holders that were announced in any order. Here
the records are joined and read as one array of 9-byte rows, and what follows is a few operations on whole arrays:

1. Each holder's incarnation is found among the fleet's lives by a hash (`_Lives`).
2. Its mask is written into a matrix of bytes, a row a life, a column a record.
3. An engine's row is that of its own lives, of which only `gpu` counts, joined with those of its host's.
4. The lowest bit of each byte is the fastest tier; the first byte that is zero ends the engine's run.

A fleet of thousands and a prompt of thousands of chunks would make a large matrix, of which little is needed: a
prompt's first chunks are held by many, its last ones by few. So a matrix is made for as many records at a time as
`CELLS_MAX` and `HOLDERS_MAX` allow, and the engines whose run has ended are left out of the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import ne

import numpy as np
import numpy.typing as npt

from directory.members import INCARNATION_BYTES
from directory.placements import HOLDER_BYTES, PrefixMatch, Reach, ReachTable
from directory.tiers import HOST_TIERS, Tier

PLAIN_HOLDERS_MAX = 64
"""Holders in all records that differ from the one before, up to which a `ReachTable` is asked: both take 35 us where
all of these holders came or went. Where few did a `ReachTable` would be quicker for longer, by less than that."""

CELLS_MAX = 1 << 18
"""Bytes of a matrix: what stays in a core's own cache."""

HOLDERS_MAX = 1 << 14
"""Holders, on average, that are read before engines whose run has ended are left out."""

_Indexes = npt.NDArray[np.intp]
_Masks = npt.NDArray[np.uint8]
_Names = npt.NDArray[np.uint64]
_NONE: _Indexes = np.empty(0, np.intp)


class ReachMatrix:
    """Which engines each incarnation serves. Building it costs a pass over the fleet: keep it as long as the fleet."""

    def __init__(self, reaches: Sequence[Reach]) -> None:
        self._plain = ReachTable(reaches)
        self._reaches = reaches
        self._fleet: _Fleet | None = None

    def match(self, records: Sequence[bytes | None]) -> dict[str, PrefixMatch]:
        """What `ReachTable.match` says of the same records, in the time of the quicker way."""
        changed = compress(records, map(ne, records, chain((None,), records)))
        if sum(map(len, filter(None, changed))) <= PLAIN_HOLDERS_MAX * HOLDER_BYTES:
            return self._plain.match(records)
        if self._fleet is None:
            self._fleet = _Fleet(self._reaches)
        prompt = _prompt_of(records)
        return _written_out(self._fleet.runs(prompt.records), prompt)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt's records, each once as long as it comes again and again.

    `ends[n]`: the position after the last one that is known to hold `records[n]`; `places`: for each position which
    of `records` it holds, or would if it were known, and `None` where that is its own number; `unknown`: the positions
    that aren't known.
    """

    records: Sequence[bytes]
    ends: Sequence[int]
    places: _Indexes | None
    unknown: _Indexes


def _prompt_of(records: Sequence[bytes | None]) -> _Prompt:
    distinct: list[bytes] = []
    ends: list[int] = []
    places: list[int] = []
    unknown: list[int] = []
    last: bytes | None = None
    for position, record in enumerate(records, 1):
        if record is None:
            unknown.append(position - 1)
        elif record == last:
            ends[-1] = position
        else:
            distinct.append(record)
            ends.append(position)
            last = record
        places.append(len(distinct) - 1)
    if len(distinct) == len(records):
        return _Prompt(distinct, ends, None, _NONE)
    return _Prompt(distinct, ends, np.maximum(places, 0), np.array(unknown, np.intp))


_HOLDER = np.dtype([("life", "<u8"), ("mask", "u1")])
assert _HOLDER.itemsize == HOLDER_BYTES
_OWN_TIERS, _HOST_TIERS = np.uint8(Tier.GPU), np.uint8(HOST_TIERS)
_UNKNOWN = 8
_TIER_OF: npt.NDArray[np.object_] = np.array([None] * (_UNKNOWN + 1), dtype=object)
for _tier in (Tier.GPU, Tier.DRAM, Tier.NVME):
    _TIER_OF[int(_tier)] = _tier
"""What a byte of a run stands for; of masks only the lowest bit is left."""


class _Fleet:
    """The engines and their lives as arrays."""

    def __init__(self, reaches: Sequence[Reach]) -> None:
        own: dict[str, set[bytes]] = {}
        host: dict[str, set[bytes]] = {}
        for reach in reaches:
            own.setdefault(reach.engine, set()).update(reach.own)
            host.setdefault(reach.engine, set()).update(reach.host)
        self._names = list(own)
        lives = list(set().union(*own.values(), *host.values()))
        self._lives = _Lives(lives)
        number = dict(zip(lives, self._lives.numbers.tolist(), strict=True))
        self._own = _padded([[number[life] for life in each] for each in own.values()], len(lives))
        self._host = _padded([[number[life] for life in each] for each in host.values()], len(lives))

    def runs(self, records: Sequence[bytes]) -> dict[str, bytes]:
        """Each engine's unbroken run of records from the first: a byte for the fastest tier of each."""
        if b"" in records:
            records = records[: records.index(b"")]
        runs: dict[str, bytes] = {}
        engines, own, host = np.arange(len(self._names)), self._own, self._host
        rows: _Indexes | None = None  # Of the matrix, by a life's number; `None`: that number itself.
        rows_count = len(self._lives)
        records_at_once = max(1, HOLDERS_MAX * HOLDER_BYTES * len(records) // max(1, sum(map(len, records))))
        start = 0
        while start < len(records) and engines.size:
            width = max(1, min(records_at_once, CELLS_MAX // max(rows_count + 1, own.size, host.size)))
            part = records[start : start + width]
            held = self._masks(part, rows, rows_count)
            fastest = _joined(held, own) & _OWN_TIERS
            fastest |= _joined(held, host) & _HOST_TIERS
            fastest &= np.negative(fastest)
            lengths = _lengths(fastest)
            self._lengthen(runs, engines, fastest, lengths)
            start += len(part)
            left = np.flatnonzero(lengths == len(part))
            if start < len(records) and left.size < engines.size:
                engines = engines[left]
                rows, rows_count = self._rows_of(engines)
                own, host = rows[self._own[engines]], rows[self._host[engines]]
        return runs

    def _masks(self, records: Sequence[bytes], rows: _Indexes | None, rows_count: int) -> _Masks:
        """Who holds each record in which tiers: a row a life, a column a record. The last row is nobody's: empty."""
        counts = [len(record) // HOLDER_BYTES for record in records]
        joined = b"".join(records)
        if len(joined) != sum(counts) * HOLDER_BYTES:  # What follows a record's last whole holder isn't one.
            cut = [record[: count * HOLDER_BYTES] for record, count in zip(records, counts, strict=True)]
            joined = b"".join(cut)
        holders = np.frombuffer(joined, _HOLDER)
        masks = holders["mask"]
        cells = self._lives.find(holders["life"].copy())
        if rows is not None:
            cells = rows[cells]
        strangers = cells == rows_count
        cells *= len(records)
        cells += np.repeat(np.arange(len(records)), counts)
        held = np.zeros((rows_count + 1) * len(records), np.uint8)
        held[cells] = masks
        # A life that stands in a record twice holds it in the tiers of both.
        overwritten = np.flatnonzero((held[cells] != masks) & ~strangers)
        if overwritten.size:
            np.bitwise_or.at(held, cells[overwritten], masks[overwritten])
        held[rows_count * len(records) :] = 0
        return held.reshape(rows_count + 1, len(records))

    def _rows_of(self, engines: _Indexes) -> tuple[_Indexes, int]:
        """A row for each life that serves these engines, the row after the last for all others; and how many."""
        serves = np.zeros(len(self._lives) + 1, bool)
        serves[self._own[engines]] = True
        serves[self._host[engines]] = True
        serves[-1] = False
        count = int(np.count_nonzero(serves))
        rows = np.full(len(serves), count)
        rows[serves] = np.arange(count)
        return rows, count

    def _lengthen(self, runs: dict[str, bytes], engines: _Indexes, fastest: _Masks, lengths: _Indexes) -> None:
        held = np.flatnonzero(lengths)
        width, cells = fastest.shape[1], fastest.tobytes()
        for row, engine, length in zip(held.tolist(), engines[held].tolist(), lengths[held].tolist(), strict=True):
            name = self._names[engine]
            runs[name] = runs.get(name, b"") + cells[row * width : row * width + length]


class _Lives:
    """Numbers incarnations from 0, and finds many at once.

    They lie in the order of a multiplicative hash (Knuth, The Art of Computer Programming 6.4: by the golden ratio),
    whose highest bits name a bucket; sixteen buckets a life, so that hardly one holds two. The first of a bucket is
    compared, and only where it is another one the next. Incarnations are random; were they chosen to fall into one
    bucket, they would be compared one by one.
    """

    def __init__(self, lives: Sequence[bytes]) -> None:
        names = np.frombuffer(b"".join(lives), "<u8")
        assert names.size == len(lives), f"an incarnation has {INCARNATION_BYTES} bytes"
        self._shift = np.uint64(64 - max(6, (16 * len(lives)).bit_length()))
        buckets = self._buckets(names)
        order = np.argsort(buckets, kind="stable")
        self.numbers = np.empty(len(lives), np.intp)
        self.numbers[order] = np.arange(len(lives))
        self._names = np.append(names[order], np.uint64(0))  # The last one is nobody, whatever its name.
        self._first = np.full(1 << (64 - int(self._shift)), len(lives))
        self._first[buckets[order[::-1]]] = np.arange(len(lives))[::-1]
        self._in_bucket_most = int(np.bincount(buckets).max(initial=0))

    def __len__(self) -> int:
        return len(self.numbers)

    def find(self, names: _Names) -> _Indexes:
        """Each one's number; that of nobody, which is the next after the last, for those that aren't among them."""
        numbers = self._first[self._buckets(names)]
        missed = np.flatnonzero(self._names[numbers] != names)
        for _ in range(self._in_bucket_most - 1):
            if not missed.size:
                break
            tried = np.minimum(numbers[missed] + 1, len(self))
            numbers[missed] = tried
            missed = missed[self._names[tried] != names[missed]]
        numbers[missed] = len(self)
        return numbers

    def _buckets(self, names: _Names) -> _Indexes:
        return ((names * _GOLDEN_RATIO) >> self._shift).astype(np.intp)


_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


def _padded(numbers: Sequence[Sequence[int]], nobody: int) -> _Indexes:
    """A row for each sequence, all as long as the longest one."""
    width = max(map(len, numbers), default=0)
    return np.array([[*row, *[nobody] * (width - len(row))] for row in numbers], np.intp).reshape(len(numbers), width)


def _joined(held: _Masks, lives: _Indexes) -> _Masks:
    """For each row of `lives` the tiers in which any of them holds each record."""
    if lives.shape[1] == 1:
        return held.take(lives[:, 0], axis=0)
    joined: _Masks = np.bitwise_or.reduce(held.take(lives, axis=0), axis=1)
    return joined


def _lengths(fastest: _Masks) -> _Indexes:
    """How many bytes of each row come before its first zero."""
    missing = fastest == 0
    lengths: _Indexes = missing.argmax(axis=1)
    lengths[(lengths == 0) & ~missing[:, 0]] = fastest.shape[1]
    return lengths


def _written_out(runs: dict[str, bytes], prompt: _Prompt) -> dict[str, PrefixMatch]:
    """Runs of distinct records as runs of chunks, up to the last one that is held; equal ones share a match."""
    distinct = dict.fromkeys(runs.values())
    cells = b"".join(distinct if prompt.places is None else [_of_chunks(run, prompt) for run in distinct])
    tiers = _TIER_OF[np.frombuffer(cells, np.uint8)].tolist()
    matches: dict[bytes, PrefixMatch] = {}
    begun = 0
    for run in distinct:
        end = begun + prompt.ends[len(run) - 1]
        matches[run] = PrefixMatch(tuple(tiers[begun:end]))
        begun = end
    return {engine: matches[run] for engine, run in runs.items()}


def _of_chunks(run: bytes, prompt: _Prompt) -> bytes:
    assert prompt.places is not None
    end = prompt.ends[len(run) - 1]
    cells = np.frombuffer(run, np.uint8)[prompt.places[:end]]
    cells[prompt.unknown[: np.searchsorted(prompt.unknown, end)]] = _UNKNOWN
    return cells.tobytes()
