"""The admin API keeps what its description (OpenAPI) promises, whatever it is asked."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.gateway.assembly import TestGateway, gateway_for, serving
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

OPERATIONS = ("GET /healthz", "GET /readyz", "GET /metrics", "GET /fleet", "POST /route/explain")


@dataclass
class Served:
    """The admin API of a gateway on a port of its own, a client, and its description."""

    loop: asyncio.Runner
    gateway: TestGateway
    client: httpx.AsyncClient
    url: str
    operations: dict[str, Any]

    def check(self, case: Any) -> httpx.Response:
        """Send it; raises for a fault, and for an answer that isn't described."""
        asked = case.as_transport_kwargs(base_url=self.url)
        request = self.client.build_request(
            asked["method"],
            asked["url"],
            params=asked.get("params"),
            headers=asked.get("headers"),
            content=asked.get("data"),
            json=asked.get("json"),
        )
        answer = self.loop.run(self.client.send(request))
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])  # a body's details are its engine's
        return answer


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with asyncio.Runner() as loop:
        stack = contextlib.AsyncExitStack()

        async def start() -> Served:
            engine = await stack.enter_async_context(MockEngine("a"))
            gateway = await stack.enter_async_context(gateway_for([engine]))
            url = await stack.enter_async_context(serving(gateway.admin))
            client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
            described = (await client.get(f"{url}/openapi.json")).json()
            found = schemathesis.openapi.from_dict(described).get_all_operations()
            operations = {each.ok().label: each.ok() for each in found}
            return Served(loop, gateway, client, url, operations)

        yield loop.run(start())
        loop.run(stack.aclose())


def test_every_operation_is_described(served: Served) -> None:
    assert set(served.operations) == set(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_answers_are_those_that_are_described(served: Served, operation: str) -> None:
    is_question = operation.startswith("POST")

    @settings(max_examples=60 if is_question else 3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(served.operations[operation].as_strategy(), st.sampled_from([MODEL, "other"]))
    def check(case: Any, model: str) -> None:
        if is_question and isinstance(case.body, dict):
            case.body["model"] = model
        answer = served.check(case)
        assert answer.status_code < 500
        assert served.gateway.ledger.engines() == ()

    check()
