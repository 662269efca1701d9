"""Which requests belong together when nothing better is known: the key that keeps a session on its engine."""

import hashlib
from collections.abc import Sequence
from typing import Any

import orjson

from gateway.header_rules import Headers
from gateway.openai_schema import InferenceRequest

SESSION_HEADERS = (b"x-session-id", b"x-conversation-id")
NAMING_FIELDS = ("session_id", "conversation_id", "conversation", "prompt_cache_key")
SESSION_FIELDS = (*NAMING_FIELDS, "user", "previous_response_id")
OPENING_FIELDS = ("instructions", "system", "query", "queries", "text_1")
OPENING_BYTES_MAX = 4096


def session_key(request: InferenceRequest, headers: Headers) -> bytes:
    """32 bytes, equal for the requests of one session and alike on every gateway.

    A session id that the client gives, in a header or a field, comes first; else the opening of the conversation (all
    up to the first user message), which every later turn repeats; for a completion the opening of its prompt. What goes
    on from a response has only that response's name, which says nothing of the session before it.
    """
    named = _named(request, headers, SESSION_FIELDS)
    if named is not None:
        return named
    opening = _opening(request)[:OPENING_BYTES_MAX]
    return hashlib.sha256(request.model.encode() + b"\x00opening" + opening).digest()


def conversation_key(request: InferenceRequest, headers: Headers) -> bytes:
    """As `session_key`, but by all of the opening, however long: what begins alike may still go different ways."""
    named = _named(request, headers, SESSION_FIELDS)
    if named is not None:
        return named
    prompts = [each if isinstance(each, bytes) else each.encode() for each in request.prompts]
    opening = b"\x00".join(prompts) if prompts else _opening(request)
    return hashlib.sha256(request.model.encode() + b"\x00conversation" + opening).digest()


def named_session(request: InferenceRequest, headers: Headers) -> bytes | None:
    """`session_key` where the client gives a session a name of its own, else `None`.

    A `user` has many sessions, and each response has another name than the one before it: these are none.
    """
    return _named(request, headers, NAMING_FIELDS)


def _named(request: InferenceRequest, headers: Headers, fields: Sequence[str]) -> bytes | None:
    model = request.model.encode()
    for name, value in headers:
        if name.lower() in SESSION_HEADERS and value:
            return hashlib.sha256(model + b"\x00header" + value).digest()
    for field in fields:
        named = request.fields.get(field)
        if isinstance(named, dict):  # OpenAI's `conversation`
            named = named.get("id")
        if isinstance(named, str) and named:
            return hashlib.sha256(model + b"\x00field" + named.encode()).digest()
    return None


def _opening(request: InferenceRequest) -> bytes:
    if request.prompts:
        prompt = request.prompts[0]
        return prompt if isinstance(prompt, bytes) else prompt[:OPENING_BYTES_MAX].encode()
    if request.content_type:  # a form begins with what all have in common; what is in its middle is the file's
        middle = len(request.body) // 2
        return request.body[middle : middle + OPENING_BYTES_MAX]
    fields = request.fields
    opening: list[Any] = [fields[name] for name in OPENING_FIELDS if name in fields]
    items = fields.get("messages", fields.get("input", fields.get("prompt")))
    for item in items if isinstance(items, list) else [items]:
        if not isinstance(item, dict):
            opening.append(item)
            continue
        opening.append([item.get("role"), item.get("content")])
        if item.get("role") == "user":
            break
    try:
        return orjson.dumps(opening)
    except orjson.JSONEncodeError:  # nested more deeply than is written, though not more deeply than is read
        return request.body
