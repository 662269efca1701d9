"""Streams on their way: whole events in their order, whatever is in the way, and no more than the client can take."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import EngineConfig
from gateway.stream_relay import StreamRelay
from gateway.upstream import EngineFailed
from gateway.upstream_http.exchange import BODY_BYTES_WAITING_MAX
from tests.gateway.assembly import gateway_for

EVENT = st.binary(min_size=1, max_size=12).map(lambda data: b"data: %s\n\n" % data.hex().encode())
PIECE = b"data: " + b"#" * 65_528 + b"\n\n"
PIECES = 400


class Piecemeal:
    """Stands for `gateway.upstream.Answer`: these pieces, and then its end or a break."""

    def __init__(self, pieces: list[bytes], breaks: bool, is_end_told: bool = True) -> None:
        self._pieces, self._breaks, self.is_end_told = pieces[1:], breaks, is_end_told
        self.first = pieces[0] if pieces else b""

    async def pass_to(self, take: Callable[[bytes], bool]) -> bool:
        while self._pieces:
            if not take(self._pieces.pop(0)):
                return False
        if self._breaks:
            raise EngineFailed("broke off", is_connection=True)
        return True


class Client:
    """A `Sink` that takes a piece at once or not, as told."""

    def __init__(self, takes: list[bool]) -> None:
        self._takes, self.got, self.waits = takes, b"", 0

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        raise AssertionError("the relay is told how to start")

    async def write(self, piece: bytes) -> None:
        await asyncio.sleep(0)
        self.waits += 1
        self.got += piece

    def push(self, piece: bytes) -> bool:
        is_taken = self._takes.pop() if self._takes else True
        self.got += piece if is_taken else b""
        return is_taken

    async def finish(self) -> None:
        raise AssertionError("the relay doesn't end an answer")


@given(
    events=st.lists(EVENT, max_size=12),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    takes=st.lists(st.booleans(), max_size=12),
    hidden=st.sets(st.integers(0, 11)),
    breaks=st.booleans(),
)
def test_the_client_gets_the_chosen_events_whole_and_in_order(
    events: list[bytes], cuts: list[int], takes: list[bool], hidden: set[int], breaks: bool
) -> None:
    whole = b"".join(events)
    places = sorted({0, len(whole), *(place for place in cuts if place < len(whole))})
    pieces = [whole[start:end] for start, end in itertools.pairwise(places)]
    left_out = {events[number] for number in hidden if number < len(events)}
    started: list[bytes] = []
    client = Client(takes)

    async def start() -> None:
        started.append(client.got)

    def choose(some: bytes) -> bytes:
        return b"".join(each + b"\n\n" for each in some.split(b"\n\n")[:-1] if each + b"\n\n" not in left_out)

    async def story() -> StreamRelay:
        relay = StreamRelay(client, start, choose)
        with contextlib.suppress(EngineFailed):
            await relay.run(Piecemeal(pieces, breaks))  # type: ignore[arg-type]
        return relay

    relay = asyncio.run(story())
    assert client.got == b"".join(each for each in events if each not in left_out)
    assert started == ([b""] if events else []), "the head goes first, once, and not before there is an event"
    assert relay.has_started is bool(events)
    assert relay.tail.kept == whole[-8192:]


async def test_what_breaks_off_within_an_event_never_reaches_the_client() -> None:
    client = Client([])

    async def start() -> None:
        pass

    relay = StreamRelay(client, start, lambda events: events)
    with contextlib.suppress(EngineFailed):
        await relay.run(Piecemeal([b"data: 1\n\ndata: 2", b"3"], breaks=True))  # type: ignore[arg-type]
    assert client.got == b"data: 1\n\n"


async def test_a_client_that_reads_late_gets_all_and_the_engine_is_held_meanwhile() -> None:
    written = 0

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"POST"):
                body = orjson.dumps({"data": [{"id": "slow"}]})
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
                for _ in range(PIECES):
                    writer.write(PIECE)
                    await writer.drain()
                    written += len(PIECE)
                writer.write(b"data: [DONE]\n\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with gateway_for([], static=[EngineConfig(url=url)]) as gateway:
            await gateway.fleet.check_health()
            port = int(gateway.url.rpartition(":")[2])
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=65_536)
            body = b'{"model":"slow","stream":true,"messages":[{"role":"user","content":"hi"}]}'
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            held_at = await _settled(lambda: written)
            assert held_at < PIECES * len(PIECE) // 2, "what isn't read doesn't pile up in the gateway"
            assert held_at > BODY_BYTES_WAITING_MAX
            got = 0
            while chunk := await asyncio.wait_for(reader.read(2**20), 10.0):
                got += chunk.count(b"#")
                if chunk.endswith(b"0\r\n\r\n"):
                    break
            assert got == PIECES * PIECE.count(b"#")
            writer.close()


async def _settled(value: Callable[[], int]) -> int:
    """The value when it has stayed the same for a while."""
    last, same = -1, 0
    for _ in range(1_000):
        same = same + 1 if value() == last else 0
        last = value()
        if same == 20 and last:
            return last
        await asyncio.sleep(0.01)
    raise AssertionError("it never settled")
