"""What a gateway that ends tells new requests, and how long it waits for running ones."""

from collections.abc import Callable, MutableMapping
from typing import Any

import httpx
import pytest

from gateway.drain import DrainingDoor, drained


async def behind(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode(), "more_body": False})


async def asked(path: str, is_draining: bool) -> httpx.Response:
    transport = httpx.ASGITransport(DrainingDoor(behind, lambda: is_draining))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.post(path)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/healthz", "/readyz", "/v1/models"])
async def test_while_nothing_ends_everything_passes(path: str) -> None:
    assert (await asked(path, is_draining=False)).text == path


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_pass_to_the_end(path: str) -> None:
    assert (await asked(path, is_draining=True)).text == path


async def test_a_refusal_has_the_shape_of_the_api_that_was_asked() -> None:
    openai, anthropic = await asked("/v1/chat/completions", True), await asked("/v1/messages", True)
    assert openai.json()["error"]["code"] == "gateway_draining"
    assert anthropic.json()["error"]["type"] == "overloaded_error"
    for refused in (openai, anthropic):
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")


@pytest.mark.parametrize(
    ("drain_s", "is_cut_short", "left"),
    [(10_000.0, lambda: False, 0), (0.0, lambda: False, 3), (10_000.0, lambda: True, 3)],
    ids=["to its end", "no time", "cut short"],
)
async def test_running_requests_are_waited_for(drain_s: float, is_cut_short: Callable[[], bool], left: int) -> None:
    counts = iter([3, 2, 1, 0])
    assert await drained(lambda: next(counts), drain_s, is_cut_short) == left
