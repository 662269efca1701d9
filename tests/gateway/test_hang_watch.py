"""An engine that takes requests and answers none is found, left, and taken again when it answers; a slow one isn't."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from gateway import hang_watch
from gateway.config import TimeoutsConfig
from gateway.fleet import HUNG
from gateway.hang_watch import HangWatch
from gateway.openai_schema import CHAT, COMPLETIONS
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

QUICK = TimeoutsConfig(probe_s=0.3)


class Hanging:
    """Answers nothing until it is let; or only questions for one token."""

    def __init__(self, answers_questions: bool = False) -> None:
        self.answers_questions, self.is_well = answers_questions, asyncio.Event()
        self.questions = self.requests = 0

    async def __call__(self, engine: MockEngine, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        is_question = fields.get("max_tokens") == 1
        self.questions += is_question
        self.requests += not is_question
        if not (is_question and self.answers_questions):
            await self.is_well.wait()
        return await mock.answer_well(engine, request, fields)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become tenths."""
    for name, seconds in {"LOOK_S": 0.02, "SUSPECT_S": 0.15, "PAUSE_S": 0.2, "AGAIN_S": 0.1}.items():
        monkeypatch.setattr(hang_watch, name, seconds)


@contextlib.asynccontextmanager
async def fleet_of(hanging: Hanging, *names: str) -> AsyncIterator[tuple[TestGateway, httpx.AsyncClient, MockEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        sick = await stack.enter_async_context(MockEngine("sick", hanging))
        others = [await stack.enter_async_context(MockEngine(name)) for name in names]
        gateway = await stack.enter_async_context(gateway_for([sick, *others], QUICK))
        for name in names:
            gateway.ledger.book(name, 60.0)  # so the one that hangs is the first for each
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30))
        stack.callback(hanging.is_well.set)
        yield gateway, client, sick


def body(stream: bool = False) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "q"}], "stream": stream, "max_tokens": 9}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_requests_on_an_engine_that_hangs_are_answered_elsewhere(stream: bool) -> None:
    hanging = Hanging()
    async with fleet_of(hanging, "b") as (gateway, client, _):
        answers = await asyncio.gather(*(client.post(CHAT, json=body(stream)) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        assert gateway.fleet.table.engines["sick"].state == HUNG
        await gateway.fleet.check_health()
        await gateway.fleet.refresh()
        assert gateway.fleet.table.engines["sick"].state == HUNG, "its health was never bad"
        asked = hanging.requests
        assert (await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "q"})).status_code == 200
        assert hanging.requests == asked
        assert gateway.ledger.running("sick") == 0


async def test_an_engine_that_answers_again_is_taken_again() -> None:
    hanging = Hanging()
    async with fleet_of(hanging, "b") as (gateway, client, _):
        assert (await client.post(CHAT, json=body())).status_code == 200
        assert gateway.fleet.table.serving(MODEL)[0].engine == "b"
        hanging.is_well.set()
        await eventually(lambda: len(gateway.fleet.table.serving(MODEL)) == 2)
        assert not gateway.fleet.hung


async def test_a_slow_engine_that_answers_a_question_is_left_alone() -> None:
    hanging = Hanging(answers_questions=True)
    async with fleet_of(hanging, "b") as (gateway, client, _):
        asking = asyncio.create_task(client.post(CHAT, json=body()))
        await eventually(lambda: hanging.questions >= 2)
        assert gateway.fleet.table.engines["sick"].is_ready
        hanging.is_well.set()
        answer = await asking
        assert answer.json()["id"] == "sick"


async def test_where_all_seem_to_hang_one_is_kept_and_both_serve_when_they_answer() -> None:
    hanging = Hanging()
    async with MockEngine("sick", hanging) as sick, MockEngine("slow", hanging) as slow:
        async with gateway_for([sick, slow], QUICK) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30) as client:
                asked = [asyncio.create_task(client.post(CHAT, json=body())) for _ in range(4)]
                await eventually(lambda: gateway.fleet.hung)
                await eventually(lambda: hanging.questions > 6)
                assert len(gateway.fleet.hung) == 1
                hanging.is_well.set()
                assert [(await each).status_code for each in asked] == [200] * 4
                await eventually(lambda: len(gateway.fleet.table.serving(MODEL)) == 2)


async def test_a_gateway_that_is_late_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "LATE_S", -1.0)
    hanging = Hanging()
    async with fleet_of(hanging, "b") as (gateway, client, _):
        asking = asyncio.create_task(client.post(CHAT, json=body()))
        await eventually(lambda: hanging.questions > 2)
        assert not gateway.fleet.hung
        hanging.is_well.set()
        assert (await asking).json()["id"] == "sick"


async def test_an_engine_that_was_slow_lately_has_longer_for_its_answer() -> None:
    hanging = Hanging()
    async with fleet_of(hanging, "b") as (gateway, client, _):
        gateway.completion.hangs._note_sign("sick", 100.0)
        asking = asyncio.create_task(client.post(CHAT, json=body()))
        await eventually(lambda: hanging.questions)
        assert gateway.completion.hangs._bound_s("sick") == hang_watch.PROBE_S_MAX
        hanging.is_well.set()
        assert (await asking).json()["id"] == "sick"
        assert gateway.completion.hangs._bound_s("nobody") == QUICK.probe_s


async def test_the_only_engine_is_never_taken_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = 0, HangWatch._suspects

    def counted(watch: HangWatch) -> Any:
        nonlocal looks
        looks += 1
        return look(watch)

    monkeypatch.setattr(HangWatch, "_suspects", counted)
    hanging = Hanging()
    async with fleet_of(hanging) as (gateway, client, sick):
        asking = asyncio.create_task(client.post(CHAT, json=body()))
        await eventually(lambda: sick.received)
        asked_at = looks
        await eventually(lambda: looks > asked_at + 3 * hang_watch.SUSPECT_S / hang_watch.LOOK_S)
        assert hanging.questions == 0
        hanging.is_well.set()
        assert (await asking).status_code == 200
        assert gateway.fleet.table.engines["sick"].is_ready
