"""One connection at the chunk door: hello, then requests, answered in order of arrival but for two kinds.

A commit's bytes are checked in a thread while other requests of the connection go on, and so they do while an open
reads chunks from disk. When the connection ends, what its process holds stays: references and reservations end with
`Close`, `Abort`, or the process itself.

Tokens are counted when they are asked for, and as hit or missed when their fate is known: at the answer, or when the
references are given back. What a run's first piece doesn't hold is counted when the next is asked for.
"""

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterator

from directory.tiers import Tier
from nodeagent.errors import DoorProtocolError, HelloRefused, MemoryShort, TierUnavailable
from nodeagent.labels import ChunkLabel
from nodeagent.messages import (
    DOOR_VERSION,
    LENGTH_BYTES,
    PREAMBLE_BYTES,
    Abort,
    ArenaOffer,
    ArenaRefused,
    ClientMessage,
    Close,
    Commit,
    Committed,
    Goodbye,
    GpuChanges,
    GpuSnapshot,
    Hello,
    Holding,
    LoadReport,
    Message,
    Open,
    Opened,
    PutOutcome,
    Refused,
    Reserve,
    Reserved,
    Welcome,
    body_length,
    decode_client,
    decode_hello,
    frame,
    read_preamble,
)
from nodeagent.metrics import AgentMetrics
from nodeagent.processes import Holder, ProcessWatch
from nodeagent.roster import AttachedEngine, Roster
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.dram import DramTier
from nodeagent.tiers.hierarchy import Source
from nodeagent.tiers.promotion import LowerTier

HELLO_S = 10.0
SEND_S = 5.0
RECEIVE_BYTES = 1 << 14
COMMITS_MAX = 64
ARENA_AGAIN_S = 10.0
"""How long an engine that was refused the arena, for memory that others hold, goes without another attempt."""
READING_OPENS_MAX = 16
"""Opens of one connection that read from disk at a time; one more takes what is in DRAM."""
DRAM = Tier.DRAM.label

logger = logging.getLogger(__name__)


class Session:
    """Attends one connection (a non-blocking socket, closed by the caller). `life` names this run of the agent."""

    def __init__(
        self,
        connection: socket.socket,
        life: bytes,
        processes: ProcessWatch,
        roster: Roster,
        tier: DramTier,
        lower: LowerTier,
        metrics: AgentMetrics,
    ) -> None:
        self._connection = connection
        self._life = life
        self._processes = processes
        self._roster = roster
        self._tier = tier
        self._lower = lower
        self._metrics = metrics
        self._sending = asyncio.Lock()
        self._received = bytearray(RECEIVE_BYTES)
        self._received_start = self._received_end = 0
        self._commits = asyncio.Semaphore(COMMITS_MAX)
        self._reading_opens = 0
        self._is_superseded = False
        self._has_left = False

    def supersede(self) -> None:
        """See `Connection`: end this connection, and heed nothing more of it."""
        self._is_superseded = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    async def run(self) -> None:
        """Until the peer leaves. Raises `DoorProtocolError`, `HelloRefused`, `OSError` or `IncompleteReadError`."""
        holder: Holder | None = None
        engine: AttachedEngine | None = None
        try:
            async with asyncio.timeout(HELLO_S):
                process = self._processes.peer_of(self._connection)
                hello = await self._read_hello()
                engine = self._roster.attach(hello, process, self)
            process.clients[hello.client] = hello.chunk_tokens
            holder = Holder(process, hello.client)
            await self._send(Welcome(self._life))
            await self._serve(hello, engine, holder)
        except HelloRefused as error:
            self._metrics.hellos_refused.inc()
            with contextlib.suppress(OSError, TimeoutError):
                await self._send(Refused(str(error)))
            raise
        finally:
            if holder is not None and self._tier.hierarchy is not None and not self._is_superseded:
                self._tier.hierarchy.quarantine(holder)
            if engine is not None:
                self._roster.lose(engine, self)

    async def _read_hello(self) -> Hello:
        version = read_preamble(bytes(await self._read(PREAMBLE_BYTES)))
        if version != DOOR_VERSION:
            raise HelloRefused(
                f"the engine's client speaks version {version} of the chunk door, this agent version {DOOR_VERSION}; "
                "install the same release on both sides"
            )
        body = await self._read_body()
        try:
            return decode_hello(body)
        except DoorProtocolError as error:
            raise HelloRefused(str(error)) from error

    async def _serve(self, hello: Hello, engine: AttachedEngine, holder: Holder) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                offer = group.create_task(self._offer(hello))
                try:
                    while True:
                        message = decode_client(await self._read_body())
                        if self._is_superseded:
                            return
                        if isinstance(message, Goodbye):
                            self._has_left = True
                            self._roster.detach(engine, "goodbye")
                            return
                        await self._handle(message, engine, holder, group)
                finally:
                    offer.cancel()
        except ExceptionGroup as errors:
            ends, bugs = errors.split((DoorProtocolError, OSError, TimeoutError, asyncio.IncompleteReadError))
            if bugs is not None or ends is None:
                raise
            first: Exception = ends
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
            raise first from None

    async def _offer(self, hello: Hello) -> None:
        """Lend the arena, which the first engine's hello makes; an engine that can't have it works without.

        Where others hold the memory, it is told so and offered the arena later, once that can be made.
        """
        is_told = False
        while True:
            try:
                hierarchy = await self._tier.ensure(hello.chunk_bytes)
                break
            except TierUnavailable as error:
                if not is_told:
                    logger.error("engine %s works without the dram tier: %s", hello.engine, error)
                    self._metrics.degraded.labels("dram_unavailable").inc()
                    await self._send(ArenaRefused(str(error)))
                    is_told = True
                if not isinstance(error, MemoryShort):
                    return
            await asyncio.sleep(ARENA_AGAIN_S)
        arena = hierarchy.arena
        offer = ArenaOffer(arena.header_bytes, arena.slot_bytes, arena.slots, self._tier.verify_reads)
        await self._send(offer, arena)

    async def _handle(
        self, message: ClientMessage, engine: AttachedEngine, holder: Holder, group: asyncio.TaskGroup
    ) -> None:
        match message:
            case Open():
                may_read = message.wait_s > 0 and self._reading_opens < READING_OPENS_MAX
                if may_read and self._lower.continues(message.keys):
                    self._reading_opens += 1
                    group.create_task(self._open_reading(message, engine, holder))
                else:
                    began = time.perf_counter()
                    answer = self._open(message, engine, holder)
                    await self._send(answer)
                    if answer.chunks:
                        engine.rates.note_open(time.perf_counter() - began)
            case Close():
                self._close(message, engine, holder)
            case Holding():
                self._keep_only(message, engine, holder)
            case Reserve():
                await self._send(self._reserve(message, engine, holder))
            case Commit():
                await self._commits.acquire()
                group.create_task(self._commit(message, engine, holder))
            case Abort():
                if self._tier.hierarchy is not None:
                    self._tier.hierarchy.abort(holder, message.reservation)
                    self._tier.account()
            case GpuSnapshot():
                if engine.events is None:
                    await self._note_gpu(engine.replacing_gpu(message.keys))
            case GpuChanges():
                if engine.events is None:
                    await self._note_gpu(engine.changing_gpu(message.stored, message.evicted))
            case LoadReport():
                engine.note_load(message)

    async def _note_gpu(self, steps: Iterator[None]) -> None:
        """Tens of thousands of keys at once would keep everybody waiting; what a newer connection says counts."""
        for _ in steps:
            await asyncio.sleep(0)
            if self._is_superseded:
                return

    async def _open_reading(self, message: Open, engine: AttachedEngine, holder: Holder) -> None:
        """Answer an open whose run goes on on disk: what is read in time is held, then handed out as one run.

        A client that has left meanwhile gets nothing: it would never give it back.
        """
        try:
            run = await self._lower.open_run(message.keys, message.wait_s)
            self._tier.account()
            try:
                if self._is_superseded or self._has_left:
                    return
                answer = self._open(message, engine, holder, run.from_nvme)
            finally:
                run.let_go()
            await self._send(answer)
        finally:
            self._reading_opens -= 1

    def _open(self, message: Open, engine: AttachedEngine, holder: Holder, from_nvme: Collection[bytes] = ()) -> Opened:
        hierarchy = self._tier.hierarchy
        opened = hierarchy.open_run(message.keys, holder, from_nvme) if hierarchy is not None else []
        self._lower.note_hit(message.keys[: len(opened)])
        rest = message.keys[len(opened) :]
        goes_on = message.in_pieces and bool(opened) and self._lower.continues(rest)
        missed = 0 if goes_on else len(rest)
        tokens = engine.registration.chunk_tokens
        self._metrics.tokens_requested.inc((len(opened) + missed) * tokens)
        self._metrics.tokens_missed.inc(missed * tokens)
        return Opened(message.id, opened, goes_on)

    def _close(self, message: Close, engine: AttachedEngine, holder: Holder) -> None:
        hierarchy = self._tier.hierarchy
        if hierarchy is None:
            return
        failed = hierarchy.close(holder, message.failed)
        unread = hierarchy.close(holder, message.unread)
        closed = hierarchy.close(holder, message.references)
        tokens = engine.registration.chunk_tokens
        for (tier, source), chunks in Counter((held.tier, held.entry.source) for held in closed).items():
            self._metrics.hit_tokens.labels(tier.label, source.value).inc(chunks * tokens)
        for held in closed:
            held.entry.source = Source.LOCAL
        self._metrics.tokens_missed.inc((len(failed) + len(unread)) * tokens)
        if message.read_bytes and math.isfinite(message.read_s):
            self._metrics.read_seconds.labels(DRAM).observe(message.read_s)
            engine.rates.note_read(message.read_bytes, message.read_s)
        for held in failed:
            self._metrics.degraded.labels("read_failed").inc()
            self._tier.recheck(held.entry)
        self._tier.account()

    def _keep_only(self, message: Holding, engine: AttachedEngine, holder: Holder) -> None:
        """Give back what was granted in answers that were lost with an earlier connection."""
        if self._tier.hierarchy is not None:
            ended = self._tier.hierarchy.keep_only(holder, message.references, message.reservations)
            self._metrics.tokens_missed.inc(ended * engine.registration.chunk_tokens)
            self._tier.account()

    def _reserve(self, message: Reserve, engine: AttachedEngine, holder: Holder) -> Reserved:
        hierarchy = self._tier.hierarchy
        if hierarchy is None:
            return Reserved(message.id, PutOutcome.REFUSED)
        if message.parent == message.storage_key:
            raise DoorProtocolError("a chunk can't be its own parent")
        label = self._tier.labels.complete(
            ChunkLabel(message.storage_key, message.directory_key, message.parent, message.position, message.salt_tag)
        )
        on_disk = self._lower.meet(label, message.length, message.checksum)
        if on_disk is PutOutcome.CONFLICT:
            return Reserved(message.id, self._note_outcome(on_disk, engine))
        granted = hierarchy.reserve(label, message.length, message.checksum, holder, engine.identity_digest)
        if granted.outcome is PutOutcome.BUSY and on_disk is PutOutcome.HAVE:
            # The other who fills a slot with this chunk is the agent, or will be told the same.
            return Reserved(message.id, on_disk)
        if granted.evicted:
            self._metrics.evictions.labels(DRAM, "demand").inc(granted.evicted)
        outcome = self._note_outcome(granted.outcome, engine)
        self._tier.account()
        reservation = granted.reservation
        if reservation is None:
            return Reserved(message.id, outcome)
        return Reserved(message.id, granted.outcome, reservation.number, reservation.slot, reservation.generation)

    async def _commit(self, message: Commit, engine: AttachedEngine, holder: Holder) -> None:
        try:
            outcome = await self._tier.commit(holder, message.reservation)
            await self._send(Committed(message.id, self._note_outcome(outcome, engine)))
        finally:
            self._commits.release()

    def _note_outcome(self, outcome: PutOutcome, engine: AttachedEngine) -> PutOutcome:
        """Count an outcome, and return what the client is told.

        A foreign engine may compute one chunk twice with other last bits, as its batches fall: the first stays, and it
        is had. Where an engine promises the same bits, other ones are an alarm.
        """
        if outcome is PutOutcome.CONFLICT and engine.events is not None:
            self._metrics.admission_refused.labels("other_bits").inc()
            return PutOutcome.HAVE
        if outcome is PutOutcome.CONFLICT:
            self._metrics.conflicts.inc()
            logger.error("a put was refused: other bytes are stored under its key; an identity may be incomplete")
        if outcome not in (PutOutcome.GRANTED, PutOutcome.STORED, PutOutcome.HAVE):
            self._metrics.admission_refused.labels(outcome.value).inc()
        return PutOutcome.REFUSED if outcome is PutOutcome.FORGOTTEN else outcome

    async def _read_body(self) -> bytearray:
        return await self._read(body_length(await self._read(LENGTH_BYTES)))

    async def _read(self, length: int) -> bytearray:
        """The next bytes. What comes with them is kept: a message, and often the next, is received in one go."""
        data = bytearray(length)
        filled = min(length, self._received_end - self._received_start)
        data[:filled] = self._received[self._received_start : self._received_start + filled]
        self._received_start += filled
        loop = asyncio.get_running_loop()
        with memoryview(data) as view:
            while (missing := length - filled) >= RECEIVE_BYTES:
                filled += self._arrived(await loop.sock_recv_into(self._connection, view[filled:]), data, filled)
            while missing:
                end = self._arrived(await loop.sock_recv_into(self._connection, self._received), data, filled)
                taken = min(missing, end)
                view[filled : filled + taken] = self._received[:taken]
                self._received_start, self._received_end = taken, end
                filled, missing = filled + taken, missing - taken
        return data

    @staticmethod
    def _arrived(received: int, data: bytearray, filled: int) -> int:
        if not received:
            raise asyncio.IncompleteReadError(bytes(data[:filled][:64]), len(data))
        return received

    async def _send(self, message: Message, arena: Arena | None = None) -> None:
        """Send a frame, with the arena's two descriptors where it is given. One at a time, within `SEND_S`."""
        data = memoryview(frame(message))
        async with self._sending:
            if arena is None:
                with contextlib.suppress(BlockingIOError):
                    data = data[self._connection.send(data) :]
                if not data:
                    return  # as nearly always: what fits the socket needs neither timer nor loop
            async with asyncio.timeout(SEND_S):
                if arena is not None:
                    await self._writable()
                    fds = [arena.read_only_fd, arena.writable_fd]
                    data = data[socket.send_fds(self._connection, [data], fds) :]
                await asyncio.get_running_loop().sock_sendall(self._connection, data)

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        fd = self._connection.fileno()
        loop.add_writer(fd, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(fd)
