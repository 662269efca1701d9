"""A connection writes no faster than its server reads, and gives none but a whole, undoubted exchange to its keeper."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway.upstream_http.connection import JOINED_BYTES_MAX, SLICE_BYTES, Connection
from gateway.upstream_http.connection_pool import ConnectionPool
from gateway.upstream_http.errors import ConnectionBroken
from gateway.upstream_http.exchange import BODY_BYTES_WAITING_MAX
from gateway.upstream_http.origin import parse_url
from tests.gateway.upstream_http.scripted_server import OK
from tests.virtual_time import VirtualTimeLoop

ORIGIN = parse_url("http://127.0.0.1:1").origin


class Transport(asyncio.Transport):
    """Notes what is done to it."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        super().__init__({"socket": sock})
        self.written: list[bytes] = []
        self.is_aborted = self.is_paused = False
        self.on_write: Callable[[], None] = lambda: None

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))
        self.on_write()

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


class Keeper:
    """Notes what becomes of the connection."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def made(self, connection: Connection) -> None:
        self.told.append("made")

    def rested(self, connection: Connection) -> None:
        self.told.append("rested")

    def lost(self, connection: Connection) -> None:
        self.told.append("lost")


class Setting:
    """A connection that stands."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.keeper, self.transport = loop, Keeper(), Transport()
        self.connection = Connection(ORIGIN, loop, self.keeper)
        self.connection.connection_made(self.transport)


@pytest.fixture
def made() -> Iterator[Setting]:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        yield Setting(runner.get_loop())


def test_what_is_written_leaves_at_once(made: Setting) -> None:
    with socket.socket() as sock:
        Connection(ORIGIN, made.loop, made.keeper).connection_made(Transport(sock))
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_small_body_leaves_with_its_head_and_a_large_one_is_not_copied_behind_it(made: Setting) -> None:
    made.connection.begin(False)
    made.connection.send(b"head", b"x" * JOINED_BYTES_MAX)
    assert made.transport.written == [b"head" + b"x" * JOINED_BYTES_MAX]
    made.transport.written.clear()
    made.connection.send(b"head", b"x" * (JOINED_BYTES_MAX + 1))
    assert made.transport.written == [b"head", b"x" * (JOINED_BYTES_MAX + 1)]


def test_a_server_that_does_not_read_is_not_written_to(made: Setting) -> None:
    body = bytes(range(256)) * (SLICE_BYTES // 256) * 3 + b"end"
    exchange = made.connection.begin(False)
    made.connection.pause_writing()
    made.connection.send(b"head", body)
    assert made.transport.written == [b"head"]
    made.transport.on_write = made.connection.pause_writing
    for count in range(1, 4):
        made.connection.resume_writing()
        assert len(made.transport.written) == 1 + count
    made.connection.data_received(OK)
    assert exchange.is_over
    assert made.keeper.told == ["made"], "a request that wasn't sent whole leaves a connection nobody can use"
    assert made.transport.is_aborted
    made.connection.resume_writing()
    assert b"".join(made.transport.written) == b"head" + body[: 3 * SLICE_BYTES]


def test_a_whole_request_and_its_whole_answer_leave_the_connection_for_the_next(made: Setting) -> None:
    for count in range(1, 4):
        exchange = made.connection.begin(False)
        made.connection.send(b"head", b"x" * SLICE_BYTES * 3)
        made.connection.data_received(OK)
        assert exchange.is_over
        assert made.keeper.told == ["made"] + ["rested"] * count
        assert made.connection.is_usable
    assert b"".join(made.transport.written) == (b"head" + b"x" * SLICE_BYTES * 3) * 3


def test_an_end_that_comes_though_reading_is_paused_leaves_the_connection_reading(made: Setting) -> None:
    """Under TLS what was decrypted already still comes."""
    length = BODY_BYTES_WAITING_MAX + 2
    exchange = made.connection.begin(False)
    made.connection.send(b"head", b"")
    made.connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length + b"x" * (length - 1))
    assert made.transport.is_paused
    made.connection.data_received(b"x")
    assert exchange.is_over
    assert made.keeper.told == ["made", "rested"]
    assert not made.transport.is_paused
    assert not made.connection.is_held


def test_a_request_of_pieces_that_is_answered_before_its_end_is_not_whole(made: Setting) -> None:
    made.connection.begin(False)
    made.connection.write(b"half")
    made.connection.data_received(OK)
    assert made.keeper.told == ["made"]
    assert made.transport.is_aborted


@pytest.mark.parametrize("event", ["words", "end", "loss", "abort"])
def test_a_connection_on_which_anything_happens_before_its_request_is_not_used(made: Setting, event: str) -> None:
    if event == "words":
        made.connection.data_received(OK)
    elif event == "end":
        made.connection.eof_received()
    elif event == "loss":
        made.connection.connection_lost(None)
    else:
        made.connection.abort()
    assert not made.connection.is_usable
    exchange = made.connection.begin(False)
    assert isinstance(exchange.failure, ConnectionBroken)
    assert not exchange.has_received


def test_a_connection_that_was_given_up_while_it_was_made_is_closed(made: Setting) -> None:
    late = Connection(ORIGIN, made.loop, made.keeper)
    late.abort()
    transport = Transport()
    late.connection_made(transport)
    assert transport.is_aborted
    assert not late.is_usable


def test_a_connection_that_is_made_after_the_end_of_its_pool_is_closed(made: Setting) -> None:
    pool = ConnectionPool(made.loop, 60.0)
    made.loop.run_until_complete(pool.close())
    transport = Transport()
    Connection(ORIGIN, made.loop, pool).connection_made(transport)
    assert transport.is_aborted


def test_an_end_while_the_request_is_being_written_is_not_waited_out(made: Setting) -> None:
    exchange = made.connection.begin(False)
    made.connection.pause_writing()
    made.connection.send(b"head", b"x" * SLICE_BYTES)
    made.connection.eof_received()
    assert isinstance(exchange.failure, ConnectionBroken)
    assert made.transport.is_aborted, "a polite close would wait until all is written"


def test_a_reset_is_no_end_of_a_body_that_ends_with_the_connection(made: Setting) -> None:
    exchange = made.connection.begin(False)
    made.connection.send(b"head", b"")
    made.connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nabc")
    made.connection.connection_lost(ConnectionResetError())
    assert isinstance(exchange.failure, ConnectionBroken)
    assert not exchange.is_over
    assert made.keeper.told == ["made", "lost"]
