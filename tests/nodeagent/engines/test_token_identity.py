"""The promise of the engine: a cache changes no bit, whatever it holds and wherever that comes from."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.chunks import chunk_keys, directory_key, pack_tokens
from directory.identity import Scope
from nodeagent.engines.reference.loaded_model import LoadedModel
from nodeagent.engines.reference.prefix_cache import NoPrefixCache
from tests.nodeagent.engines.fakes import Caches, MemoryStore, run_alone
from tests.nodeagent.engines.tiny_model import CHUNK_TOKENS, words

PROMPT = words(5 * CHUNK_TOKENS + 7)
ALICE = Scope(salt="alice")


def storage_keys(loaded: LoadedModel, tokens: list[int], scope: Scope | None = None) -> list[bytes]:
    root = (scope or Scope()).root(loaded.identity.shard_digest(0))
    return chunk_keys(root, pack_tokens(tokens), CHUNK_TOKENS)


def test_a_second_run_loads_all_full_chunks_from_gpu(tiny: LoadedModel) -> None:
    with Caches(tiny, gpu_chunks=8) as caches:
        first = run_alone(tiny, caches.cache, PROMPT)
        second = run_alone(tiny, caches.cache, PROMPT)
    assert first.same_bits(run_alone(tiny, NoPrefixCache(), PROMPT))
    assert second.same_bits(first)
    assert (first.loaded, second.loaded) == ({}, {"gpu": 5 * CHUNK_TOKENS})
    assert second.cached_tokens == 5 * CHUNK_TOKENS
    assert first.computed_tokens - second.computed_tokens == 5 * CHUNK_TOKENS


def test_another_engine_of_the_host_loads_from_dram(tiny: LoadedModel) -> None:
    store = MemoryStore()
    with Caches(tiny, gpu_chunks=8, store=store) as one:
        first = run_alone(tiny, one.cache, PROMPT)
        one.writer.drain()
    with Caches(tiny, gpu_chunks=8, store=store) as other:
        second = run_alone(tiny, other.cache, PROMPT)
        third = run_alone(tiny, other.cache, PROMPT)
    assert second.loaded == {"dram": 5 * CHUNK_TOKENS}
    assert third.loaded == {"gpu": 5 * CHUNK_TOKENS}
    assert second.same_bits(first)
    assert third.same_bits(first)
    assert store.references == 0


def test_a_prompt_of_whole_chunks_still_computes_its_last_one(tiny: LoadedModel) -> None:
    prompt = PROMPT[: 2 * CHUNK_TOKENS]
    with Caches(tiny, gpu_chunks=8) as caches:
        first = run_alone(tiny, caches.cache, prompt)
        second = run_alone(tiny, caches.cache, prompt)
    assert second.loaded == {"gpu": CHUNK_TOKENS}
    assert second.same_bits(first)


def test_a_chunk_that_fails_its_check_is_never_used(tiny: LoadedModel) -> None:
    store = MemoryStore()
    with Caches(tiny, gpu_chunks=1, store=store) as one:
        first = run_alone(tiny, one.cache, PROMPT)
        one.writer.drain()
    store.corrupt.add(storage_keys(tiny, PROMPT)[2])
    with Caches(tiny, gpu_chunks=8, store=store) as other:
        second = run_alone(tiny, other.cache, PROMPT)
    assert second.loaded == {"dram": 2 * CHUNK_TOKENS}
    assert second.same_bits(first)
    assert store.references == 0


def test_a_chunk_of_another_length_is_a_miss(tiny: LoadedModel) -> None:
    store = MemoryStore()
    store.chunks[storage_keys(tiny, PROMPT)[0]] = b"short"
    with Caches(tiny, gpu_chunks=8, store=store) as caches:
        outcome = run_alone(tiny, caches.cache, PROMPT)
    assert outcome.loaded == {}
    assert outcome.same_bits(run_alone(tiny, NoPrefixCache(), PROMPT))


def test_a_salt_shares_nothing(tiny: LoadedModel) -> None:
    with Caches(tiny, gpu_chunks=16) as caches:
        run_alone(tiny, caches.cache, PROMPT)
        salted = run_alone(tiny, caches.cache, PROMPT, scope=ALICE)
        again = run_alone(tiny, caches.cache, PROMPT, scope=ALICE)
        caches.writer.drain()
        keys = set(caches.store.chunks)
    assert salted.loaded == {}
    assert again.loaded == {"gpu": 5 * CHUNK_TOKENS}
    assert keys == set(storage_keys(tiny, PROMPT)) | set(storage_keys(tiny, PROMPT, ALICE))


def test_chunks_are_labelled_with_fleet_keys_and_parents(tiny: LoadedModel) -> None:
    with Caches(tiny, gpu_chunks=8) as caches:
        run_alone(tiny, caches.cache, PROMPT)
        caches.writer.drain()
        labels = list(caches.store.labels.values())
    fleet = chunk_keys(tiny.identity.fleet_digest(), pack_tokens(PROMPT), CHUNK_TOKENS)
    assert [label.directory_key for label in labels] == [directory_key(key) for key in fleet]
    assert [label.storage_key for label in labels] == storage_keys(tiny, PROMPT)
    assert [label.parent for label in labels] == [None, *storage_keys(tiny, PROMPT)[:-1]]
    assert [label.position for label in labels] == list(range(5))
    assert set(caches.gpu.inventory()) == caches.store.in_gpu == {directory_key(key) for key in fleet}


def test_a_replys_kv_is_never_stored(tiny: LoadedModel) -> None:
    with Caches(tiny, gpu_chunks=16) as caches:
        run_alone(tiny, caches.cache, PROMPT[: CHUNK_TOKENS - 2], max_tokens=3 * CHUNK_TOKENS)
        caches.writer.drain()
        assert caches.store.chunks == {}
        assert len(caches.gpu) == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_mix_of_tiers_holes_and_faults_changes_a_bit(tiny: LoadedModel, data: st.DataObject) -> None:
    store = MemoryStore()
    draw = data.draw
    with Caches(tiny, gpu_chunks=draw(st.integers(0, 6)), store=store) as caches:
        for _ in range(draw(st.integers(1, 4))):
            shared = draw(st.integers(0, 4 * CHUNK_TOKENS))
            tail = draw(st.integers(1, 2 * CHUNK_TOKENS))
            prompt = words(shared) + words(tail, seed=draw(st.integers(1, 3)))
            scope = draw(st.sampled_from([Scope(), ALICE]))
            outcome = run_alone(tiny, caches.cache, prompt, max_tokens=3, scope=scope)
            assert outcome.same_bits(run_alone(tiny, NoPrefixCache(), prompt, max_tokens=3))
            assert outcome.cached_tokens <= (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
            caches.writer.drain()
            held = sorted(store.chunks)
            if held:
                for key in draw(st.lists(st.sampled_from(held), max_size=3)):
                    store.chunks.pop(key, None)
                store.corrupt = set(draw(st.lists(st.sampled_from(held), max_size=1)))
            assert caches.store.in_gpu == set(caches.gpu.inventory())
    assert store.references == 0


TEXT = "The lighthouse keeper wrote down every ship that passed, its flag, its course and the hour. "


@pytest.fixture(scope="module")
def real_prompt(real: LoadedModel) -> list[int]:
    text = "<|im_start|>user\n" + "".join(f"Entry {i}. {TEXT}" for i in range(25))
    return real.tokenizer.encode(text + "What did the keeper write down?<|im_end|>\n<|im_start|>assistant\n")


def test_the_real_model_gives_the_same_bits_with_every_cache(real: LoadedModel, real_prompt: list[int]) -> None:
    assert len(real_prompt) >= 600
    store = MemoryStore()
    chunks = (len(real_prompt) - 1) // real.chunk_tokens
    expected = run_alone(real, NoPrefixCache(), real_prompt, max_tokens=6)
    with Caches(real, gpu_chunks=1, store=store) as one:
        filling = run_alone(real, one.cache, real_prompt, max_tokens=6)
        one.writer.drain()
        mixed = run_alone(real, one.cache, real_prompt, max_tokens=6)
    with Caches(real, gpu_chunks=4, store=store) as other:
        from_dram = run_alone(real, other.cache, real_prompt, max_tokens=6)
        from_gpu = run_alone(real, other.cache, real_prompt, max_tokens=6)
    assert mixed.loaded == {"gpu": 256, "dram": 256 * (chunks - 1)}
    assert from_dram.loaded == {"dram": 256 * chunks}
    assert from_gpu.loaded == {"gpu": 256 * chunks}
    for outcome in (filling, mixed, from_dram, from_gpu):
        assert outcome.same_bits(expected)


def test_the_real_model_knows_the_capital_of_france(real: LoadedModel) -> None:
    prompt = real.tokenizer.encode(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert run_alone(real, NoPrefixCache(), prompt, max_tokens=7).text == "The capital of France is Paris."
