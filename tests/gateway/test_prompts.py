"""A prompt for engines that work with different files: each is encoded, named and found with its own."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.chunks import chunk_keys, directory_key
from directory.identity import Scope
from directory.memory import MemoryDirectory
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder, Encoders, build_renderer
from gateway.encoding.model_files import ModelFiles
from gateway.encoding.prompt_tokenizer import WholeTexts
from gateway.encoding.tokenizer import Backend, HuggingFaceBackend
from gateway.fleet import EngineView
from gateway.lookup import CHAINS_MAX, ChunkLookup
from gateway.openai_schema import COMPLETIONS, InferenceRequest, parse_request
from gateway.prompts import EncodedPrompt, Prompts
from tests.gateway.pipelines import PIPELINES
from tests.gateway.samples import MODEL
from tests.gateway.views import view

CHUNK_TOKENS = 4
BACKENDS: dict[str, Backend] = {
    digest * 64: HuggingFaceBackend(orjson.dumps(PIPELINES[name]()).decode())
    for digest, name in {"a": "gpt2 and digits", "b": "gpt2, a space before gaps"}.items()
}
FILES = {"chat_template.jinja": b"{{ messages[0].content }}", "tokenizer_config.json": b"{}"}


class LoadedEncoders(Encoders):
    """Those of some files are loaded: by their tokenizer's digest."""

    def __init__(self, loaded: Mapping[str, Backend], pool: EncodePool) -> None:
        self.loaded, self.pool = loaded, pool

    def find(self, files: ModelFiles) -> Encoder | None:
        backend = self.loaded.get(dict(files.digests).get("tokenizer.json", ""))
        if backend is None:
            return None
        return Encoder(WholeTexts(backend, self.pool, "for tests"), build_renderer(files.renderer, FILES), 100)


@pytest.fixture(scope="module")
def pool() -> Iterator[EncodePool]:
    pool = EncodePool()
    yield pool
    pool.close()


def engine(name: str, digest: str, **other: Any) -> EngineView:
    files = {"tokenizer.json": digest * 64, **other.pop("files", {})}
    return view(name, tokenizer_files=files, **other)


def asked(text: str) -> InferenceRequest:
    return parse_request(COMPLETIONS, orjson.dumps({"model": MODEL, "prompt": text}))


async def encoded(
    text: str, views: Sequence[EngineView], pool: EncodePool, loaded: Mapping[str, Backend] = BACKENDS
) -> EncodedPrompt:
    lookup = ChunkLookup(MemoryDirectory(lambda: 0.0), lambda: 0.0)
    return await Prompts(LoadedEncoders(loaded, pool), lookup).encode(asked(text), tuple(views))


def keys_of(prompt: EncodedPrompt) -> dict[str, tuple[bytes, ...]]:
    chains = prompt.chains(Scope())
    return {each.engine: chain.keys for chain in chains for each in chain.group.engines}


def expected_keys(text: str, each: EngineView) -> tuple[bytes, ...]:
    assert each.registration is not None
    ids = BACKENDS[each.registration.tokenizer_files["tokenizer.json"]].encode(text)
    keys = chunk_keys(each.registration.identity.fleet_digest(), ids, CHUNK_TOKENS)
    usable = max(0, len(ids) // 4 - 1) // CHUNK_TOKENS
    return tuple(directory_key(key) for key in keys[:usable])


texts = st.lists(st.text(max_size=8) | st.sampled_from(["1234", " 567", "<|im_end|>", "word "]), max_size=20)


@given(texts.map("".join), st.lists(st.sampled_from("ab"), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_each_engines_keys_come_from_its_own_ids(text: str, digests: list[str]) -> None:
    pool = EncodePool()
    views = [engine(f"e{number}", digest) for number, digest in enumerate(digests)]
    try:
        prompt = asyncio.run(encoded(text, views, pool))
    finally:
        pool.close()
    assert keys_of(prompt) == {each.engine: expected_keys(text, each) for each in views}
    for each in views:
        own = prompt.of(each)
        assert own is not None
        assert own.tokens == BACKENDS[each.registration.tokenizer_files["tokenizer.json"]].encode(text)  # type: ignore[union-attr]


async def test_the_same_text_has_other_keys_at_an_engine_with_another_tokenizer(pool: EncodePool) -> None:
    one, other = engine("a", "a"), engine("b", "b")
    keys = keys_of(await encoded("In 2024, 1234567 boats left; 89 came back." * 3, [one, other], pool))
    assert keys["a"]
    assert keys["b"]
    assert not set(keys["a"]) & set(keys["b"])


async def test_an_engine_whose_encoder_is_not_loaded_is_left_without_matches(pool: EncodePool) -> None:
    views = [engine("new", "c"), engine("old", "a")]
    prompt = await encoded("one two three four five six seven", views, pool)
    assert set(keys_of(prompt)) == {"old"}
    assert prompt.of(views[0]) is None
    assert prompt.shortfalls == ("not_encoded_for_all",)
    assert prompt.best.is_whole


async def test_without_any_encoder_the_prompt_is_not_encoded(pool: EncodePool) -> None:
    prompt = await encoded("one two three", [engine("new", "c")], pool)
    assert (prompt.best.tokens, prompt.best.reason) == (None, "no_tokenizer")
    assert prompt.shortfalls == ("not_encoded_no_tokenizer",)


async def test_another_template_is_another_group_though_the_tokenizer_is_the_same(pool: EncodePool) -> None:
    views = [engine("a", "a"), engine("b", "a", files={"chat_template.jinja": "d" * 64})]
    prompt = await encoded("one two three four five six", views, pool)
    assert len(prompt.groups) == 2
    assert len(prompt.by_files) == 2


async def test_only_so_many_groups_are_encoded_and_those_that_can_be(pool: EncodePool) -> None:
    late = [engine(f"late{number}", "c", files={"x": str(number)}) for number in range(CHAINS_MAX)]
    ready = [engine(f"e{number}", "a", files={"x": str(number)}) for number in range(CHAINS_MAX + 2)]
    prompt = await encoded("one two three four five six", [*late, *ready], pool)
    assert set(keys_of(prompt)) == {each.engine for each in ready[:CHAINS_MAX]}
    assert len(prompt.by_files) == CHAINS_MAX


async def test_an_engine_that_knows_the_whole_prompt_is_the_measure(pool: EncodePool) -> None:
    views = [engine("i", "a", renderer="vllm-unknown"), engine("v", "a", renderer="vllm")]
    prompt = await encoded("one two three four five six", views, pool)
    assert prompt.best.is_whole
    assert prompt.shortfalls == ("not_encoded_own_tokenizer",)
    assert set(keys_of(prompt)) == {"v"}


async def test_a_prompts_length_is_said_where_it_differs_between_engines(pool: EncodePool) -> None:
    views = [engine("a", "a"), engine("b", "b")]
    text = "<|im_end|>x<|im_end|>1"
    prompt = await encoded(text, views, pool)
    lengths = [len(BACKENDS[digest * 64].encode(text)) // 4 for digest in "ab"]
    assert [prompt.tokens_of(each) for each in views] == lengths
    assert (await encoded(text, views[:1], pool)).tokens_of(views[0]) is None
