"""What is asked: conversations of several turns over shared system prompts.

Their text is the words of `bench.fleet.words` in lines, as prose and code are.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from tokenizers import Tokenizer

from bench.fleet.words import chat_text, some_words, tokenizer_files
from bench.gateway.client import MARK
from bench.gateway.engine import MODEL

SYSTEM_PROMPTS = 8
TURNS = 4
"""Of a conversation, before its last question."""
LINE_WORDS, LINE_TOKENS = 12, 14
"""The first word of a line has two tokens, for want of the blank in front, and the line's end is one."""
WORD_CHARS = 5


@dataclass(frozen=True, slots=True)
class Conversation:
    """A body, with a mark in its last question, and the token ids of all before that: what engines have cached."""

    body: bytes
    known_ids: tuple[int, ...]


@cache
def conversations(tokens: int, count: int, output_tokens: int, is_streamed: bool) -> tuple[Conversation, ...]:
    """`count` conversations of about `tokens` tokens, half of them the system prompt's."""
    return tuple(_conversation(tokens, number, output_tokens, is_streamed) for number in range(count))


def _conversation(tokens: int, number: int, output_tokens: int, is_streamed: bool) -> Conversation:
    turn_tokens = tokens // 2 // (TURNS * 2)
    messages: list[Mapping[str, str]] = [
        {"role": "system", "content": _lines(f"{tokens} of {number % SYSTEM_PROMPTS}", tokens // 2)}
    ]
    for turn in range(TURNS):
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": _lines(f"{tokens} {number} {turn} {role}", turn_tokens)})
    messages.append({"role": "user", "content": f"what of {MARK.decode()}"})
    ids = _tokenizer().encode(chat_text(messages), add_special_tokens=False).ids
    body: dict[str, object] = {"model": MODEL, "messages": messages, "max_tokens": output_tokens, "user": str(len(ids))}
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    before = len(_tokenizer().encode(chat_text(messages[:-1]), add_special_tokens=False).ids) - 1
    return Conversation(json.dumps(body).encode(), tuple(ids[:before]))


def _lines(seed: str, tokens: int) -> str:
    words = some_words(seed, max(1, tokens * LINE_WORDS // LINE_TOKENS))
    line = LINE_WORDS * WORD_CHARS
    return "\n".join(words[start : start + line].strip() for start in range(0, len(words), line))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_files()["tokenizer.json"])
