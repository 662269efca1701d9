"""An engine that says no at once is left to the last for a moment, and isn't given what the others would serve."""

from typing import Any

import httpx
import pytest

from gateway.completion import RETRY_STATUSES
from gateway.openai_schema import COMPLETIONS
from gateway.refusals import BACK_OFF_S, BACK_OFF_S_MAX, ENGINES_MAX, Refusals
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL


def test_each_refusal_in_a_row_lasts_twice_as_long_and_a_good_answer_ends_it() -> None:
    refusals, now, lasted = Refusals(), 0.0, []
    for _ in range(8):
        refusals.note_refused("a", now)
        lasted.append(refusals.back_off_s("a", now))
        now += lasted[-1]
        assert refusals.back_off_s("a", now) == 0
    assert lasted == [min(BACK_OFF_S_MAX, BACK_OFF_S * 2**number) for number in range(8)]
    refusals.note_served("a")
    refusals.note_refused("a", now)
    assert refusals.back_off_s("a", now) == BACK_OFF_S
    assert refusals.back_off_s("b", now) == 0


def test_refusals_of_requests_that_were_sent_together_are_one() -> None:
    refusals = Refusals()
    for _ in range(20):
        refusals.note_refused("a", 5.0)
    assert refusals.back_off_s("a", 5.0) == BACK_OFF_S


def test_the_memory_of_refusals_is_bounded() -> None:
    refusals = Refusals()
    for number in range(ENGINES_MAX + 1):
        refusals.note_refused(f"e{number}", 0.0)
    assert [refusals.back_off_s(engine, 0.0) > 0 for engine in ("e0", "e1")] == [False, True]


@pytest.mark.parametrize(("status", "received"), [(500, 1), (503, 1), (429, 1), (400, 6)])
async def test_an_engine_that_refuses_everything_at_once_does_not_draw_the_requests(status: int, received: int) -> None:
    async def behave(engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
        answer = mock.answer_status(status) if engine.name == "sick" else mock.answer_well
        return await answer(engine, request, fields)

    engines = [MockEngine(name, behave) for name in ("sick", "b", "c")]
    sick, b, c = engines
    async with sick, b, c, gateway_for(engines, clock=lambda: 1000.0) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=20) as client:
            for engine in "bc":
                gateway.ledger.book(engine, 60.0)  # so the one that refuses would be the first for each
            body = {"model": MODEL, "prompt": "q"}
            statuses = [(await client.post(COMPLETIONS, json=body)).status_code for _ in range(6)]
    assert len(sick.received) == received
    assert statuses.count(200) == (6 if status in RETRY_STATUSES else 6 - received)


async def test_where_all_refuse_all_are_tried() -> None:
    engines = [MockEngine(name, mock.answer_status(503)) for name in "ab"]
    a, b = engines
    async with a, b, gateway_for(engines, clock=lambda: 1000.0) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=20) as client:
            for _ in range(2):
                assert (await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "q"})).status_code == 503
    assert [len(each.received) for each in engines] == [2, 2]
