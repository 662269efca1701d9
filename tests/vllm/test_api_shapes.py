"""A real vLLM behind the gateway: every endpoint that it serves, and token ids sent in place of text."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest

from gateway import ids_sender
from gateway.audit import StreamTail
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder, build_renderer
from gateway.encoding.local_model_reader import read_apart
from gateway.encoding.prompt_tokenizer import Shared, load_tokenizer
from gateway.openai_schema import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RERANK, RESPONSES, SCORE
from tests.directory.stands import running_valkey
from tests.gateway.assembly import TestGateway, gateway_for
from tests.gateway.samples import MODEL
from tests.render_matrix import TORTURE, USER, WEATHER
from tests.vllm.engines import RunningEngine, model_folder, running_engines
from tests.vllm.fleet import ANSWER_BOUND_S, CHUNK_TOKENS, AgentProcess, document, reset
from tests.warmroute.fleets import until

pytestmark = pytest.mark.timeout(900)
FLAGS = ("--served-model-name", MODEL, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
EXPLAIN = {"x-warmroute-explain": "1"}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}}, "required": ["city"]}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "two turns": {"messages": [USER, {"role": "assistant", "content": "Rain."}, USER]},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "torture": {"messages": [{"role": "user", "content": TORTURE}]},
    "tools": {"messages": [USER], "tools": [WEATHER]},
    "a tool that must be called": {"messages": [USER], "tools": [WEATHER], "tool_choice": "required", "max_tokens": 40},
    "structured": {
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}},
    },
    "stop": {"messages": [USER], "stop": ["the"]},
    "logprobs": {"messages": [USER], "logprobs": True, "top_logprobs": 2},
    "token ids asked back": {"messages": [USER], "return_token_ids": True},
    "salted": {"messages": [USER], "cache_salt": "s"},
    "closed": {"messages": [USER], "add_generation_prompt": False},
}
TEXTS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "Once upon a time"},
    "torture": {"prompt": TORTURE},
    "without special tokens": {"prompt": "Once", "add_special_tokens": False},
    "stop": {"prompt": "One two three four", "stop": ["six"]},
    "logprobs": {"prompt": "Once upon a time", "logprobs": 2},
    "structured": {"prompt": "A city:", "structured_outputs": {"choice": ["Bonn", "Rome"]}},
}
AS_TEXT: dict[str, dict[str, Any]] = {
    "echo": {"prompt": "Once upon a time", "echo": True},
    "prompt logprobs": {"prompt": "Once upon a time", "prompt_logprobs": 1},
    "several": {"prompt": ["Once", "Twice"]},
}


class Host:
    """An agent, its engine, and the gateway's encoder for that engine's files."""

    def __init__(self, agent: AgentProcess, engine: RunningEngine, encoder: Encoder) -> None:
        self.agent, self.engine, self.encoder = agent, engine, encoder

    @asynccontextmanager
    async def gateway(self, sends_ids: bool = False) -> AsyncIterator[TestGateway]:
        named: Any = SimpleNamespace(name="v", url=self.engine.url)
        async with gateway_for([named], renderer="vllm", encoder=self.encoder, sends_ids=sends_ids) as gateway:
            await gateway.probe.probe_all()
            yield gateway


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder, pool = tmp_path_factory.mktemp("v"), EncodePool()
    files = dict(asyncio.run(read_apart(model_folder(), "vllm")).contents)
    loaded = asyncio.run(load_tokenizer(files["tokenizer.json"], Shared.of(pool), 2**20))
    encoder = Encoder(loaded[0], build_renderer("vllm", files), loaded[1])
    with pytest.MonkeyPatch.context() as patch, running_valkey() as server:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        agent = AgentProcess("h1", folder, server.connection_url, dram_gb=0.6, nvme_gb=1)
        try:
            with running_engines(folder, {"v": agent.door}, flags=FLAGS) as engines:
                until(lambda: agent.is_attached("v"), 90, "it is attached")
                yield Host(agent, engines["v"], encoder)
        finally:
            agent.end()
            pool.close()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_BOUND_S) as client:
        yield client


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each request was sent with ids."""
    seen: list[bool] = []
    real = ids_sender.body_with_ids

    def note(*arguments: Any) -> bytes | None:
        body = real(*arguments)
        seen.append(body is not None)
        return body

    monkeypatch.setattr(ids_sender, "body_with_ids", note)
    return seen


def told(answer: httpx.Response) -> tuple[Any, Any]:
    """What doesn't differ from one request to the next: choices and counts, without what happened to be cached."""
    assert answer.status_code == 200, answer.text
    decoded = answer.json()
    usage = {name: value for name, value in decoded["usage"].items() if isinstance(value, int)}
    choices = decoded["choices"]
    for choice in choices:
        for call in (choice.get("message") or {}).get("tool_calls") or []:
            call.pop("id")  # drawn anew each time
    return (choices, decoded.get("prompt_token_ids")), usage


async def test_sent_ids_give_the_answers_and_the_usage_of_the_text(
    host: Host, client: httpx.AsyncClient, sent: list[bool]
) -> None:
    async with host.gateway(sends_ids=True) as gateway:
        view = gateway.fleet.table.engines["v"]
        assert gateway.probe.state(view) == {CHAT: "taken", COMPLETIONS: "taken"}
        for endpoint, rows in ((CHAT, CHATS), (COMPLETIONS, TEXTS)):
            for name, fields in rows.items():
                asked = {**GREEDY, **fields}
                direct = await client.post(host.engine.url + endpoint, json=asked)
                routed = await client.post(gateway.url + endpoint, json=asked)
                assert sent.pop() is True, name
                assert told(routed) == told(direct), name
        for name, fields in AS_TEXT.items():
            asked = {**GREEDY, **fields}
            direct = await client.post(host.engine.url + COMPLETIONS, json=asked)
            routed = await client.post(gateway.url + COMPLETIONS, json=asked)
            assert sent.pop() is False, name
            assert told(routed) == told(direct), name
        assert gateway.probe.state(view) == {CHAT: "taken", COMPLETIONS: "taken"}


async def test_sent_ids_stream_the_same_text_and_are_refused_in_the_same_words(
    host: Host, client: httpx.AsyncClient, sent: list[bool]
) -> None:
    async with host.gateway(sends_ids=True) as gateway:
        for endpoint, fields in ((CHAT, CHATS["plain"]), (COMPLETIONS, TEXTS["plain"])):
            asked = {**GREEDY, **fields, "stream": True}
            direct = await client.post(host.engine.url + endpoint, json=asked)
            routed = await client.post(gateway.url + endpoint, json=asked)
            assert sent.pop() is True
            assert deltas(routed) == deltas(direct)
        for odd in ({"temperature": -1}, {"tool_choice": "required"}, {"max_tokens": 100_000}):
            asked = {**GREEDY, **CHATS["plain"], **odd}
            direct = await client.post(host.engine.url + CHAT, json=asked)
            routed = await client.post(gateway.url + CHAT, json=asked)
            assert (routed.status_code, routed.json()) == (direct.status_code, direct.json()), odd
            assert direct.status_code == 400


def deltas(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices = [orjson.loads(event)["choices"] for event in events]
    return [[each.get("text"), each.get("delta"), each["finish_reason"]] for choice in choices for each in choice]


async def test_the_host_keeps_and_gives_back_what_was_computed_from_sent_ids(
    host: Host, client: httpx.AsyncClient, sent: list[bool]
) -> None:
    async with host.gateway(sends_ids=True) as gateway:
        for endpoint, fields in (
            (COMPLETIONS, {"prompt": document("rivers", 70)}),
            (CHAT, {"messages": [{"role": "user", "content": document("lakes", 70)}]}),
        ):
            before = host.agent.status()["tiers"]["nvme"]["chunks"]
            asked = {**GREEDY, **fields}
            first = await client.post(gateway.url + endpoint, json=asked)
            assert sent.pop() is True
            chunks = first.json()["usage"]["prompt_tokens"] // CHUNK_TOKENS
            assert chunks >= 3
            host.agent.until_written(before + chunks)
            for url in (gateway.url, host.engine.url):
                reset(host.engine.launch)
                again = await client.post(url + endpoint, json=asked)
                assert told(again) == told(first)
                cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == chunks * CHUNK_TOKENS, "ids and text have the same keys"


async def test_every_endpoint_is_answered_or_refused_in_the_engines_words(
    host: Host, client: httpx.AsyncClient
) -> None:
    rows: list[tuple[str, dict[str, Any], int, str]] = [
        (CHAT, {"messages": [USER], "max_tokens": 3}, 200, "exact"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 3}, 200, "exact"),
        (RESPONSES, {"input": "Hello", "max_output_tokens": 3}, 200, "exact"),
        (MESSAGES, {"messages": [USER], "max_tokens": 3}, 200, "exact"),
        (MESSAGES, {"messages": [USER], "max_tokens": "three"}, 400, "exact"),
        (COUNT_TOKENS, {"messages": [USER]}, 200, "affinity"),
        (EMBEDDINGS, {"input": "a"}, 404, "exact"),
        (RERANK[0], {"query": "a", "documents": ["b"]}, 404, "affinity"),
        (SCORE, {"text_1": "a", "text_2": "b"}, 404, "affinity"),
    ]
    async with host.gateway() as gateway:
        for endpoint, fields, status, known in rows:
            asked = {"model": MODEL, **fields}
            answer = await client.post(gateway.url + endpoint, json=asked, headers=EXPLAIN)
            assert answer.status_code == status, (endpoint, answer.text)
            assert answer.headers["x-warmroute-encoding"] == known, endpoint
            if endpoint in (CHAT, COMPLETIONS, RESPONSES, MESSAGES) and status == 200:
                streamed = await client.post(gateway.url + endpoint, json={**asked, "stream": True})
                assert streamed.status_code == 200
                tail = StreamTail()
                tail.add(streamed.content)
                assert tail.is_done, (endpoint, streamed.text[-300:])
        assert gateway.count("warmroute_degraded_total", reason="stream_broken") == 0
        assert gateway.ledger.engines() == ()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_stored_response_is_found_gone_on_from_and_unknown_elsewhere(
    host: Host, client: httpx.AsyncClient, stream: bool
) -> None:
    async with host.gateway() as gateway:
        asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 3, "stream": stream}
        first = await client.post(gateway.url + RESPONSES, json=asked)
        assert first.status_code == 200, first.text
        text = first.text.partition("data: ")[2].partition("\n")[0] if stream else first.text
        decoded = orjson.loads(text)
        response_id = decoded["response"]["id"] if stream else decoded["id"]
        shown = await client.get(f"{gateway.url}{RESPONSES}/{response_id}")
        assert shown.status_code == 200, shown.text
        assert shown.json()["id"] == response_id
        on = await client.post(gateway.url + RESPONSES, json={**asked, "previous_response_id": response_id})
        assert on.status_code == 200, on.text
        lost = await client.post(gateway.url + RESPONSES, json={**asked, "previous_response_id": "resp_lost"})
        assert lost.status_code == 404
        assert "resp_lost" in lost.json()["error"]["message"]
        unknown = await client.get(f"{gateway.url}{RESPONSES}/resp_lost")
        assert unknown.status_code == 404
