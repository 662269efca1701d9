"""How a gateway's process ends, and how it is changed while it runs: nothing in flight is lost."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from tests.gateway.gateway_process import CHAT, GatewayProcess, file_for, running_gateway, until
from tests.gateway.mock_engine import MockEngine, event, start_stream


class Slow:
    """An engine's answer that goes on when it is let."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()

    async def __call__(self, engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            await self.goes_on.wait()
            return web.json_response({"id": engine.name})
        response = await start_stream(request)
        await response.write(event(1))
        await self.goes_on.wait()
        await response.write(event(2) + b"data: [DONE]\n\n")
        return response


@contextlib.asynccontextmanager
async def open_stream(gateway: GatewayProcess) -> AsyncIterator[AsyncIterator[bytes]]:
    url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
    async with gateway.client.stream("POST", url, json={**CHAT, "stream": True}) as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == event(1)
        yield pieces


async def test_a_signal_lets_streams_finish_and_refuses_what_comes_then(tmp_path: Path) -> None:
    slow = Slow()
    async with MockEngine("a", slow) as engine, running_gateway(tmp_path, file_for(engine)) as gateway:
        async with open_stream(gateway) as pieces:
            gateway.process.send_signal(signal.SIGTERM)
            await until(lambda: says(gateway, "/readyz", 503))
            refused = await gateway.chat()
            assert (refused.status_code, refused.headers["connection"], refused.headers["retry-after"]) == (
                503,
                "close",
                "1",
            )
            assert refused.json()["error"]["code"] == "gateway_draining"
            assert await says(gateway, "/healthz", 200)
            slow.goes_on.set()
            assert b"".join([piece async for piece in pieces]) == event(2) + b"data: [DONE]\n\n"
        assert await gateway.ended() == 0
        assert len(engine.received) == 1


async def test_a_second_signal_ends_it_with_streams_that_run(tmp_path: Path) -> None:
    file_with_hours = {"limits": {"drain_s": 10_000}}
    async with MockEngine("a", Slow()) as engine:
        async with running_gateway(tmp_path, file_for(engine, **file_with_hours)) as gateway:
            async with open_stream(gateway):
                gateway.process.send_signal(signal.SIGTERM)
                await until(lambda: says(gateway, "/readyz", 503))
                gateway.process.send_signal(signal.SIGTERM)
                assert await gateway.ended() == 0
            await asyncio.wait_for(engine.gone.wait(), 60)


async def test_engines_change_with_the_file_and_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    slow = Slow()
    async with MockEngine("a", slow) as a, MockEngine("b", slow) as b, MockEngine("new") as new:
        async with running_gateway(tmp_path, file_for(a, b)) as gateway, open_stream(gateway) as pieces:
            await until(lambda: states(gateway, {"a": "ready", "b": "ready"}))
            waiting = asyncio.create_task(gateway.chat())
            await until(lambda: have_received((a, b), 2))
            gateway.write(file_for(a, b, routing={"polcy": "sticky"}))
            await until(lambda: counted(gateway, 'warmroute_config_reloads_total{result="rejected"}', 1))
            assert await gateway.engines() == {"a": "ready", "b": "ready"}
            gateway.write(file_for(new))
            await until(lambda: states(gateway, {"new": "ready"}))
            assert (await gateway.chat()).headers["x-engine"] == "new"
            new.is_well = False  # health checks go on after a change
            await until(lambda: states(gateway, {"new": "unhealthy: status 503"}))
            new.is_well = True
            await until(lambda: states(gateway, {"new": "ready"}))
            gateway.write(file_for(new, limits={"body_bytes_max": 1024}))
            await until(lambda: counted(gateway, 'warmroute_config_reloads_total{result="ok"}', 2))
            assert (await gateway.chat(user="x" * 2000)).status_code == 413
            slow.goes_on.set()
            assert b"".join([piece async for piece in pieces]) == event(2) + b"data: [DONE]\n\n"
            assert (await waiting).json()["id"] in ("a", "b")
            assert await have_received((a, b), 2), "none was sent once more"


async def have_received(engines: Sequence[MockEngine], count: int) -> bool:
    return sum(len(engine.received) for engine in engines) == count


async def says(gateway: GatewayProcess, path: str, status: int) -> bool:
    """What a probe on the clients' port says."""
    with contextlib.suppress(httpx.HTTPError):
        return (await gateway.client.get(f"http://127.0.0.1:{gateway.port}{path}")).status_code == status
    return False


async def counted(gateway: GatewayProcess, series: str, count: float) -> bool:
    return await gateway.metric(series) == count


async def states(gateway: GatewayProcess, wanted: dict[str, str]) -> bool:
    return await gateway.engines() == wanted
