"""vLLM's scheduler and staging rows in miniature: how 0.32 asks a secondary tier, and when it gives it rows.

After `TieringOffloadingManager` (lookup, on_schedule_end), `CPUOffloadingManager` (rows, the least recently used goes
first, one that is being written or is pinned stays) and `OffloadingConnectorScheduler._maximal_prefix_lookup`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nodeagent.engines.vllm.chunk_transfers import ChunkRow, ChunkTransfers
from nodeagent.engines.vllm.promises import Verdict


@dataclass(slots=True)
class _Cell:
    row: int
    is_ready: bool = False
    is_pinned: bool = False


@dataclass(slots=True)
class _Waiting:
    request: str
    keys: Sequence[bytes]
    computed: int


@dataclass(slots=True)
class Staging:
    """`hits` says of each request that was scheduled how many chunks it found, behind those its GPU had."""

    transfers: ChunkTransfers
    rows: int
    hits: dict[str, int] = field(default_factory=dict)
    cells: dict[bytes, _Cell] = field(default_factory=dict)
    _waiting: list[_Waiting] = field(default_factory=list)
    _pending: dict[str, list[bytes]] = field(default_factory=dict)
    _jobs: dict[int, list[bytes]] = field(default_factory=dict)
    _next_job: int = 0

    def add(self, request: str, keys: Sequence[bytes], computed: int = 0) -> None:
        """A request arrives, whose first `computed` chunks the GPU holds."""
        self._waiting.append(_Waiting(request, keys, computed))

    def put(self, key: bytes, *, is_pinned: bool = False) -> None:
        """A row is filled from the GPU."""
        row = self._row()
        assert row is not None
        self.cells[key] = _Cell(row, is_ready=True, is_pinned=is_pinned)

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        """Schedule whatever needn't be asked again; then begin the loads, and tell the tier that the step ends."""
        for finished in self.transfers.take_finished():
            for key in self._jobs.pop(finished.job):
                if key in finished.moved:
                    self.cells[key].is_ready = True
                else:
                    del self.cells[key]
        scheduled = []
        for waiting in list(self._waiting):
            hits = self._find(waiting)
            if hits is not None:
                self._waiting.remove(waiting)
                self.hits[waiting.request] = hits
                scheduled.append(waiting.request)
        for keys in self._pending.values():
            self._next_job += 1
            self._jobs[self._next_job] = keys
            self.transfers.load(self._next_job, [ChunkRow(key, self.cells[key].row) for key in keys])
        self._pending.clear()
        for request in scheduled:
            self.transfers.forget(request)
        self.transfers.flush()

    def _find(self, waiting: _Waiting) -> int | None:
        hits, is_deferred = 0, False
        for key in waiting.keys[waiting.computed :]:
            cell = self.cells.get(key)
            if cell is None:
                verdict = self.transfers.look_up(key, waiting.request)
                if verdict is Verdict.MISS or (verdict is Verdict.HIT and not self._promote(key, waiting.request)):
                    break
                is_deferred = True
            elif not cell.is_ready:
                is_deferred = True
            hits += 1
        return None if is_deferred else hits

    def _promote(self, key: bytes, request: str) -> bool:
        row = self._row()
        if row is None:
            return False
        self.cells[key] = _Cell(row)
        self._pending.setdefault(request, []).append(key)
        return True

    def _row(self) -> int | None:
        free = set(range(self.rows)) - {cell.row for cell in self.cells.values()}
        if free:
            return min(free)
        for key, cell in self.cells.items():
            if cell.is_ready and not cell.is_pinned:
                del self.cells[key]
                return cell.row
        return None
