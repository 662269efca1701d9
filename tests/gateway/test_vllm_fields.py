"""Fields by which a request reaches into vLLM's cache: refused, or routed as what the engine makes of them."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from directory.tiers import Tier
from gateway.encoding.vllm_fields import reads_cache
from gateway.openai_schema import CHAT, COMPLETIONS
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

PROMPT = "hello there, hello there"
EXPLAIN = {"x-warmroute-explain": "1"}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        yield client


@pytest.mark.parametrize(
    ("xargs", "field"),
    [
        ({"kv_cache_report_mode": "full"}, "vllm_xargs.kv_cache_report_mode"),
        ({"kv_cache_report_mode": ["full"]}, "vllm_xargs.kv_cache_report_mode"),
        ({"kv_transfer_params": "x"}, "vllm_xargs.kv_transfer_params"),
        ({"ec_transfer_params": 1}, "vllm_xargs.ec_transfer_params"),
    ],
)
async def test_what_would_falsify_the_fleets_knowledge_is_refused_by_name_and_reaches_no_engine(
    client: httpx.AsyncClient, xargs: dict[str, Any], field: str
) -> None:
    async with MockEngine("a") as engine, gateway_for([engine], renderer="vllm") as gateway:
        for endpoint, prompt in (
            (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
            (COMPLETIONS, {"prompt": "x"}),
        ):
            answer = await client.post(
                gateway.url + endpoint, json={"model": MODEL, **prompt, "vllm_xargs": {"other": 1, **xargs}}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert field in answer.json()["error"]["message"]
        assert engine.received == []


@pytest.mark.parametrize("xargs", [{"kv_cache_report_mode": "incremental"}, {"top_n": 3}, {}, None, [], "x"], ids=repr)
async def test_other_extra_arguments_pass(client: httpx.AsyncClient, xargs: Any) -> None:
    async with MockEngine("a") as engine, gateway_for([engine], renderer="vllm") as gateway:
        body = {"model": MODEL, "prompt": "x", "vllm_xargs": xargs}
        assert (await client.post(gateway.url + COMPLETIONS, json=body)).status_code == 200
        assert len(engine.received) == 1


async def test_an_engine_that_isnt_vllm_is_asked_whatever_the_field_says(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        body = {"model": MODEL, "prompt": "x", "vllm_xargs": {"kv_cache_report_mode": "full"}}
        assert (await client.post(gateway.url + COMPLETIONS, json=body)).status_code == 200


async def test_a_request_that_reads_no_cache_is_predicted_no_hit_where_its_prefix_is(
    client: httpx.AsyncClient,
) -> None:
    async with MockEngine("a") as engine, gateway_for([engine], renderer="vllm") as gateway:
        await gateway.hold(PROMPT, "a", Tier.GPU)
        body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT}
        matched = []
        for more in ({}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 0}, {"echo": True}):
            answer = await client.post(gateway.url + COMPLETIONS, json=body | more, headers=EXPLAIN)
            matched.append(int(answer.headers["x-warmroute-matched-tokens"]))
        assert matched[0] > 0
        assert matched[1:] == [0, 0, matched[0]]
        assert gateway.count("warmroute_directory_errors_total", op="lookup") == 0


@pytest.mark.parametrize(
    ("endpoint", "fields", "reads"),
    [
        (COMPLETIONS, {}, True),
        (COMPLETIONS, {"prompt_logprobs": 0}, False),
        (COMPLETIONS, {"prompt_logprobs": None}, True),
        (COMPLETIONS, {"logprobs": 5}, True),
        (COMPLETIONS, {"echo": True}, True),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, False),
        (COMPLETIONS, {"echo": "yes", "logprobs": 1}, False),
        (COMPLETIONS, {"echo": "False", "logprobs": 1}, True),
        (COMPLETIONS, {"echo": 0, "logprobs": 1}, True),
        (CHAT, {"echo": True}, False),
        (CHAT, {"echo": False, "logprobs": True, "top_logprobs": 3}, True),
        (CHAT, {"prompt_logprobs": -1}, False),
    ],
)
def test_vllm_reads_its_cache_unless_logprobs_of_the_prompt_are_wanted(
    endpoint: str, fields: dict[str, Any], reads: bool
) -> None:
    assert reads_cache(endpoint, fields) is reads
