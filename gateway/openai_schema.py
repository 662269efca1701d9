"""The few fields of a request that the gateway reads; everything else passes through untouched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from directory.chunks import pack_tokens
from gateway.errors import InvalidRequest
from gateway.form_body import form_fields, is_form

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
EMBEDDINGS = "/v1/embeddings"
RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE = "/v1/score"
PAIRS = (*RERANK, SCORE, "/score")
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, EMBEDDINGS, *PAIRS)
"""The paths of vLLM 0.32; SGLang 0.5.23 serves all but `/v2/rerank`, `/rerank` and `/score`."""
PLAIN = (
    "/pooling",
    "/classify",
    "/v1/classify",
    "/v1/moderations",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/v1/audio/speech",
    "/v1/images/generations",
)
"""Of these only the model is read: vLLM's and SGLang's, and those that speak, draw and judge."""
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations")
"""The same, with a form as body."""
FORM_BYTES_PER_TEXT_BYTE = 64
"""Of sound and pictures about so many bytes are one byte of text's work: a minute of speech is 3,000 tokens."""
ANTHROPICS = (MESSAGES, COUNT_TOKENS)
"""Those whose errors and streams have Anthropic's shape."""
_TRUE = frozenset({"1", "true", "on", "yes"})


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request for a model: the fields read, and the body as it came.

    `fields` is the decoded object. For completions and embeddings `prompts` holds each prompt, as text or as token ids
    packed to little-endian u32; elsewhere it is empty.
    """

    endpoint: str
    body: bytes
    fields: Mapping[str, Any]
    model: str
    stream: bool
    cache_salt: str | None
    prompts: tuple[str | bytes, ...] = ()
    content_type: str = ""
    """Of a form, with its boundary; else empty."""

    @property
    def text_bytes(self) -> int:
        """By how many bytes of text the work is estimated, where nothing better is known."""
        return len(self.body) // (FORM_BYTES_PER_TEXT_BYTE if self.content_type else 1)


def parse_passed(endpoint: str, body: bytes, content_type: str) -> InferenceRequest:
    """Read of a request no more than its model, and whether it streams. Raises `InvalidRequest`.

    `fields` are a form's fields as text, but for `stream`.
    """
    if not is_form(content_type):
        fields = _decode_object(body)
        return InferenceRequest(endpoint, body, fields, _read_model(fields), fields.get("stream") is True, None)
    said = {
        each.name: body[each.start : each.end].decode("utf-8", "replace") for each in form_fields(body, content_type)
    }
    is_streamed = said.pop("stream", "").strip().lower() in _TRUE
    return InferenceRequest(endpoint, body, said, _read_model(said), is_streamed, None, content_type=content_type)


def parse_request(endpoint: str, body: bytes) -> InferenceRequest:
    """Read a request to one of `ENDPOINTS`. Raises `InvalidRequest` that names the field and says what would be right.

    Lone surrogates are refused with the body: they are no Unicode, and no tokenizer takes them.
    """
    fields = _decode_object(body)
    model = _read_model(fields)
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequest("stream must be true or false", "stream")
    prompts: tuple[str | bytes, ...] = ()
    if endpoint in (CHAT, *ANTHROPICS) or (endpoint == EMBEDDINGS and "messages" in fields):
        _check_messages(fields.get("messages"))
    elif endpoint in (COMPLETIONS, EMBEDDINGS) and not (endpoint == EMBEDDINGS and _is_media(fields.get("input"))):
        name = "prompt" if endpoint == COMPLETIONS else "input"
        prompts = _read_prompts(fields.get(name), name)
    elif endpoint == RESPONSES:
        _check_input(fields)
    elif endpoint in RERANK:
        _check_pairs(fields, "query", "documents")
    return InferenceRequest(endpoint, body, fields, model, bool(stream), _read_salt(fields), prompts)


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        decoded = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise InvalidRequest("the body must be a JSON object")
    return decoded


def _read_model(fields: Mapping[str, Any]) -> str:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("model must be a non-empty string", "model")
    return model


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


def _check_input(fields: Mapping[str, Any]) -> None:
    if not isinstance(fields.get("input"), str | list):
        raise InvalidRequest("input must be a string or a list of items", "input")
    previous = fields.get("previous_response_id")
    if previous is not None and (not isinstance(previous, str) or not previous):
        raise InvalidRequest("previous_response_id must be a non-empty string", "previous_response_id")


def _is_media(given: Any) -> bool:
    """Whether an embedding's inputs are objects of text and images, which SGLang takes."""
    return isinstance(given, list) and bool(given) and all(isinstance(each, dict) for each in given)


def _check_pairs(fields: Mapping[str, Any], one: str, many: str) -> None:
    if not isinstance(fields.get(one), str | dict | list):  # a list of parts is SGLang's
        raise InvalidRequest(f"{one} must be a string, an object with content, or a list of parts", one)
    if not isinstance(fields.get(many), str | list | dict) or not fields[many]:
        raise InvalidRequest(f"{many} must be a non-empty list", many)


def _read_prompts(prompt: Any, name: str) -> tuple[str | bytes, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"{name} must be a string, a list of strings, or token ids", name)
    if _is_id(prompt[0]):
        return (_pack_ids(prompt, name),)
    prompts: list[str | bytes] = []
    for index, each in enumerate(prompt):
        if isinstance(each, str):
            prompts.append(each)
        elif isinstance(each, list) and each:
            prompts.append(_pack_ids(each, f"{name}[{index}]"))
        else:
            where = f"{name}[{index}]"
            raise InvalidRequest(f"{where} must be a string or a non-empty list of token ids", where)
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
