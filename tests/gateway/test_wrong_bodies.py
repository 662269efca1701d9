"""Whatever stands at whatever place of a request, at every endpoint: a 400 that names it, or the engine's word."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.affinity import session_key
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder, build_renderer
from gateway.encoding.prompt_tokenizer import Shared, WholeTexts
from gateway.encoding.vllm_fields import refuse_reserved
from gateway.errors import InvalidRequest
from gateway.ids_body import body_with_ids
from gateway.openai_schema import (
    ANTHROPICS,
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    EMBEDDINGS,
    ENDPOINTS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    InferenceRequest,
    parse_request,
)
from tests import bad_input
from tests.gateway.api_answers import answer_in_shape
from tests.gateway.assembly import ByteBackend, TestGateway, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL
from tests.render_matrix import CHATS, PARTS, SHOW_ALL, SPECIAL_TOKENS
from tests.render_matrix import MESSAGES as MESSAGES_ASKED
from tests.render_matrix import RESPONSES as RESPONSES_ASKED

KINDS = ("reference", "vllm", "vllm-own", "vllm-unknown", "sglang")
Path = tuple[str | int, ...]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            **CHATS["two calls"],
            **{name: CHATS["documents"][name] for name in ("documents",)},
            "chat_template_kwargs": {"extra": {"a": [1]}, "enable_thinking": True},
            "reasoning_effort": "low",
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "vllm_xargs": {"a": 1},
            "cache_salt": "s",
            "stream": False,
            "user": "u",
            "max_tokens": 5,
        },
    ),
    (CHAT, {**CHATS["parts"], "input_ids": [1, 2], "echo": False, "add_generation_prompt": True}),
    (CHAT, CHATS["continued"]),
    (COMPLETIONS, {"prompt": ["a", "b"], "suffix": None, "add_special_tokens": True, "max_tokens": 5, "echo": False}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "truncate_prompt_tokens": None, "logprobs": None}),
    (RESPONSES, {**RESPONSES_ASKED["an agent's turns"], "instructions": "b", "reasoning": {"effort": "low"}}),
    (RESPONSES, {**RESPONSES_ASKED["messages"], "previous_response_id": "resp_1", "conversation": {"id": "c"}}),
    (MESSAGES, {**MESSAGES_ASKED["tools"], "system": [{"type": "text", "text": "a"}], "thinking": {"type": "enabled"}}),
    (MESSAGES, {**MESSAGES_ASKED["a result in blocks"], "output_config": {"effort": "low"}}),
    (MESSAGES, MESSAGES_ASKED["thoughts"]),
    (COUNT_TOKENS, MESSAGES_ASKED["plain"]),
    (EMBEDDINGS, {"input": ["a", "b"], "dimensions": 5}),
    (EMBEDDINGS, {"input": [{"text": "a", "image": "http://x"}]}),
    (EMBEDDINGS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    *((endpoint, {"query": {"content": [{"type": "text"}]}, "documents": ["a", {"b": 1}]}) for endpoint in RERANK),
    (SCORE, {"text_1": "a", "text_2": ["b"]}),
    ("/score", {"queries": ["a"], "items": ["b"], "documents": [{"content": []}]}),
]
VALUES: list[Any] = [*bad_input.TYPES.values(), *(bad_input.deep_list(levels) for levels in (300, 900, 1010, 10_000))]
OURS: dict[str, set[Path]] = {
    CHAT: {("messages",), ("messages", 0), ("messages", 0, "role"), ("messages", 0, "content")},
    COMPLETIONS: {("prompt",), ("prompt", 0)},
    RESPONSES: {("input",), ("previous_response_id",)},
    MESSAGES: {("messages",), ("messages", 0), ("messages", 0, "role"), ("messages", 0, "content")},
    EMBEDDINGS: {("input",), ("input", 0)},
    **{endpoint: {("query",), ("documents",)} for endpoint in RERANK},
}
"""Fields besides `model`, `stream` and `cache_salt` that the gateway itself refuses, at these places of `BODIES`."""


def paths(value: Any, before: Path = ()) -> Iterator[Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in items:
        yield (*before, step)
        yield from paths(inner, (*before, step))


class Readers:
    """Encoders of each kind, and a loop to run them in."""

    def __init__(self, loop: asyncio.Runner, pool: EncodePool) -> None:
        self.loop = loop
        self.encoders = [(kind, encoder_of(kind, template, pool)) for kind in KINDS for template in (SHOW_ALL, PARTS)]

    def read(self, endpoint: str, body: bytes) -> InvalidRequest | None:
        """All that becomes of a request before it is sent on; the refusal, if it is refused."""
        try:
            request = parse_request(endpoint, body)
            refuse_reserved(request.fields)
        except InvalidRequest as refusal:
            return refusal
        assert len(session_key(request, [])) == 32
        self.loop.run(self._encode(request))
        return None

    async def _encode(self, request: InferenceRequest) -> None:
        for kind, encoder in self.encoders:
            encoding = await encoder.encode(request, 8192)
            assert (encoding.tokens is None) <= bool(encoding.reason)
            sent = body_with_ids(request, kind, encoding, 8192)
            assert sent is None or orjson.loads(sent)["model"] == request.model


def encoder_of(kind: str, template: str, pool: EncodePool) -> Encoder:
    files = {"chat_template.jinja": template.encode(), "tokenizer_config.json": orjson.dumps(SPECIAL_TOKENS)}
    return Encoder(
        WholeTexts(ByteBackend(), Shared.of(pool), "for tests"), build_renderer(kind, files), token_chars_max=1
    )


@pytest.fixture(scope="module")
def readers() -> Iterator[Readers]:
    pool = EncodePool()
    with asyncio.Runner() as loop:
        yield Readers(loop, pool)
    pool.close()


@pytest.mark.parametrize(("endpoint", "fields"), BODIES, ids=[f"{n} {each[0]}" for n, each in enumerate(BODIES)])
def test_a_wrong_value_anywhere_is_refused_by_name_or_left_to_the_engine(
    readers: Readers, endpoint: str, fields: dict[str, Any]
) -> None:
    base = {"model": MODEL, **fields}
    assert readers.read(endpoint, bad_input.encoded(base)) is None
    for path in paths(base):
        for value in VALUES:
            body = bad_input.encoded(bad_input.replaced(base, path, value))
            refusal = readers.read(endpoint, body)
            if refusal is None:
                continue
            if isinstance(value, bad_input.Deep) and value.levels > 900:
                continue  # no JSON any more
            named = refusal.param or ""
            assert named.split("[")[0].split(".")[0] == path[0], (path, value, refusal.message)
            assert "must" in refusal.message or "isn't taken" in refusal.message


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_the_gateway_reads_itself_is_refused_with_the_fields_name(endpoint: str) -> None:
    fields = next((body for of, body in BODIES if of == endpoint), {})
    fields = {"input": [{"role": "user", "content": "x"}]} if endpoint == RESPONSES else fields
    base = {"model": MODEL, "stream": False, "cache_salt": "s", **fields}
    for path in OURS.get(endpoint, set()) | {("model",), ("stream",), ("cache_salt",)}:
        with pytest.raises(InvalidRequest) as refused:
            parse_request(endpoint, bad_input.encoded(bad_input.replaced(base, path, 7)))
        assert (refused.value.param or "").startswith(bad_input.param_of(path[:1]))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_last_of_two_keys_counts_at_every_endpoint(endpoint: str) -> None:
    fields = next(body for of, body in BODIES if of == endpoint)
    body = bad_input.encoded({"model": MODEL, **fields})
    assert parse_request(endpoint, b'{"model":7,' + body[1:]).model == MODEL
    with pytest.raises(InvalidRequest):
        parse_request(endpoint, body[:-1] + b',"model":7}')


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_lone_surrogate_anywhere_is_refused(endpoint: str) -> None:
    fields = next(body for of, body in BODIES if of == endpoint)
    for path in paths(fields):
        with pytest.raises(InvalidRequest):
            parse_request(endpoint, bad_input.encoded(bad_input.replaced({"model": MODEL, **fields}, path, "a\ud800")))


class Served:
    """A gateway of each kind, and a client."""

    def __init__(self, loop: asyncio.Runner, gateways: dict[str, TestGateway], client: httpx.AsyncClient) -> None:
        self.loop, self.gateways, self.client = loop, gateways, client

    def post(self, kind: str, endpoint: str, body: bytes) -> httpx.Response:
        return self.loop.run(self.client.post(self.gateways[kind].url + endpoint, content=body))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with asyncio.Runner() as loop:
        stack = contextlib.AsyncExitStack()

        async def start() -> Served:
            engine = await stack.enter_async_context(MockEngine("a", answer_in_shape))
            gateways = {
                kind: await stack.enter_async_context(gateway_for([engine], renderer=kind))
                for kind in ("reference", "vllm", "sglang")
            }
            client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=10))
            return Served(loop, gateways, client)

        yield loop.run(start())
        loop.run(stack.aclose())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def bodies(draw: Any) -> tuple[str, bytes]:
    """A request that was right, with one to three values replaced by anything."""
    endpoint, fields = draw(st.sampled_from(BODIES))
    body: dict[str, Any] = {"model": MODEL, **fields}
    for _ in range(draw(st.integers(1, 3))):
        body = bad_input.replaced(body, draw(st.sampled_from(list(paths(body)))), draw(json_values))
    return endpoint, bad_input.encoded(body)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(("reference", "vllm", "sglang")), bodies() | st.tuples(st.sampled_from(ENDPOINTS), st.binary()))
def test_no_body_makes_the_gateway_fail(served: Served, kind: str, asked: tuple[str, bytes]) -> None:
    endpoint, body = asked
    answer = served.post(kind, endpoint, body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 200:
        return
    if endpoint in ANTHROPICS:
        assert answer.json()["type"] == "error"
    else:
        bad_input.check_error_shape(answer.content)
    assert served.gateways[kind].ledger.engines() == ()
