"""Which requests belong together when nothing better is known: the key that keeps a session on its engine."""

import hashlib

import orjson

from gateway.openai_schema import CHAT, InferenceRequest
from gateway.upstream import Headers

SESSION_HEADERS = (b"x-session-id", b"x-conversation-id")
SESSION_FIELDS = ("session_id", "conversation_id", "prompt_cache_key", "user")
OPENING_BYTES_MAX = 4096


def session_key(request: InferenceRequest, headers: Headers) -> bytes:
    """32 bytes, equal for the requests of one session and alike on every gateway.

    A session id that the client gives, in a header or a field, comes first; else the opening of the conversation (all
    up to the first user message), which every later turn repeats; for a completion the opening of its prompt.
    """
    digest = hashlib.sha256(request.model.encode())
    for name, value in headers:
        if name.lower() in SESSION_HEADERS and value:
            digest.update(b"\x00header" + value)
            return digest.digest()
    for field in SESSION_FIELDS:
        named = request.fields.get(field)
        if isinstance(named, str) and named:
            digest.update(b"\x00field" + named.encode())
            return digest.digest()
    digest.update(b"\x00opening" + _opening(request)[:OPENING_BYTES_MAX])
    return digest.digest()


def _opening(request: InferenceRequest) -> bytes:
    if request.endpoint != CHAT:
        prompt = request.prompts[0]
        return prompt if isinstance(prompt, bytes) else prompt[:OPENING_BYTES_MAX].encode()
    messages = []
    for message in request.fields["messages"]:
        messages.append([message["role"], message.get("content")])
        if message["role"] == "user":
            break
    try:
        return orjson.dumps(messages)
    except orjson.JSONEncodeError:  # nested more deeply than is written, though not more deeply than is read
        return request.body
