"""The chunk door's client, for an engine's process: synchronous, thread-safe, never in the way.

It depends on msgspec and xxhash only. Whatever happens to the agent, calls return within their timeout with "nothing
here": an engine that loses its agent computes what it would have loaded. A background thread connects, says hello,
reports the whole `gpu` inventory, and does so again whenever the connection was lost.

References outlive a lost connection, because the bytes are still mapped. The next connection begins by saying what is
still held, so what was granted in answers that got lost is given back. After a restart of the agent there is nothing
to give back; chunks opened before stay readable for a few seconds, then they are misses: the memory is let go.
"""

import enum
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from directory.chunks import DIRECTORY_KEY_BYTES
from nodeagent.arena_map import ArenaMap
from nodeagent.engine_hello import EngineHello
from nodeagent.errors import DoorProtocolError
from nodeagent.labels import ChunkLabel
from nodeagent.link import Answer, Link
from nodeagent.messages import (
    CLIENT_BYTES,
    OPEN_KEYS_MAX,
    STORAGE_KEY_BYTES,
    Abort,
    AgentMessage,
    ArenaOffer,
    ArenaRefused,
    Close,
    Commit,
    Committed,
    Goodbye,
    GpuChanges,
    GpuSnapshot,
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
)
from nodeagent.old_arenas import OldArenas
from nodeagent.opened_chunk import NO_ANSWER, OpenedChunk, OpenedPiece, Read, Reference, close_of, opened_chunks

RECONNECT_MIN_S = 0.1
RECONNECT_MAX_S = 2.0
WELCOME_S = 10.0
STOP_S = 5.0
GIVE_BACK_S = 0.05
REPLY_S = 0.05  # of an open's time (at most half of it), left for its answer to come back
GPU_CHANGES_MAX = 65_536
OWED_MAX = 65_536

logger = logging.getLogger(__name__)

__all__ = ["ChunkClient", "ChunkLabel", "EngineHello", "OpenedChunk", "OpenedPiece", "PutResult"]


class PutResult(enum.Enum):
    """What became of a put. ALREADY: the host has the same bytes. REFUSED: it doesn't have them, whatever the cause."""

    STORED = "stored"
    ALREADY = "already"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class _Attachment:
    """A connection that may use the tier: the run of the agent, and its arena."""

    link: Link
    life: bytes
    arena: ArenaMap


class ChunkClient:
    """An engine's connection to the agent of its host.

    `gpu_inventory` returns the directory keys of all chunks in the engine's `gpu` tier, least recently used first. It
    is called from the client's thread, after each connect; changes are reported after they have been made.
    """

    def __init__(self, door: str, hello: EngineHello, gpu_inventory: Callable[[], Sequence[bytes]]) -> None:
        self._door = door
        self._hello = hello
        self._gpu_inventory = gpu_inventory
        self._lock = threading.Lock()
        self._name = os.urandom(CLIENT_BYTES)
        self._attachment: _Attachment | None = None
        self._link: Link | None = None
        self._life: bytes | None = None
        self._reads: dict[Reference, Read] = {}
        self._filling: set[int] = set()
        self._owed: deque[Message] = deque(maxlen=OWED_MAX)
        self._gpu_changes: dict[bytes, bool] = {}
        self._is_gpu_stale = True
        self._load: LoadReport | None = None
        self._old_arenas = OldArenas()
        self._last_refusal = ""
        self._stopping = threading.Event()
        self._tier_known = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="warmroute-door", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Whether the agent has let this engine in, and has said whether there is a tier."""
        return self._tier_known.is_set()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until `is_connected`; returns whether it is."""
        return self._tier_known.wait(timeout_s)

    def open(self, keys: Sequence[bytes], timeout_s: float) -> list[OpenedChunk]:
        """References to the leading run of `keys` (storage keys) that the host holds, or reads from disk in time.

        For an engine that takes a run all at once or not at all: what comes stays open until it is closed.
        """
        return self._open(keys, timeout_s, in_pieces=False).chunks

    def open_piece(self, keys: Sequence[bytes], timeout_s: float) -> OpenedPiece:
        """The same, of a run that may be longer than what the host can hold at once: engines here load this way.

        Where it `goes_on`, close these chunks and open the keys behind them, or the host counts those as not wanted.
        """
        return self._open(keys, timeout_s, in_pieces=True)

    def read_into(self, chunk: OpenedChunk, target: memoryview) -> bool:
        """Copy a chunk's bytes into `target`, which has its length. `False` is a miss: don't use the bytes.

        The slot's generation and the checksum of what was copied are looked at after the copy, so a slot that was
        reused, or written late, is never taken for the chunk. The agent may say to leave the checksum out.
        """
        with self._lock:
            read = self._reads.get(chunk.reference)
        if read is None:
            return False
        started = time.perf_counter()
        is_good = chunk.copy_into(target)
        read.read_s += time.perf_counter() - started
        read.read_bytes += chunk.length if is_good else 0
        read.has_failed = read.has_failed or not is_good
        return is_good

    def close(self, chunks: Sequence[OpenedChunk]) -> None:
        """Give references back, and report what was read. Closing again does nothing."""
        ended: dict[bytes, list[tuple[int, Read]]] = {}
        with self._lock:
            for chunk in chunks:
                read = self._reads.pop(chunk.reference, None)
                if read is not None:
                    ended.setdefault(chunk.reference.life, []).append((chunk.reference.number, read))
        for life, reads in ended.items():
            self._give_back(life, close_of(reads))

    def put(self, label: ChunkLabel, payload: memoryview, timeout_s: float) -> PutResult:
        """Store a chunk in the host's tiers. The payload must not change meanwhile; nothing is raised."""
        deadline = time.monotonic() + timeout_s
        attachment = self._attachment
        if attachment is None:
            return PutResult.REFUSED
        try:
            data = payload.cast("B")
            length, checksum = data.nbytes, xxhash.xxh3_128_digest(data)
            if not length or not label.is_sound():
                raise ValueError("it is empty, or its keys or position aren't what a chunk's are")
            answer = attachment.link.request(
                lambda number: Reserve(
                    number,
                    label.storage_key,
                    label.directory_key,
                    label.parent,
                    label.position,
                    length,
                    checksum,
                    label.salt_tag,
                ),
                timeout_s,
            )
        except (TypeError, ValueError, BufferError) as error:
            logger.error("a payload can't be stored: %s", error)
            return PutResult.REFUSED
        if not isinstance(answer, Reserved) or answer.outcome is not PutOutcome.GRANTED:
            return _result(answer)
        return self._fill(attachment, answer, data, deadline)

    def report_gpu(self, stored: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """Directory keys that came to, and went from, the `gpu` tier. Returns at once."""
        if not _are_keys([*stored, *evicted], DIRECTORY_KEY_BYTES):
            return
        with self._lock:
            self._gpu_changes.update((key, True) for key in stored)
            self._gpu_changes.update((key, False) for key in evicted)
            if len(self._gpu_changes) > GPU_CHANGES_MAX:
                self._is_gpu_stale = True
                self._gpu_changes.clear()
        self._wake()

    def report_load(self, running: int, waiting: int, flops: float) -> None:
        """How busy the engine is, and the useful FLOP/s it observes. Returns at once."""
        with self._lock:
            self._load = LoadReport(running, waiting, flops)
        self._wake()

    def stop(self) -> None:
        """Say goodbye, end the thread and let the arena go; chunks that are open stay readable. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wake()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            logger.warning("the connection to the agent didn't end within %s s", STOP_S)
            return
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _open(self, keys: Sequence[bytes], timeout_s: float, in_pieces: bool) -> OpenedPiece:
        attachment = self._attachment
        wanted = list(keys[:OPEN_KEYS_MAX])
        if attachment is None or not wanted or not _are_keys(wanted, STORAGE_KEY_BYTES):
            return NO_ANSWER
        wait_s = max(0.0, timeout_s - min(REPLY_S, timeout_s / 2))
        answer = attachment.link.request(lambda number: Open(number, wanted, wait_s, in_pieces), timeout_s)
        if not isinstance(answer, Opened):
            return NO_ANSWER
        chunks = opened_chunks(wanted, answer.chunks, attachment.life, attachment.arena)
        return OpenedPiece(chunks, answer.goes_on)

    def _fill(self, attachment: _Attachment, granted: Reserved, data: memoryview, deadline: float) -> PutResult:
        try:
            attachment.arena.write(granted.slot, data)
        except (ValueError, IndexError, BufferError) as error:
            logger.error("a chunk can't be written: %s", error)
            self._end_fill(attachment.life, granted.reservation, is_abort=True)
            return PutResult.REFUSED
        answer = attachment.link.request(
            lambda number: Commit(number, granted.reservation), max(0.0, deadline - time.monotonic())
        )
        # Where the commit's fate is unknown, the abort frees the slot if no commit arrived, and is ignored otherwise.
        self._end_fill(attachment.life, granted.reservation, is_abort=answer is None)
        return _result(answer)

    def _end_fill(self, life: bytes, reservation: int, is_abort: bool) -> None:
        with self._lock:
            if self._life == life:
                self._filling.discard(reservation)
        if is_abort:
            self._give_back(life, Abort(reservation))

    def _give_back(self, life: bytes, message: Message) -> None:
        """Send at once, or soon. Where the connection is lost, the next one's `Holding` says it."""
        with self._lock:
            link = self._link if self._life == life else None
        if link is None or link.send(message, GIVE_BACK_S):
            return
        with self._lock:
            if self._link is link:
                self._owed.append(message)
        self._wake()

    def _note_grant(self, answer: Answer, is_awaited: bool) -> None:
        """Account for what an answer grants, before anybody uses it; give back what nobody waits for any more."""
        life = self._life
        assert life is not None, "answers follow a welcome"
        if isinstance(answer, Opened) and answer.chunks:
            if is_awaited:
                with self._lock:
                    self._reads.update((Reference(life, each.reference), Read()) for each in answer.chunks)
            else:
                self._give_back(life, Close([], [], 0, 0.0, [each.reference for each in answer.chunks]))
        elif isinstance(answer, Reserved) and answer.outcome is PutOutcome.GRANTED:
            if is_awaited:
                with self._lock:
                    self._filling.add(answer.reservation)
            else:
                self._give_back(life, Abort(answer.reservation))

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                try:
                    os.eventfd_write(self._wake_fd, 1)
                except BlockingIOError:
                    return

    def _run(self) -> None:
        pause_s = RECONNECT_MIN_S
        while not self._stopping.is_set():
            try:
                if self._converse():
                    pause_s = RECONNECT_MIN_S
            except (OSError, DoorProtocolError) as error:
                logger.debug("no agent at %s: %s", self._door, error)
            except Exception:  # the edge of the loop: an engine must not lose its tier for good to one fault
                logger.exception("the connection to the agent met a fault")
            self._old_arenas.let_go(time.monotonic())
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_MAX_S)

    def _converse(self) -> bool:
        """One connection from hello to its end. Returns whether the agent had let us in."""
        link = Link(self._door, self._note_grant)
        is_welcome = False
        try:
            is_welcome = self._introduce(link)
            while is_welcome and not self._stopping.is_set():
                self._flush(link)
                for message in link.receive(self._wake_fd, self._old_arenas.let_go(time.monotonic())):
                    self._heed(message, link)
            if is_welcome:
                self._flush(link)
                link.send(Goodbye())
        except ConnectionError as error:
            if not is_welcome:
                raise
            logger.info("the agent at %s is gone: %s", self._door, error)
        finally:
            with self._lock:
                lost, self._attachment, self._link = self._attachment, None, None
            if lost is not None:
                self._old_arenas.add(lost.life, lost.arena, time.monotonic())
                del lost
            self._tier_known.clear()
            link.close()
        return is_welcome

    def _introduce(self, link: Link) -> bool:
        sent = link.send(self._hello.message(self._name))
        deadline = time.monotonic() + WELCOME_S
        while sent and not self._stopping.is_set() and (left_s := deadline - time.monotonic()) > 0:
            messages = link.receive(self._wake_fd, left_s)
            for position, message in enumerate(messages):
                if isinstance(message, Refused):
                    self._note_refusal(message.reason)
                    return False
                if isinstance(message, Welcome):
                    self._enter(message.life, link)
                    for later in messages[position + 1 :]:
                        self._heed(later, link)
                    return True
        return False

    def _enter(self, life: bytes, link: Link) -> None:
        self._last_refusal = ""
        self._old_arenas.keep(life)
        with self._lock:
            if life != self._life:
                self._filling.clear()
            self._life, self._link = life, link
            self._owed.clear()
            held = [reference.number for reference in self._reads if reference.life == life]
            holding = Holding(held, list(self._filling))
            self._is_gpu_stale = True
        # Before the tier is there for anybody: said later, it would take back what was granted in between.
        if not link.send(holding):
            raise ConnectionResetError("the agent took no greeting")
        logger.info("attached to the agent at %s", self._door)

    def _heed(self, message: AgentMessage, link: Link) -> None:
        if isinstance(message, ArenaOffer):
            fds = link.take_fds()
            if fds is None:
                raise DoorProtocolError("the agent's offer came without its descriptors")
            assert self._life is not None, "an offer follows a welcome"
            self._attachment = _Attachment(link, self._life, ArenaMap(message, *fds))
            self._tier_known.set()
        elif isinstance(message, ArenaRefused):
            logger.warning("this engine works without the host's dram tier: %s", message.reason)
            self._tier_known.set()

    def _note_refusal(self, reason: str) -> None:
        if reason != self._last_refusal:
            self._last_refusal = reason
            logger.warning("the agent at %s refuses this engine: %s", self._door, reason)

    def _flush(self, link: Link) -> None:
        """Send what was reported since, newest states only."""
        with self._lock:
            is_stale, self._is_gpu_stale = self._is_gpu_stale, False
            changes, self._gpu_changes = self._gpu_changes, {}
            load, self._load = self._load, None
            owed = list(self._owed)
            self._owed.clear()
        if is_stale:
            # Changes made while the inventory is read are pending by now, and follow it: states, so none is lost.
            inventory = list(self._gpu_inventory())
            link.send(GpuSnapshot(inventory if _are_keys(inventory, DIRECTORY_KEY_BYTES) else []))
        elif changes:
            stored = [key for key, is_held in changes.items() if is_held]
            link.send(GpuChanges(stored, [key for key, is_held in changes.items() if not is_held]))
        if load is not None:
            link.send(load)
        for message in owed:
            if not link.send(message):
                with self._lock:
                    self._owed.append(message)


def _are_keys(keys: Sequence[bytes], length: int) -> bool:
    """Whether all are keys: what isn't would cost the connection, so it isn't sent, and the engine's log says so."""
    if all(len(key) == length for key in keys):
        return True
    logger.error("a key given to the chunk client doesn't have %d bytes; the call does nothing", length)
    return False


def _result(answer: Answer | None) -> PutResult:
    if isinstance(answer, Reserved | Committed):
        if answer.outcome is PutOutcome.STORED:
            return PutResult.STORED
        if answer.outcome is PutOutcome.HAVE:
            return PutResult.ALREADY
    return PutResult.REFUSED
