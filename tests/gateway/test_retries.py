"""A request is sent again where that may help: elsewhere, within the budget, and not what it brings about itself."""

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.completion import ATTEMPTS_MAX, RETRY_PAUSE_S
from gateway.openai_schema import CHAT, COMPLETIONS
from gateway.retry_after import retry_after_s
from gateway.retry_budget import RETRIES_MAX, SHARE, RetryBudget
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

BODY = {"model": MODEL, "prompt": "q"}
CHAT_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "q"}]}


async def ask(engines: list[MockEngine], times: int = 1, body: dict[str, Any] | None = None) -> list[httpx.Response]:
    pauses: list[float] = []

    async def pause(pause_s: float) -> None:
        pauses.append(pause_s)

    async with gateway_for(engines, pause=pause) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30) as client:
            answers = [await client.post(COMPLETIONS, json=body or BODY) for _ in range(times)]
        assert gateway.ledger.engines() == ()
    assert all(0 <= each <= RETRY_PAUSE_S * 2**ATTEMPTS_MAX for each in pauses)
    assert len(pauses) == sum(len(each.received) for each in engines) - times
    return answers


async def test_what_two_engines_fail_at_is_not_tried_on_a_third() -> None:
    engines = [MockEngine(name, mock.answer_status(500)) for name in "abc"]
    a, b, c = engines
    async with a, b, c:
        (answer,) = await ask(engines)
        assert answer.status_code == 500
        assert "says 500" in answer.json()["error"]["message"]
        assert sum(len(each.received) for each in engines) == 2


async def test_of_engines_that_refuse_no_more_than_three_are_asked() -> None:
    engines = [MockEngine(name, mock.answer_status(503)) for name in "abcde"]
    a, b, c, d, e = engines
    async with a, b, c, d, e:
        (answer,) = await ask(engines)
        assert answer.status_code == 503
        assert sorted(len(each.received) for each in engines) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_at_everything_costs_no_request_and_is_seldom_asked(stream: bool) -> None:
    async with MockEngine("a", mock.answer_status(500)) as bad, MockEngine("b") as b, MockEngine("c") as c:
        async with gateway_for([bad, b, c], clock=lambda: 1000.0) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30) as client:
                for engine in "bc":
                    gateway.ledger.book(engine, 60.0)
                statuses = [
                    (await client.post(CHAT, json={**CHAT_BODY, "stream": stream})).status_code for _ in range(10)
                ]
        assert statuses == [200] * 10
        assert len(bad.received) == 1


async def test_without_budget_an_engines_own_words_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryBudget, "allows_one", property(lambda self: False))
    async with MockEngine("a", mock.answer_status(503)) as a, MockEngine("b", mock.answer_status(503)) as b:
        (answer,) = await ask([a, b])
        assert answer.status_code == 503
        assert len(a.received) + len(b.received) == 1


@given(st.lists(st.booleans(), max_size=300))
def test_no_more_is_sent_again_than_the_budget_holds(steps: list[bool]) -> None:
    budget, requests, retries = RetryBudget(), 0, 0
    for is_request in steps:
        if is_request:
            budget.note_request()
            requests += 1
        elif budget.take():
            retries += 1
    assert retries <= RETRIES_MAX + SHARE * requests


def test_a_budget_that_is_spent_comes_back_with_requests() -> None:
    budget = RetryBudget()
    while budget.take():
        pass
    assert not budget.allows_one
    for _ in range(round(1 / SHARE) + 1):
        budget.note_request()
    assert budget.take()


@pytest.mark.parametrize(
    ("status", "value", "seconds"),
    [
        (429, b"7", 7.0),
        (503, b" 120 ", 120.0),
        (200, b"7", 0.0),
        (429, b"-7", 0.0),
        (429, b"soon", 0.0),
        (429, b"9" * 400, 0.0),
        (429, b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (429, b"\xff\x00", 0.0),
        (429, b"Mon, 01 Jan 99999999999999 00:00:00 GMT", 0.0),
        (503, b"Mon, 01 Jan 2024 00:00:00 +99999999999999999", 0.0),
        (429, b"", 0.0),
    ],
)
def test_only_a_time_that_can_be_read_is_kept(status: int, value: bytes, seconds: float) -> None:
    assert retry_after_s(status, [(b"Retry-After", value)]) == seconds
    assert retry_after_s(status, []) == 0.0


def test_a_date_is_the_seconds_until_then() -> None:
    assert retry_after_s(429, [(b"retry-after", b"Fri, 31 Dec 9999 23:59:59 GMT")]) > 1e9
