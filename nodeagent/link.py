"""One connection of a client to the agent: frames, requests from many threads, and the descriptors it is sent.

An answer that passes through the receiving thread costs two switches between threads, half of a hand-off. So whoever
asks while nobody else does receives its answer itself, and the receiving thread looks away meanwhile:

    asker      takes `_receiving` if it is free, tells the epoll to look away, reads until its answer is there, gives
               `_receiving` back, and only then lets the epoll look again
    receiver   waits at the epoll, and reads only what it finds with `_receiving` in its hands

The epoll tells levels, not edges: what arrives in between is found when it looks again. Answers for others are handed
to them by whoever reads; all else that an asker reads is left to the receiving thread, which is woken for it.
"""

import contextlib
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
OWN_POLL_S_MAX = 60.0
FDS_MAX = 2
FD_BYTES = 4
FDS_SPACE = socket.CMSG_SPACE(FDS_MAX * FD_BYTES)

logger = logging.getLogger(__name__)

Answer = Opened | Reserved | Committed


class _Waiter:
    """Waits for one answer, and is woken once. A bare lock: an `Event` costs as much as the message."""

    __slots__ = ("_awake", "answer", "is_awake")

    def __init__(self) -> None:
        self._awake = threading.Lock()
        self._awake.acquire()
        self.answer: Answer | None = None
        self.is_awake = False

    def wait(self, timeout_s: float) -> None:
        self._awake.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        self.is_awake = True
        self._awake.release()


class Link:
    """A connected socket. One thread calls `receive`; any thread calls `send` and `request`.

    `on_answer(answer, is_awaited)` hears each answer before whoever waits for it, in the thread that reads it; what an
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
        self._receiving = threading.Lock()
        self._left: list[AgentMessage] = []
        self._fault: DoorProtocolError | None = None
        self._wake_fd = -1
        self._own_poll = select.poll()
        self._poll = select.epoll()
        self._fds: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(SEND_S)
            self._socket.connect(door)
            self._socket.setblocking(False)
            self._poll.register(self._socket, select.EPOLLIN)
            self._own_poll.register(self._socket, select.POLLIN)
            self._send_bytes(preamble(), SEND_S)
        except OSError:
            self._socket.close()
            self._poll.close()
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
        if self.send(make(number), timeout_s) and not self._receive_own(waiter, deadline):
            waiter.wait(max(0.0, deadline - time.monotonic()))
        with self._waiting:
            if self._waiters is not None:
                self._waiters.pop(number, None)
            return waiter.answer

    def receive(self, wake_fd: int, timeout_s: float | None) -> list[AgentMessage]:
        """What has arrived, but for answers, which go to their waiters. Returns at the latest after `timeout_s`, or
        when `wake_fd` is readable. Raises `ConnectionError` at the end, `DoorProtocolError` for garbage.
        """
        if self._wake_fd != wake_fd:
            self._poll.register(wake_fd, select.EPOLLIN)
            self._wake_fd = wake_fd
        ready = dict(self._poll.poll(timeout_s))
        if wake_fd in ready:
            os.eventfd_read(wake_fd)
        if not self._receiving.acquire(blocking=False):
            return []  # an asker has it, and has us woken for what it leaves
        try:
            if self._fault is not None:
                raise self._fault
            if ready.get(self._socket.fileno(), 0) & ~select.EPOLLOUT:
                self._fill()
            if self._left:
                self._look(select.EPOLLIN)
            left, self._left = self._left, []
            return [message for message in [*left, *self._messages()] if not self._deliver(message)]
        finally:
            self._receiving.release()

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
        # An asker that receives finds the end of the connection, and leaves.
        with self._receiving, self._sending:
            self._socket.close()
            self._poll.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _receive_own(self, waiter: _Waiter, deadline: float) -> bool:
        """Receive until the waiter has its answer, or the time is up; `False` where another receives."""
        if not self._receiving.acquire(blocking=False):
            return False
        try:
            self._look(0)
            while not waiter.is_awake and (left_s := deadline - time.monotonic()) > 0:
                if self._own_poll.poll(min(left_s, OWN_POLL_S_MAX) * 1_000):
                    self._fill()
                    self._left += [each for each in self._messages() if not self._hand_over(each)]
        except DoorProtocolError as error:
            self._fault = error
            self.shut()
        except OSError:
            self.shut()
        finally:
            has_left = bool(self._left) or self._fault is not None
            self._receiving.release()
            # A socket that can be written wakes whoever looks for that, so what is left is found without a message.
            self._look(select.EPOLLIN | select.EPOLLOUT if has_left else select.EPOLLIN)
        return True

    def _look(self, events: int) -> None:
        """Let the receiving thread be woken by the socket, or not; its end it hears of in any case."""
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            self._poll.modify(self._socket, events)

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
        """Take what has arrived, if an asker hasn't taken it since it was seen."""
        try:
            received, ancillary, _, _ = self._socket.recvmsg_into([self._incoming], FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
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
        if self._hand_over(message):
            return True
        if isinstance(message, Opened | Reserved | Committed):
            self._on_answer(message, False)
            return True
        return False

    def _hand_over(self, message: AgentMessage) -> bool:
        """Give an answer to whoever waits for it."""
        if not isinstance(message, Opened | Reserved | Committed):
            return False
        with self._waiting:
            waiter = self._waiters.pop(message.id, None) if self._waiters is not None else None
            if waiter is None:
                return False
            self._on_answer(message, True)
            waiter.answer = message
            waiter.wake()
        return True


def _writable(connection: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1_000))
