"""Adapters (LoRA), which engines list as models with a parent: served by those that have them, and sharing no chunk."""

import httpx

from directory.tiers import Tier
from gateway.openai_schema import COMPLETIONS
from tests.gateway.assembly import TestGateway, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

TEXT = "a long shared prefix " * 20
WHOLE = len(TEXT) // 4 * 4


async def served(client: httpx.AsyncClient, gateway: TestGateway, model: str, suffix: str) -> tuple[str, int]:
    """Who served a prompt, and how many of its tokens were counted on as cached."""
    body = {"model": model, "prompt": TEXT + suffix}
    answer = await client.post(gateway.url + COMPLETIONS, json=body, headers={"x-warmroute-explain": "1"})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-warmroute-engine"], int(answer.headers["x-warmroute-matched-tokens"])


async def test_an_adapter_is_served_by_the_engines_that_list_it_and_shares_no_chunk_with_its_model() -> None:
    a, b = MockEngine("a"), MockEngine("b")
    b.adapters = {"adapter": MODEL, "of another model": "another"}
    async with a, b, gateway_for([a, b]) as gateway, httpx.AsyncClient(trust_env=False) as client:
        await gateway.hold(TEXT, "a", Tier.GPU)
        await gateway.hold(TEXT, "b", Tier.GPU)
        assert await served(client, gateway, "adapter", "1") == ("b", 0)
        await gateway.fleet.refresh()
        await gateway.fleet.check_health()
        assert await served(client, gateway, "adapter", "2") == ("b", WHOLE), "what was sent to it itself"
        assert (await served(client, gateway, MODEL, "3"))[1] == WHOLE
        answer = await client.post(gateway.url + COMPLETIONS, json={"model": "of another model", "prompt": "x"})
        assert answer.status_code == 404
        rows = (await client.get(gateway.url + "/v1/models")).json()["data"]
        assert {row["id"]: row["parent"] for row in rows} == {MODEL: None, "adapter": MODEL}


async def test_an_adapter_goes_with_the_last_engine_that_had_it() -> None:
    async with MockEngine("a") as a, MockEngine("b") as b, httpx.AsyncClient(trust_env=False) as client:
        b.adapters = {"adapter": MODEL}
        async with gateway_for([a, b]) as gateway:
            b.is_well = False
            gateway.fleet.note_failure("b")
            await gateway.fleet.check_health()
            answer = await client.post(gateway.url + COMPLETIONS, json={"model": "adapter", "prompt": TEXT})
            assert answer.status_code == 503
            assert (await served(client, gateway, MODEL, "1"))[0] == "a"
