"""The policy that is configured decides, among engines that may serve and no others."""

from collections import Counter
from typing import get_args

import httpx
import pytest
from pydantic import ValidationError

from directory.tiers import Tier
from gateway.config import RoutingConfig
from gateway.openai_schema import COMPLETIONS
from gateway.routing.policies import POLICIES
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

OFFERED = get_args(RoutingConfig.model_fields["policy"].annotation)
TEXT = "a long shared prefix " * 20
REASONS = {"seconds": "prefix", "least-load": "least-load", "round-robin": "round-robin", "sticky": "sticky"}


def test_the_policies_offered_are_there_and_the_others_are_for_comparison() -> None:
    assert set(OFFERED) == set(REASONS) < set(POLICIES)
    with pytest.raises(ValidationError, match="policy"):
        RoutingConfig(policy="weighted")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", OFFERED)
async def test_every_policy_chooses_among_ready_engines_that_serve_the_model(policy: str) -> None:
    routing = RoutingConfig(policy=policy)  # type: ignore[arg-type]
    a, b, unwell, other, in_doubt = (MockEngine(name) for name in ("a", "b", "unwell", "other", "in-doubt"))
    unwell.is_well, other.models = False, ["another model", "an adapter"]
    async with a, b, unwell, other, in_doubt, httpx.AsyncClient(trust_env=False) as client:
        async with gateway_for([a, b, unwell, other, in_doubt], routing=routing) as gateway:
            for engine in (a, unwell, other, in_doubt):
                await gateway.hold(TEXT, engine.name, Tier.GPU)
            gateway.fleet.note_failure("in-doubt")
            chosen, reasons = Counter[str](), set()
            for number in range(6):
                request = {"model": MODEL, "prompt": TEXT + str(number)}
                answer = await client.post(
                    gateway.url + COMPLETIONS, json=request, headers={"x-warmroute-explain": "1"}
                )
                chosen[answer.headers["x-warmroute-engine"]] += 1
                reasons.add(answer.headers["x-warmroute-reason"])
            assert reasons == {REASONS[policy]}
            assert not any(each.received for each in (unwell, other, in_doubt))
            if policy == "seconds":
                assert chosen == {"a": 6}
            if policy == "round-robin":
                assert chosen == {"a": 3, "b": 3}
