"""The few fields of a request that the gateway reads; everything else passes through untouched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from directory.chunks import pack_tokens
from gateway.errors import InvalidRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A chat or completion request: the fields read, and the body as it came.

    `fields` is the decoded object. For completions `prompts` holds each prompt, as text or as token ids packed to
    little-endian u32; for chat it is empty.
    """

    endpoint: str
    body: bytes
    fields: Mapping[str, Any]
    model: str
    stream: bool
    cache_salt: str | None
    prompts: tuple[str | bytes, ...] = ()


def parse_request(endpoint: str, body: bytes) -> InferenceRequest:
    """Read a request. Raises `InvalidRequest` that names the field and says what would be right."""
    fields = _decode_object(body)
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("model must be a non-empty string", "model")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequest("stream must be true or false", "stream")
    prompts: tuple[str | bytes, ...] = ()
    if endpoint == CHAT:
        _check_messages(fields.get("messages"))
    else:
        prompts = _read_prompts(fields.get("prompt"))
    return InferenceRequest(endpoint, body, fields, model, bool(stream), _read_salt(fields), prompts)


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        decoded = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise InvalidRequest("the body must be a JSON object")
    return decoded


def _read_salt(fields: Mapping[str, Any]) -> str | None:
    salt = fields.get("cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise InvalidRequest("cache_salt must be a non-empty string; leave it out to share the cache", "cache_salt")
    return salt


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a non-empty list", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequest(f"{where} must be an object with role and content", where)
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidRequest(f"{where}.role must be a non-empty string", f"{where}.role")
        if not isinstance(message.get("content"), str | list | None):
            raise InvalidRequest(f"{where}.content must be a string or a list of parts", f"{where}.content")


def _read_prompts(prompt: Any) -> tuple[str | bytes, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest("prompt must be a string, a list of strings, or token ids", "prompt")
    if _is_id(prompt[0]):
        return (_pack_ids(prompt, "prompt"),)
    prompts: list[str | bytes] = []
    for index, each in enumerate(prompt):
        if isinstance(each, str):
            prompts.append(each)
        elif isinstance(each, list) and each:
            prompts.append(_pack_ids(each, f"prompt[{index}]"))
        else:
            raise InvalidRequest(
                f"prompt[{index}] must be a string or a non-empty list of token ids", f"prompt[{index}]"
            )
    return tuple(prompts)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _pack_ids(token_ids: Sequence[Any], where: str) -> bytes:
    if not all(_is_id(each) for each in token_ids):
        raise InvalidRequest(f"{where} must hold whole numbers only", where)
    try:
        return pack_tokens(token_ids)
    except ValueError as error:
        raise InvalidRequest(f"{where}: {error}", where) from error
