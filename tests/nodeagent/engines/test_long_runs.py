"""Conversations longer than the host's DRAM, drives slower than hoped, agents that say nothing."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from directory.chunks import chunk_keys, pack_tokens
from nodeagent.client import ChunkClient, ChunkLabel, OpenedPiece, PutResult
from nodeagent.engines.reference.gpu_tier import GpuTier
from nodeagent.engines.reference.loaded_model import LoadedModel
from nodeagent.engines.reference.prefix_cache import (
    OPEN_TIMEOUT_MAX_S,
    OPEN_TIMEOUT_MIN_S,
    NoPrefixCache,
    PromptKeys,
)
from nodeagent.engines.reference.serve import describe
from nodeagent.engines.reference.speed import Speedometer
from nodeagent.opened_chunk import NO_ANSWER
from nodeagent.tiers.chunk_file import file_bytes, name_of
from nodeagent.tiers.machine_memory import PAGE_BYTES
from tests.nodeagent.engines.fakes import Caches, MemoryStore, run_alone
from tests.nodeagent.engines.test_scheduler import Rig
from tests.nodeagent.engines.tiny_model import CHUNK_TOKENS, words
from tests.nodeagent.running import WAIT_S, RunningAgent, eventually, running_agent

CHUNKS = 12
DRAM_SLOTS = 4
PROMPT = words(CHUNKS * CHUNK_TOKENS + 3)


def agent_on(folder: Path, loaded: LoadedModel) -> Any:
    slot = -(-loaded.chunk_bytes // PAGE_BYTES) * PAGE_BYTES
    return running_agent(
        folder,
        dram_bytes=PAGE_BYTES + DRAM_SLOTS * slot,
        nvme_path=str(folder / "nvme"),
        nvme_bytes=100 * file_bytes(loaded.chunk_bytes),
        nvme_write="through",
    )


class WrittenThrough(ChunkClient):
    """A client whose puts wait until their chunk is on disk, or DRAM would lose some of them first."""

    agent: RunningAgent

    def put(self, label: ChunkLabel, payload: memoryview, timeout_s: float) -> PutResult:
        result = super().put(label, payload, timeout_s)
        nvme = self.agent.agent._nvme
        eventually(lambda: self.agent.on_loop(lambda: nvme.holds(label.storage_key)), "the file")  # type: ignore[union-attr]
        return result


@contextmanager
def engine(agent: RunningAgent, loaded: LoadedModel, name: str, gpu_chunks: int = 0) -> Iterator[Caches]:
    gpu = GpuTier(gpu_chunks)
    client = WrittenThrough(agent.config.door, describe(loaded, name, "http://127.0.0.1:9", gpu), gpu.inventory)
    client.agent = agent
    try:
        assert client.wait_connected(WAIT_S)
        # Patience is not what these tests are about: they run on machines that may be busy.
        with Caches(loaded, gpu=gpu, store=client, prefill_s=lambda end, start: WAIT_S) as caches:
            yield caches
    finally:
        client.stop()


def fill(agent: RunningAgent, loaded: LoadedModel) -> None:
    with engine(agent, loaded, "writer") as caches:
        for chunks in range(4, CHUNKS + 1, 4):
            run_alone(loaded, caches.cache, PROMPT[: chunks * CHUNK_TOKENS + 3], max_tokens=1)
            caches.writer.drain()
        assert set(caches.outcomes) <= {"stored", "already"}


def tokens(agent: RunningAgent, name: str, **labels: str) -> float:
    return agent.metric(f"warmroute_tier_{name}_total", **labels)


@pytest.mark.parametrize("is_restarted", [False, True], ids=["the same agent", "after a restart"])
def test_a_conversation_of_three_times_the_dram_is_loaded_from_nvme_over_all_its_length(
    tmp_path: Path, tiny: LoadedModel, is_restarted: bool
) -> None:
    expected = run_alone(tiny, NoPrefixCache(), PROMPT)
    with agent_on(tmp_path, tiny) as agent:
        fill(agent, tiny)
        if not is_restarted:
            loads_all_from_nvme(agent, tiny, expected)
    if is_restarted:
        with agent_on(tmp_path, tiny) as agent:
            eventually(lambda: agent.status()["tiers"]["nvme"]["chunks"] == CHUNKS, "the index")
            loads_all_from_nvme(agent, tiny, expected)


def loads_all_from_nvme(agent: RunningAgent, loaded: LoadedModel, expected: Any) -> None:
    requested, missed = tokens(agent, "tokens_requested"), tokens(agent, "missed_tokens")
    hits = tokens(agent, "hit_tokens", tier="nvme", source="local")
    with engine(agent, loaded, "reader") as caches:
        outcome = run_alone(loaded, caches.cache, PROMPT)
        assert outcome.loaded == {"nvme": CHUNKS * CHUNK_TOKENS}
        assert outcome.cached_tokens == CHUNKS * CHUNK_TOKENS
        assert outcome.computed_tokens == len(PROMPT) - outcome.cached_tokens + 7
        assert outcome.same_bits(expected)
        eventually(lambda: agent.tier()["references"] == 0, "the closes")
        assert tokens(agent, "hit_tokens", tier="nvme", source="local") - hits == CHUNKS * CHUNK_TOKENS
        assert tokens(agent, "tokens_requested") - requested == CHUNKS * CHUNK_TOKENS
        assert tokens(agent, "missed_tokens") == missed
        assert agent.tier()["bytes_used"] <= agent.tier()["bytes_limit"]


def test_gpu_chunks_come_first_and_a_bad_file_ends_the_run(tmp_path: Path, tiny: LoadedModel) -> None:
    expected = run_alone(tiny, NoPrefixCache(), PROMPT)
    bad = chunk_keys(tiny.identity.shard_digest(0), pack_tokens(PROMPT), CHUNK_TOKENS)[9]
    with agent_on(tmp_path, tiny) as agent:
        fill(agent, tiny)
        with engine(agent, tiny, "reader", gpu_chunks=3) as caches:
            run_alone(tiny, caches.cache, PROMPT, max_tokens=1)
            name = name_of(bad).hex()
            path = tmp_path / "nvme" / name[:2] / name[2:4] / name
            path.write_bytes(path.read_bytes()[:-1])
            eventually(lambda: agent.on_loop(lambda: agent.agent._tier.hierarchy.find(bad)), "the bad chunk in DRAM")
            outcome = run_alone(tiny, caches.cache, PROMPT)
    assert outcome.loaded == {"gpu": 3 * CHUNK_TOKENS, "nvme": 6 * CHUNK_TOKENS}
    assert outcome.same_bits(expected)


@pytest.mark.parametrize("piece_chunks", [1, 2, 5, 11, 12])
def test_pieces_of_any_size_add_up_to_the_run(tiny: LoadedModel, piece_chunks: int) -> None:
    store = MemoryStore(piece_chunks)
    with Caches(tiny, store=store) as caches:
        first = run_alone(tiny, caches.cache, PROMPT)
        while len(store.chunks) < CHUNKS:
            caches.writer.drain()
            run_alone(tiny, caches.cache, PROMPT, max_tokens=1)
        before = len(store.timeouts_s)
        second = run_alone(tiny, caches.cache, PROMPT)
    assert second.loaded == {"dram": CHUNKS * CHUNK_TOKENS}
    assert second.same_bits(first)
    assert len(store.timeouts_s) - before == -(-CHUNKS // piece_chunks)
    assert store.references == 0


def keys(chunks: int) -> PromptKeys:
    return PromptKeys(tuple(number.to_bytes(32, "big") for number in range(chunks)), ())


@pytest.mark.parametrize(
    ("chunks", "waited_s", "expected_s"),
    [
        pytest.param(8, 0.0, 4.0, id="what computing would take"),
        pytest.param(8, 1.5, 2.5, id="less what was waited for already"),
        pytest.param(8, 9.0, OPEN_TIMEOUT_MIN_S, id="each open has its minimum"),
        pytest.param(0, 0.0, OPEN_TIMEOUT_MIN_S, id="however fast the engine is"),
        pytest.param(1_000, 0.0, OPEN_TIMEOUT_MAX_S, id="at most so much"),
        pytest.param(1_000, 4.0, OPEN_TIMEOUT_MAX_S - 4.0, id="for all opens of a prompt"),
    ],
)
def test_an_open_waits_as_long_as_recomputing_would_take(
    tiny: LoadedModel, chunks: int, waited_s: float, expected_s: float
) -> None:
    store = MemoryStore()
    with Caches(tiny, store=store, prefill_s=lambda end, start: (end - start) / CHUNK_TOKENS / 2) as caches:
        caches.cache.begin_open(keys(chunks + 3), 3, chunks + 3, waited_s).result(WAIT_S)
    assert store.timeouts_s == [pytest.approx(expected_s)]


def test_the_estimate_is_the_arithmetic_of_costs_at_the_observed_speed(tiny: LoadedModel) -> None:
    speed = Speedometer(tiny.model.shape)
    assert speed.prefill_s(512, 0) == 0.0
    speed.observe(256, 0, 2.0)
    assert speed.prefill_s(256, 0) == pytest.approx(2.0)
    assert speed.prefill_s(512, 256) > 2.0
    assert speed.prefill_s(512, 0) == pytest.approx(speed.prefill_s(256, 0) + speed.prefill_s(512, 256))


def test_an_agent_that_says_nothing_is_given_the_minimum_until_it_answers(tiny: LoadedModel) -> None:
    class Silent(MemoryStore):
        is_silent = True

        def open_piece(self, keys: Sequence[bytes], timeout_s: float) -> OpenedPiece:
            piece = super().open_piece(keys, timeout_s)
            return NO_ANSWER if self.is_silent else piece

    store = Silent()
    with Caches(tiny, store=store, prefill_s=lambda end, start: 5.0) as caches:
        for is_silent in (True, True, False, False):
            store.is_silent = is_silent
            run_alone(tiny, caches.cache, PROMPT, max_tokens=1)
    assert store.timeouts_s == [5.0, OPEN_TIMEOUT_MIN_S, OPEN_TIMEOUT_MIN_S, 5.0]


class SlowStore(MemoryStore):
    """Answers opens of long runs when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Semaphore(0)
        self.may_answer = threading.Event()

    def open_piece(self, keys: Sequence[bytes], timeout_s: float) -> OpenedPiece:
        if len(keys) > 2:
            self.is_asked.release()
            assert self.may_answer.wait(WAIT_S)
        return super().open_piece(keys, timeout_s)


@pytest.fixture
def slow(tiny: LoadedModel) -> Iterator[tuple[SlowStore, Rig]]:
    store = SlowStore()
    with Caches(tiny, store=store) as caches:
        store.may_answer.set()
        while len(store.chunks) < CHUNKS:
            run_alone(tiny, caches.cache, PROMPT, max_tokens=1)
            caches.writer.drain()
            assert store.is_asked.acquire(timeout=WAIT_S)
        store.may_answer.clear()
        rig = Rig(tiny, caches.cache)
        rig.model.open_gate()
        yield store, rig
        store.may_answer.set()
        rig.scheduler.stop()


def test_replies_go_on_while_a_prompt_waits_for_its_chunks(slow: tuple[SlowStore, Rig]) -> None:
    store, rig = slow
    reply = rig.submit(CHUNK_TOKENS, 100, seed=3)
    reply.next()
    waiting = rig.submit(len(PROMPT), 1)
    assert store.is_asked.acquire(timeout=WAIT_S)
    assert reply.read_all()[-1].completion_tokens == 100
    assert waiting.steps.empty()
    store.may_answer.set()
    assert waiting.read_all()[-1].cached_tokens == CHUNKS * CHUNK_TOKENS
    assert store.references == 0


def test_a_prompt_that_is_given_up_while_it_waits_makes_room_and_gives_back(slow: tuple[SlowStore, Rig]) -> None:
    store, rig = slow
    gone = rig.submit(len(PROMPT), 1)
    assert store.is_asked.acquire(timeout=WAIT_S)
    gone.generation.cancel()
    assert rig.submit(CHUNK_TOKENS, 1, seed=3).read_all()[-1].finish_reason == "length"
    assert store.references == 0
    store.may_answer.set()
    eventually(lambda: store.gave_back, "the late chunks")
    assert store.references == 0
    assert gone.steps.empty()
