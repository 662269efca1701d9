"""`warmroute gateway --workers 2`: one port, one account, and no death that a client or a counter notices for long."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.free_port import free_port
from tests.gateway.gateway_process import GatewayProcess, file_for, running_gateway, until
from tests.gateway.mock_engine import MockEngine, never_answer
from tests.gateway.samples import MODEL

ANSWERED = "warmroute_requests_total{"
OPEN = "warmroute_inflight_requests{"


async def workers(gateway: GatewayProcess) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await gateway.admin("/fleet")).json()["workers"]
    return rows


async def are_up(gateway: GatewayProcess, restarts: int) -> bool:
    rows = await workers(gateway)
    return all(row["is_up"] for row in rows) and sum(row["restarts"] for row in rows) == restarts


async def test_a_worker_that_dies_is_replaced_and_what_it_counted_stays(tmp_path: Path) -> None:
    async with MockEngine("a") as engine, running_gateway(tmp_path, file_for(engine), "--workers", "2") as gateway:
        await until(lambda: are_up(gateway, 0))
        for _ in range(20):
            assert (await gateway.chat()).status_code == 200
        assert await gateway.metric(ANSWERED) == 20
        for deaths, row in enumerate(await workers(gateway), 1):  # so that whoever served them has died
            os.kill(row["pid"], signal.SIGKILL)
            for _ in range(5):
                assert (await gateway.chat()).status_code == 200
            await until(lambda deaths=deaths: are_up(gateway, deaths))  # type: ignore[misc]
            assert await gateway.metric(ANSWERED) == 20 + deaths * 5
        assert (await gateway.admin("/route/explain")).status_code == 405
        assert "/fleet" in (await gateway.admin("/openapi.json")).json()["paths"]
        gateway.process.send_signal(signal.SIGTERM)
        assert await gateway.ended() == 0


async def test_open_requests_are_those_of_all_workers_and_go_with_a_dead_one(tmp_path: Path) -> None:
    async with MockEngine("a", never_answer) as engine:
        async with running_gateway(tmp_path, file_for(engine), "--workers", "2") as gateway:
            await until(lambda: are_up(gateway, 0))
            asking = [asyncio.create_task(gateway.chat()) for _ in range(16)]
            await until(lambda: equals(gateway, OPEN, 16))
            for row in await workers(gateway):
                os.kill(row["pid"], signal.SIGKILL)
            await asyncio.wait(asking)
            assert all(task.exception() for task in asking)
            await until(lambda: are_up(gateway, 2))
            await until(lambda: equals(gateway, OPEN, 0))


async def test_each_worker_knows_which_engine_made_a_response_that_another_saw(tmp_path: Path) -> None:
    engines = MockEngine("a", make_response), MockEngine("b", make_response)
    async with engines[0], engines[1], running_gateway(tmp_path, file_for(*engines), "--workers", "2") as gateway:
        await until(lambda: are_up(gateway, 0))
        url = f"http://127.0.0.1:{gateway.port}/v1/responses"
        made = [await gateway.client.post(url, json={"model": MODEL, "input": f"{number}"}) for number in range(8)]
        for answer in made:
            asked = [await gateway.client.get(f"{url}/{answer.json()['id']}") for _ in range(4)]
            assert {each.headers["x-engine"] for each in asked} == {answer.headers["x-engine"]}


async def make_response(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = {"id": f"resp_{engine.name}_{body['input']}", "object": "response", "status": "completed", "output": []}
    return web.json_response(response, headers={"x-engine": engine.name})


async def test_all_workers_take_a_changed_file(tmp_path: Path) -> None:
    async with MockEngine("a") as old, MockEngine("b") as new:
        async with running_gateway(tmp_path, file_for(old), "--workers", "2") as gateway:
            await until(lambda: are_up(gateway, 0))
            gateway.write("engines: [")
            await until(lambda: equals(gateway, 'warmroute_config_reloads_total{result="rejected"}', 2))
            gateway.write(file_for(new))
            await until(lambda: equals(gateway, 'warmroute_config_reloads_total{result="ok"}', 2))
            await until(lambda: is_served_by(gateway, "b"))
            gateway.process.send_signal(signal.SIGINT)
            assert await gateway.ended() == 0


async def test_no_worker_outlives_the_process_that_watches_over_them(tmp_path: Path) -> None:
    async with MockEngine("a") as engine, running_gateway(tmp_path, file_for(engine), "--workers", "2") as gateway:
        await until(lambda: are_up(gateway, 0))
        pids = [row["pid"] for row in await workers(gateway)]
        gateway.process.kill()
        await until(lambda: have_ended(pids))


async def have_ended(pids: Sequence[int]) -> bool:
    """Nobody may be there who reaps them."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                return False
    return True


def test_a_taken_port_is_one_sentence_and_no_worker_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        command = [sys.executable, "-m", "warmroute.cli", "gateway", "--workers", "2"]
        done = subprocess.run(
            [*command, "--port", str(taken.getsockname()[1])], capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.startswith("warmroute gateway: can't listen on 127.0.0.1:")


def test_what_no_worker_can_start_with_ends_it() -> None:
    command = [sys.executable, "-m", "warmroute.cli", "gateway", "--workers", "2", "--redis", "http://nonsense"]
    done = subprocess.run(
        [*command, "--port", str(free_port())], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "warmroute gateway: a worker can't run" in done.stderr


async def equals(gateway: GatewayProcess, series: str, count: float) -> bool:
    return await gateway.metric(series) == count


async def is_served_by(gateway: GatewayProcess, engine: str) -> bool:
    answers = await asyncio.gather(*(gateway.chat() for _ in range(8)))
    return {answer.headers.get("x-engine") for answer in answers} == {engine}
