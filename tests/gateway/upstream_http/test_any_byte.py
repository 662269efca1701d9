"""A server that ends at any byte, or a client that leaves at any moment: nothing false is read, and nothing is left."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from gateway.upstream_http.errors import ConnectionBroken, ExchangeFailed
from gateway.upstream_http.http_client import HttpClient
from gateway.upstream_http.origin import parse_url
from gateway.upstream_http.request import Request
from tests.gateway.assembly import eventually
from tests.gateway.upstream_http.answers import SAMPLES, WireAnswer
from tests.gateway.upstream_http.scripted_server import OK, ScriptedServer, Step

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """In the loop of the gateway, and in that of the other tests."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


async def read_all(client: HttpClient, url: str, body: bytes = b"{}") -> tuple[bytes, ExchangeFailed | None]:
    """What came of a body, and what it broke off with."""
    got = b""
    try:
        exchange = await client.send(Request("POST", url, (), body), 60.0)
        try:
            while piece := await exchange.read(60.0):
                got += piece
        finally:
            exchange.close()
    except ExchangeFailed as failure:
        return got, failure
    return got, None


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("answer", SAMPLES, ids=range(len(SAMPLES)))
def test_an_answer_cut_at_any_byte_is_never_taken_for_whole(run: Run, answer: WireAnswer, how: Step) -> None:
    run(cut_at_any_byte(answer, how))


async def cut_at_any_byte(answer: WireAnswer, how: Step) -> None:
    cuts = range(len(answer.wire))
    scripts: list[list[Step]] = [[answer.wire[:place], how] for place in cuts]
    async with ScriptedServer(*scripts) as server, HttpClient(5.0, 60.0) as client:
        for place in cuts:
            got, failure = await read_all(client, server.url)
            assert answer.body.startswith(got)
            if answer.framing == "close" and how == "close" and failure is None:
                assert answer.wire[:place].endswith(b"\r\n\r\n" + got)
            else:
                assert isinstance(failure, ConnectionBroken)
        assert len(server.seen) == len(cuts), "each was sent once: its connection was a fresh one"
        await eventually(lambda: client.pool.open() == server.open == 0)


def test_clients_that_leave_at_any_moment_leave_nothing(run: Run) -> None:
    run(leave_at_any_moment())


async def leave_at_any_moment() -> None:
    chance = random.Random(8)
    cut = [SAMPLES[0].wire[:50], "reset"], [SAMPLES[2].wire[:-9], "stall"], [SAMPLES[3].wire, "close"]
    whole = [OK], [SAMPLES[0].wire], [SAMPLES[1].wire[:60], SAMPLES[1].wire[60:]]
    answers: list[list[Step]] = [*cut, *whole, ["stall"], ["close"], ["reset"], [b"garbage"], [OK + OK]]
    scripts = [chance.choice(answers) for _ in range(400)]
    before = len(asyncio.all_tasks())
    async with ScriptedServer(*scripts) as server:
        async with HttpClient(5.0, 60.0) as client:

            async def visit() -> None:
                for _ in range(12):
                    asking = asyncio.create_task(read_all(client, server.url, b"x" * chance.choice([0, 2, 300_000])))
                    for _ in range(chance.choice([0, 1, 3, 8, 20, 40])):
                        await asyncio.sleep(0)
                    await asyncio.sleep(0.002 * chance.random())
                    asking.cancel()
                    await asyncio.wait([asking])
                    if not asking.cancelled():
                        asking.result()

            await asyncio.gather(*(visit() for _ in range(25)))
            assert len(server.seen) > 50
            origin = parse_url(server.url).origin
            await eventually(lambda: client.pool.open() == client.pool.idle(origin) == server.open)
        assert client.pool.open() == 0
        await eventually(lambda: server.open == 0)
    await eventually(lambda: len(asyncio.all_tasks()) == before)
