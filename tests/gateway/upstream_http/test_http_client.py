"""Connections are used again, closed and bounded; a request is sent twice only where nothing of an answer came."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.upstream_http import connection_pool
from gateway.upstream_http.errors import AnswerTimedOut, BadRequest, ConnectionBroken, ConnectTimedOut
from gateway.upstream_http.exchange import BODY_BYTES_WAITING_MAX, Exchange
from gateway.upstream_http.http_client import HttpClient
from gateway.upstream_http.origin import parse_url
from gateway.upstream_http.request import Request
from tests.directory.certificates import make_certificate
from tests.gateway.assembly import eventually
from tests.gateway.upstream_http.scripted_server import OK, ScriptedServer, Step, served
from tests.virtual_time import in_quiet_time

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"
LONG_S = 600.0


def client_for(keep_s: float = 60.0, **options: Any) -> HttpClient:
    return HttpClient(connect_s=2.0, keep_s=keep_s, **options)


async def whole(exchange: Exchange) -> bytes:
    body = b""
    while piece := await exchange.read(LONG_S):
        body += piece
    return body


async def ask(client: HttpClient, server: ScriptedServer, body: Any = b"{}", method: str = "POST") -> bytes:
    """The answer's body."""
    exchange = await client.send(
        Request(method, server.url + "/v1/x?y=%20", ((b"x-a", b"caf\xe9\t\xff"),), body), LONG_S
    )
    try:
        return await whole(exchange)
    finally:
        exchange.close()


async def test_a_request_goes_as_it_was_given() -> None:
    async with ScriptedServer() as server, client_for() as client:
        assert await ask(client, server) == b"ok"
        assert await ask(client, server, b"", "GET") == b"ok"
        assert await ask(client, server, b"") == b"ok"
    named = (b"host", f"127.0.0.1:{server.port}".encode())
    post, get, empty = server.seen
    assert (post.method, post.target, post.body) == ("POST", b"/v1/x?y=%20", b"{}")
    assert post.headers == (named, (b"x-a", b"caf\xe9\t\xff"), (b"content-length", b"2"))
    assert get.headers == (named, (b"x-a", b"caf\xe9\t\xff"))
    assert empty.headers == (named, (b"x-a", b"caf\xe9\t\xff"), (b"content-length", b"0"))


async def test_the_connection_that_was_used_last_is_used_next() -> None:
    async with ScriptedServer() as server, client_for() as client:
        await asyncio.gather(*(ask(client, server) for _ in range(3)))
        assert (server.accepted, client.pool.open()) == (3, 3)
        for _ in range(3):
            await ask(client, server)
        assert server.accepted == 3
        assert len({seen.connection for seen in server.seen[3:]}) == 1


async def test_no_more_connections_lie_idle_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "IDLE_PER_ORIGIN_MAX", 2)
    async with ScriptedServer() as server, client_for() as client:
        await asyncio.gather(*(ask(client, server) for _ in range(5)))
        await eventually(lambda: client.pool.open() == 2 and server.open == 2)


@in_quiet_time
async def test_an_idle_connection_is_closed_in_time_and_one_too_old_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedServer() as server, client_for(keep_s=3.0) as client:
        await ask(client, server)
        await asyncio.sleep(2.0)
        await ask(client, server)
        await asyncio.sleep(2.0)
        await asyncio.gather(ask(client, server), ask(client, server))
        assert server.accepted == 2, "it was used within the time"
        await asyncio.sleep(3.1)
        assert (client.pool.open(), server.open) == (0, 0)
        await ask(client, server)
        assert server.accepted == 3
        loop = asyncio.get_running_loop()
        late = loop.time() + 3.1
        monkeypatch.setattr(loop, "time", lambda: late)  # and no timer came to its turn
        await ask(client, server)
        assert server.accepted == 4


@in_quiet_time
async def test_each_idle_connection_has_its_own_time() -> None:
    async with ScriptedServer() as server, client_for(keep_s=3.0) as client:
        await asyncio.gather(ask(client, server), ask(client, server))
        await asyncio.sleep(2.0)
        await ask(client, server)
        await asyncio.sleep(1.5)
        assert client.pool.open() == 1
        await asyncio.sleep(2.0)
        assert client.pool.open() == 0


HOWS: list[Step] = ["close", "reset"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_kept_connection_that_ends_before_a_byte_is_replaced_once(how: Step, method: str) -> None:
    async with ScriptedServer([OK], [how], [OK], [how], [how], [OK]) as server, client_for() as client:
        await ask(client, server)
        assert await ask(client, server, b"{}", method) == b"ok"
        assert [seen.connection for seen in server.seen] == [0, 0, 1]
        assert server.seen[1].body == server.seen[2].body == b"{}"
        with pytest.raises(ConnectionBroken):
            await ask(client, server, b"{}", method)
        assert len(server.seen) == 5, "and no third time"


@pytest.mark.parametrize("how", HOWS)
async def test_a_fresh_connection_that_ends_is_not_replaced(how: Step) -> None:
    async with ScriptedServer([how], [OK]) as server, client_for() as client:
        with pytest.raises(ConnectionBroken):
            await ask(client, server)
        assert len(server.seen) == 1


@pytest.mark.parametrize(
    "part", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", HEAD, HEAD + b"abc"], ids=["byte", "100", "head", "body"]
)
async def test_nothing_is_sent_again_after_a_byte(part: bytes) -> None:
    async with ScriptedServer([OK], [part, "close"], [OK]) as server, client_for() as client:
        await ask(client, server)
        with pytest.raises(ConnectionBroken):
            await ask(client, server)
        assert len(server.seen) == 2


@in_quiet_time
async def test_what_is_late_is_not_sent_again() -> None:
    async with ScriptedServer([OK], ["stall"], [OK]) as server, client_for() as client:
        await ask(client, server)
        with pytest.raises(AnswerTimedOut):
            await client.send(Request("POST", server.url), 5.0)
        await eventually(lambda: server.open == 0)
        assert len(server.seen) == 2


async def test_what_nobody_asked_for_ends_an_idle_connection() -> None:
    async with ScriptedServer() as server, client_for() as client:
        await ask(client, server)
        server.say(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother")
        await eventually(lambda: client.pool.open() == 0)
        assert await ask(client, server) == b"ok"
        assert server.accepted == 2


async def test_an_idle_connection_that_its_server_closes_is_gone() -> None:
    async with ScriptedServer([OK, "close"], [OK]) as server, client_for() as client:
        await ask(client, server)
        await eventually(lambda: client.pool.open() == 0)
        assert await ask(client, server) == b"ok"
        assert len(server.seen) == 2


@pytest.mark.parametrize("answer", [b"connection: close\r\n", b"connection: Close, x\r\n"])
async def test_a_server_that_says_close_is_believed(answer: bytes) -> None:
    closing = b"HTTP/1.1 200 OK\r\n" + answer + b"content-length: 2\r\n\r\nok"
    async with ScriptedServer([closing]) as server, client_for() as client:
        await ask(client, server)
        await eventually(lambda: server.open == 0 and client.pool.open() == 0)


async def test_an_answer_to_head_has_no_body() -> None:
    async with ScriptedServer([HEAD], [OK]) as server, client_for() as client:
        assert await ask(client, server, b"", "HEAD") == b""
        assert await ask(client, server) == b"ok"
        assert server.accepted == 1


@pytest.mark.parametrize("steps", [["stall"], [HEAD[:20], "stall"]], ids=["nothing", "half a head"])
async def test_a_request_that_is_cancelled_ends_its_connection(steps: list[Step]) -> None:
    async with ScriptedServer(steps) as server, client_for() as client:
        asking = asyncio.create_task(ask(client, server))
        await eventually(lambda: server.seen)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await eventually(lambda: server.open == 0 and client.pool.open() == 0)


async def test_an_answer_that_is_left_ends_its_connection() -> None:
    async with ScriptedServer([HEAD + b"abc", "stall"]) as server, client_for() as client:
        exchange = await client.send(Request("POST", server.url), LONG_S)
        assert await exchange.read(LONG_S) == b"abc"
        exchange.close()
        await eventually(lambda: server.open == 0 and client.pool.open() == 0)
        with pytest.raises(ConnectionBroken):
            await exchange.read(LONG_S)


async def test_the_end_of_the_client_ends_all_connections() -> None:
    async with ScriptedServer([OK], [HEAD, "stall"], [OK]) as server:
        async with client_for() as client:
            await ask(client, server)
            running = await client.send(Request("POST", server.url), LONG_S)
            await asyncio.gather(ask(client, server), ask(client, server))
            assert client.pool.open() == 3
        assert client.pool.open() == 0
        with pytest.raises(ConnectionBroken):
            await running.read(LONG_S)
        await eventually(lambda: server.open == 0)


@in_quiet_time
async def test_a_head_that_drips_has_one_deadline_and_a_body_one_for_each_piece() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for each in HEAD if dripping == "head" else [HEAD, *[b"x"] * 9]:
            writer.write(bytes([each]) if isinstance(each, int) else each)
            await asyncio.sleep(1.0)

    async with served(drip) as url, client_for() as client:
        request = Request("GET", url)
        dripping = "head"
        began_at = asyncio.get_running_loop().time()
        with pytest.raises(AnswerTimedOut):
            await client.send(request, 5.0)
        assert asyncio.get_running_loop().time() - began_at == pytest.approx(5.0, abs=0.1)
        dripping = "body"
        exchange = await client.send(request, 5.0)
        assert b"".join([await exchange.read(1.5) for _ in range(9)]) == b"x" * 9
        exchange.close()


@in_quiet_time
async def test_a_body_that_stops_is_given_up_when_its_piece_is_due_and_not_while_nobody_waits() -> None:
    async with ScriptedServer([HEAD + b"abc", "stall"]) as server, client_for() as client:
        loop = asyncio.get_running_loop()
        exchange = await client.send(Request("POST", server.url), 3.0)
        assert await exchange.read(3.0) == b"abc"
        await asyncio.sleep(60.0)
        began_at = loop.time()
        with pytest.raises(AnswerTimedOut):
            await exchange.read(4.0)
        assert loop.time() - began_at == pytest.approx(4.0, abs=0.1)
        await eventually(lambda: client.pool.open() == 0)


@in_quiet_time
async def test_each_piece_has_its_own_time_though_the_timer_stays_where_it_is() -> None:
    async def two_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"a")
        await asyncio.sleep(3.0)
        writer.write(b"b")
        await reader.read()

    async with served(two_pieces) as url, client_for() as client:
        loop = asyncio.get_running_loop()
        exchange = await client.send(Request("GET", url), 5.0)
        assert [await exchange.read(5.0), await exchange.read(5.0)] == [b"a", b"b"]
        began_at = loop.time()
        with pytest.raises(AnswerTimedOut):
            await exchange.read(5.0)
        assert loop.time() - began_at == pytest.approx(5.0, abs=0.1)


async def test_a_stream_needs_few_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Queue[None]()

    async def one_by_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n")
            for _ in range(50):
                await asked.get()
                writer.write(b"x")

    async with served(one_by_one) as url, client_for() as client:
        loop, armed = asyncio.get_running_loop(), []
        call_at = loop.call_at
        monkeypatch.setattr(loop, "call_at", lambda *given, **named: armed.append(given[1]) or call_at(*given, **named))
        for _ in range(5):
            exchange = await client.send(Request("GET", url), 600.0)
            for _ in range(50):
                asked.put_nowait(None)
                assert await exchange.read(120.0) == b"x"
        ours = [call for call in armed if "Connection" in getattr(call, "__qualname__", "")]
        assert 1 <= len(ours) <= 3


@in_quiet_time
async def test_a_reader_that_waits_holds_the_server_back() -> None:
    size, block = 20 * 2**20, b"x" * 65_536
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(block)
            await writer.drain()
            sent += len(block)
        await reader.read()

    async with served(flood) as url, client_for() as client:
        exchange = await client.send(Request("GET", url), 5.0)
        await asyncio.sleep(60.0)  # passes when nothing moves any more
        assert sent < size, "it is held back by full buffers"
        assert exchange.waiting_bytes <= BODY_BYTES_WAITING_MAX + 2**18
        assert await whole(exchange) == block * (size // len(block))
        assert client.pool.idle(parse_url(url).origin) == 1


@in_quiet_time
async def test_a_large_body_arrives_whole_and_waits_for_a_server_that_reads_slowly() -> None:
    body = bytes(range(256)) * 2**16
    begin, got = asyncio.Event(), bytearray()

    async def read_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await begin.wait()
        while len(got) < len(body):
            got.extend(await reader.read(2**20))
        writer.write(OK)
        await reader.read()

    async with served(read_late) as url, client_for() as client:
        asking = asyncio.create_task(client.send(Request("POST", url, (), body), LONG_S))
        await asyncio.sleep(60.0)
        assert not asking.done()
        begin.set()
        assert await whole(await asking) == b"ok"
        assert got == body
        assert client.pool.idle(parse_url(url).origin) == 1


@in_quiet_time
async def test_an_answer_that_comes_before_the_whole_request_was_read_is_heard() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await asyncio.sleep(600.0)

    async with served(refuse) as url, client_for() as client:
        exchange = await client.send(Request("POST", url, (), b"x" * 2**25), 5.0)
        assert (exchange.status, await whole(exchange)) == (413, b"no")
        await eventually(lambda: client.pool.open() == 0)


async def pieces_of(*pieces: bytes | Exception) -> AsyncIterator[bytes]:
    for piece in pieces:
        if isinstance(piece, Exception):
            raise piece
        yield piece


async def test_a_body_of_pieces_goes_as_it_comes_and_never_twice() -> None:
    async with ScriptedServer([OK], [OK], ["close"], [OK]) as server, client_for() as client:
        await ask(client, server)
        assert await ask(client, server, pieces_of(b"one", b"", b"two" * 50_000)) == b"ok"
        assert server.seen[1].body == b"one" + b"two" * 50_000
        assert (b"transfer-encoding", b"chunked") in server.seen[1].headers
        assert server.seen[1].connection == 1, "on a connection that can't have been closed"
        with pytest.raises(ConnectionBroken):
            await ask(client, server, pieces_of(b"one"))
        assert len(server.seen) == 3


async def test_a_body_that_breaks_off_breaks_its_connection() -> None:
    async with ScriptedServer() as server, client_for() as client:
        with pytest.raises(ZeroDivisionError):
            await ask(client, server, pieces_of(b"one", ZeroDivisionError()))
        await eventually(lambda: server.open == 0 and client.pool.open() == 0)
        assert not server.seen


@in_quiet_time
async def test_a_refusal_ends_a_body_of_pieces_and_a_slow_one_has_the_deadline() -> None:
    asked = 0

    async def endless(pause_s: float) -> AsyncIterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            await asyncio.sleep(pause_s)
            yield b"x" * 65_536

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nn")
        await asyncio.sleep(1.0)
        writer.write(b"o")
        await asyncio.sleep(600.0)

    async with served(refuse) as url, ScriptedServer() as patient, client_for() as client:
        began_at = asyncio.get_running_loop().time()
        exchange = await client.send(Request("POST", url, (), endless(0.0)), 5.0)
        assert asyncio.get_running_loop().time() - began_at < 0.5, "its head is enough"
        assert (exchange.status, await whole(exchange)) == (413, b"no")
        assert asked < 1000
        with pytest.raises(AnswerTimedOut):
            await client.send(Request("POST", patient.url, (), endless(7.0)), 5.0)
        await eventually(lambda: client.pool.open() == 0)


@pytest.mark.parametrize(
    "request_",
    [
        Request("GET", "http://x/", ((b"a", b"b\r\nc: d"),)),
        Request("GET", "http://x/", ((b"a", b"b\nc"),)),
        Request("GET", "http://x/", ((b"a\r", b"b"),)),
        Request("GET", "http://x/", ((b"a", b"\0"),)),
        Request("GET", "http://x/a b"),
        Request("GET", "http://x/a\x01b"),
        Request("GET", "http://x/ü€"),
        Request("GET", "http:///path"),
        Request("GET", "http://x:0/"),
        Request("GET", "http://x:70000/"),
        Request("GET", "http://[::1/"),
        Request("GET", "ftp://x/"),
        Request("GET", "x"),
        Request("GET", ""),
    ],
    ids=repr,
)
async def test_what_http_cannot_tell_is_not_sent(request_: Request) -> None:
    async with client_for() as client:
        with pytest.raises(BadRequest):
            await client.send(request_, LONG_S)


async def test_a_server_that_is_not_there_is_a_broken_connection() -> None:
    async with ScriptedServer() as server:
        pass
    async with client_for() as client:
        for url in (server.url, "http://name.invalid", f"http://{'a' * 70}.invalid", "http://a..invalid"):
            with pytest.raises(ConnectionBroken):
                await client.send(Request("GET", url), LONG_S)
        assert client.pool.open() == 0


@in_quiet_time
async def test_a_server_that_accepts_nobody_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(loop, "create_connection", never)
    async with client_for() as client:
        began_at = loop.time()
        with pytest.raises(ConnectTimedOut):
            await client.send(Request("GET", "http://127.0.0.1:1"), LONG_S)
        assert loop.time() - began_at == pytest.approx(2.0, abs=0.1)


async def test_every_address_of_a_name_is_tried_and_the_good_one_is_first_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, asked = asyncio.get_running_loop(), []

    async def two_addresses(host: str, port: None, **_: object) -> list[Any]:
        asked.append(host)
        await asyncio.sleep(0)
        return [(2, 1, 6, "", ("127.0.0.2", 0)), (2, 1, 6, "", ("127.0.0.1", 0))]

    tried: list[str] = []
    connect = loop.create_connection

    async def note(protocol: Any, host: str, *given: Any, **named: Any) -> Any:
        tried.append(host)
        return await connect(protocol, host, *given, **named)

    monkeypatch.setattr(loop, "getaddrinfo", two_addresses)
    monkeypatch.setattr(loop, "create_connection", note)
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    async with ScriptedServer([closing]) as server, client_for() as client:
        server.url = f"http://engine.example:{server.port}"
        answers = await asyncio.gather(*(ask(client, server) for _ in range(3)))
        assert answers == [b"ok"] * 3
        assert asked == ["engine.example"], "asked for once, and kept"
        assert tried[:2] == ["127.0.0.2", "127.0.0.2"]
        tried.clear()
        await ask(client, server)
        assert tried == ["127.0.0.1"]
        assert (b"host", f"engine.example:{server.port}".encode()) in server.seen[0].headers


@in_quiet_time
async def test_an_address_that_accepts_nobody_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def two_addresses(*_: object, **__: object) -> list[Any]:
        return [(2, 1, 6, "", ("192.0.2.1", 0)), (2, 1, 6, "", ("127.0.0.1", 0))]

    async def hang_at_the_first(protocol: Any, host: str, *given: Any, **named: Any) -> Any:
        if host == "192.0.2.1":
            await asyncio.Event().wait()
        return await connect(protocol, host, *given, **named)

    monkeypatch.setattr(loop, "getaddrinfo", two_addresses)
    monkeypatch.setattr(loop, "create_connection", hang_at_the_first)
    async with ScriptedServer() as server, client_for() as client:
        server.url = f"http://engine.example:{server.port}"
        began_at = loop.time()
        assert await ask(client, server) == b"ok"
        assert loop.time() - began_at == pytest.approx(1.0, abs=0.1), "half of the time to connect"


@in_quiet_time
async def test_a_name_is_asked_for_again_and_its_old_addresses_serve_while_nobody_can_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    known, tried = ["127.0.0.1"], list[str]()
    asked = 0

    async def ask_dns(*_: object, **__: object) -> list[Any]:
        nonlocal asked
        asked += 1
        if not known:
            raise OSError("no answer")
        return [(2, 1, 6, "", (each, 0)) for each in known]

    monkeypatch.setattr(loop, "getaddrinfo", ask_dns)
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    async with ScriptedServer([closing]) as server, client_for() as client:
        server.url = f"http://engine.example:{server.port}"
        for _ in range(3):
            await ask(client, server)
        assert asked == 1
        await asyncio.sleep(6.0)
        known.insert(0, "127.0.0.9")
        connect = loop.create_connection
        with monkeypatch.context() as noted:
            noted.setattr(
                loop, "create_connection", lambda *given, **named: tried.append(given[1]) or connect(*given, **named)
            )
            await ask(client, server)
        assert tried == ["127.0.0.1"], "which has worked before"
        await asyncio.sleep(6.0)
        known.clear()
        assert await ask(client, server) == b"ok"
        assert asked == 3
        await asyncio.sleep(6.0)
        known[:] = ["127.0.0.9"]
        with pytest.raises(ConnectionBroken):
            await ask(client, server)
        known.clear()
        with pytest.raises(ConnectionBroken):
            await client.send(Request("GET", "http://another.example"), LONG_S)


async def test_a_server_with_an_ipv6_address_is_reached() -> None:
    try:
        server = await ScriptedServer(host="::1").__aenter__()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with client_for() as client:
        assert await ask(client, server) == b"ok"
        assert (b"host", f"[::1]:{server.port}".encode()) in server.seen[0].headers
    await server.__aexit__()


async def test_tls_is_spoken_and_strangers_are_refused(tmp_path: Path) -> None:
    mine, other = make_certificate(tmp_path, "mine"), make_certificate(tmp_path, "other")
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(mine.certificate, mine.key)
    trusting, doubting = (ssl.create_default_context(cafile=str(each.certificate)) for each in (mine, other))
    to_the_end: list[Step] = [b"HTTP/1.1 200 OK\r\n\r\nto the end", "close"]
    async with ScriptedServer([OK], [OK], [HEAD + b"abc", "stall"], to_the_end, tls=serving) as server:
        async with client_for(tls=trusting) as client:
            body = b"x" * 300_000
            assert [await ask(client, server, body), await ask(client, server)] == [b"ok", b"ok"]
            assert server.seen[0].body == body
            assert server.accepted == 1
            exchange = await client.send(Request("POST", server.url), LONG_S)
            exchange.close()
            await eventually(lambda: client.pool.open() == 0)
            assert await ask(client, server) == b"to the end"
        async with client_for(tls=doubting) as client:
            with pytest.raises(ConnectionBroken):
                await ask(client, server)
            assert client.pool.open() == 0
        await eventually(lambda: server.open == 0)
