"""The engine against the real agent and its door, in one process: no fake between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from directory.chunks import chunk_keys, directory_key, pack_tokens
from directory.members import EngineRegistration
from directory.tiers import Tier
from nodeagent.client import ChunkClient
from nodeagent.engines.reference.gpu_tier import GpuTier
from nodeagent.engines.reference.loaded_model import LoadedModel
from nodeagent.engines.reference.prefix_cache import NoPrefixCache
from nodeagent.engines.reference.serve import describe
from tests.nodeagent.engines.fakes import Caches, run_alone
from tests.nodeagent.engines.tiny_model import CHUNK_TOKENS, words
from tests.nodeagent.running import WAIT_S, RunningAgent, eventually, running_agent

PROMPT = words(4 * CHUNK_TOKENS + 3)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    with running_agent(tmp_path, dram_bytes=1 << 20) as agent:
        yield agent


@contextmanager
def engine(agent: RunningAgent, loaded: LoadedModel, name: str, gpu_chunks: int) -> Iterator[Caches]:
    gpu = GpuTier(gpu_chunks)
    client = ChunkClient(agent.config.door, describe(loaded, name, "http://127.0.0.1:9", gpu), gpu.inventory)
    try:
        assert client.wait_connected(WAIT_S)
        with Caches(loaded, gpu=gpu, store=client) as caches:
            yield caches
    finally:
        client.stop()


def keys(loaded: LoadedModel) -> list[bytes]:
    chain = chunk_keys(loaded.identity.fleet_digest(), pack_tokens(PROMPT), CHUNK_TOKENS)
    return [directory_key(key) for key in chain]


def test_what_one_engine_computed_is_a_dram_hit_for_its_neighbour(agent: RunningAgent, tiny: LoadedModel) -> None:
    expected = run_alone(tiny, NoPrefixCache(), PROMPT)
    with engine(agent, tiny, "one", 8) as one, engine(agent, tiny, "two", 8) as two:
        first = run_alone(tiny, one.cache, PROMPT)
        one.writer.drain()
        second = run_alone(tiny, two.cache, PROMPT)
        third = run_alone(tiny, two.cache, PROMPT)
        assert one.outcomes == ["stored"] * 4
    assert (first.loaded, second.loaded, third.loaded) == (
        {},
        {"dram": 4 * CHUNK_TOKENS},
        {"gpu": 4 * CHUNK_TOKENS},
    )
    for outcome in (first, second, third):
        assert outcome.same_bits(expected)


def test_a_restarted_engine_finds_its_hosts_dram(agent: RunningAgent, tiny: LoadedModel) -> None:
    with engine(agent, tiny, "one", 8) as before:
        run_alone(tiny, before.cache, PROMPT)
        before.writer.drain()
    with engine(agent, tiny, "one", 8) as after:
        assert run_alone(tiny, after.cache, PROMPT).loaded == {"dram": 4 * CHUNK_TOKENS}


def test_chunks_are_announced_by_tier_and_withdrawn_from_gpu_alone(agent: RunningAgent, tiny: LoadedModel) -> None:
    with engine(agent, tiny, "one", 2) as one:
        run_alone(tiny, one.cache, PROMPT)
        one.writer.drain()
        first, *_, last = keys(tiny)
        eventually(lambda: agent.believed(first) == Tier.GPU | Tier.DRAM)
        eventually(lambda: agent.believed(last) == Tier.DRAM)
        run_alone(tiny, one.cache, words(3 * CHUNK_TOKENS, seed=9))
        eventually(lambda: agent.believed(first) == Tier.DRAM)


@pytest.mark.parametrize(("gpu_chunks", "kv_tokens"), [(8, 8 * CHUNK_TOKENS), (0, None)])
def test_the_engine_is_registered_as_it_describes_itself(
    agent: RunningAgent, tiny: LoadedModel, gpu_chunks: int, kv_tokens: int | None
) -> None:
    def registrations() -> list[EngineRegistration]:
        members = agent.call(agent.directory.members())  # type: ignore[attr-defined]
        return [each.registration for each in members if isinstance(each.registration, EngineRegistration)]

    with engine(agent, tiny, "one", gpu_chunks):
        eventually(registrations)
        found = registrations()[0]
    assert (found.engine, found.identity, found.models) == ("one", tiny.identity, ("tiny",))
    assert (found.chunk_tokens, found.context_tokens) == (CHUNK_TOKENS, tiny.context_tokens)
    assert found.kv_tokens == kv_tokens
    assert found.tokenizer_files.keys() == {"tokenizer.json", "chat_template.jinja", "tokenizer_config.json"}


def test_an_engine_without_its_agent_computes_what_it_would_have_loaded(tmp_path: Path, tiny: LoadedModel) -> None:
    with running_agent(tmp_path, dram_bytes=1 << 20) as agent, engine(agent, tiny, "one", 0) as one:
        first = run_alone(tiny, one.cache, PROMPT)
        one.writer.drain()
        agent.stop()
        second = run_alone(tiny, one.cache, PROMPT)
    assert second.loaded == {}
    assert second.same_bits(first)
