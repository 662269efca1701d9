import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nodeagent.engines.reference.errors import Overloaded
from nodeagent.engines.reference.generation import Generation, GenerationRequest, GenerationStep
from nodeagent.engines.reference.loaded_model import LoadedModel
from nodeagent.engines.reference.metrics import EngineMetrics
from nodeagent.engines.reference.prefix_cache import NoPrefixCache
from nodeagent.engines.reference.sampling import SamplingSettings
from nodeagent.engines.reference.scheduler import Scheduler
from tests.nodeagent.engines.fakes import Caches, GatedModel
from tests.nodeagent.engines.tiny_model import CHUNK_TOKENS, words


class Listener:
    """A request and the steps it got."""

    def __init__(self, prompt_tokens: int, max_tokens: int, seed: int = 0) -> None:
        self.steps: queue.SimpleQueue[GenerationStep] = queue.SimpleQueue()
        request = GenerationRequest(
            np.array(words(prompt_tokens, seed), np.uint32), max_tokens, SamplingSettings(0.0), ignore_eos=True
        )
        self.generation = Generation(request, self.steps.put)

    def next(self) -> GenerationStep:
        return self.steps.get(timeout=30)

    def read_all(self) -> list[GenerationStep]:
        steps = [self.next()]
        while steps[-1].finish_reason is None:
            steps.append(self.next())
        return steps


class Rig:
    """A scheduler on a gated model."""

    def __init__(self, loaded: LoadedModel, cache: Any = None, **limits: int) -> None:
        self.model = GatedModel(loaded.model)
        self.metrics = EngineMetrics("tiny")
        model: Any = self.model
        self.scheduler = Scheduler(
            model, loaded.tokenizer, cache or NoPrefixCache(), CHUNK_TOKENS, self.metrics, loaded.speed, **limits
        )
        self.scheduler.start()

    def submit(self, prompt_tokens: int, max_tokens: int, seed: int = 0) -> Listener:
        listener = Listener(prompt_tokens, max_tokens, seed)
        self.scheduler.submit(listener.generation)
        return listener

    def value(self, name: str) -> float:
        found = self.metrics.registry.get_sample_value(name, {"engine": "0", "model_name": "tiny"})
        assert found is not None
        return found


@pytest.fixture
def rig(tiny: LoadedModel) -> Iterator[Rig]:
    rig = Rig(tiny, waiting_max=2, running_max=2)
    yield rig
    rig.model.open_gate()
    rig.scheduler.stop()


def test_a_reply_is_told_token_by_token_and_ends_with_its_reason(rig: Rig) -> None:
    rig.model.open_gate()
    steps = rig.submit(20, 5).read_all()
    assert [step.completion_tokens for step in steps] == [1, 2, 3, 4, 5]
    assert [step.finish_reason for step in steps] == [None] * 4 + ["length"]
    assert rig.value("vllm:generation_tokens_total") == 5
    assert rig.value("vllm:prompt_tokens_total") == 20


def test_a_running_reply_goes_on_between_the_batches_of_a_long_prompt(rig: Rig) -> None:
    short = rig.submit(4, 50)
    rig.model.step()
    short.next()
    rig.model.wait_for_pass()
    long = rig.submit(6 * CHUNK_TOKENS, 1)
    rig.model.let_go()
    for _ in range(12):
        rig.model.step()
    rig.model.wait_for_pass()
    assert long.read_all()[-1].completion_tokens == 1
    during = rig.model.passes[2:14]
    assert during == [CHUNK_TOKENS, 1] * 6, "one token of the reply after each batch of the prompt"


def test_prompts_are_computed_in_the_order_of_arrival(rig: Rig) -> None:
    rig.model.open_gate()
    first, second = rig.submit(3 * CHUNK_TOKENS, 1), rig.submit(5, 1)
    first.read_all()
    second.read_all()
    assert rig.model.passes == [CHUNK_TOKENS] * 3 + [5]


def test_a_request_that_nobody_waits_for_is_dropped_while_its_prompt_is_computed(rig: Rig) -> None:
    gone = rig.submit(20 * CHUNK_TOKENS, 100)
    rig.model.wait_for_pass()
    gone.generation.cancel()
    other = rig.submit(5, 1)
    rig.model.open_gate()
    other.read_all()
    assert rig.model.passes == [CHUNK_TOKENS, 5]
    assert gone.steps.empty()


def test_a_request_that_nobody_waits_for_is_dropped_while_it_replies(rig: Rig) -> None:
    gone = rig.submit(5, 400)
    rig.model.step()
    gone.next()
    rig.model.wait_for_pass()
    gone.generation.cancel()
    other = rig.submit(6, 1)
    rig.model.open_gate()
    other.read_all()
    assert rig.model.passes == [5, 1, 6]


def test_a_request_that_nobody_waits_for_leaves_the_queue(rig: Rig) -> None:
    busy = rig.submit(5, 3)
    rig.model.wait_for_pass()
    gone = [rig.submit(7, 1), rig.submit(8, 1)]
    for each in gone:
        each.generation.cancel()
    last = rig.submit(9, 1)
    rig.model.open_gate()
    busy.read_all()
    last.read_all()
    assert 7 not in rig.model.passes
    assert 8 not in rig.model.passes


def test_a_full_queue_refuses_with_429(rig: Rig) -> None:
    rig.submit(5, 1)
    rig.model.wait_for_pass()
    rig.submit(6, 1)
    rig.submit(7, 1)
    with pytest.raises(Overloaded) as refusal:
        rig.submit(8, 1)
    assert refusal.value.status == 429


def test_no_more_than_the_bound_run_at_once(rig: Rig) -> None:
    replies = [rig.submit(5, 30)]
    rig.model.step()
    rig.model.wait_for_pass()
    replies.append(rig.submit(6, 30))
    rig.model.let_go()
    rig.model.step()
    replies[1].next()
    rig.model.wait_for_pass()
    third = rig.submit(7, 1)
    rig.model.let_go()
    for _ in range(10):
        rig.model.step()
    assert 7 not in rig.model.passes
    assert rig.scheduler.running == 2
    rig.model.open_gate()
    third.read_all()


def test_a_request_that_fails_costs_only_itself(tiny: LoadedModel) -> None:
    class Failing(NoPrefixCache):
        def find(self, tokens: bytes, scope: Any) -> Any:
            if len(tokens) == 4 * 5:
                raise OSError("planted")
            return super().find(tokens, scope)

    rig = Rig(tiny, Failing())
    rig.model.open_gate()
    failed, fine = rig.submit(5, 1), rig.submit(6, 1)
    step = failed.next()
    assert step.finish_reason == "abort"
    assert step.failure is not None
    assert "planted" not in step.failure
    assert fine.read_all()[-1].finish_reason == "length"
    rig.scheduler.stop()


def test_stopping_tells_everybody(tiny: LoadedModel) -> None:
    rig = Rig(tiny, running_max=1)
    running = rig.submit(5, 400)
    rig.model.step()
    running.next()
    rig.model.wait_for_pass()
    waiting = rig.submit(6, 1)
    rig.model.open_gate()
    rig.scheduler.stop()
    assert running.read_all()[-1].failure == waiting.next().failure == "the engine is stopping"
    with pytest.raises(Overloaded) as refusal:
        rig.submit(5, 1)
    assert refusal.value.status == 503
    assert not rig.scheduler.is_alive


def test_cached_tokens_are_counted_by_tier(tiny: LoadedModel) -> None:
    with Caches(tiny, gpu_chunks=2) as caches:
        rig = Rig(tiny, caches.cache)
        rig.model.open_gate()
        prompt = 4 * CHUNK_TOKENS + 1
        assert rig.submit(prompt, 1).read_all()[-1].cached_tokens == 0
        caches.writer.drain()
        assert rig.submit(prompt, 1).read_all()[-1].cached_tokens == 4 * CHUNK_TOKENS
        rig.scheduler.stop()
    assert rig.value("vllm:prefix_cache_queries_total") == 2 * prompt
    assert rig.value("vllm:prefix_cache_hits_total") == 2 * CHUNK_TOKENS
    assert rig.value("vllm:external_prefix_cache_hits_total") == 2 * CHUNK_TOKENS
    loaded = rig.metrics.registry.get_sample_value(
        "warmroute_engine_loaded_tokens_total", {"model": "tiny", "tier": "dram"}
    )
    assert loaded == 2 * CHUNK_TOKENS
