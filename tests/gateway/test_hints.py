"""What an agent hears of requests on their way to its engine: hints before, and their withdrawal if it is in vain."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from aiohttp import web

from directory.tiers import Tier
from gateway.config import RoutingConfig
from gateway.openai_schema import COMPLETIONS
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

TEXT = "a long shared prefix " * 20
CHUNKS = len(TEXT) // 4


class Agent:
    """The agent of all hosts: what it was asked, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []

    async def prefetch(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, (await request.json())["keys"]))
        return web.json_response({"accepted": 0}, status=202)


@asynccontextmanager
async def agent_and_gateway(*engines: MockEngine) -> AsyncIterator[tuple[Agent, TestGateway, httpx.AsyncClient]]:
    agent, app = Agent(), web.Application()
    app.router.add_route("*", "/prefetch", agent.prefetch)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with (
            gateway_for(engines, agent_url=url, routing=RoutingConfig(on_its_way_s=0)) as gateway,
            httpx.AsyncClient(trust_env=False) as client,
        ):
            await gateway.hold(TEXT, "host-a", Tier.NVME)
            yield agent, gateway, client
    finally:
        await runner.cleanup()


async def ask(client: httpx.AsyncClient, gateway: TestGateway) -> httpx.Response:
    return await client.post(gateway.url + COMPLETIONS, json={"model": MODEL, "prompt": TEXT + "?"})


async def test_an_agent_is_told_before_the_engine_answers_and_what_was_used_is_not_taken_back() -> None:
    gate = asyncio.Event()

    async def wait(engine: MockEngine, request: Any, fields: Any) -> Any:
        await gate.wait()
        return await mock.answer_well(engine, request, fields)

    async with MockEngine("a", wait) as a, agent_and_gateway(a) as (agent, gateway, client):
        request = asyncio.create_task(ask(client, gateway))
        await eventually(lambda: agent.asked)
        gate.set()
        assert (await request).status_code == 200
        gate.clear()
        request = asyncio.create_task(ask(client, gateway))
        await eventually(lambda: len(agent.asked) == 2)
        gate.set()
        await request
        assert [(method, len(keys)) for method, keys in agent.asked] == [("POST", CHUNKS)] * 2


async def test_a_hint_is_taken_back_when_the_client_goes() -> None:
    async def never(engine: MockEngine, request: Any, fields: Any) -> Any:
        return await asyncio.Event().wait()

    async with MockEngine("a", never) as a, agent_and_gateway(a) as (agent, gateway, client):
        request = asyncio.create_task(ask(client, gateway))
        await eventually(lambda: agent.asked and a.received)
        request.cancel()
        await asyncio.wait({request})
        await eventually(lambda: len(agent.asked) == 2)
        (given, keys), (taken, same) = agent.asked
        assert (given, taken, same) == ("POST", "DELETE", keys)


async def test_a_hint_is_taken_back_when_the_engine_refuses() -> None:
    heard: Agent | None = None

    async def refuse(engine: MockEngine, request: Any, fields: Any) -> Any:
        await eventually(lambda: heard and heard.asked)
        return await mock.answer_status(503)(engine, request, fields)

    async with MockEngine("a", refuse) as a, MockEngine("b") as b:
        async with agent_and_gateway(a, b) as (agent, gateway, client):
            heard = agent
            assert (await ask(client, gateway)).status_code == 200
            assert len(b.received) == 1
            await eventually(lambda: len(agent.asked) == 2)
            assert [method for method, _ in agent.asked] == ["POST", "DELETE"]
