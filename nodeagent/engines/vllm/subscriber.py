"""Follows one vLLM engine's KV events over ZeroMQ, and keeps the table of what its GPU holds.

The engine publishes numbered batches (SUB: topic, sequence, payload) and repeats those it still has on request
(DEALER: "", start -> "", topic, sequence, payload each, sequence -1 at the end; vllm/distributed/kv_events.py). At
start, after a hole in the numbers, and when it has been quiet for a while, the subscriber asks for a replay that
begins one batch before the next, which must be the very batch that was seen last: else it is another process's.
Live batches are held meanwhile, and follow in order.

The listener is called at once, and must not wait: whatever becomes of the directory, the socket is drained and
nothing is queued here but the held batches, which are bounded. A hole that can't be closed drops the table, and the
engine is unknown: only what is stored from then on is claimed, as far as it can be keyed.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import zmq
import zmq.asyncio

from nodeagent.engines.vllm.batch_order import SEQUENCE_MAX, BatchOrder, Place
from nodeagent.engines.vllm.events import PAYLOAD_BYTES_MAX, decode_batch
from nodeagent.engines.vllm.gpu_table import GpuChanges, GpuTable
from nodeagent.engines.vllm.saved_table import SavedTable, dump_table
from nodeagent.messages import KvEventSource

LIVE_BATCHES_MAX = 10_000
"""In the SUB socket's queue; beyond it the engine's own socket queues, then drops, and a replay closes the hole."""
REPLAYED_BATCHES_MAX = 100_000
"""In a DEALER socket's queue."""
DRAIN_BATCHES_MAX = 32
"""Taken in before other work of the event loop has its turn."""
RECONNECT_MIN_MS, RECONNECT_MAX_MS = 100, 2_000
SEQUENCE_BYTES = 8
REPLAY_END = b"\xff" * SEQUENCE_BYTES
FAULT_PAUSE_S, FAULT_PAUSE_MAX_S = 1.0, 30.0
"""After a fault, then twice as long after each that follows soon."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SubscriberLimits:
    """Bounds of waiting, in seconds, batches and bytes."""

    replay_timeout_s: float = 2.0
    replay_stalls_max: int = 3
    probe_interval_s: float = 15.0
    held_batches_max: int = 10_000
    held_bytes_max: int = 64 * 2**20
    warm_batches_max: int = 10_000


@dataclass(frozen=True, slots=True)
class GpuUnknown:
    """What the GPU holds isn't known any more, and why: nothing is claimed but what is stored from now on."""

    reason: str


class GpuListener(Protocol):
    """Is told what changed, in order. Must not wait, and must not raise."""

    def changed(self, changes: GpuChanges) -> None:
        """Chunks are held now, or not any more."""
        ...

    def unknown(self, unknown: GpuUnknown) -> None:
        """The table was dropped; the removals came before."""
        ...


class _Replay(Enum):
    COMPLETE = auto()
    AGAIN = auto()


class KvEventSubscriber:
    """One engine rank's events. `start` is a fresh table at 0, or one that was saved. One event loop's."""

    def __init__(
        self,
        source: KvEventSource,
        start: SavedTable,
        listener: GpuListener,
        context: zmq.asyncio.Context,
        *,
        limits: SubscriberLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.revision = 0
        """Counts up whenever the table, or the place in the events that it stands for, may have changed."""
        self._source = source
        self._table = start.table
        self._order = BatchOrder(start.next_sequence, start.last_digest)
        self._listener = listener
        self._context = context
        self._limits = limits or SubscriberLimits()
        self._clock = clock
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._epoch = 0
        self._needs_replay = True
        self._is_replaying = False
        self._is_synced = False
        self._is_connected = False

    @property
    def table(self) -> GpuTable:
        """What the GPU holds, as far as it is known."""
        return self._table

    @property
    def is_known(self) -> bool:
        """Whether the table is all that the engine holds, and up to date."""
        return self._is_synced and self._table.is_complete

    @property
    def next_sequence(self) -> int:
        """The number of the batch that is expected next."""
        return self._order.next_sequence

    @property
    def held_batches(self) -> int:
        """Live batches that wait for a replay; at most `held_batches_max`."""
        return len(self._held)

    def dump(self, life: bytes) -> bytes | None:
        """The table of the engine process `life`, to be loaded at the next start; None where it isn't to be trusted.

        One that was loaded and isn't confirmed yet is dumped as it was: it will be confirmed, or not, at that start.
        """
        if not self._order.last_digest:
            return None
        return dump_table(SavedTable(self._table, self._order.next_sequence, self._order.last_digest), life)

    def cleared(self) -> None:
        """The engine's prefix cache was reset, or its memory put to sleep: it says so only when it next computes."""
        self._tell(self._table.clear(is_complete=True))

    async def run(self) -> None:
        """Follow until cancelled."""
        pause_s = FAULT_PAUSE_S
        while True:
            began_at = self._clock()
            try:
                with closing(self._open(zmq.SUB, LIVE_BATCHES_MAX)) as live:
                    live.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
                    live.connect(self._source.endpoint)
                    await self._listen(live)
            except Exception:  # the edge of the loop: whatever it was, nothing that was known is trusted
                logger.exception("following the KV events of %s met a fault", self._source.endpoint)
                self._begin_anew()
                if self._clock() - began_at > FAULT_PAUSE_MAX_S:
                    pause_s = FAULT_PAUSE_S
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, FAULT_PAUSE_MAX_S)

    async def _listen(self, live: zmq.asyncio.Socket) -> None:
        self._needs_replay = True
        while True:
            if self._needs_replay:
                await self._synchronize(live)
            if await live.poll(int(self._limits.probe_interval_s * 1000)):
                await self._drain(live)
            else:
                self._needs_replay = True

    async def _drain(self, live: zmq.asyncio.Socket) -> None:
        for _ in range(DRAIN_BATCHES_MAX):
            try:
                frames = await live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._receive(frames)
        await asyncio.sleep(0)

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or not _is_sequence(frames[1]):
            self.counts["malformed_message"] += 1
        elif frames[0] != self._source.topic.encode():
            self.counts["other_topic"] += 1
        elif self._is_replaying:
            self._hold(int.from_bytes(frames[1], "big"), frames[2])
        else:
            self._take(int.from_bytes(frames[1], "big"), frames[2])

    def _take(self, sequence: int, payload: bytes) -> None:
        """Take in a live batch, or hold it until what comes before is there."""
        place = self._order.place(sequence, payload)
        if place is Place.SEEN:
            self.counts["seen"] += 1
            return
        if place is Place.OTHER_LIFE:
            self._begin_life()
            place = self._order.place(sequence, payload)
        if place is Place.NEXT and (self._is_synced or sequence == 0):
            self._apply(payload)
            self._announce()
        else:
            self._needs_replay = True
            self._hold(sequence, payload)

    def _hold(self, sequence: int, payload: bytes) -> None:
        self._held.append((sequence, payload))
        self._held_bytes += len(payload)
        if len(self._held) > self._limits.held_batches_max or self._held_bytes > self._limits.held_bytes_max:
            self._give_up("flood")

    def _release(self) -> list[tuple[int, bytes]]:
        held, self._held, self._held_bytes = list(self._held), deque(), 0
        return held

    def _apply(self, payload: bytes) -> None:
        """Take in the next batch. With number 0 it is the first of a life, of which everything is known."""
        if self._order.next_sequence == 0:
            self._tell(self._table.begin_life())
        batch = decode_batch(payload)
        self._order.advance(payload)
        was_followed, was_complete = self._table.approximation is None, self._table.is_complete
        if batch.data_parallel_rank not in (None, self._source.data_parallel_rank):
            self._drop("other_rank")
            return
        self._tell(self._table.apply(batch))
        if not batch.is_complete:
            self._drop("malformed")
        elif was_followed and self._table.approximation is not None:
            self._say_unknown("approximate")
        elif was_complete and not self._table.is_complete:
            self._say_unknown("table_full")

    def _tell(self, changes: GpuChanges) -> None:
        self.revision += 1
        if changes and self._is_synced:
            self._listener.changed(changes)

    def _announce(self) -> None:
        """From now on the table is what the engine holds; the listener is told of all of it at once."""
        if not self._is_synced:
            self._is_synced = True
            self._tell(GpuChanges(stored=tuple(self._table.held), labels=self._table.labels()))

    def _drop(self, reason: str) -> None:
        self._tell(self._table.clear(is_complete=False))
        self._say_unknown(reason)

    def _say_unknown(self, reason: str) -> None:
        logger.warning("what the engine at %s holds isn't known any more: %s", self._source.endpoint, reason)
        self.counts["unknown"] += 1
        self._listener.unknown(GpuUnknown(reason))

    def _begin_life(self) -> None:
        """Another process. What is held is dropped: of the new process's batches it is in the replay that follows."""
        self.counts["restart"] += 1
        self._tell(self._table.begin_life())
        self._order.restart(0)
        self._release()
        self._epoch += 1
        self._needs_replay = True

    def _begin_anew(self) -> None:
        """After a fault nothing that was known is trusted: as at the start, with an empty table."""
        self._drop("fault")
        self._release()
        self._order.restart(0)
        self._is_synced = False
        self._epoch += 1

    def _give_up(self, reason: str) -> None:
        """Do without a replay: go on with the batches that are held, and drop the table at each hole before them."""
        self._epoch += 1
        held = self._release()
        if not self._is_synced:
            self._drop(reason)
            self._order.restart(held[0][0] if held else 0)
            self._is_synced = bool(held)
        for sequence, payload in held:
            if self._order.place(sequence, payload) is Place.OTHER_LIFE:
                self._begin_life()
            if self._order.place(sequence, payload) is Place.AHEAD:
                self._drop(reason)
                self._order.restart(sequence)
            self._take(sequence, payload)
        self._needs_replay = False

    async def _synchronize(self, live: zmq.asyncio.Socket) -> None:
        """Have the engine repeat what was missed. Gives up after `replay_stalls_max` attempts that brought nothing."""
        self._needs_replay, stalls = False, 0
        while self._source.replay_endpoint is not None and stalls < self._limits.replay_stalls_max:
            before = (self._epoch, self._order.next_sequence)
            self._is_replaying = True
            try:
                outcome = await self._replay(live, self._source.replay_endpoint)
            finally:
                self._is_replaying = False
            if outcome is _Replay.COMPLETE:
                self._announce()
                self._needs_replay = False
                for sequence, payload in self._release():
                    self._take(sequence, payload)
                if not self._needs_replay:
                    return
            stalls = stalls + 1 if before == (self._epoch, self._order.next_sequence) else 0
        cannot_verify = self._source.replay_endpoint is None and self._order.next_sequence > 0 and not self._is_synced
        if self._held or cannot_verify:
            self._give_up("no_replay")
        self._needs_replay = False

    async def _replay(self, live: zmq.asyncio.Socket, endpoint: str) -> _Replay:
        """One request, from the batch before the next on (or further back, to warm a table that was saved)."""
        epoch, back = self._epoch, 1 if self._is_synced else self._limits.warm_batches_max
        start = max(0, self._order.next_sequence - back)
        self._is_connected = False
        with closing(self._open(zmq.DEALER, REPLAYED_BATCHES_MAX)) as replay:
            replay.connect(endpoint)
            await replay.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            poller = zmq.asyncio.Poller()
            poller.register(live, zmq.POLLIN)
            poller.register(replay, zmq.POLLIN)
            deadline = self._clock() + self._limits.replay_timeout_s
            while (left_s := deadline - self._clock()) > 0:
                ready = dict(await poller.poll(int(left_s * 1000) + 1))
                if live in ready:
                    await self._drain(live)
                if self._epoch != epoch:
                    return _Replay.AGAIN
                if replay in ready:
                    deadline = self._clock() + self._limits.replay_timeout_s
                    outcome = await self._drain_replay(replay)
                    if outcome is not None:
                        return outcome
        self.counts["replay_timeout"] += 1
        return _Replay.AGAIN

    async def _drain_replay(self, replay: zmq.asyncio.Socket) -> _Replay | None:
        for _ in range(DRAIN_BATCHES_MAX):
            try:
                frames = await replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            outcome = self._replayed(frames)
            if outcome is not None:
                return outcome
        await asyncio.sleep(0)
        return None

    def _replayed(self, frames: list[bytes]) -> _Replay | None:
        """Take in one reply. Returns how the replay ended, if it did. (Older versions send no topic.)"""
        if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != SEQUENCE_BYTES:
            self.counts["malformed_message"] += 1
            return None
        if frames[-2] == REPLAY_END:
            if self._is_connected or not self._order.next_sequence:
                return _Replay.COMPLETE
            self._begin_life()  # nothing from the last batch on: the engine hasn't come as far
            return _Replay.AGAIN
        if not _is_sequence(frames[-2]):
            self.counts["malformed_message"] += 1
            return None
        sequence, payload = int.from_bytes(frames[-2], "big"), frames[-1]
        if sequence < self._order.next_sequence:
            return self._repeated(sequence, payload)
        if not self._is_connected and sequence > 0:
            self._drop("replay_too_short")
            self._order.restart(sequence)
        if sequence > self._order.next_sequence:
            return _Replay.AGAIN  # the engine's socket dropped some: ask again from here
        self._is_connected = True
        self._apply(payload)
        return None

    def _repeated(self, sequence: int, payload: bytes) -> _Replay | None:
        """A batch that is in the table already: it shows that this is the same process, and warms what was saved."""
        if sequence == self._order.next_sequence - 1:
            if self._order.place(sequence, payload) is not Place.SEEN:
                self._begin_life()
                return _Replay.AGAIN
            self._is_connected = True
        if not self._is_synced:
            self._table.warm(decode_batch(payload))
        return None

    def _open(self, kind: int, batches_max: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, batches_max)
        socket.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MIN_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        return socket


def _is_sequence(frame: bytes) -> bool:
    return len(frame) == SEQUENCE_BYTES and int.from_bytes(frame, "big") <= SEQUENCE_MAX
