"""The table of `gateway/encoding/README.md` is what the encoders do, streamed or not."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder, Encoding, build_renderer
from gateway.encoding.prompt_tokenizer import PromptTokenizer, Shared, load_tokenizer
from gateway.openai_schema import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RERANK, RESPONSES, SCORE
from tests.gateway.pipelines import smollm2_content
from tests.gateway.rendered import asked
from tests.render_matrix import CALL, RESULT, SPECIAL_TOKENS, USER, WEATHER
from tests.render_matrix import RESPONSES as RESPONSES_ASKED

README = Path(__file__).parent.parent.parent / "gateway" / "encoding" / "README.md"
KINDS = ("reference", "vllm", "sglang")
TEXT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LISTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% if p.type == 'image' %}<|image|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
BEFORE = {"role": "system", "content": "Look closely at what the user shows."}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SHOWN = {"messages": [BEFORE, {"role": "user", "content": [{"type": "text", "text": "This:"}, IMAGE]}]}
BLOCK = {"type": "image", "source": {"type": "url", "url": "http://x"}}

ASKED: dict[tuple[str, str], tuple[str, list[dict[str, Any]]]] = {
    (CHAT, "messages of text, continued or not"): (
        TEXT,
        [
            {"messages": [BEFORE, USER]},
            {
                "messages": [USER, {"role": "assistant", "content": "It is"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ],
    ),
    (CHAT, "parts of text"): (TEXT, [{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}]),
    (CHAT, "`developer`"): (TEXT, [{"messages": [{"role": "developer", "content": "Be brief."}, USER]}]),
    (CHAT, "tools, tool calls, results"): (
        TEXT,
        [
            {"messages": [USER], "tools": [WEATHER]},
            {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]},
        ],
    ),
    (CHAT, "`reasoning_effort`, `chat_template_kwargs`"): (
        TEXT,
        [{"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"extra": "x"}}],
    ),
    (CHAT, "`documents`"): (TEXT, [{"messages": [USER], "documents": [{"title": "t", "text": "u"}]}]),
    (CHAT, "images, audio, video in a template of parts"): (LISTS, [SHOWN]),
    (CHAT, "media in a template of one text"): (TEXT, [SHOWN]),
    (CHAT, "a `chat_template` of its own"): (TEXT, [{"messages": [USER], "chat_template": "x"}]),
    (CHAT, "`input_ids`"): (TEXT, [{"messages": [USER], "input_ids": [1, 2, 3]}]),
    (COMPLETIONS, "a text"): (TEXT, [{"prompt": "a b"}]),
    (COMPLETIONS, "several texts (the first one decides)"): (TEXT, [{"prompt": ["a b", "c"]}]),
    (COMPLETIONS, "token ids"): (TEXT, [{"prompt": [1, 2]}]),
    (COMPLETIONS, "several lists of token ids"): (TEXT, [{"prompt": [[1, 2], [3]]}]),
    (COMPLETIONS, "`truncate_prompt_tokens`"): (TEXT, [{"prompt": "a b", "truncate_prompt_tokens": 1}]),
    (RESPONSES, "text, messages, tools, calls and results, reasoning"): (
        TEXT,
        [
            {"input": "a", "instructions": "b", "tools": [{"type": "function", "name": "f"}]},
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
            RESPONSES_ASKED["an agent's turns"],
        ],
    ),
    (RESPONSES, "other items, media"): (
        LISTS,
        [
            {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}]},
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        ],
    ),
    (RESPONSES, "`previous_response_id`, `conversation`"): (
        TEXT,
        [{"input": "a", "previous_response_id": "resp_1"}, {"input": "a", "conversation": {"id": "c"}}],
    ),
    (MESSAGES, "text, thinking, tools and results"): (
        TEXT,
        [
            {"system": "s", "messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 2000}},
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
                ]
            },
        ],
    ),
    (MESSAGES, "images in a template of parts"): (
        LISTS,
        [{"system": "Look closely at this.", "messages": [{"role": "user", "content": [BLOCK]}]}],
    ),
    (EMBEDDINGS, "a text or token ids"): (TEXT, [{"input": "a"}, {"input": [1, 2]}]),
    (EMBEDDINGS, "messages"): (TEXT, [{"messages": [USER]}]),
    (RERANK[0], "a query and documents"): (TEXT, [{"query": "q", "documents": ["d"]}]),
    (SCORE, "pairs of texts"): (TEXT, [{"text_1": "a", "text_2": "b"}]),
}


def table() -> dict[tuple[str, str], tuple[str, ...]]:
    rows = [line.strip("| \n").split(" | ") for line in README.read_text(encoding="utf-8").splitlines()]
    return {(row[0].strip("`"), row[1]): tuple(row[2:]) for row in rows if len(row) == 5 and row[0].startswith("`/")}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[tuple[PromptTokenizer, int]]:
    """SmolLM2's: its texts are short, and encoded inline."""
    pool = EncodePool()
    yield asyncio.run(load_tokenizer(smollm2_content(), Shared.of(pool), 2**20))
    pool.close()


def class_of(encoding: Encoding) -> str:
    if encoding.tokens is None:
        assert encoding.reason
        return "affinity"
    assert encoding.tokens
    return "exact" if encoding.is_whole else "up to"


def test_the_table_has_a_row_for_every_shape_that_is_tried() -> None:
    assert list(table()) == list(ASKED)


@pytest.mark.parametrize("row", ASKED, ids=lambda row: " ".join(row))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_row_of_the_table_is_what_the_encoders_do(
    tokenizer: tuple[PromptTokenizer, int], row: tuple[str, str], stream: bool
) -> None:
    template, several = ASKED[row]
    contents = {"chat_template.jinja": template.encode(), "tokenizer_config.json": orjson.dumps(SPECIAL_TOKENS)}
    for kind, expected in zip(KINDS, table()[row], strict=True):
        encoder = Encoder(tokenizer[0], build_renderer(kind, contents), tokenizer[1])
        for fields in several:
            encoding = await encoder.encode(asked(row[0], {**fields, "stream": stream}), 8192)
            assert class_of(encoding) == expected, (kind, fields, encoding.reason)
