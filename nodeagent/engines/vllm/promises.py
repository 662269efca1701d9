"""What is known of the chunks that vLLM's scheduler asks for, and what it was promised; no waiting, no clock.

The scheduler asks for a prompt's chunks key by key, in every step anew until each is a hit or a miss. What is new in a
step is opened at its end, as one run for each request. A chunk that is found is held by a reference until it is loaded
or its requests are through with their lookups, so what was promised is there when it is loaded.

A run that the host's DRAM can't hold at once is opened in pieces: what lies behind the piece in hand is RETRY until
that piece is in the engine's staging rows and was given back. Two rules keep such a prompt from being looked up for
ever:

1. The next piece is opened when the scheduler asks for it and no chunk of this one is being loaded. Chunks that it
   didn't load by then it has already, in its rows or in the GPU, or has no row for: they are given back.
2. A request is promised at most as many chunks as there are rows, each of them once. One more would take the row of
   the request's own first chunk, whose load would take that of the second, and so on: vLLM pins none of them before all
   are there (TieringOffloadingManager.lookup, CPUOffloadingManager.prepare_store of 0.32). A chunk that was promised
   and is asked for again found no row, or has lost it: the rows are too few now, and the prompt's rest is computed.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from nodeagent.client import OpenedChunk

VERDICTS_MAX = 1_000_000


class Verdict(enum.Enum):
    """What is known of a key: it can be loaded, it can't, or ask again at the next step."""

    HIT = enum.auto()
    MISS = enum.auto()
    RETRY = enum.auto()


@dataclass(eq=False, slots=True)
class Run:
    """Keys that are opened one behind the other: those of the piece in hand, and the rest.

    `waited_s` is how long its opens took, and `keys` how many keys it began with: whoever opens it keeps these.
    """

    piece: list[bytes] = field(default_factory=list)
    rest: list[bytes] = field(default_factory=list)
    keys: int = 0
    waited_s: float = 0.0
    is_opening: bool = False


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What is to be done at the end of a step, in this order."""

    given_back: list[OpenedChunk]
    to_open: list[Run]


@dataclass(eq=False, slots=True)
class _Asked:
    """A key that requests wait for. `opened` is the reference that a hit holds until it is being loaded."""

    run: Run
    requests: set[str] = field(default_factory=set)
    verdict: Verdict = Verdict.RETRY
    opened: OpenedChunk | None = None

    @property
    def is_loading(self) -> bool:
        return self.verdict is Verdict.HIT and self.opened is None

    def take(self) -> list[OpenedChunk]:
        """The reference, if there is one; from now on it isn't this key's."""
        opened, self.opened = self.opened, None
        return [] if opened is None else [opened]


@dataclass(eq=False, slots=True)
class _Request:
    """What a request asks for, and what it was promised."""

    asked: dict[bytes, None] = field(default_factory=dict)
    promised: set[bytes] = field(default_factory=set)


class Promises:
    """See the module. `rows` is how many chunks the staging area holds. One thread at a time.

    Methods that return chunks return references which are the caller's to give back.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._asked: dict[bytes, _Asked] = {}
        self._requests: dict[str, _Request] = {}
        self._new_runs: dict[str, Run] = {}
        self._awaited: dict[Run, None] = {}

    def look_up(self, key: bytes, request: str, *, may_ask: bool) -> Verdict:
        """What is known of a key; one that is new is to be opened at the end of this step, or else it is a miss."""
        asking = self._requests.get(request)
        if asking is not None and (key in asking.promised or len(asking.promised) >= self._rows):
            return Verdict.MISS
        asked = self._asked.get(key)
        if asked is None:
            if not may_ask or len(self._asked) >= VERDICTS_MAX:
                return Verdict.MISS
            run = self._new_runs.setdefault(request, Run())
            run.rest.append(key)
            run.keys += 1
            asked = self._asked[key] = _Asked(run)
        asked.requests.add(request)
        asking = self._requests.setdefault(request, _Request())
        asking.asked[key] = None
        if asked.verdict is Verdict.RETRY:
            self._awaited[asked.run] = None
        elif asked.opened is not None:
            asking.promised.add(key)
        return asked.verdict

    def end_step(self) -> StepEnd:
        """What follows from this step's lookups, after its loads were begun."""
        given_back: list[OpenedChunk] = []
        to_open = [run for run in self._awaited if not run.is_opening and not self._is_loading(run)]
        for run in to_open:
            given_back += self._end_piece(run)
            run.is_opening = True
        self._awaited.clear()
        self._new_runs.clear()
        return StepEnd(given_back, to_open)

    def wanted(self, run: Run) -> list[bytes]:
        """The keys of a run that are to be opened, and still asked for."""
        return [key for key in run.rest if (asked := self._asked.get(key)) is not None and asked.run is run]

    def settle(self, run: Run, keys: Sequence[bytes], found: Sequence[OpenedChunk], goes_on: bool) -> list[OpenedChunk]:
        """Of `keys`, which were opened, the first are held now; the others are behind them if the run `goes_on`.

        Returns what nobody wants any more.
        """
        unwanted: list[OpenedChunk] = []
        run.is_opening = False
        run.rest = list(keys[len(found) :]) if goes_on else []
        for index, key in enumerate(keys):
            asked = self._asked.get(key)
            if asked is None or asked.run is not run or asked.verdict is not Verdict.RETRY:
                unwanted += found[index : index + 1]
            elif index < len(found):
                run.piece.append(key)
                asked.opened, asked.verdict = found[index], Verdict.HIT
            elif not goes_on:
                asked.verdict = Verdict.MISS
        return unwanted

    def begin_load(self, keys: Sequence[bytes]) -> list[OpenedChunk | None]:
        """The references by which to load chunks that were hits."""
        opened: list[OpenedChunk | None] = []
        for key in keys:
            asked = self._asked.get(key)
            opened.append(asked.opened if asked is not None else None)
            if asked is not None:
                asked.opened = None
        return opened

    def end_load(self, keys: Sequence[bytes], moved: Collection[bytes]) -> None:
        """A load has ended, and its references were given back.

        What was `moved` is in the staging rows: who asks again, after it left them, asks the agent anew. What failed
        is a miss for as long as its requests look it up.
        """
        for key in keys:
            asked = self._asked.get(key)
            if asked is None:
                continue
            if key in moved:
                self._drop(key, asked)
            else:
                asked.verdict = Verdict.MISS

    def forget(self, request: str) -> list[OpenedChunk]:
        """A request is through with its lookups, or begins them anew. Returns what was held for it alone."""
        given_back: list[OpenedChunk] = []
        self._new_runs.pop(request, None)
        asking = self._requests.pop(request, None)
        for key in asking.asked if asking is not None else ():
            asked = self._asked.get(key)
            if asked is None:
                continue
            asked.requests.discard(request)
            if not asked.requests:
                del self._asked[key]
                given_back += asked.take()
        return given_back

    def forget_all(self) -> list[OpenedChunk]:
        """Nobody asks any more."""
        return [chunk for request in list(self._requests) for chunk in self.forget(request)]

    def _is_loading(self, run: Run) -> bool:
        return any(asked.is_loading for _, asked in self._of(run, run.piece))

    def _end_piece(self, run: Run) -> list[OpenedChunk]:
        """The scheduler has asked for what lies behind: what it didn't load of this piece it doesn't need."""
        given_back: list[OpenedChunk] = []
        for key, asked in self._of(run, run.piece):
            if asked.opened is not None:
                given_back += asked.take()
                self._drop(key, asked)
        run.piece.clear()
        return given_back

    def _of(self, run: Run, keys: Sequence[bytes]) -> list[tuple[bytes, _Asked]]:
        """Those of the keys that are asked for in this run, not anew in another."""
        return [(key, asked) for key in keys if (asked := self._asked.get(key)) is not None and asked.run is run]

    def _drop(self, key: bytes, asked: _Asked) -> None:
        for request in asked.requests:
            if request in self._requests:
                self._requests[request].asked.pop(key, None)
        del self._asked[key]
