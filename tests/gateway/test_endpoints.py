"""Every endpoint through the whole gateway: one code path, each API's own streams and errors."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from pydantic import SecretStr

from directory.tiers import Tier
from gateway.audit import StreamTail
from gateway.config import EngineConfig, RoutingConfig
from gateway.context_guard import refuse_too_long
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder, build_renderer, unencoded
from gateway.encoding.prompt_tokenizer import Shared, WholeTexts
from gateway.errors import ContextTooLong
from gateway.openai_schema import (
    ANTHROPICS,
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    EMBEDDINGS,
    ENDPOINTS,
    MESSAGES,
    RESPONSES,
    parse_request,
)
from gateway.prompts import EncodedPrompt
from tests import bad_input
from tests.gateway import mock_engine as mock
from tests.gateway.api_answers import PROMPTS, STREAMED, answer_in_shape, events_of, named, whole_of
from tests.gateway.assembly import TEMPLATE, ByteBackend, TestGateway, gateway_for
from tests.gateway.byte_engine import ByteEngine
from tests.gateway.encoding_rows import ASKED, KINDS, table
from tests.gateway.mock_engine import MockEngine
from tests.gateway.real_engine import real_engine
from tests.gateway.samples import MODEL
from tests.gateway.views import view

EXPLAIN = {"x-warmroute-explain": "1"}


def body(endpoint: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, **PROMPTS[endpoint], **fields}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        yield client


def anthropic_error(answer: httpx.Response) -> dict[str, Any]:
    said = answer.json()
    assert said.keys() == {"type", "error"}
    assert said["type"] == "error"
    assert said["error"].keys() == {"type", "message"}
    return dict(said["error"])


def error_of(endpoint: str, answer: httpx.Response) -> dict[str, Any]:
    if endpoint in ANTHROPICS:
        return anthropic_error(answer)
    return bad_input.check_error_shape(answer.content)


async def test_every_endpoint_is_answered_whole_and_as_a_stream(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", answer_in_shape) as engine, gateway_for([engine]) as gateway:
        for endpoint in ENDPOINTS:
            answer = await client.post(gateway.url + endpoint, json=body(endpoint))
            assert answer.status_code == 200, endpoint
            assert answer.json() == whole_of(endpoint, "a", f"resp_a{len(engine.received)}")
            assert engine.received[-1][0] == answer.request.content, "byte for byte"
            if endpoint in STREAMED:
                streamed = await client.post(gateway.url + endpoint, json=body(endpoint, stream=True))
                assert streamed.content == b"".join(events_of(endpoint, f"resp_a{len(engine.received)}"))
            count = 1 + (endpoint in STREAMED)
            assert gateway.count("warmroute_requests_total", model=MODEL, endpoint=endpoint, status="200") == count
            assert gateway.ledger.engines() == ()


async def test_a_real_engine_answers_every_row_or_refuses_it_in_its_own_words(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with real_engine(tmp_path) as (url, encoder):
        engine: Any = SimpleNamespace(name="a", url=url)
        async with gateway_for([engine], encoder=encoder) as gateway:
            statuses = set()
            for (endpoint, prompt), (_, several) in ASKED.items():
                for fields in several:
                    for stream in (False, True):
                        asked = {"model": MODEL, "max_tokens": 1, **fields, "stream": stream}
                        answer = await client.post(gateway.url + endpoint, json=asked, headers=EXPLAIN)
                        statuses.add(answer.status_code)
                        is_served = endpoint in (CHAT, COMPLETIONS)
                        assert answer.status_code in ((200, 400) if is_served else (404,)), (prompt, answer.text)
                        known = table()[endpoint, prompt][KINDS.index("reference")]
                        assert answer.headers["x-warmroute-encoding"] == known, (endpoint, prompt)
            assert statuses == {200, 400, 404}
            assert gateway.fleet.table.engines["a"].state == "ready"


async def test_route_explain_knows_an_endpoint_by_its_fields() -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        transport = httpx.ASGITransport(app=gateway.admin)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
            for endpoint in (CHAT, COMPLETIONS, RESPONSES, "/v1/rerank", "/v1/score"):
                told = await admin.post("/route/explain", json=body(endpoint))
                assert told.json()["engine"] == "a", told.text
            wrong = await admin.post("/route/explain", params={"endpoint": "/v1/x"}, json=body(CHAT))
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "endpoint")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_failure_before_the_first_byte_is_retried_at_every_endpoint(
    client: httpx.AsyncClient, endpoint: str
) -> None:
    async with MockEngine("a", mock.answer_status(503)) as bad, MockEngine("b", answer_in_shape) as good:
        async with gateway_for([bad, good], routing=RoutingConfig(on_its_way_s=0)) as gateway:
            for number in range(6):
                fields = {"prompt_cache_key": str(number), "stream": endpoint in STREAMED and number % 2 == 1}
                answer = await client.post(gateway.url + endpoint, json=body(endpoint, **fields))
                assert answer.status_code == 200
            assert bad.received
            assert gateway.ledger.engines() == ()


async def test_an_engine_that_lacks_an_endpoint_says_so_itself_and_is_asked_once(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", mock.answer_status(404)) as a, MockEngine("b", mock.answer_status(404)) as b:
        async with gateway_for([a, b]) as gateway:
            for endpoint in ENDPOINTS:
                asked = len(a.received) + len(b.received)
                answer = await client.post(gateway.url + endpoint, json=body(endpoint))
                assert answer.status_code == 404
                assert "says 404" in answer.json()["error"]["message"]
                assert len(a.received) + len(b.received) == asked + 1


@pytest.mark.parametrize("endpoint", STREAMED)
async def test_a_stream_that_no_http_bounds_is_whole_with_its_last_event_and_broken_without(
    client: httpx.AsyncClient, endpoint: str
) -> None:
    events = events_of(endpoint)
    whole = b"".join(events)
    last = whole.rindex(b"data:")
    async with ByteEngine("a") as engine, gateway_for([engine]) as gateway:  # type: ignore[list-item]
        engine.framing = "close"
        for place in (len(whole), len(whole) - 1, len(whole) - 2, len(whole) - 3, last + 5, last - 3, len(whole) // 2):
            await gateway.fleet.check_health()
            engine.events = (whole[:place],)
            broken = gateway.count("warmroute_degraded_total", reason="stream_broken")
            answer = await client.post(gateway.url + endpoint, json=body(endpoint, stream=True))
            assert answer.status_code == 200
            is_broken = gateway.count("warmroute_degraded_total", reason="stream_broken") > broken
            assert is_broken == (place < len(whole) - 2), place
            if not is_broken:
                assert answer.content == whole
                continue
            kept = max(whole[:start] for start in ends_of(events) if start <= place)
            assert answer.content.startswith(kept)
            check_broken(endpoint, answer.content.removeprefix(kept))
            assert gateway.ledger.engines() == ()


def ends_of(events: tuple[bytes, ...]) -> list[int]:
    return [len(b"".join(events[:count])) for count in range(len(events) + 1)]


def check_broken(endpoint: str, said: bytes) -> None:
    """One event, in the shape of the API."""
    assert said.endswith(b"\n\n")
    assert said.count(b"\n\n") == 1
    name, _, data = said.removesuffix(b"\n\n").rpartition(b"data: ")
    error = orjson.loads(data)
    if endpoint == MESSAGES:
        assert name == b"event: error\n"
        assert error["type"] == "error"
        assert error["error"]["type"] == "api_error"
    elif endpoint == RESPONSES:
        assert name == b"event: error\n"
        assert error.keys() == {"type", "code", "message", "param", "sequence_number"}
        assert error["code"] == "stream_broken"
        assert error["sequence_number"] > 0
    else:
        assert error["error"]["code"] == "stream_broken"


def test_a_last_event_longer_than_what_is_kept_of_a_stream_still_ends_it() -> None:
    tail = StreamTail()
    tail.add(named("response.created"))
    assert not tail.is_done
    last = named("response.completed", response={"output_text": "x" * 100_000})
    tail.add(last)
    assert tail.is_done
    cut = StreamTail()
    cut.add(last[:-40])
    assert not cut.is_done


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_errors_have_the_shape_of_the_api_that_was_asked(client: httpx.AsyncClient, endpoint: str) -> None:
    async with MockEngine("a", mock.drop_connection) as engine, gateway_for([engine]) as gateway:
        url = gateway.url + endpoint
        refused = await client.post(url, json={**body(endpoint), "model": 7})
        assert refused.status_code == 400
        error = error_of(endpoint, refused)
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("model ")
        unknown = await client.post(url, json={**body(endpoint), "model": "other"})
        assert unknown.status_code == 404
        is_anthropic = endpoint in ANTHROPICS
        assert error_of(endpoint, unknown)["type"] == ("not_found_error" if is_anthropic else "invalid_request_error")
        dropped = await client.post(url, json=body(endpoint))
        assert dropped.status_code == 502
        assert error_of(endpoint, dropped)["type"] == ("api_error" if is_anthropic else "upstream_error")
        wrong = await client.get(url)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        error_of(endpoint, wrong)
        engine.is_well = False
        await gateway.fleet.check_health()
        nobody = await client.post(url, json=body(endpoint))
        assert (nobody.status_code, nobody.headers["retry-after"]) == (503, "1")
        assert error_of(endpoint, nobody)["type"] == ("overloaded_error" if is_anthropic else "service_unavailable")


@pytest.fixture
async def one() -> AsyncIterator[tuple[MockEngine, TestGateway]]:
    async with MockEngine("a", answer_in_shape) as engine, gateway_for([engine]) as gateway:
        yield engine, gateway


@pytest.mark.parametrize(("kind", "status"), [("vllm", 400), ("reference", 400), ("sglang", 200)])
async def test_a_prompt_that_fits_nowhere_is_refused_before_it_is_tokenized(
    client: httpx.AsyncClient, kind: str, status: int
) -> None:
    pool = EncodePool()
    files = {"chat_template.jinja": TEMPLATE.encode(), "tokenizer_config.json": b"{}"}
    encoder = Encoder(
        WholeTexts(ByteBackend(), Shared.of(pool), "for tests"), build_renderer(kind, files), token_chars_max=2
    )
    text = "x" * (8192 * 2 + 1)
    async with MockEngine("a", answer_in_shape) as engine:
        async with gateway_for([engine], renderer=kind, encoder=encoder) as gateway:
            for endpoint in (CHAT, COMPLETIONS):
                key, prompt = next(iter(PROMPTS[endpoint].items()))
                long = text if isinstance(prompt, str) else [{"role": "user", "content": text}]
                answer = await client.post(gateway.url + endpoint, json=body(endpoint, **{key: long}))
                assert answer.status_code == status, (kind, endpoint)
                assert len(engine.received) == (status == 200) * (1 + (endpoint == COMPLETIONS))
                if status == 400:
                    error = bad_input.check_error_shape(answer.content)
                    assert (error["code"], error["param"]) == ("context_length_exceeded", key)
                    assert "8192 tokens" in error["message"]
            shorter = body(COMPLETIONS, prompt=text[:-1])
            assert (await client.post(gateway.url + COMPLETIONS, json=shorter)).status_code == 200
    pool.close()


def test_a_long_prompt_is_left_to_an_engine_that_may_have_room_though_it_is_not_ready_now() -> None:
    request = parse_request(COMPLETIONS, orjson.dumps(body(COMPLETIONS)))
    too_long = EncodedPrompt(unencoded(request, "too_long"))
    small, large = view("a"), view("b", context_tokens=10**6)
    with pytest.raises(ContextTooLong):
        refuse_too_long(too_long, request, [small], [small, view("c")])
    refuse_too_long(too_long, request, [small], [small, large])
    refuse_too_long(too_long, request, [small], [small, replace(small, engine="d", registration=None)])
    with pytest.raises(ContextTooLong):
        refuse_too_long(too_long, request, [small], [small, replace(large, models=("other",))])
    refuse_too_long(EncodedPrompt(unencoded(request, "tools")), request, [small], [small])


async def test_a_request_goes_where_its_prefix_is_at_other_endpoints_too(client: httpx.AsyncClient) -> None:
    text = "a long shared prefix " * 50
    async with MockEngine("a", answer_in_shape) as a, MockEngine("b", answer_in_shape) as b:
        async with gateway_for([a, b], renderer="sglang") as gateway:
            await gateway.hold(text, "host-b", Tier.DRAM)
            asked = body(EMBEDDINGS, input=text + "question")
            answer = await client.post(gateway.url + EMBEDDINGS, json=asked, headers=EXPLAIN)
            assert answer.headers["x-warmroute-engine"] == "b"
            assert int(answer.headers["x-warmroute-matched-tokens"]) == len(text) // 4 * 4


async def test_counting_tokens_is_no_prefill(one: tuple[MockEngine, TestGateway], client: httpx.AsyncClient) -> None:
    _, gateway = one
    answer = await client.post(gateway.url + COUNT_TOKENS, json=body(COUNT_TOKENS), headers=EXPLAIN)
    assert answer.headers["x-warmroute-encoding"] == "affinity"
    assert gateway.count("warmroute_degraded_total", reason="not_encoded_endpoint") == 1


async def test_a_clients_key_is_not_shown_to_an_engine_that_has_its_own(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", answer_in_shape) as a, MockEngine("b", answer_in_shape) as b:
        static = [EngineConfig(url=a.url, name="a", api_key=SecretStr("secret")), EngineConfig(url=b.url, name="b")]
        async with gateway_for([], static=static) as gateway:
            for number in range(8):
                headers = {"x-api-key": "clients", "x-session-id": str(number)}
                await client.post(gateway.url + MESSAGES, json=body(MESSAGES), headers=headers)
            seen = {(seen.get("authorization"), seen.get("x-api-key")) for _, seen in a.received}
            assert seen == {("Bearer secret", None)}
            assert {seen.get("x-api-key") for _, seen in b.received} == {"clients"}
