"""Requests for every row of the table in `gateway/encoding/README.md`, and the table as it is written."""

from pathlib import Path
from typing import Any

from gateway.openai_schema import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RERANK, RESPONSES, SCORE
from tests.render_matrix import CALL, RESULT, USER, WEATHER
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
    (COUNT_TOKENS, "whatever is counted"): (TEXT, [{"messages": [USER]}]),
    (EMBEDDINGS, "a text or token ids"): (TEXT, [{"input": "a"}, {"input": [1, 2]}]),
    (EMBEDDINGS, "messages, or inputs with media"): (
        TEXT,
        [{"messages": [USER]}, {"input": [{"text": "a", "image": "http://x"}]}],
    ),
    (RERANK[0], "a query and documents"): (TEXT, [{"query": "q", "documents": ["d"]}]),
    (SCORE, "pairs of texts"): (TEXT, [{"text_1": "a", "text_2": "b"}]),
}


def table() -> dict[tuple[str, str], tuple[str, ...]]:
    rows = [line.strip("| \n").split(" | ") for line in README.read_text(encoding="utf-8").splitlines()]
    return {(row[0].strip("`"), row[1]): tuple(row[2:]) for row in rows if len(row) == 5 and row[0].startswith("`/")}
