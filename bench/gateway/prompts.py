"""What is asked: conversations of several turns over shared system prompts, in the words of `bench.fleet.words`."""

import json
from dataclasses import dataclass
from functools import cache

from bench.fleet.words import ASSISTANT, END, SYSTEM, USER, encode, some_words
from bench.gateway.client import MARK
from bench.gateway.engine import MODEL

SYSTEM_PROMPTS = 8
TURNS = 4
"""Of a conversation, before its last question."""
MARK_TOKENS = 9
"""A blank and eight digits, which are no words: a token each."""


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
    each = max(1, tokens // 2 // (TURNS * 2))
    messages = [{"role": "system", "content": some_words(f"{tokens} of {number % SYSTEM_PROMPTS}", tokens // 2)}]
    for turn in range(TURNS):
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": some_words(f"{tokens} {number} {turn} {role}", each)})
    tags = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
    known = encode("".join(f"{tags[each['role']]}{each['content']}{END}" for each in messages))
    messages.append({"role": "user", "content": f" {MARK.decode()}"})
    prompt_tokens = len(known) + 1 + MARK_TOKENS + 2
    body = {"model": MODEL, "messages": messages, "max_tokens": output_tokens, "user": str(prompt_tokens)}
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Conversation(json.dumps(body).encode(), tuple(known))
