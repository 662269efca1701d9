"""Records requests as a trace for `warmroute replay`: when, how long, and which blocks of prompts were alike.

A JSON object a line, in Mooncake's format: `timestamp` (ms since the start), `input_length` and `output_length`
(tokens), and `hash_ids`, a number for each 512 tokens of the prompt, and for what is left. A number is a digest of the
block's chunk key with a salt that is drawn for this file and kept nowhere: equal numbers say that two prompts began
alike, and nothing else; neither text nor a key that the directory would know can be had from it. Where a stream doesn't
tell how many tokens it had (clients ask for that: `stream_options.include_usage`), its events are counted. Requests are
written when their answer is over, by a loop of its own. A file that is full, or can't be written, ends the record,
never a request.
"""

import asyncio
import hashlib
import json
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.audit import Usage
from gateway.fleet import EngineView
from gateway.preparation import Prepared

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 512
ROWS_WAITING_MAX = 10_000
"""Requests that wait to be written; more are left out, and counted."""
WRITE_INTERVAL_S = 1.0
ID_BITS = 53
"""Of a number in `hash_ids`: what every reader of JSON keeps exactly."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request whose answer is over. `keys` name its chunks, of `chunk_tokens` each, as far as they are known."""

    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[bytes]
    chunk_tokens: int


class TraceRecorder:
    """Writes to `path`, at most `bytes_max` bytes; without a path it does nothing. `clock` gives monotonic seconds."""

    def __init__(
        self,
        path: Path | None,
        bytes_max: int,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path, self._bytes_left, self._sleep = path, bytes_max, sleep
        self._started_at, self._salt = clock(), secrets.token_bytes(32)
        self._rows: deque[Row] = deque()
        self._file: int | None = None
        self._writing = threading.Lock()
        self.left_out = 0
        """Requests that aren't in the trace."""

    def note(
        self, arrived_at: float, prepared: Prepared, view: EngineView, usage: Usage | None, events: int = 0
    ) -> None:
        """A request that came at `arrived_at` was answered by this engine, by so many events. Never waits."""
        if self._path is None:
            return
        best = prepared.prompt.best
        counted = best.prompt_tokens if best.is_whole else 0
        prompt_tokens = prepared.prompt.tokens_of(view) or (counted if usage is None else usage.prompt_tokens)
        told = usage.output_tokens if usage is not None else None
        output_tokens = (events or None) if told is None else told
        if not prompt_tokens or output_tokens is None or len(self._rows) >= ROWS_WAITING_MAX:
            self.left_out += 1
            return
        keys = prepared.holders.keys.get(view.engine, ())
        self._rows.append(Row(arrived_at, prompt_tokens, output_tokens, keys, view.chunk_tokens))

    async def run(self) -> None:
        """Write until cancelled, and what is left then."""
        try:
            while self._path is not None:
                await self._sleep(WRITE_INTERVAL_S)
                await asyncio.to_thread(self._write)
        finally:
            self._write()  # after one that a thread is still at
            if self.left_out:
                logger.warning("%d requests aren't in the trace: how long they were isn't known", self.left_out)
            self._end()

    def _write(self) -> None:
        with self._writing:
            self._write_rows()

    def _write_rows(self) -> None:
        try:
            while self._rows and self._path is not None:
                line = self._line(self._rows.popleft())
                self._bytes_left -= len(line)
                if self._bytes_left < 0:
                    logger.warning("the trace %s is full; nothing more is recorded", self._path)
                    self._end()
                    return
                if self._file is None:
                    self._file = _begin(self._path)
                os.write(self._file, line)
        except OSError as error:
            logger.warning("the trace %s can't be written, and ends: %s", self._path, error)
            self._end()

    def _end(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = self._path = None
        self._rows.clear()

    def _line(self, row: Row) -> bytes:
        told = {
            "timestamp": max(0, round(1000 * (row.arrived_at - self._started_at))),
            "input_length": row.prompt_tokens,
            "output_length": row.output_tokens,
            "hash_ids": block_ids(row, self._salt),
        }
        return json.dumps(told, separators=(",", ":")).encode() + b"\n"


def block_ids(row: Row, salt: bytes) -> list[int]:
    """A number for each block of the prompt; one of its own for a block that isn't whole, or isn't known.

    A block is named by the chunk in which it ends, and by where.
    """
    ids = []
    for end in range(BLOCK_TOKENS, row.prompt_tokens + BLOCK_TOKENS, BLOCK_TOKENS):
        chunk, within = divmod(end - 1, row.chunk_tokens)
        is_known = end <= row.prompt_tokens and chunk < len(row.keys)
        name = row.keys[chunk] + within.to_bytes(8, "little") if is_known else secrets.token_bytes(24)
        digest = hashlib.blake2b(name, key=salt, digest_size=8).digest()
        ids.append(int.from_bytes(digest, "big") >> 64 - ID_BITS)
    return ids


def _begin(path: Path) -> int:
    """The file, empty, for this user only. One that is there already is kept as `<name>.1`. Raises `OSError`, also
    where a folder or a device is: they aren't moved away."""
    if path.is_file():
        path.rename(path.with_name(f"{path.name}.1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
