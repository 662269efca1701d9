"""A slice of a trace as requests with real text."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from bench.fleet.engine_api import MODEL
from bench.fleet.scale import Scale
from bench.fleet.words import some_words
from warmroute.replay.trace import TracedRequest, from_zero


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What the client sends, and when: real seconds after the start."""

    at_s: float
    body: bytes


def slice_of(requests: Sequence[TracedRequest], speed: float, seconds: float) -> list[TracedRequest]:
    """What arrives in `seconds` from the trace's middle on, `speed` times as fast; the first half is for tuning."""
    start = requests[len(requests) // 2].arrival_s
    part = [each for each in requests if start <= each.arrival_s < start + seconds * speed]
    return from_zero(part, speed)


def text_requests(requests: Sequence[TracedRequest], scale: Scale) -> list[TextRequest]:
    """The requests as chats of one message: equal blocks are equal text, and what follows them is nobody else's."""
    blocks: dict[bytes, str] = {}
    made = []
    for number, request in enumerate(requests):
        for key in request.keys:
            if key not in blocks:
                blocks[key] = some_words(f"block {key.hex()}", scale.block_tokens)
        rest = request.prompt_tokens // scale.trace_tokens - len(request.keys) * scale.block_tokens
        tail = some_words(f"rest {number}", max(1, rest))
        content = "".join(blocks[key] for key in request.keys) + tail
        tokens = max(1, round(request.output_tokens / scale.trace_tokens))
        made.append(TextRequest(request.arrival_s * scale.real_s, chat_body(content, tokens)))
    return made


def chat_body(content: str, output_tokens: int) -> bytes:
    """A streaming chat that asks for its usage."""
    fields = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()
