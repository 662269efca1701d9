"""The JSON an answer is made of: whole, in pieces, and errors, in OpenAI's shapes."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from nodeagent.engines.reference.errors import EngineError, InvalidRequest, Overloaded

STREAM_END = b"data: [DONE]\n\n"
MESSAGE_CHARS_MAX = 400
"""A template's complaint may repeat what it was given."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What all parts of one answer share."""

    model: str
    is_chat: bool
    prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(16))

    def whole(self, text: str, finish_reason: str, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """A complete answer."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": self._usage(completion_tokens, cached_tokens),
        }

    def opening(self, *, include_usage: bool) -> bytes:
        """What a stream begins with: the role, for a chat."""
        if not self.is_chat:
            return b""
        return self._event({"role": "assistant", "content": ""}, None, include_usage=include_usage)

    def piece(self, text: str, finish_reason: str | None, *, include_usage: bool) -> bytes:
        """A piece of the text, as a server-sent event."""
        delta = {"content": text} if text or finish_reason is None else {}
        return self._event(delta if self.is_chat else text, finish_reason, include_usage=include_usage)

    def usage_event(self, completion_tokens: int, cached_tokens: int) -> bytes:
        """The event with the usage, behind all choices."""
        usage = self._usage(completion_tokens, cached_tokens)
        return _sse({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})

    def _event(self, content: dict[str, str] | str, finish_reason: str | None, *, include_usage: bool) -> bytes:
        part = {"delta": content} if self.is_chat else {"text": content}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish_reason}
        body: dict[str, Any] = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if include_usage:
            body["usage"] = None
        return _sse(body)

    def _head(self, chat_object: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.name}" if self.is_chat else f"cmpl-{self.name}",
            "object": chat_object if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _usage(self, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def error_status(error: EngineError) -> int:
    """The HTTP status of an error."""
    return error.status if isinstance(error, InvalidRequest | Overloaded) else 500


def error_body(error: EngineError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    if isinstance(error, InvalidRequest):
        return _error(str(error), "invalid_request_error", error.param, error.code)
    if isinstance(error, Overloaded):
        kind = "rate_limit_error" if error.status == 429 else "service_unavailable"
        return _error(str(error), kind, None, "engine_overloaded" if error.status == 429 else "engine_unavailable")
    return _error(str(error), "server_error", None, None)


def error_event(error: EngineError) -> bytes:
    """An error in the middle of a stream."""
    return _sse(error_body(error))


def _error(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message[:MESSAGE_CHARS_MAX], "type": kind, "param": param, "code": code}}


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
