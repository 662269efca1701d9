"""Requests that hypothesis makes, to every path of the gateway: each is answered, and never by a fault of its own."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config import AliasTarget, LogsConfig, ModelsConfig
from gateway.openai_schema import ENDPOINTS, FORMS, PLAIN, RESPONSES
from tests import bad_input
from tests.gateway.api_answers import PROMPTS
from tests.gateway.assembly import TestGateway, gateway_for
from tests.gateway.mock_engine import PASSED, MockEngine
from tests.gateway.samples import MODEL

ALIAS = "alias"
MODELS = ModelsConfig(pass_through=(PASSED,), aliases={ALIAS: (AliasTarget(model=MODEL), AliasTarget(model="away"))})
TYPE = "multipart/form-data; boundary=xyz"
ANSWERS = frozenset({200, 400, 404, 405, 415})


@dataclass
class Served:
    """A gateway, and a client that waits for it."""

    loop: asyncio.Runner
    gateway: TestGateway
    client: httpx.AsyncClient

    def ask(self, method: str, path: str, headers: list[tuple[str, bytes]], body: bytes) -> httpx.Response:
        url = self.gateway.url + path
        return self.loop.run(self.client.request(method, url, headers=headers, content=body))  # type: ignore[arg-type]


async def answer(engine: MockEngine, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"usage": {"prompt_tokens": 1}})


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with asyncio.Runner() as loop:
        stack = contextlib.AsyncExitStack()

        async def start() -> Served:
            engine = await stack.enter_async_context(MockEngine("a", answer))
            gateway = await stack.enter_async_context(
                gateway_for([engine], models=MODELS, logs=LogsConfig(access=True), renderer="vllm")
            )
            client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
            return Served(loop, gateway, client)

        yield loop.run(start())
        loop.run(stack.aclose())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
models = st.sampled_from([MODEL, ALIAS, "away", "", None])
paths = st.sampled_from((*ENDPOINTS, *PLAIN, *FORMS, PASSED, "/v1/models", f"{RESPONSES}/x", "/v1/other"))
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20)
HEADERS = ("x-request-id", "x-session-id", "connection", "traceparent", "accept-encoding", "x-warmroute-explain", "te")


@st.composite
def objects(draw: Any, path: str) -> bytes:
    fields = {**PROMPTS.get(path, {"prompt": "x"}), "model": draw(models)}
    for _ in range(draw(st.integers(0, 2))):
        fields[draw(st.sampled_from([*fields, "stream", "user", "tools", "odd"]))] = draw(json_values)
    return bad_input.encoded(fields)


@st.composite
def forms(draw: Any) -> bytes:
    parts = draw(
        st.lists(st.tuples(st.sampled_from(["model", "file", "stream", ""]), st.binary(max_size=9)), max_size=4)
    )
    rows = [b'--xyz\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (n.encode(), v) for n, v in parts]
    model = (draw(models) or "").encode()
    rows.append(b"--xyz\r\nContent-Disposition: form-data; name=model\r\n\r\n%s\r\n" % model)
    cut = b"".join(rows) + b"--xyz--"
    return cut[: len(cut) - draw(st.integers(0, 12))]


@st.composite
def requests(draw: Any) -> tuple[str, str, list[tuple[str, bytes]], bytes]:
    method, path = draw(st.sampled_from(["POST"] * 6 + ["GET", "PUT", "DELETE"])), draw(paths)
    content_type, body = draw(
        st.one_of(
            st.tuples(st.just("application/json"), objects(path)),
            st.tuples(st.just(TYPE), forms()),
            st.tuples(st.sampled_from(["", "text/plain", TYPE, "multipart/form-data"]), st.binary(max_size=60)),
        )
    )
    told = st.tuples(st.sampled_from(HEADERS), header_values.map(lambda text: text.strip().encode("latin-1").strip()))
    headers = draw(st.lists(told, max_size=3))
    return method, path, [*headers, ("content-type", content_type.encode())], body


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests())
def test_any_request_is_answered(served: Served, asked: tuple[str, str, list[tuple[str, bytes]], bytes]) -> None:
    answer = served.ask(*asked)
    assert answer.status_code in ANSWERS, (answer.status_code, answer.content)
    assert len(answer.headers.get_list("x-request-id")) == 1
    if answer.status_code != 200 and asked[0] != "HEAD":
        assert set(orjson.loads(answer.content)) <= {"error", "type"}
    assert served.gateway.ledger.engines() == ()
