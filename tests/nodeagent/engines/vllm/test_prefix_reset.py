"""A reset through the agent: what the engine's answer means, and that the table is emptied by a success alone."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from nodeagent.engines.vllm import prefix_reset
from nodeagent.engines.vllm.prefix_reset import reset_prefix_cache
from nodeagent.http_api import ResetOutcome
from nodeagent.messages import KvEventSource

EVENTS = KvEventSource("ipc:///e", None, "kv", 32)
DEEP = "[" * 100_000


class Followed:
    """Which engines' tables were emptied."""

    def __init__(self) -> None:
        self.reset: list[str] = []

    async def was_reset(self, engine: str) -> None:
        self.reset.append(engine)


@asynccontextmanager
async def serving(handler: Any) -> AsyncIterator[str]:
    """An engine whose reset route does that; its URL."""
    app = web.Application()
    app.router.add_post("/reset_prefix_cache", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def reset(url: str, name: str = "e", events: KvEventSource | None = EVENTS) -> tuple[ResetOutcome, list[str]]:
    engine = SimpleNamespace(name="e", events=events, registration=SimpleNamespace(url=url))
    roster: Any = SimpleNamespace(engines=[engine])
    follower: Any = Followed()
    return await reset_prefix_cache(roster, follower, name), follower.reset


async def test_an_engine_that_has_reset_itself_holds_nothing_at_once() -> None:
    async def done(request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async with serving(done) as url:
        assert await reset(url) == (ResetOutcome.DONE, ["e"])
        assert await reset(url, name="other") == (ResetOutcome.UNKNOWN, [])
        assert await reset(url, events=None) == (ResetOutcome.DONE, []), "one that tells by itself"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, '{"success": false}'),
        (200, '{"success": 1}'),
        (200, "{}"),
        (200, "[]"),
        (200, "not JSON"),
        (200, DEEP),
        (404, '{"success": true}'),
        (500, "trouble"),
        (200, '{"success": true' + " " * 100_000 + "}"),
    ],
    ids=["busy", "no truth", "nothing", "a list", "no JSON", "deep", "no such route", "broken", "endless"],
)
async def test_whatever_else_it_answers_its_table_stays(status: int, body: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    async with serving(answer) as url:
        assert await reset(url) == (ResetOutcome.REFUSED, [])


async def test_an_engine_that_is_not_there_is_no_fault() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        assert await reset(f"http://127.0.0.1:{taken.getsockname()[1]}") == (ResetOutcome.REFUSED, [])


async def test_an_answer_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_reset, "RESET_TIMEOUT_S", 0.2)

    async def trickle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" ")
            await asyncio.sleep(0.01)

    async with serving(trickle) as url:
        assert await reset(url) == (ResetOutcome.REFUSED, [])
