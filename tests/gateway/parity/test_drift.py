"""A template argument that the gateway doesn't know of: its requests lose belief, and get it back after the fix."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from directory.members import draw_incarnation
from directory.tiers import Tier
from gateway.openai_schema import CHAT, COMPLETIONS
from tests.gateway.assembly import TERM_S, TestGateway, eventually, gateway_for, serving
from tests.gateway.mock_engine import MockEngine
from tests.gateway.parity.counting_engine import Counting
from tests.gateway.samples import ENGINE_LOAD, MODEL

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
LONG = "a long shared prefix " * 20


@dataclass
class Stand:
    gateway: TestGateway
    counting: Counting
    client: httpx.AsyncClient
    admin_url: str

    async def ask(self, content: str = "hello", stream: bool = False, **fields: Any) -> httpx.Headers:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": stream, **fields}
        answer = await self.client.post(self.gateway.url + CHAT, json=body, headers={"x-warmroute-explain": "1"})
        assert answer.status_code == 200
        return answer.headers

    async def parity(self) -> dict[str, Any]:
        fleet: dict[str, Any] = (await self.client.get(f"{self.admin_url}/fleet")).json()
        parity: dict[str, Any] = fleet["parity"]
        return parity


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    counting = Counting()
    async with (
        MockEngine("a", counting) as engine,
        gateway_for([engine]) as gateway,
        serving(gateway.admin) as admin_url,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        yield Stand(gateway, counting, client, admin_url)


def encoding(headers: httpx.Headers) -> str:
    return headers["x-warmroute-encoding"]


@STREAMS
async def test_an_unknown_template_argument_turns_its_bucket_within_20_requests_and_back_after_the_fix(
    stand: Stand, stream: bool
) -> None:
    await stand.gateway.hold(f"user:{LONG};", "a", Tier.GPU)
    for _ in range(30):
        before = await stand.ask(LONG, stream)
    assert (encoding(before), int(before["x-warmroute-matched-tokens"]) > 0) == ("exact", True)
    stand.counting.argument = "/no_think;"
    turned_after = 0
    while encoding(await stand.ask(LONG, stream)) == "exact":
        turned_after += 1
    assert turned_after <= 20
    drifted = await stand.ask(LONG, stream)
    assert drifted["x-warmroute-matched-tokens"] == "0", "no hit is counted on"
    assert drifted["x-warmroute-reason"] == "approximate"
    assert stand.gateway.count("warmroute_degraded_total", reason="approximate") == 2
    assert stand.gateway.count("warmroute_approximate_buckets") == 1
    parity = await stand.parity()
    (row,) = parity["buckets"]
    assert (parity["approximate_buckets"], row["state"], row["engine"]) == (1, "approximate", "a")
    own = len(f"user:{LONG};")
    assert row["example"] == {"own_tokens": own, "engine_tokens": own + 10}
    assert LONG[:8] not in str(parity)
    stand.counting.argument = ""
    back_after = 0
    while encoding(await stand.ask(LONG, stream)) == "approximate":
        back_after += 1
    assert back_after == 20
    assert (await stand.ask(LONG, stream))["x-warmroute-matched-tokens"] == before["x-warmroute-matched-tokens"]
    assert stand.gateway.count("warmroute_approximate_buckets") == 0
    mismatches = stand.gateway.count("warmroute_token_count_mismatch_total")
    assert mismatches == turned_after + 2
    assert mismatches == stand.gateway.count("warmroute_parity_total", kind="usage", result="mismatch")


async def test_other_kinds_of_requests_stay_exact(stand: Stand) -> None:
    for _ in range(10):
        stand.counting.argument = "thinking;"
        await stand.ask(chat_template_kwargs={"colour": "blue"})
        stand.counting.argument = ""
        await stand.ask()
    assert encoding(await stand.ask(chat_template_kwargs={"colour": "blue"})) == "approximate"
    assert encoding(await stand.ask()) == "exact"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    reasoning = body | {"chat_template_kwargs": {"colour": "red"}}
    for asked, said in ((body, "exact"), (reasoning, "approximate")):
        answer = await stand.client.post(f"{stand.admin_url}/route/explain", json=asked)
        assert answer.json()["encoding"] == said


async def test_while_one_engine_drifts_the_others_hits_are_believed() -> None:
    drifting, well = Counting(), Counting()
    drifting.argument = "x"
    async with (
        MockEngine("a", drifting) as a,
        MockEngine("b", well) as b,
        gateway_for([a, b]) as gateway,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        await gateway.hold(f"user:{LONG};", "a", Tier.GPU)
        body = {"model": MODEL, "messages": [{"role": "user", "content": LONG}]}
        engines = []
        for _ in range(6):
            answer = await client.post(gateway.url + CHAT, json=body, headers={"x-warmroute-explain": "1"})
            engines.append((answer.headers["x-warmroute-engine"], answer.headers["x-warmroute-reason"]))
            if engines[-1][0] == "b":
                break
        assert engines[0] == ("a", "prefix")
        await gateway.hold(f"user:{LONG};", "b", Tier.GPU)
        answer = await client.post(gateway.url + CHAT, json=body, headers={"x-warmroute-explain": "1"})
        said = answer.headers
        assert (said["x-warmroute-engine"], said["x-warmroute-encoding"]) == ("b", "exact")
        assert said["x-warmroute-reason"] == "prefix"
        counted = gateway.count("warmroute_degraded_total", reason="approximate")
        a.is_well = False
        while len(gateway.fleet.table.serving(MODEL)) > 1:
            await gateway.fleet.check_health()
        await client.post(gateway.url + CHAT, json=body)
        assert gateway.count("warmroute_degraded_total", reason="approximate") == counted, "nobody asks it any more"


async def test_an_answer_that_was_begun_in_another_life_says_nothing_of_this_one(stand: Stand) -> None:
    gateway, counting = stand.gateway, stand.counting
    counting.argument = "/no_think;"
    counting.may_answer.clear()
    late = [asyncio.create_task(stand.ask(stream=True)) for _ in range(5)]
    await eventually(lambda: counting.waiting == len(late))
    (engine,) = gateway.fleet.table.engines.values()
    assert engine.registration is not None
    life = draw_incarnation()
    await gateway.directory.retire(gateway.lives["a"])
    await gateway.directory.register(life, engine.registration, ENGINE_LOAD, TERM_S)
    await gateway.fleet.refresh()
    counting.may_answer.set()
    await asyncio.gather(*late)
    assert gateway.count("warmroute_parity_total", kind="usage", result="mismatch") == len(late)
    assert (await stand.parity())["buckets"] == []


async def test_requests_whose_engine_counts_other_things_are_left_out(stand: Stand) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    answer = await stand.client.post(
        stand.gateway.url + CHAT, json={"model": MODEL, "messages": [{"role": "user", "content": picture}]}
    )
    assert answer.status_code == 200
    for prompt in (["one", "two"], [[1, 2], [3]]):
        answer = await stand.client.post(stand.gateway.url + COMPLETIONS, json={"model": MODEL, "prompt": prompt})
        assert answer.status_code == 200
    kinds = ("match", "mismatch", "unreported")
    assert [stand.gateway.count("warmroute_parity_total", kind="usage", result=each) for each in kinds] == [0, 0, 0]


async def test_every_series_is_there_from_the_start(stand: Stand) -> None:
    metrics = (await stand.client.get(f"{stand.admin_url}/metrics")).text
    for series in (
        'warmroute_parity_total{kind="usage",result="mismatch"} 0.0',
        'warmroute_parity_total{kind="usage",result="unreported"} 0.0',
        'warmroute_parity_total{kind="ids",result="mismatch"} 0.0',
        'warmroute_parity_total{kind="ids",result="unknown"} 0.0',
        'warmroute_parity_total{kind="self_check",result="mismatch"} 0.0',
        "warmroute_token_count_mismatch_total 0.0",
        "warmroute_approximate_buckets 0.0",
        'warmroute_degraded_total{reason="approximate"} 0.0',
        'warmroute_replies_warmed_total{result="dropped"} 0.0',
    ):
        assert series in metrics
