"""Two vLLM engines with an agent each, behind a gateway: requests go where their prefix is, and predictions hold."""

import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from tests.directory.stands import running_valkey
from tests.vllm.engines import RunningEngine, running_engines
from tests.vllm.fleet import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    MODEL,
    AgentProcess,
    Answer,
    GatewayProcess,
    ask,
    document,
)
from tests.warmroute.fleets import until

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Fleet:
    gateway: GatewayProcess
    agents: dict[str, AgentProcess]
    engines: dict[str, RunningEngine]

    def ask(self, messages: list[dict[str, str]], **fields: object) -> Answer:
        """A request through the gateway, of which the prediction must hold."""
        answer = ask(self.gateway.url, messages, **{"max_tokens": 12, **fields})
        off_by = abs(answer.predicted_tokens - answer.cached_tokens)
        assert off_by <= CHUNK_TOKENS + BLOCK_TOKENS, answer
        # What the engine holds is announced when its events are; the next turn may come no sooner.
        self.until_announced(answer)
        return answer

    def until_announced(self, answer: Answer) -> None:
        chunks = answer.prompt_tokens // CHUNK_TOKENS

        def is_announced() -> bool:
            row = self.agents[f"h-{answer.engine}"].engine(answer.engine)
            return bool(row["gpu_chunks"] >= chunks and not row["pending_keys"])

        until(is_announced, 30, "the prompt's chunks are announced")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("v")
    with running_valkey() as server:
        url = server.connection_url
        agents = {f"h-{name}": AgentProcess(f"h-{name}", folder, url, dram_gb=0.6, nvme_gb=1) for name in ("a", "b")}
        gateway = GatewayProcess(folder, url)
        try:
            with running_engines(folder, {name: agents[f"h-{name}"].door for name in ("a", "b")}) as engines:
                gateway.until_ready("a", "b")
                yield Fleet(gateway, agents, engines)
        finally:
            for part in (gateway, *agents.values()):
                part.end()


def said(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def test_the_gateway_knows_what_each_engines_kv_cache_holds(fleet: Fleet) -> None:
    rows = fleet.gateway.engines()
    for name, engine in fleet.engines.items():
        metrics = httpx.get(f"{engine.url}/metrics", timeout=30, trust_env=False).text
        (told,) = re.findall(r'^vllm:cache_config_info\{.*kv_cache_size_tokens="(\d+)"', metrics, re.MULTILINE)
        assert rows[name]["kv_tokens"] == int(told) > 0


def test_four_turns_stay_with_the_engine_that_holds_them_and_predictions_hold(fleet: Fleet) -> None:
    texts = [document("tides", 70) + " What does sentence 3 say?"]
    first = fleet.ask(said(*texts))
    assert (first.cached_tokens, first.predicted_tokens) == (0, 0)
    for turn in range(3):
        texts += [first.text, document(f"turn {turn}", 25) + f" And sentence {turn + 5}?"]
        answer = fleet.ask(said(*texts))
        assert answer.engine == first.engine
        assert answer.reason == "prefix"
        assert answer.cached_tokens >= (answer.prompt_tokens - 400) // CHUNK_TOKENS * CHUNK_TOKENS > 0


def test_a_second_reader_of_a_document_goes_to_the_engine_that_holds_it(fleet: Fleet) -> None:
    for topic in ("lamps", "ferries", "kites"):
        first = fleet.ask(said(document(topic) + " What does sentence 3 say?"))
        second = fleet.ask(said(document(topic) + " And who wrote it?"))
        assert second.engine == first.engine
        assert second.predicted["gpu"] == second.prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS
        assert second.cached_tokens >= second.predicted_tokens


def test_readers_of_different_documents_at_once_use_both_engines(fleet: Fleet) -> None:
    def read(number: int) -> str:
        return ask(fleet.gateway.url, said(document(f"{number} {uuid.uuid4()}", 30)), max_tokens=4).engine

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(8))) == {"a", "b"}


def test_a_salt_shares_no_chunk_with_the_unsalted_prompt_or_another_salt(fleet: Fleet) -> None:
    prompt = said(document("salted herrings") + " What does sentence 3 say?")
    plain = fleet.ask(prompt)
    for salt in ("one", "two"):
        first = fleet.ask(prompt, cache_salt=salt)
        assert (first.cached_tokens, first.predicted_tokens) == (0, 0)
        again = fleet.ask(prompt, cache_salt=salt)
        assert again.engine == first.engine
        assert again.predicted_tokens >= CHUNK_TOKENS
        assert again.text == first.text == plain.text


def test_a_completions_text_and_token_ids_are_matched_alike(fleet: Fleet) -> None:
    prompt = document("plain text", 60)
    first = ask(fleet.gateway.url, prompt, max_tokens=4)
    fleet.until_announced(first)
    second = ask(fleet.gateway.url, prompt, max_tokens=4)
    assert second.engine == first.engine
    assert second.predicted_tokens == (second.prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    assert second.cached_tokens >= second.predicted_tokens


def test_a_request_for_which_the_engine_reads_no_cache_is_predicted_none(fleet: Fleet) -> None:
    prompt = document("margins", 60)
    fleet.until_announced(ask(fleet.gateway.url, prompt, max_tokens=4))
    for fields in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}):
        answer = ask(fleet.gateway.url, prompt, max_tokens=4, **fields)
        assert (answer.predicted_tokens, answer.cached_tokens) == (0, 0), fields
    assert ask(fleet.gateway.url, prompt, max_tokens=4, echo=True).cached_tokens > 0


def test_a_request_that_would_have_blocks_announced_twice_reaches_no_engine(fleet: Fleet) -> None:
    body = {"model": MODEL, "prompt": "x", "vllm_xargs": {"kv_cache_report_mode": "full"}}
    answer = httpx.post(f"{fleet.gateway.url}/v1/completions", json=body, timeout=30, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "vllm_xargs.kv_cache_report_mode")


def test_answers_and_announced_chunks_agree_with_what_was_encoded_and_no_client_sees_usage_it_did_not_ask_for(
    fleet: Fleet,
) -> None:
    def parity(kind: str, result: str) -> float:
        lines = httpx.get(f"http://127.0.0.1:{fleet.gateway.port + 1}/metrics", trust_env=False).text.splitlines()
        series = f'warmroute_parity_total{{kind="{kind}",result="{result}"}} '
        return next(float(line.removeprefix(series)) for line in lines if line.startswith(series))

    before = parity("usage", "match")
    for path, kind in (
        ("/v1/chat/completions", {"messages": said(document("parity", 40) + " What does sentence 3 say?")}),
        ("/v1/completions", {"prompt": document("more parity", 40)}),
    ):
        for options in ({}, {"stream_options": {"include_usage": True}}):
            body = {"model": MODEL, "max_tokens": 4, "stream": True, **kind, **options}
            answer = httpx.post(fleet.gateway.url + path, json=body, timeout=120, trust_env=False)
            assert (answer.status_code, answer.content.endswith(b"data: [DONE]\n\n")) == (200, True)
            assert (b'"usage":{' in answer.content, b'"choices":[]' in answer.content) == (bool(options),) * 2
    assert parity("usage", "match") == before + 4

    def is_found() -> bool:
        """An engine is judged once it says that it holds chunks, some seconds after an answer that it computed."""
        ask(fleet.gateway.url, f"{uuid.uuid4()} {document('ids', 40)}", max_tokens=1)
        return parity("ids", "match") >= 1

    until(is_found, 60, "a prompt's chunks are found among the announced ones")
    assert [parity(kind, "mismatch") for kind in ("usage", "ids")] == [0, 0]
