"""A host's tiers without an agent: chunks in a dict, a DRAM of a few slots, faults on request."""

import threading
from collections.abc import Sequence
from typing import Any

from nodeagent.client import ChunkLabel, PutResult
from nodeagent.opened_chunk import NO_ANSWER, OpenedPiece

WAIT_S = 20.0


class Held:
    """A reference, as the client hands it out."""

    def __init__(self, key: bytes, length: int) -> None:
        self.storage_key, self.length = key, length


class FakeHost:
    """All of a run is on disk; at most `slots` references are held at a time, so that a longer run goes on.

    References are counted, so that none is lost or given back twice.
    """

    def __init__(self) -> None:
        self.is_connected = True
        self.slots = 1_000
        self.chunks: dict[bytes, bytes] = {}
        self.damaged: set[bytes] = set()
        self.references: set[Held] = set()
        self.lent = 0
        self.asked: list[list[bytes]] = []
        self.timeouts: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_silent = False

    def open_piece(self, keys: Sequence[bytes], timeout_s: float) -> Any:
        self.asked.append(list(keys))
        self.timeouts.append(timeout_s)
        if self.is_silent:
            threading.Event().wait(timeout_s)
            return NO_ANSWER
        assert self.gate.wait(WAIT_S)
        opened: list[Any] = []
        for key in keys:
            if key not in self.chunks or len(self.references) >= self.slots:
                break
            opened.append(Held(key, len(self.chunks[key])))
            self.references.add(opened[-1])
            self.lent += 1
        rest = keys[len(opened) :]
        return OpenedPiece(opened, goes_on=bool(opened and rest) and rest[0] in self.chunks)

    def read_into(self, chunk: Any, target: memoryview) -> bool:
        assert chunk in self.references, "only what is held is read"
        target[:] = self.chunks[chunk.storage_key]
        return chunk.storage_key not in self.damaged

    def close(self, chunks: Sequence[Any]) -> None:
        for chunk in chunks:
            self.references.remove(chunk)

    def put(self, label: ChunkLabel, payload: memoryview, timeout_s: float) -> PutResult:
        if self.is_silent:
            return PutResult.REFUSED
        assert self.gate.wait(WAIT_S)
        self.chunks[label.storage_key] = bytes(payload)
        return PutResult.STORED
