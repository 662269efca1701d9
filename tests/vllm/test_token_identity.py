"""Loaded KV gives the tokens that computed KV gives, wherever it was loaded from, and whatever happens meanwhile.

Two engines on one host, with one agent, so that what one stored is a hit of the other.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import xxhash

from nodeagent.tiers.chunk_file import HEADER_BYTES, FileHeader, decode_header, encode_header
from tests.directory.stands import running_valkey
from tests.vllm.engines import RunningEngine, running_engines
from tests.vllm.fleet import CHUNK_TOKENS, AgentProcess, Answer, ask, document, reset
from tests.warmroute.fleets import until

pytestmark = pytest.mark.timeout(900)
TOPICS = ("tides", "lamps", "ferries")
CHUNKS = 4


@dataclass(frozen=True)
class Host:
    agent: AgentProcess
    one: RunningEngine
    two: RunningEngine


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("v")
    with running_valkey() as server:
        agent = AgentProcess("h1", folder, server.connection_url, dram_gb=0.6, nvme_gb=2)
        try:
            with running_engines(folder, {"one": agent.door, "two": agent.door}) as engines:
                until(lambda: agent.is_attached("one") and agent.is_attached("two"), 60, "both engines are attached")
                yield Host(agent, engines["one"], engines["two"])
        finally:
            agent.end()


@pytest.fixture(scope="module")
def computed(host: Host) -> dict[str, Answer]:
    """The answers that are computed from nothing: 48 tokens each."""
    answers = {topic: ask(host.one.url, document(topic)) for topic in TOPICS}
    assert [answer.cached_tokens for answer in answers.values()] == [0] * len(TOPICS)
    host.agent.until_written(CHUNKS * len(TOPICS))
    return answers


def hits(host: Host, engine: RunningEngine, computed: dict[str, Answer], at_least: int = CHUNKS * CHUNK_TOKENS) -> None:
    """Every prompt again: the same tokens, and its chunks weren't computed."""
    for topic, answer in computed.items():
        again = ask(engine.url, document(topic))
        assert again.text == answer.text, topic
        assert again.cached_tokens >= at_least, topic


def test_a_gpu_hit_gives_the_tokens_of_no_cache(host: Host, computed: dict[str, Answer]) -> None:
    hits(host, host.one, computed)


def test_a_dram_hit_gives_them(host: Host, computed: dict[str, Answer]) -> None:
    before = host.agent.metric('warmroute_tier_hit_tokens_total{source="local",tier="dram"}')
    reset(host.one.launch)
    hits(host, host.one, computed)
    loaded = host.agent.metric('warmroute_tier_hit_tokens_total{source="local",tier="dram"}') - before
    assert loaded == CHUNKS * CHUNK_TOKENS * len(TOPICS)


def test_a_hit_on_another_engine_of_the_host_gives_them(host: Host, computed: dict[str, Answer]) -> None:
    hits(host, host.two, computed)


def test_an_nvme_hit_gives_them_after_a_restart_of_the_agent(host: Host, computed: dict[str, Answer]) -> None:
    host.agent.restart("one", "two")
    reset(host.one.launch)
    hits(host, host.one, computed)
    assert host.agent.metric('warmroute_tier_hit_tokens_total{source="local",tier="nvme"}') > 0


def test_they_come_after_the_engine_was_killed_and_restarted(host: Host, computed: dict[str, Answer]) -> None:
    host.one.kill()
    host.one.start()
    until(lambda: host.agent.is_attached("one"), 60, "the engine is attached again")
    hits(host, host.one, computed)


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("pause_s", [0.0, 0.05, 0.3])
def test_an_agent_that_goes_during_a_load_costs_nothing_but_time(
    host: Host, computed: dict[str, Answer], how: str, pause_s: float
) -> None:
    reset(host.one.launch)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, host.one.url, document("tides"))
        threading.Event().wait(pause_s)
        if how == "killed":
            host.agent.restart("one", "two")
            assert asked.result().text == computed["tides"].text
        else:
            with host.agent.stopped():
                assert asked.result().text == computed["tides"].text
    reset(host.one.launch)
    hits(host, host.one, computed, at_least=0)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_an_agent_that_goes_during_a_store_costs_nothing_but_the_store(host: Host, how: str) -> None:
    topic = f"kites that were {how}"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, host.one.url, document(topic))
        until(lambda: host.agent.status()["tiers"]["dram"]["reservations"] > 0 or asked.done(), 60, "a store begins")
        if how == "killed":
            host.agent.restart("one", "two")
            answer = asked.result()
        else:
            with host.agent.stopped():
                answer = asked.result()
    reset(host.one.launch)
    assert ask(host.one.url, document(topic)).text == answer.text
    assert host.agent.status()["tiers"]["dram"]["reservations"] == 0


def test_zeroed_bytes_with_a_valid_checksum_change_the_output(host: Host, computed: dict[str, Answer]) -> None:
    """The negative control: what is loaded is really used."""
    zeroed = 0
    for path in host.agent.nvme.rglob("*"):
        if path.is_file() and len(path.name) == 64:
            data = path.read_bytes()
            header = decode_header(data[:HEADER_BYTES])
            payload = bytes(header.length)
            whole = FileHeader(header.label, header.identity, header.length, xxhash.xxh3_128_digest(payload))
            path.write_bytes(encode_header(whole) + payload + data[HEADER_BYTES + header.length :])
            zeroed += 1
    assert zeroed >= CHUNKS * len(TOPICS)
    host.agent.restart("one", "two")
    reset(host.one.launch)
    answer = ask(host.one.url, document("tides"))
    assert answer.cached_tokens >= CHUNKS * CHUNK_TOKENS
    assert answer.text != computed["tides"].text
