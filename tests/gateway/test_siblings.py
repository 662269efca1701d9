"""Requests that share their beginning and come before anybody has announced it, over real sockets."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from directory.tiers import Tier
from gateway.openai_schema import COMPLETIONS
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

TEXT = "a long shared prefix " * 20
WHOLE = len(TEXT) // 4 * 4
EXPLAIN = {"x-warmroute-explain": "1"}


class Gated:
    """Engines whose answers wait for `gate`; those in `refusing` say that they are overloaded, at once."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.refusing: set[str] = set()
        self._started_at, self.shift_s = time.monotonic(), 0.0
        self.engines = [MockEngine(name, self._behave) for name in "abc"]

    async def _behave(self, engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
        if engine.name in self.refusing:
            return await mock.answer_status(503)(engine, request, fields)
        await self.gate.wait()
        return await mock.answer_well(engine, request, fields)

    def clock(self) -> float:
        """Stands still but for `shift_s`: how long a machine takes doesn't make a prefill late."""
        return self._started_at + self.shift_s

    def received(self) -> dict[str, int]:
        return {engine.name: len(engine.received) for engine in self.engines if engine.received}


@asynccontextmanager
async def gated() -> AsyncIterator[tuple[Gated, TestGateway, httpx.AsyncClient]]:
    engines = Gated()
    a, b, c = engines.engines
    async with a, b, c, gateway_for(engines.engines, clock=engines.clock) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=20) as client:
            yield engines, gateway, client


def asked(suffix: str) -> dict[str, Any]:
    return {"model": MODEL, "prompt": TEXT + suffix}


async def expected_tokens(gateway: TestGateway) -> dict[str, int]:
    """What is on its way to each engine of another such request, as `/route/explain` has it."""
    transport = httpx.ASGITransport(gateway.admin)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        answer = await client.post("/route/explain", json=asked("explained"))
    assert answer.status_code == 200, answer.text
    rows = answer.json()["candidates"]
    assert all(row["matched_tokens"] >= row["expected_tokens"] for row in rows)
    return {row["engine"]: row["expected_tokens"] for row in rows if row["expected_tokens"]}


async def test_siblings_in_a_burst_follow_the_first_until_it_must_have_been_announced() -> None:
    async with gated() as (engines, gateway, client), asyncio.TaskGroup() as requests:
        requests.create_task(client.post(COMPLETIONS, json=asked("first")))
        await eventually(engines.received)
        (home,) = engines.received()
        assert await expected_tokens(gateway) == {home: WHOLE}
        engines.shift_s = gateway.ledger.wait_s(home) / 2
        siblings = [
            requests.create_task(client.post(COMPLETIONS, json=asked(f"s{n}"), headers=EXPLAIN)) for n in range(4)
        ]
        await eventually(lambda: sum(engines.received().values()) == 5)
        assert engines.received() == {home: 5}
        engines.gate.set()
        for sibling in siblings:
            assert int((await sibling).headers["x-warmroute-matched-tokens"]) == WHOLE
        assert await expected_tokens(gateway) == {home: WHOLE}
        engines.shift_s += 5.5
        assert await expected_tokens(gateway) == {}


async def test_what_is_explained_only_is_no_decision_of_the_metrics() -> None:
    async with gated() as (engines, gateway, client):
        engines.gate.set()
        await client.post(COMPLETIONS, json=asked("first"))
        await expected_tokens(gateway)
        counted = [gateway.count("warmroute_decisions_total", reason=reason) for reason in ("load", "prefix")]
        assert counted == [1, 0]


async def test_a_refused_attempts_expectation_is_taken_back_and_the_retrys_stays() -> None:
    async with gated() as (engines, gateway, client):
        engines.gate.set()
        await gateway.hold(TEXT, "a", Tier.GPU, chunks=20)
        engines.refusing = {"a"}
        answer = await client.post(COMPLETIONS, json=asked("first"), headers=EXPLAIN)
        home = answer.headers["x-warmroute-engine"]
        assert home != "a"
        assert await expected_tokens(gateway) == {home: WHOLE}


async def test_a_client_that_goes_before_the_first_byte_leaves_no_expectation() -> None:
    async with gated() as (engines, gateway, client):
        request = asyncio.create_task(client.post(COMPLETIONS, json=asked("first")))
        await eventually(engines.received)
        assert len(await expected_tokens(gateway)) == 1
        request.cancel()
        await asyncio.wait({request})
        await eventually(lambda: not gateway.ledger.engines())
        assert await expected_tokens(gateway) == {}


async def test_nothing_is_expected_of_an_engine_that_dropped_a_connection() -> None:
    async with gated() as (engines, gateway, client):
        engines.gate.set()
        home = (await client.post(COMPLETIONS, json=asked("first"), headers=EXPLAIN)).headers["x-warmroute-engine"]
        assert await expected_tokens(gateway) == {home: WHOLE}
        gateway.fleet.note_failure(home)
        assert not gateway.fleet.table.engines[home].is_ready
        await gateway.fleet.check_health()
        assert await expected_tokens(gateway) == {}


async def test_a_session_that_the_client_names_decides_among_equals() -> None:
    async with gated() as (engines, _, client):
        engines.gate.set()
        homes = {}
        for session in range(8):
            answers = [
                await client.post(
                    COMPLETIONS,
                    json={"model": MODEL, "prompt": f"{turn}.{session}: nothing is shared"},
                    headers={**EXPLAIN, "x-session-id": f"session {session}"},
                )
                for turn in range(3)
            ]
            found = {answer.headers["x-warmroute-engine"] for answer in answers}
            assert len(found) == 1, "all turns of a session, whatever they begin with"
            homes[session] = found.pop()
        assert len(set(homes.values())) > 1, "sessions are spread"
