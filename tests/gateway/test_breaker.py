"""An engine that fails or says no at once is left to the others for a moment, and tried by one request at a time."""

from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.breaker import ENGINES_MAX, OPEN_S, OPEN_S_MAX, RETRY_AFTER_S_MAX, TRIAL_S_MAX, Breaker
from gateway.completion import RETRY_STATUSES
from gateway.openai_schema import COMPLETIONS
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

SOON_S = 1e-6


@dataclass(frozen=True)
class View:
    engine: str


A, B = View("a"), View("b")


def test_each_failure_in_a_row_lasts_twice_as_long_and_a_good_answer_ends_it() -> None:
    breaker, now, lasted = Breaker(), 0.0, []
    for _ in range(8):
        breaker.note_failed("a", now)
        began = now
        while not breaker.admits("a", now):
            now += OPEN_S / 4
        lasted.append(now - began)
    assert lasted == [min(OPEN_S_MAX, OPEN_S * 2**number) for number in range(8)]
    breaker.note_served("a")
    breaker.note_failed("a", now)
    assert not breaker.admits("a", now)
    assert breaker.admits("a", now + OPEN_S)
    assert breaker.admits("b", now)


def test_failures_of_requests_that_were_sent_together_are_one() -> None:
    breaker = Breaker()
    for _ in range(20):
        breaker.note_failed("a", 5.0)
    assert breaker.admits("a", 5.0 + OPEN_S)


def test_the_memory_of_failures_is_bounded() -> None:
    breaker = Breaker()
    for number in range(ENGINES_MAX + 1):
        breaker.note_failed(f"e{number}", 0.0)
    assert [breaker.admits(engine, 0.0) for engine in ("e0", "e1")] == [True, False]


def test_a_half_open_engine_is_tried_by_one_request_at_a_time() -> None:
    breaker = Breaker()
    breaker.note_failed("a", 0.0)
    assert (breaker.state("a", 0.0), breaker.state("a", OPEN_S)) == ("open", "half-open")
    trial = breaker.send("a", OPEN_S)
    assert not breaker.admits("a", OPEN_S)
    assert list(breaker.admitted([A, B], OPEN_S)) == [B]
    trial.end()
    assert breaker.admits("a", OPEN_S), "a trial that told nothing is followed by another"
    second = breaker.send("a", OPEN_S)
    second.answered(200, 0, OPEN_S)
    second.end()
    assert breaker.state("a", OPEN_S) == "closed"


def test_a_trial_that_has_no_answer_for_long_does_not_keep_the_others_away_for_ever() -> None:
    breaker = Breaker()
    breaker.note_failed("a", 0.0)
    breaker.send("a", 1.0)
    assert not breaker.admits("a", 1.0 + TRIAL_S_MAX - SOON_S)
    assert breaker.admits("a", 1.0 + TRIAL_S_MAX)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_what_a_client_does_wrong_says_nothing_of_an_engine(status: int) -> None:
    breaker = Breaker()
    breaker.send("a", 0.0).answered(status, 0, 0.0)
    assert breaker.state("a", 0.0) == "closed"
    breaker.note_failed("a", 0.0)
    breaker.send("a", OPEN_S).answered(status, 0, OPEN_S)
    assert breaker.state("a", OPEN_S) == "half-open"


@pytest.mark.parametrize(("named_s", "lasts_s"), [(0.0, OPEN_S), (7.0, 7.0), (1e9, RETRY_AFTER_S_MAX)])
def test_a_busy_engine_is_left_alone_as_long_as_it_says(named_s: float, lasts_s: float) -> None:
    breaker = Breaker()
    breaker.send("a", 0.0).answered(429, named_s, 0.0)
    assert not breaker.admits("a", lasts_s - SOON_S)
    assert breaker.admits("a", lasts_s)


def test_where_all_failed_those_that_failed_least_often_in_a_row_are_tried() -> None:
    breaker = Breaker()
    breaker.note_failed("a", 0.0)
    breaker.note_failed("a", OPEN_S)
    breaker.note_failed("b", OPEN_S)
    assert list(breaker.admitted([A, B], OPEN_S)) == [B]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "good", "bad", "busy", "wrong", "gone", "later"]), st.integers(0, 2), st.floats(0, 3)
    ),
    max_size=40,
)


@given(STEPS)
def test_nobody_is_shut_out_for_long_and_somebody_is_always_admitted(steps: list[tuple[str, int, float]]) -> None:
    breaker, now, views = Breaker(), 0.0, [View(name) for name in "abc"]
    trials = []
    for what, which, amount in steps:
        engine = views[which].engine
        if what == "send":
            trials.append(breaker.send(engine, now))
        elif what == "later":
            now += amount
        elif trials:
            trial = trials.pop(which % len(trials))
            status = {"good": 200, "bad": 502, "busy": 429, "wrong": 400}.get(what)
            if status is not None:
                trial.answered(status, amount, now)
            trial.end()
            trial.end()
            if what == "good":
                assert breaker.admits(trial.engine, now)
        assert breaker.admitted(views, now)
    for trial in trials:
        trial.end()
    later = now + max(OPEN_S_MAX, 3.0)
    assert list(breaker.admitted(views, later)) == views


@pytest.mark.parametrize(("status", "received"), [(500, 1), (503, 1), (429, 1), (408, 1), (400, 6)])
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
