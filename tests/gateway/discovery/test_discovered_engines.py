"""A gateway serves with the pods of a service: they join when they are well, and leave with their requests finished."""

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

from gateway.twins import without_twins
from tests.gateway import mock_engine as mock
from tests.gateway.discovery.samples import SERVICE, endpoint, endpoint_slice
from tests.gateway.discovery.scripted_api import ScriptedApi, event
from tests.gateway.gateway_process import running_gateway, until
from tests.gateway.mock_engine import MockEngine
from tests.gateway.views import view


def slice_of(engine: MockEngine, name: str = "pods", pod: str = "pod-0") -> dict[str, object]:
    port = urlsplit(engine.url).port
    return endpoint_slice(name, endpoint(pod, "127.0.0.1"), ports=[{"name": "http", "port": port}])


async def test_pods_serve_move_and_leave_and_a_running_answer_ends_as_it_should(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def held(engine: MockEngine, request: object, fields: dict[str, object]) -> object:
        await release.wait()
        return await mock.answer_well(engine, request, fields)  # type: ignore[arg-type]

    async with MockEngine("first", held) as first, MockEngine("second") as second, ScriptedApi(slice_of(first)) as api:
        moved = slice_of(second)
        api.watches = []
        config = json.dumps({"kubernetes": [{"service": SERVICE, "namespace": "llm", "api_url": api.url}]})
        async with running_gateway(tmp_path, config) as gateway:
            assert await gateway.engines() == {"pod-0": "ready"}
            asking = asyncio.create_task(gateway.chat())
            await until(lambda: _true(first.received))
            api.play(event("MODIFIED", moved))
            await until(lambda: _is_at(gateway, second.url))
            assert (await gateway.chat()).json()["id"] == "second"
            release.set()
            assert (await asking).json()["id"] == "first"
            (row,) = (await gateway.admin("/fleet")).json()["discovery"]
            assert (row["state"], row["engines"]) == ("watching", ["pod-0"])
            api.play(event("DELETED", moved))
            await until(lambda: _is_gone(gateway))
            assert (await gateway.chat()).status_code == 503


async def _true(value: object) -> bool:
    return bool(value)


async def _is_at(gateway: object, url: str) -> bool:
    rows = (await gateway.admin("/fleet")).json()["engines"]  # type: ignore[attr-defined]
    return [(row["url"], row["state"]) for row in rows] == [(url, "ready")]


async def _is_gone(gateway: object) -> bool:
    return not await gateway.engines()  # type: ignore[attr-defined]


def test_an_engine_that_an_agent_tells_of_is_not_there_twice() -> None:
    told, other = view("a"), view("b")
    listed = type(told)("pod-0", told.url, ("m",), None, "", told.reach, None)
    elsewhere = type(told)("pod-1", "http://elsewhere:1", ("m",), None, "", told.reach, None)
    engines = {each.engine: each for each in (told, other, listed, elsewhere)}
    assert list(without_twins(engines)) == ["a", "b", "pod-1"]
