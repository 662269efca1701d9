"""Prompts that are known up to a part: the ids before it are the whole prompt's, whatever the part turns out to be."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack

import httpx
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.encoding.fuzz import load
from gateway.affinity import session_key
from gateway.encoding.added_tokens import AddedTokenSplitter
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder, build_renderer
from gateway.encoding.prompt_tokenizer import PromptTokenizer, Shared, WholeTexts, load_tokenizer
from gateway.encoding.tokenizer import HuggingFaceBackend
from gateway.openai_schema import CHAT, MESSAGES, RESPONSES
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.pipelines import nested_tokens, smollm2_content, stripping_tokens
from tests.gateway.rendered import asked
from tests.gateway.samples import MODEL
from tests.render_matrix import SPECIAL_TOKENS

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% if p.type == 'image' %}<|image|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
FILES = {"chat_template.jinja": TEMPLATE.encode(), "tokenizer_config.json": orjson.dumps(SPECIAL_TOKENS)}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}}
SYSTEM = {"role": "system", "content": "Look closely at all that the user shows, and say what is seen on it."}
REFERENCE = HuggingFaceBackend(smollm2_content().decode())


def shown(text: str, image: object = IMAGE) -> dict[str, object]:
    content = [{"type": "text", "text": text}, *([image] if image else [])]
    return {"messages": [SYSTEM, {"role": "user", "content": content}]}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[tuple[PromptTokenizer, int]]:
    pool = EncodePool()
    yield asyncio.run(load_tokenizer(smollm2_content(), Shared.of(pool), 2**20))
    pool.close()


async def test_the_ids_before_an_image_are_those_of_the_whole_prompt(tokenizer: tuple[PromptTokenizer, int]) -> None:
    encoder = Encoder(tokenizer[0], build_renderer("vllm", FILES), tokenizer[1])
    encoding = await encoder.encode(asked(CHAT, shown("What is this?")), 8192)
    assert encoding.tokens is not None
    assert (encoding.reason, encoding.is_whole) == ("media", False)
    for placeholder in ("<|image|>", "<img><img>", " <|im_end|>"):
        whole = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\nWhat is this?{placeholder}"
        assert REFERENCE.encode(whole).startswith(encoding.tokens)
    before = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>"
    assert encoding.tokens == REFERENCE.encode(before)


async def test_the_size_of_an_image_in_the_body_is_not_taken_for_tokens(tokenizer: tuple[PromptTokenizer, int]) -> None:
    encoder = Encoder(tokenizer[0], build_renderer("vllm", FILES), tokenizer[1])
    encoding = await encoder.encode(asked(CHAT, shown("What is this?")), 8192)
    assert 1000 < encoding.prompt_tokens < 2000


async def test_a_prompt_is_not_known_in_part_where_the_tokenizer_is_not_known_to_take_it_apart() -> None:
    pool = EncodePool()
    encoder = Encoder(WholeTexts(REFERENCE, Shared.of(pool), "for tests"), build_renderer("vllm", FILES), 100)
    encoding = await encoder.encode(asked(CHAT, shown("What is this?")), 8192)
    pool.close()
    assert (encoding.tokens, encoding.reason) == (None, "media")


async def test_special_tokens_around_a_prompt_known_in_part_are_not_guessed(
    tokenizer: tuple[PromptTokenizer, int],
) -> None:
    encoder = Encoder(tokenizer[0], build_renderer("vllm", FILES), tokenizer[1])
    encoding = await encoder.encode(asked(CHAT, {**shown("x"), "add_special_tokens": True}), 8192)
    assert (encoding.tokens, encoding.reason) == (None, "media")


@pytest.fixture(scope="module")
def nested() -> tuple[AddedTokenSplitter, HuggingFaceBackend]:
    content = json.dumps(nested_tokens())
    return AddedTokenSplitter(load("nested", content.encode(), "tokenizers").pipeline.added_tokens), HuggingFaceBackend(
        content
    )


pieces = st.lists(
    st.sampled_from(["<|", "x", "|>", "y", "\n", "\n\n", "▁", "the", " the", "<|the", "<|im_start|>", "<|im_", "a"]),
    max_size=14,
).map("".join)


@settings(max_examples=500, deadline=None)
@given(pieces, pieces)
@example("a<|", "x|>")
@example("<|im_start|>x|>", "y")
@example("the", "re")
def test_what_is_certain_of_a_text_is_certain_before_any_other(
    nested: tuple[AddedTokenSplitter, HuggingFaceBackend], text: str, rest: str
) -> None:
    splitter, backend = nested
    certain = splitter.certain_chars(text)
    assert backend.encode(text + rest).startswith(backend.encode(text[:certain]))


def test_something_is_certain_of_a_text_with_added_tokens(
    nested: tuple[AddedTokenSplitter, HuggingFaceBackend],
) -> None:
    text = "<|im_start|>user\nWhat is this?"
    assert nested[0].certain_chars(text) == len("<|im_start|>")
    assert nested[0].certain_chars("no token at all in this text, and none at its end") == 0


def test_nothing_is_certain_where_tokens_strip_spaces() -> None:
    tokens = load("strips", json.dumps(stripping_tokens()).encode(), "tokenizers").pipeline.added_tokens
    assert AddedTokenSplitter(tokens).certain_chars("<|im_start|>user\nWhat is this?" + "a" * 40) == 0


async def test_prompts_of_which_little_is_known_stay_with_their_session(
    tokenizer: tuple[PromptTokenizer, int],
) -> None:
    """Less than a chunk is known, and alike for all: were that their key, all would go to one engine."""
    encoder = Encoder(tokenizer[0], build_renderer("vllm", FILES), tokenizer[1])
    explained = {"x-warmroute-explain": "1"}
    seen: set[str] = set()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(MockEngine(f"e{number}")) for number in range(4)]
        gateway = await stack.enter_async_context(gateway_for(engines, renderer="vllm", encoder=encoder))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        for number in range(24):
            content = [{"type": "text", "text": "Look closely at this."}, IMAGE, {"type": "text", "text": str(number)}]
            fields = {"model": MODEL, "user": f"u{number}", "messages": [{"role": "user", "content": content}]}
            answers = [await client.post(gateway.url + CHAT, json=fields, headers=explained) for _ in range(2)]
            (chosen,) = {answer.headers["x-warmroute-engine"] for answer in answers}
            seen.add(chosen)
        assert gateway.count("warmroute_degraded_total", reason="partly_encoded_media") == 48
    assert len(seen) > 1


def test_a_responses_session_is_what_the_client_names_before_what_it_goes_on_from() -> None:
    one = session_key(asked(RESPONSES, {"input": "a", "previous_response_id": "r1"}), [])
    assert session_key(asked(RESPONSES, {"input": "b", "previous_response_id": "r1"}), []) == one
    assert session_key(asked(RESPONSES, {"input": "a", "previous_response_id": "r2"}), []) != one
    named = {"conversation": {"id": "c"}}
    kept = session_key(asked(RESPONSES, {"input": "a", "previous_response_id": "r1", **named}), [])
    assert session_key(asked(RESPONSES, {"input": "z", "previous_response_id": "r2", **named}), []) == kept


def test_a_conversation_of_messages_keeps_its_opening() -> None:
    first = {"role": "user", "content": "a"}
    one = session_key(asked(MESSAGES, {"system": "s", "messages": [first]}), [])
    later = [first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert session_key(asked(MESSAGES, {"system": "s", "messages": later}), []) == one
    assert session_key(asked(MESSAGES, {"system": "t", "messages": later}), []) != one
