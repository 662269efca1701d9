"""An answer is parsed the same however it is cut, ends where HTTP says, and can't take more memory than it may."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.upstream_http.errors import AnswerTimedOut, ConnectionBroken, NotHttp
from gateway.upstream_http.exchange import HEAD_BYTES_MAX, Exchange
from tests.gateway.upstream_http.answers import SAMPLES, WireAnswer, answers, build
from tests.virtual_time import VirtualTimeLoop

HEAD = b"HTTP/1.1 200 OK\r\n"


class StillLine:
    """A connection that only remembers what is asked of it."""

    def __init__(self) -> None:
        self.is_held = self.is_aborted = False
        self.resumed = 0

    def wake_at(self, deadline: float) -> None:
        """Nobody looks at the clock."""

    def resume(self) -> None:
        self.is_held = False
        self.resumed += 1

    def abort(self) -> None:
        self.is_aborted = True


def run(story: Callable[[asyncio.AbstractEventLoop], Any]) -> Any:
    """In a loop without sockets."""

    async def tell() -> Any:
        return await story(asyncio.get_running_loop())

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(tell())


@pytest.fixture(scope="module")
def loop() -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        yield runner.get_loop()


def fed(
    loop: asyncio.AbstractEventLoop, pieces: list[bytes], *, ends: bool = False, is_bodiless: bool = False
) -> Exchange:
    """What has come of an answer in these pieces; as a connection does it, nothing is fed behind its end."""
    exchange = Exchange(StillLine(), loop, is_bodiless)
    for piece in pieces:
        if exchange.is_over or exchange.failure is not None:
            break
        exchange.feed(piece)
    if ends and not exchange.is_over and exchange.failure is None:
        exchange.finish()
    return exchange


def body_of(loop: asyncio.AbstractEventLoop, exchange: Exchange) -> bytes:
    """All that there is."""
    return loop.run_until_complete(exchange.read(1.0)) if exchange.waiting_bytes else b""


def cut(wire: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(places), len(wire)]
    return [wire[start:end] for start, end in itertools.pairwise(edges) if start < end]


def check(loop: asyncio.AbstractEventLoop, answer: WireAnswer, pieces: list[bytes]) -> None:
    exchange = fed(loop, pieces, ends=answer.framing == "close")
    assert exchange.failure is None
    assert exchange.is_over
    assert (exchange.status, tuple(exchange.headers)) == (answer.status, answer.headers)
    assert body_of(loop, exchange) == answer.body
    assert exchange.is_clean == answer.keeps_alive
    assert exchange.is_end_told == (answer.framing != "close")


@settings(max_examples=60, deadline=None)
@given(answers, st.data())
def test_an_answer_is_the_same_however_its_bytes_are_cut(
    loop: asyncio.AbstractEventLoop, answer: WireAnswer, data: st.DataObject
) -> None:
    check(loop, answer, cut(answer.wire, data.draw(st.lists(st.integers(0, len(answer.wire)), max_size=8))))


@pytest.mark.parametrize("answer", SAMPLES, ids=range(len(SAMPLES)))
def test_an_answer_is_the_same_when_cut_at_any_byte_or_at_all(
    loop: asyncio.AbstractEventLoop, answer: WireAnswer
) -> None:
    for place in range(len(answer.wire)):
        check(loop, answer, cut(answer.wire, [place]))
    check(loop, answer, [answer.wire[place : place + 1] for place in range(len(answer.wire))])


@settings(max_examples=40, deadline=None)
@given(answers)
def test_another_reader_of_http_reads_the_same(loop: asyncio.AbstractEventLoop, answer: WireAnswer) -> None:
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(answer.wire)
    body, head = b"", None
    while not isinstance(event := reader.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            reader.receive_data(b"")
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
    exchange = fed(loop, [answer.wire], ends=answer.framing == "close")
    assert head is not None
    assert exchange.status == head.status_code
    assert [(name.lower(), value) for name, value in exchange.headers] == list(head.headers)
    assert body_of(loop, exchange) == body


@pytest.mark.parametrize("answer", SAMPLES, ids=range(len(SAMPLES)))
def test_an_answer_that_breaks_off_is_never_taken_for_whole(
    loop: asyncio.AbstractEventLoop, answer: WireAnswer
) -> None:
    end_of_head = answer.wire.index(b"\r\n\r\n") + 4
    for length in range(len(answer.wire)):
        exchange = fed(loop, [answer.wire[:length]] if length else [], ends=True)
        if answer.framing == "close" and length >= end_of_head:
            assert exchange.is_over, "nothing else tells its end"
            assert body_of(loop, exchange) == answer.wire[end_of_head:length]
        else:
            assert not exchange.is_over
            assert isinstance(exchange.failure, ConnectionBroken)
            assert answer.body.startswith(body_of(loop, exchange))


SECOND = build([b"another's"], "length", headers=((b"X-Other", b"1"),)).wire
BEHIND = {"an answer": SECOND, "half a head": SECOND[:20], "garbage": b"\x00garbage", "one byte": b"H"}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize(
    "answer", [each for each in SAMPLES if each.framing != "close"], ids=["length", "100", "trailers", "empty"]
)
def test_what_stands_behind_an_answer_is_not_of_it_and_ends_the_connection(
    loop: asyncio.AbstractEventLoop, answer: WireAnswer, behind: str
) -> None:
    exchange = fed(loop, [answer.wire + BEHIND[behind]])
    assert exchange.is_over
    assert exchange.failure is None
    assert (exchange.status, tuple(exchange.headers)) == (answer.status, answer.headers)
    assert body_of(loop, exchange) == answer.body
    assert not exchange.is_clean


@pytest.mark.parametrize(
    ("wire", "is_bodiless"),
    [
        (HEAD + b"content-length: 500\r\n\r\n", True),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 500\r\n\r\n", False),
    ],
    ids=["HEAD with a length", "HEAD of chunks", "204", "304"],
)
def test_an_answer_without_a_body_is_over_with_its_head(
    loop: asyncio.AbstractEventLoop, wire: bytes, is_bodiless: bool
) -> None:
    exchange = fed(loop, [wire], is_bodiless=is_bodiless)
    assert exchange.is_over
    assert exchange.is_clean
    assert exchange.is_end_told
    more = fed(loop, [wire + b"HTTP/1.1 "], is_bodiless=is_bodiless)
    assert more.is_over
    assert not more.is_clean


REFUSED = {
    "no http": b"SSH-2.0-OpenSSH\r\n",
    "a page": b"<html></html>",
    "http/2": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\nab",
    "length and chunks": HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": HEAD + b"content-length: -1\r\n\r\n",
    "a huge length": HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "a coding of the transfer": HEAD + b"transfer-encoding: gzip\r\n\r\n",
    "two codings": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a NUL": HEAD + b"x: a\0b\r\ncontent-length: 0\r\n\r\n",
    "a space in a name": HEAD + b"content length: 0\r\n\r\n",
}


@pytest.mark.parametrize("wire", REFUSED.values(), ids=REFUSED)
def test_what_is_no_answer_fails_as_such(loop: asyncio.AbstractEventLoop, wire: bytes) -> None:
    exchange = fed(loop, [wire], ends=True)
    assert isinstance(exchange.failure, NotHttp)
    assert not exchange.is_over


@pytest.mark.parametrize(
    "behind",
    [b"zz\r\nab\r\n", b"2\r\nabXX", b"-2\r\nab\r\n", b"99999999999999999\r\n"],
    ids=["size", "end", "sign", "huge"],
)
def test_chunks_that_break_the_rules_break_the_connection(loop: asyncio.AbstractEventLoop, behind: bytes) -> None:
    exchange = fed(loop, [HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n" + behind])
    assert isinstance(exchange.failure, ConnectionBroken)
    assert body_of(loop, exchange).startswith(b"abc"), "what came before is there"


def test_switching_protocols_is_the_end_of_the_connection(loop: asyncio.AbstractEventLoop) -> None:
    exchange = fed(loop, [b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nraw"])
    assert exchange.is_over
    assert (exchange.status, exchange.is_clean) == (101, False)


FLOODS = {
    "one header": (HEAD + b"x: ", b"a" * 1000),
    "many headers": (HEAD, b"x: y\r\n" * 200),
    "a reason": (b"HTTP/1.1 200 ", b"a" * 1000),
    "a name": (HEAD, b"a" * 1000),
    "1xx": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 40),
    "trailers": (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 200),
    "an extension": (HEAD + b"transfer-encoding: chunked\r\n\r\n5;", b"a" * 1000),
    "a chunk's size": (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"0" * 1000),
    "empty lines": (b"", b"\r\n" * 500),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_what_is_not_of_the_body_has_a_bound(loop: asyncio.AbstractEventLoop, flood: str) -> None:
    begin, more = FLOODS[flood]
    exchange = fed(loop, [begin] if begin else [])
    fed_bytes = 0
    while exchange.failure is None:
        exchange.feed(more)
        fed_bytes += len(more)
        assert fed_bytes <= HEAD_BYTES_MAX + 2 * len(more)
    assert isinstance(exchange.failure, NotHttp | ConnectionBroken)
    assert not exchange.is_over


def test_a_head_that_comes_at_once_has_the_same_bound(loop: asyncio.AbstractEventLoop) -> None:
    fits = HEAD + b"x: %s\r\ncontent-length: 0\r\n\r\n" % (b"a" * (HEAD_BYTES_MAX - 100))
    assert fed(loop, [fits]).is_over
    exceeds = HEAD + b"x: %s\r\ncontent-length: 0\r\n\r\n" % (b"a" * HEAD_BYTES_MAX)
    assert isinstance(fed(loop, [exceeds]).failure, NotHttp)


def test_pieces_of_one_byte_are_no_flood(loop: asyncio.AbstractEventLoop) -> None:
    answer = build([b"a"] * 60_000, "chunked")
    exchange = fed(loop, cut(answer.wire, list(range(0, len(answer.wire), 50))))
    assert exchange.is_over
    assert body_of(loop, exchange) == answer.body


def test_all_that_came_before_a_break_is_read_before_it_is_told() -> None:
    async def story(loop: asyncio.AbstractEventLoop) -> None:
        exchange = fed(loop, [HEAD + b"content-length: 9\r\n\r\n", b"abc", b"de"])
        exchange.finish()
        assert await exchange.read(1.0) == b"abcde"
        for _ in range(2):
            with pytest.raises(ConnectionBroken):
                await exchange.read(1.0)

    run(story)


def test_reading_lets_a_held_connection_go_on() -> None:
    async def story(loop: asyncio.AbstractEventLoop) -> None:
        line = StillLine()
        exchange = Exchange(line, loop)
        exchange.feed(HEAD + b"content-length: 9\r\n\r\nabc")
        line.is_held = True
        assert await exchange.read(1.0) == b"abc"
        assert line.resumed == 1
        line.is_held = True  # by the next exchange
        exchange.feed(b"defghi")
        assert await exchange.read(1.0) == b"defghi"
        assert await exchange.read(1.0) == b""
        assert line.resumed == 1

    run(story)


def test_pieces_are_passed_on_when_they_come_and_wake_nobody() -> None:
    async def story(loop: asyncio.AbstractEventLoop) -> None:
        exchange, taken = Exchange(StillLine(), loop), []
        exchange.feed(HEAD + b"content-length: 9\r\n\r\nab")

        def take(piece: bytes) -> bool:
            taken.append(piece)
            return True

        passing = asyncio.ensure_future(exchange.pass_to(take, 5.0))
        await asyncio.sleep(0)
        for piece in (b"cd", b"ef"):
            await asyncio.sleep(4.0)
            exchange.feed(piece)
            assert taken[-1] == piece, "at once, and not when the task has its turn"
            assert exchange.deadline == loop.time() + 5.0, "each piece has the time-out"
            assert not passing.done()
        exchange.feed(b"ghi")
        assert await passing
        assert taken == [b"ab", b"cd", b"ef", b"ghi"]

    run(story)


def test_passing_on_pauses_when_the_taker_has_enough_and_loses_nothing() -> None:
    async def story(loop: asyncio.AbstractEventLoop) -> None:
        exchange, taken = Exchange(StillLine(), loop), []
        exchange.feed(HEAD + b"content-length: 9\r\n\r\n")

        def take(piece: bytes) -> bool:
            taken.append(piece)
            return piece != b"cd"

        passing = asyncio.ensure_future(exchange.pass_to(take, 5.0))
        await asyncio.sleep(0)
        for piece in (b"ab", b"cd", b"ef", b"ghi"):
            exchange.feed(piece)
        assert taken == [b"ab", b"cd"]
        assert not await passing, "there is more"
        assert await exchange.pass_to(take, 5.0)
        assert taken == [b"ab", b"cd", b"efghi"]

    run(story)


@pytest.mark.parametrize("is_told_before", [False, True])
def test_a_break_is_told_after_all_that_came_was_passed_on(is_told_before: bool) -> None:
    async def story(loop: asyncio.AbstractEventLoop) -> None:
        exchange, taken = Exchange(StillLine(), loop), []
        exchange.feed(HEAD + b"content-length: 9\r\n\r\nab")

        def take(piece: bytes) -> bool:
            taken.append(piece)
            return piece != b"cd"

        passing = asyncio.ensure_future(exchange.pass_to(take, 5.0))
        await asyncio.sleep(0)
        exchange.feed(b"cd")
        if is_told_before:
            exchange.finish()
        assert not await passing
        exchange.finish()
        with pytest.raises(ConnectionBroken):
            await exchange.pass_to(take, 5.0)
        assert taken == [b"ab", b"cd"]

    run(story)


def test_leaving_an_answer_ends_its_connection_unless_it_is_over() -> None:
    async def story(loop: asyncio.AbstractEventLoop) -> None:
        line = StillLine()
        exchange = Exchange(line, loop)
        exchange.feed(HEAD + b"content-length: 3\r\n\r\nab")
        exchange.close()
        assert line.is_aborted
        line = StillLine()
        exchange = Exchange(line, loop)
        exchange.feed(HEAD + b"content-length: 2\r\n\r\nab")
        exchange.close()
        assert not line.is_aborted
        assert await exchange.read(1.0) == b"ab"

    run(story)


def test_a_wait_ends_with_its_deadline_and_a_cancelled_one_leaves_no_deadline() -> None:
    async def story(loop: asyncio.AbstractEventLoop) -> None:
        exchange = Exchange(StillLine(), loop)
        waiting = asyncio.ensure_future(exchange.head(50.0))
        await asyncio.sleep(0)
        assert exchange.deadline == 50.0
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not exchange.look_at_clock(60.0), "nobody waits"
        waiting = asyncio.ensure_future(exchange.head(70.0))
        await asyncio.sleep(0)
        assert not exchange.look_at_clock(69.0)
        assert exchange.look_at_clock(70.0)
        with pytest.raises(AnswerTimedOut):
            await waiting

    run(story)
