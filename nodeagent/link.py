"""One connection of a client to the agent: frames, requests from many threads, and the descriptors it is sent."""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from nodeagent.errors import DoorProtocolError
from nodeagent.messages import (
    LENGTH_BYTES,
    AgentMessage,
    Committed,
    Message,
    Opened,
    Reserved,
    body_length,
    decode_agent,
    frame,
    preamble,
)

SEND_S = 2.0
"""How long a message that has begun to be sent may take; after that the connection is broken."""
RECEIVE_BYTES = 1 << 18
FDS_MAX = 2
FD_BYTES = 4
FDS_SPACE = socket.CMSG_SPACE(FDS_MAX * FD_BYTES)

logger = logging.getLogger(__name__)

Answer = Opened | Reserved | Committed


class _Waiter:
    """Waits for one answer, and is woken once. A bare lock: an `Event` costs as much as the message."""

    __slots__ = ("_awake", "answer")

    def __init__(self) -> None:
        self._awake = threading.Lock()
        self._awake.acquire()
        self.answer: Answer | None = None

    def wait(self, timeout_s: float) -> None:
        self._awake.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        self._awake.release()


class Link:
    """A connected socket. One thread calls `receive`; any thread calls `send` and `request`.

    `on_answer(answer, is_awaited)` hears each answer in the receiving thread, before whoever waits for it; what an
    answer grants that nobody waits for any more must be given back.
    """

    def __init__(self, door: str, on_answer: Callable[[Answer, bool], None]) -> None:
        """Connects. Raises `OSError`."""
        self._on_answer = on_answer
        self._sending = threading.Lock()
        self._waiting = threading.Lock()
        self._waiters: dict[int, _Waiter] | None = {}
        self._next_id = 0
        self._incoming = bytearray(RECEIVE_BYTES)
        self._buffer = bytearray()
        self._poll = select.poll()
        self._fds: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(SEND_S)
            self._socket.connect(door)
            self._socket.setblocking(False)
            self._poll.register(self._socket, select.POLLIN)
            self._send_bytes(preamble(), SEND_S)
        except OSError:
            self._socket.close()
            raise

    def send(self, message: Message, timeout_s: float = SEND_S) -> bool:
        """Send one message; returns whether it went. A link that took only a part of it is broken, and ends."""
        try:
            return self._send_bytes(frame(message), min(max(timeout_s, 0.0), SEND_S))
        except DoorProtocolError as error:
            logger.error("a message can't be sent: %s", error)
        except OSError:
            self.shut()
        return False

    def request(self, make: Callable[[int], Message], timeout_s: float) -> Answer | None:
        """Send `make(id)` and wait for the answer to it; `None` where none came in time."""
        deadline = time.monotonic() + timeout_s
        waiter = _Waiter()
        with self._waiting:
            if self._waiters is None:
                return None
            self._next_id += 1
            number = self._next_id
            self._waiters[number] = waiter
        if self.send(make(number), timeout_s):
            waiter.wait(max(0.0, deadline - time.monotonic()))
        with self._waiting:
            if self._waiters is not None:
                self._waiters.pop(number, None)
            return waiter.answer

    def receive(self, wake_fd: int, timeout_s: float | None) -> list[AgentMessage]:
        """What has arrived, but for answers, which go to their waiters. Returns at the latest after `timeout_s`, or
        when `wake_fd` is readable. Raises `ConnectionError` at the end, `DoorProtocolError` for garbage.
        """
        self._poll.register(wake_fd, select.POLLIN)
        ready = dict(self._poll.poll(None if timeout_s is None else timeout_s * 1_000))
        if wake_fd in ready:
            os.eventfd_read(wake_fd)
        if self._socket.fileno() in ready:
            self._fill()
        return [message for message in self._messages() if not self._deliver(message)]

    def take_fds(self) -> tuple[int, int] | None:
        """The two descriptors that came with an offer; the caller closes them."""
        if len(self._fds) < FDS_MAX:
            return None
        read_only, writable = self._fds[:FDS_MAX]
        del self._fds[:FDS_MAX]
        return read_only, writable

    def shut(self) -> None:
        """Break the connection; `receive` then raises. Safe from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close, and wake everybody who waits. Only the receiving thread calls it."""
        with self._waiting:
            waiters, self._waiters = self._waiters or {}, None
        for waiter in waiters.values():
            waiter.wake()
        self.shut()
        with self._sending:
            self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _send_bytes(self, data: bytes, timeout_s: float) -> bool:
        """Whether it went. What has begun is given `SEND_S` to end; raises `OSError` where it doesn't."""
        started = time.monotonic()
        if not self._sending.acquire(timeout=timeout_s):
            return False
        try:
            view = memoryview(data)
            while view:
                try:
                    view = view[self._socket.send(view, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    has_begun = len(view) < len(data)
                    left_s = started + (SEND_S if has_begun else timeout_s) - time.monotonic()
                    if left_s > 0 and _writable(self._socket, left_s):
                        continue
                    if not has_begun:
                        return False
                    raise TimeoutError("the agent takes no more bytes") from None
            return True
        finally:
            self._sending.release()

    def _fill(self) -> None:
        received, ancillary, _, _ = self._socket.recvmsg_into([self._incoming], FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(memoryview(data)[: len(data) // FD_BYTES * FD_BYTES].cast("i"))
        if not received:
            raise ConnectionResetError("the agent has closed the connection")
        self._buffer += memoryview(self._incoming)[:received]

    def _messages(self) -> list[AgentMessage]:
        messages, start = [], 0
        while len(self._buffer) - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            end = body + body_length(self._buffer[start:body])
            if len(self._buffer) < end:
                break
            messages.append(decode_agent(bytes(self._buffer[body:end])))
            start = end
        del self._buffer[:start]
        return messages

    def _deliver(self, message: AgentMessage) -> bool:
        if not isinstance(message, Opened | Reserved | Committed):
            return False
        with self._waiting:
            waiter = self._waiters.pop(message.id, None) if self._waiters is not None else None
            if waiter is not None:
                self._on_answer(message, True)
                waiter.answer = message
                waiter.wake()
        if waiter is None:
            self._on_answer(message, False)
        return True


def _writable(connection: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1_000))
