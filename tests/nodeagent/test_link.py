"""Askers receive for themselves, and for each other; what isn't an answer reaches the receiving thread all the same."""

import os
import socket
import threading
from contextlib import contextmanager

import pytest

from nodeagent.errors import DoorProtocolError
from nodeagent.link import Link
from nodeagent.messages import (
    LENGTH_BYTES,
    PREAMBLE_BYTES,
    ArenaRefused,
    Open,
    Opened,
    body_length,
    decode_client,
    frame,
)
from tests.nodeagent.running import WAIT_S, eventually, open_fds

ASKERS = 8
QUESTIONS = 200


class Receiver:
    """A link with its receiving thread, and the agent's end of its connection."""

    def __init__(self, door: str) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(door)
        listener.listen(1)
        self.answers: list[tuple[int, bool]] = []
        self.link = Link(door, lambda answer, is_awaited: self.answers.append((answer.id, is_awaited)))
        self.agent, _ = listener.accept()
        listener.close()
        self.agent.settimeout(WAIT_S)
        self._read(PREAMBLE_BYTES)
        self.left = []
        self.end: Exception | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def question(self) -> int:
        message = decode_client(self._read(body_length(self._read(LENGTH_BYTES))))
        assert isinstance(message, Open)
        return message.id

    def answer(self, *numbers: int) -> None:
        self.agent.sendall(b"".join(frame(Opened(number, [])) for number in numbers))

    def close(self) -> None:
        self.link.shut()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        os.close(self._wake_fd)
        self.agent.close()

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            data += self.agent.recv(length - len(data)) or pytest.fail("the link has closed the connection")
        return data

    def _receive(self) -> None:
        try:
            while True:
                self.left += self.link.receive(self._wake_fd, None)
        except (OSError, DoorProtocolError) as error:
            self.end = error
        finally:
            self.link.close()


@pytest.fixture
def receiver(tmp_path):
    before = open_fds()
    made = Receiver(str(tmp_path / "door"))
    yield made
    made.close()
    assert open_fds() == before


@contextmanager
def asking(link, timeout_s=WAIT_S):
    """Somebody asks; the list has the answer once the block has ended."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(link.request(lambda number: Open(number, []), timeout_s)))
    thread.start()
    yield answers
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_an_asker_receives_its_own_answer(receiver):
    with asking(receiver.link) as answers:
        receiver.answer(receiver.question())
    assert [answer.id for answer in answers] == [1]
    assert receiver.answers == [(1, True)]


def test_what_an_asker_reads_besides_its_answer_reaches_the_receiving_thread(receiver):
    with asking(receiver.link) as answers:
        number = receiver.question()
        receiver.agent.sendall(frame(ArenaRefused("before")) + frame(Opened(number, [])) + frame(ArenaRefused("after")))
    assert answers[0].id == number
    eventually(lambda: [message.reason for message in receiver.left] == ["before", "after"], "the other messages")


def test_an_answer_that_comes_too_late_is_heard_as_one_that_nobody_waits_for(receiver):
    with asking(receiver.link, 0.01) as answers:
        late = receiver.question()
    assert answers == [None]
    with asking(receiver.link) as answers:
        number = receiver.question()
        receiver.answer(late, number)
    assert answers[0].id == number
    eventually(lambda: sorted(receiver.answers) == [(late, False), (number, True)], "both")


@pytest.mark.parametrize("is_first_first", [True, False], ids=["in order", "the other way"])
def test_two_who_ask_at_once_both_have_their_answers(receiver, is_first_first):
    with asking(receiver.link) as first:
        numbers = [receiver.question()]
        with asking(receiver.link) as second:
            numbers.append(receiver.question())
            for number in numbers if is_first_first else reversed(numbers):
                receiver.answer(number)
    assert [first[0].id, second[0].id] == numbers


def test_many_who_ask_at_once_each_have_their_own(receiver):
    wrong = []

    def ask_once() -> None:
        asked = []
        answer = receiver.link.request(lambda number: asked.append(number) or Open(number, []), WAIT_S)
        if answer is None or answer.id != asked[0]:
            wrong.append((asked, answer))

    def ask() -> None:
        for _ in range(QUESTIONS):
            ask_once()

    threads = [threading.Thread(target=ask) for _ in range(ASKERS)]
    for thread in threads:
        thread.start()
    for number in range(ASKERS * QUESTIONS):
        if number % 50 == 0:
            receiver.agent.sendall(frame(ArenaRefused(str(number))))
        receiver.answer(receiver.question())
    for thread in threads:
        thread.join(WAIT_S)
    assert wrong == []
    assert len(receiver.answers) == ASKERS * QUESTIONS
    assert all(is_awaited for _, is_awaited in receiver.answers)
    eventually(lambda: len(receiver.left) == ASKERS * QUESTIONS // 50, "the other messages")


@pytest.mark.parametrize(
    ("send", "end"),
    [
        pytest.param(b"", ConnectionResetError, id="the end"),
        pytest.param(b"\x00\x00\x00\x02\xc1\xc1", DoorProtocolError, id="garbage"),
        pytest.param(b"\xff\xff\xff\xff", DoorProtocolError, id="a length that is none"),
    ],
)
def test_where_the_connection_ends_an_asker_waits_no_longer_and_the_receiving_thread_hears_why(receiver, send, end):
    with asking(receiver.link, 1e6) as answers:
        receiver.question()
        if send:
            receiver.agent.sendall(send)
        else:
            receiver.agent.shutdown(socket.SHUT_RDWR)
    assert answers == [None]
    eventually(lambda: isinstance(receiver.end, end), "the end")
    assert receiver.link.request(lambda number: Open(number, []), WAIT_S) is None
