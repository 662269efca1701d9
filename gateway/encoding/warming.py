"""Encodes replies when they have been sent, so that the next turn of their conversations finds them in the cache.

The cache holds pieces of text, not prompts: it is enough to render a reply between two short messages, as the template
will render it then, and to encode that. It costs about what the next turn would have waited for (`bench/RESULTS.md`).
Of a stream the events are only kept, while it runs, and read here: a list's append an event on the way. Replies that
hold tool calls, or one of several choices, are left out, and so is what exceeds a bound.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway.encoding.encoder import Encoder
from gateway.openai_schema import CHAT, InferenceRequest

logger = logging.getLogger(__name__)

REPLIES_WAITING_MAX = 16
"""More mean that the gateway has no time for what nobody waits for."""
REPLY_BYTES_MAX = 2**20
"""Of one answer, or the events of one stream: about four thousand tokens that came one by one."""
KEPT_BYTES_MAX = 2**26
"""Of the events of all streams that run."""
REPLY_CHARS_MIN = 1_000
"""What is shorter costs the next turn less than a tenth of a millisecond."""
DROPPED_FIELDS = ("tools", "tool_choice", "functions", "documents", "continue_final_message", "add_generation_prompt")
_CONTENT = re.compile(rb'"content": ?"([^"\\]*(?:\\.[^"\\]*)*)"')
_CALLS = b'"tool_calls":'


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer's body, or a stream's events, the request it answers, and what its next turn will be encoded by."""

    encoder: Encoder
    request: InferenceRequest
    context_tokens: int
    data: bytes
    is_stream: bool


class KeptEvents:
    """The events of one stream, until it ends or they are too many. `release` it, whatever happens."""

    def __init__(self, warmer: "Warmer") -> None:
        self._warmer = warmer
        self._events: list[bytes] = []
        self._bytes = 0
        self._is_full = False

    def add(self, events: bytes) -> None:
        """Take the next ones."""
        if self._is_full:
            return
        size, warmer = len(events), self._warmer
        if self._bytes + size > REPLY_BYTES_MAX or warmer.kept_bytes + size > KEPT_BYTES_MAX:
            self._is_full = True
            self.release()
            return
        self._events.append(events)
        self._bytes += size
        warmer.kept_bytes += size

    def joined(self) -> bytes:
        """All of them; nothing if they were too many."""
        return b"".join(self._events)

    def release(self) -> None:
        """Let go of them."""
        self._warmer.kept_bytes -= self._bytes
        self._events, self._bytes = [], 0


class Warmer:
    """Encodes replies in the background, one after another. `on_result` is told `warmed`, `skipped` or `dropped`."""

    def __init__(self, on_result: Callable[[str], object] = lambda result: None) -> None:
        self._on_result = on_result
        self._waiting: asyncio.Queue[Reply] = asyncio.Queue(REPLIES_WAITING_MAX)
        self.kept_bytes = 0

    def send(self, reply: Reply) -> None:
        """Encode this one soon. Never waits."""
        if not reply.data or len(reply.data) > REPLY_BYTES_MAX or not is_warmed(reply.request):
            return
        if self._waiting.full():
            self._on_result("dropped")
        else:
            self._waiting.put_nowait(reply)

    async def run(self) -> None:
        """Encode what is sent, until cancelled."""
        while True:
            reply = await self._waiting.get()
            try:
                self._on_result("warmed" if await warm(reply) else "skipped")
            except Exception:  # the edge of the loop: an engine's words and a model's template are foreign
                logger.exception("a reply couldn't be encoded in advance")


def is_warmed(request: InferenceRequest) -> bool:
    """Whether replies to this request are worth encoding: a chat's, of one choice."""
    return request.endpoint == CHAT and request.fields.get("n") in (None, 1)


async def warm(reply: Reply) -> bool:
    """Encode a reply as the next turn will show it; whether there was one."""
    text = streamed_text(reply.data) if reply.is_stream else answered_text(reply.data)
    if len(text) < REPLY_CHARS_MIN:
        return False
    kept = {name: value for name, value in reply.request.fields.items() if name not in DROPPED_FIELDS}
    around = {"role": "user", "content": "."}
    messages = [around, {"role": "assistant", "content": text}, around]
    turn = replace(reply.request, body=b"", stream=False, fields={**kept, "messages": messages})
    return (await reply.encoder.encode(turn, reply.context_tokens)).tokens is not None


def answered_text(data: bytes) -> str:
    """What the message of an answer says; nothing if it calls tools."""
    try:
        message: Any = orjson.loads(data)["choices"][0]["message"]
        content = "" if message.get("tool_calls") else message.get("content")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        return ""
    return content if isinstance(content, str) else ""


def streamed_text(events: bytes) -> str:
    """What the deltas of a stream say together; nothing if they call tools.

    The fields are found as text, which is five times cheaper than reading a thousand events. Should another field of
    that name come with them, pieces are encoded that nobody will ask for.
    """
    if _CALLS in events:
        return ""
    try:
        text = orjson.loads(b'"%b"' % b"".join(_CONTENT.findall(events)))
    except orjson.JSONDecodeError:
        return ""
    return str(text)
