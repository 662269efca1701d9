"""A serving gateway learns from first tokens how fast its engines are, uses that, and shows it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from gateway.config import EngineConfig
from gateway.metrics import GatewayMetrics, RateGauges
from gateway.openai_schema import CHAT, COMPLETIONS
from gateway.prefill_watch import WatchedPrefill
from gateway.rates import CORRECTION_MAX, ObservedRates, PrefillWork, RateReport
from gateway.routing.query import Score
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.mock_engine import Behaviour, MockEngine, answer_status, answer_well, event, start_stream
from tests.gateway.samples import ENGINE_LOAD, MODEL

PROMPTS = 10
BOUND_S = 20.0
assert ENGINE_LOAD.rates is not None
REGISTERED_FLOPS = ENGINE_LOAD.rates.flops
"""At which a prompt of this file takes two seconds; the mock engine answers in milliseconds."""


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        yield client


def prompt(number: int) -> str:
    return f"{number}: " + "a prompt of more than 512 tokens of a byte each " * 15


async def ask(client: httpx.AsyncClient, gateway: TestGateway, prompts: int = PROMPTS, stream: bool = True) -> float:
    """Ask distinct prompts; the time to first token that was expected of the last, in seconds."""
    expected = ""
    for number in range(prompts):
        fields: dict[str, Any] = {"model": MODEL, "prompt": prompt(number), "stream": stream}
        answer = await client.post(gateway.url + COMPLETIONS, json=fields, headers={"x-warmroute-explain": "1"})
        expected = answer.headers.get("x-warmroute-expected-ttft-ms", "0")
    await eventually(lambda: gateway.ledger.engines() == ())
    return float(expected) / 1000


async def row_of(gateway: TestGateway, holds: Callable[[dict[str, Any]], bool] = lambda row: True) -> dict[str, Any]:
    """The engine's row of `/fleet`, once it is as it should be."""
    transport = httpx.ASGITransport(app=gateway.admin)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin, asyncio.timeout(BOUND_S):
        while True:
            row: dict[str, Any] = (await admin.get("/fleet")).json()["engines"][0]
            if holds(row):
                return row
            await asyncio.sleep(0.01)


async def test_streams_correct_an_engines_rate_which_routing_uses_and_operators_see(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        before = await row_of(gateway)
        assert (before["flops_correction"], before["flops_samples"], before["ttft_error_factor"]) == (1.0, 0.0, None)
        await ask(client, gateway)
        row = await row_of(gateway, lambda row: row["flops_correction"] > 1.5)
        expected_s = await ask(client, gateway, 1)
        assert row["flops_registered"] == REGISTERED_FLOPS
        assert row["flops_correction"] <= CORRECTION_MAX  # however far the registered rate is from the truth
        assert row["flops"] == pytest.approx(row["flops_correction"] * REGISTERED_FLOPS, rel=0.001)
        assert row["flops_samples"] == pytest.approx(PROMPTS, abs=0.5)
        assert row["ttft_error_factor"] > 1.5
        assert row["ttft_took_over_expected"] < 1
        assert set(row["break_even_tokens"]) == {"dram"}
        assert 0 < expected_s < 1.0, "it was two seconds"
        assert gateway.count("warmroute_ttft_estimate_error_ratio_count") == PROMPTS + 1
        assert gateway.count("warmroute_engine_flops", engine="a") > 1.5 * REGISTERED_FLOPS


async def report_more_cached(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream_usage(request, len(body["prompt"]), cached=400)


async def report_longer_prompt(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream_usage(request, 2 * len(body["prompt"]), cached=0)


async def stream_usage(request: web.Request, tokens: int, cached: int) -> web.StreamResponse:
    response = await start_stream(request)
    usage = b'{"prompt_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}' % (tokens, cached)
    await response.write(event(0) + b'data: {"choices":[],"usage":%s}\n\n' % usage + b"data: [DONE]\n\n")
    return response


@pytest.mark.parametrize(
    ("behaviour", "stream"),
    [
        pytest.param(answer_well, False, id="whole answers"),
        pytest.param(answer_status(400), True, id="refusals"),
        pytest.param(report_more_cached, True, id="more cached than was expected"),
        pytest.param(report_longer_prompt, True, id="longer prompts than were counted"),
    ],
)
async def test_answers_that_say_nothing_of_the_prefill_teach_nothing(
    client: httpx.AsyncClient, behaviour: Behaviour, stream: bool
) -> None:
    async with MockEngine("a", behaviour) as engine, gateway_for([engine]) as gateway:
        await ask(client, gateway, stream=stream)
        row = await row_of(gateway)
        assert (row["flops"], row["flops_samples"]) == (REGISTERED_FLOPS, 0.0)


async def test_a_prompt_whose_length_is_not_known_teaches_nothing(client: httpx.AsyncClient) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/i.png"}}
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        for number in range(PROMPTS):
            content = [{"type": "text", "text": prompt(number)}, image]
            fields = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True}
            assert (await client.post(gateway.url + CHAT, json=fields)).status_code == 200
        assert (await row_of(gateway))["flops_samples"] == 0.0
        assert gateway.count("warmroute_ttft_estimate_error_ratio_count") == 0


def test_a_request_that_is_over_is_outstanding_no_more() -> None:
    rates = ObservedRates(lambda: 0.0)
    sending = rates.sent("a", PrefillWork(1e12, 1000, 0.0, 1.0), is_streamed=True)
    watched = WatchedPrefill(rates, GatewayMetrics(), sending, Score("a", 1.0, 0.0, 0.0, 1.0, 0), 4, 1000, True)
    watched.release()
    watched.release()
    assert not sending.is_outstanding


async def test_an_engine_without_agent_gets_a_rate_by_its_first_tokens(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as engine:
        async with gateway_for([], static=[EngineConfig(url=engine.url, name="a")]) as gateway:
            assert (await row_of(gateway))["flops"] is None
            for number in range(PROMPTS):
                message = {"role": "user", "content": prompt(number) * 8}
                fields = {"model": MODEL, "messages": [message], "stream": True}
                assert (await client.post(gateway.url + CHAT, json=fields)).status_code == 200
            row = await row_of(gateway, lambda row: row["flops"] is not None)
            assert row["flops"] > 1e9
            assert row["flops_registered"] is None


def test_an_engines_series_go_when_it_goes() -> None:
    reports = {"a": RateReport(1e14, 0.5, 9.0, 1.2, 1.1), "b": RateReport(None, 1.0, 0.0, None, None)}
    registry = CollectorRegistry()
    registry.register(RateGauges(lambda: reports.items()))
    shown = generate_latest(registry).decode()
    assert 'warmroute_engine_rate_correction{engine="a"} 0.5' in shown
    assert 'warmroute_engine_flops{engine="b"}' not in shown
    reports.clear()
    assert 'engine="' not in generate_latest(registry).decode()
