"""The bench of the gateway's cost, small: its client sees what engines do, and its figures say what they mean."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import orjson
import pytest

from bench.faults.__main__ import table as faults_table
from bench.faults.cases import CASES, Seen
from bench.gateway import report
from bench.gateway.client import MARK, Load, run_load
from bench.gateway.engine import MODEL, Answering, Behaviour, Engine
from bench.gateway.prompts import conversations
from bench.gateway.site import SGLANG, VLLM, WARMROUTE

REQUESTS = 12


@contextlib.asynccontextmanager
async def an_engine(behaviour: Behaviour) -> AsyncIterator[tuple[Engine, int]]:
    engine, loop = Engine(), asyncio.get_running_loop()
    engine.behaviour = behaviour
    server = await loop.create_server(lambda: Answering(engine, loop), "127.0.0.1", 0)
    try:
        yield engine, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


def load(is_streamed: bool = False, keeps: bool = True, timeout_s: float = 10.0) -> Load:
    bodies = [each.body for each in conversations(100, 4, 5, is_streamed)]
    return Load(bodies, 3, REQUESTS, timeout_s=timeout_s, keeps=keeps)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_good_answer_is_counted_whole(is_streamed: bool, keeps: bool) -> None:
    async with an_engine(Behaviour(token_s=0.001)) as (engine, port):
        outcome = await run_load(port, load(is_streamed, keeps))
    assert (outcome.good, outcome.total, engine.told.requests) == (REQUESTS, REQUESTS, REQUESTS)
    assert outcome.tokens == (5 * REQUESTS if is_streamed else 0)
    assert len(outcome.first_token_s) == (REQUESTS if is_streamed else 0)
    assert (engine.told.open, engine.told.left) == (0, 0)


@pytest.mark.parametrize(
    ("behaviour", "is_streamed", "error"),
    [
        (Behaviour(drops=True), False, "no answer"),
        (Behaviour(cuts_after=2), True, "cut"),
        (Behaviour(is_hung=True), False, "late"),
    ],
    ids=["closes", "cuts", "hangs"],
)
async def test_a_fault_is_counted_by_its_kind(behaviour: Behaviour, is_streamed: bool, error: str) -> None:
    async with an_engine(behaviour) as (engine, port):
        outcome = await run_load(port, load(is_streamed, timeout_s=0.2))
    assert outcome.errors == {error: REQUESTS}
    assert (outcome.good, engine.told.requests) == (0, REQUESTS)


@pytest.mark.parametrize("name", [b"max_tokens", b"max_completion_tokens"])
async def test_an_answer_is_as_long_as_asked_for_by_either_name(name: bytes) -> None:
    bodies = [each.body.replace(b"max_tokens", name) for each in conversations(100, 4, 7, True)]
    async with an_engine(Behaviour()) as (_, port):
        outcome = await run_load(port, Load(bodies, 3, REQUESTS))
    assert outcome.tokens == 7 * REQUESTS


async def test_a_status_is_counted_as_it_came() -> None:
    async with an_engine(Behaviour(status=429, retry_after_s=7)) as (_, port):
        outcome = await run_load(port, load())
    assert outcome.statuses == {429: REQUESTS}
    assert outcome.seconds == []


async def test_a_server_that_is_not_there_refuses() -> None:
    async with an_engine(Behaviour()) as (_, port):
        pass
    assert (await run_load(port, load())).errors == {"refused": REQUESTS}


def test_a_conversation_says_how_many_tokens_its_prompt_has_and_which_are_known() -> None:
    conversation = conversations(1_000, 1, 5, False)[0]
    asked = orjson.loads(conversation.body.replace(MARK, b"10000000"))
    assert asked["model"] == MODEL
    assert int(asked["user"]) == pytest.approx(1_000, rel=0.1)
    assert len(conversation.known_ids) == pytest.approx(int(asked["user"]), abs=40)
    again = conversations(1_000, 9, 5, False)[8]
    assert again.known_ids[:400] == conversation.known_ids[:400], "the ninth has the first one's system prompt"
    assert again.known_ids != conversation.known_ids


def test_ratios_are_of_pairs_and_verdicts_of_their_median() -> None:
    costs = {
        ("32k", WARMROUTE): [100.0, 150.0, 400.0],
        ("32k", SGLANG): [100.0, 100.0, 100.0],
        ("32k", VLLM): [1000.0, 1000.0, 1000.0],
        ("8k", WARMROUTE): [210.0, 190.0, 230.0],
        ("8k", SGLANG): [100.0, 100.0, 100.0],
    }
    assert report.ratios(costs, "32k", SGLANG) == [1.0, 1.5, 4.0]
    assert report.ratios(costs, "token", SGLANG) == []
    lines = report.verdicts(costs)
    assert [line.partition(":")[0] for line in lines] == ["32k", "32k", "8k"]
    assert lines[0].endswith("met, within the spread")
    assert lines[1].endswith("met")
    assert lines[2].endswith("missed, within the spread")
    assert "| warmroute / sglang-router | 1.50 [1.25..2.75] |" in report.table(costs, ["32k"], [WARMROUTE, SGLANG])


def test_what_is_bad_stands_in_bold() -> None:
    case = CASES[0]
    seen = {("a", case.name): Seen("0 failed", True), ("b", case.name): Seen("9 failed", False)}
    assert faults_table(seen, ["a", "b"], [case]).endswith(
        f"| {case.name} | {case.promise} | 0 failed | **9 failed** |"
    )
