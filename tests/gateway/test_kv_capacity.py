"""What an engine's KV cache holds: known to the gateway, and charged for where open requests and a prompt exceed it."""

import asyncio
from typing import Any

import httpx
import pytest

from directory.tiers import Tier
from gateway.openai_schema import COMPLETIONS
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.mock_engine import MockEngine, answer_well
from tests.gateway.samples import MODEL, SHAPE

PREFIX = "a long shared prefix " * 20
SHARED = len(PREFIX) // 4 * 4
FLOPS = 1e11
"""As all engines here register."""
KV_TOKENS = 600
"""Room for one prompt that begins with the prefix, and for many of them as long as it is held once."""


class Waiting(MockEngine):
    """An engine whose answers wait for `gate`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self._answer_later)
        self.gate = asyncio.Event()

    async def _answer_later(self, engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
        await self.gate.wait()
        return await answer_well(engine, request, fields)


def asked(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt}


def admin(gateway: TestGateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(gateway.admin), base_url="http://admin")  # type: ignore[arg-type]


async def evict_seconds(gateway: TestGateway, prompt: str) -> dict[str, float]:
    """What each engine would be charged for not holding a prompt, as `/route/explain` has it."""
    async with admin(gateway) as client:
        answer = await client.post("/route/explain", json=asked(prompt))
    assert answer.status_code == 200, answer.text
    return {row["engine"]: row["evict_seconds"] for row in answer.json()["candidates"]}


async def test_prompts_hold_a_prefix_in_common_once_and_what_exceeds_an_engines_cache_is_charged() -> None:
    engine, answers = Waiting("a"), []
    async with engine, gateway_for([engine], kv_tokens=KV_TOKENS, clock=lambda: 100.0) as gateway:
        url = f"{gateway.url}{COMPLETIONS}"
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client, asyncio.TaskGroup() as requests:
            for number in range(4):
                answers.append(requests.create_task(client.post(url, json=asked(f"{PREFIX}{number}"))))
                await eventually(lambda: len(engine.received) == len(answers))
            held = gateway.ledger.active_tokens("a")
            assert held == SHARED + 4 * (len(PREFIX) + 1 - SHARED)
            assert await evict_seconds(gateway, PREFIX + "?") == {"a": 0}
            other = "x" * (KV_TOKENS - held + 50)
            assert await evict_seconds(gateway, other) == {"a": pytest.approx(2 * SHAPE.parameters * 50 / FLOPS)}
            engine.gate.set()
        assert {(await answer).status_code for answer in answers} == {200}
        assert gateway.ledger.active_tokens("a") == 0


@pytest.mark.parametrize(("tier", "held"), [(Tier.GPU, len(PREFIX) + 1 - SHARED), (Tier.DRAM, len(PREFIX) + 1)])
async def test_a_prompt_takes_no_room_for_what_the_gpu_holds_but_for_what_is_loaded_into_it(
    tier: Tier, held: int
) -> None:
    engine = Waiting("a")
    async with engine, gateway_for([engine]) as gateway:
        await gateway.hold(PREFIX, "a" if tier is Tier.GPU else "host-a", tier)
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client, asyncio.TaskGroup() as requests:
            requests.create_task(client.post(f"{gateway.url}{COMPLETIONS}", json=asked(PREFIX + "1")))
            await eventually(lambda: engine.received)
            assert gateway.ledger.active_tokens("a") == held
            engine.gate.set()


@pytest.mark.parametrize("kv_tokens", [KV_TOKENS, None], ids=["said", "unsaid"])
async def test_the_fleet_shows_what_an_engines_cache_holds(kv_tokens: int | None) -> None:
    async with MockEngine("a") as engine, gateway_for([engine], kv_tokens=kv_tokens) as gateway:
        async with admin(gateway) as client:
            (row,) = (await client.get("/fleet")).json()["engines"]
        assert row["kv_tokens"] == row["registration"]["kv_tokens"] == kv_tokens
        expected = {"a": 0} if kv_tokens is None else {"a": pytest.approx(2 * SHAPE.parameters * 400 / FLOPS)}
        assert await evict_seconds(gateway, "x" * (KV_TOKENS + 400)) == expected
