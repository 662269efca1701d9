"""What engines answer at each endpoint, whole and as a stream, in the shapes of vLLM 0.32, without usage."""

from typing import Any

import orjson
from aiohttp import web

from gateway.openai_schema import ANTHROPICS, CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES
from tests.gateway.mock_engine import MockEngine, event, start_stream

STREAMED = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
"""Endpoints that can stream."""
DONE = b"data: [DONE]\n\n"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello there"}]},
    COMPLETIONS: {"prompt": "hello there"},
    RESPONSES: {"input": "hello there"},
    MESSAGES: {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 5},
    COUNT_TOKENS: {"messages": [{"role": "user", "content": "hello there"}]},
    EMBEDDINGS: {"input": "hello there"},
    "/v1/rerank": {"query": "hello there", "documents": ["a", "b"]},
    "/v2/rerank": {"query": "hello there", "documents": ["a", "b"]},
    "/rerank": {"query": "hello there", "documents": ["a", "b"]},
    "/v1/score": {"text_1": "hello there", "text_2": ["a", "b"]},
    "/score": {"queries": "hello there", "documents": ["a", "b"]},
}
"""A short request to each endpoint."""


def named(name: str, **fields: Any) -> bytes:
    """An event with a name, as `/v1/responses` and `/v1/messages` send them."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))


def response(response_id: str, text: str) -> dict[str, Any]:
    return {"id": response_id, "object": "response", "status": "completed", "output_text": text}


def events_of(endpoint: str, response_id: str = "resp_1", text: str = "abc") -> tuple[bytes, ...]:
    """A whole stream, an event an item."""
    if endpoint == RESPONSES:
        begun = {**response(response_id, ""), "status": "in_progress"}
        deltas = (named("response.output_text.delta", delta=each, sequence_number=2 + n) for n, each in enumerate(text))
        return (
            named("response.created", response=begun, sequence_number=0),
            named("response.in_progress", response=begun, sequence_number=1),
            *deltas,
            named("response.completed", response=response(response_id, text), sequence_number=2 + len(text)),
        )
    if endpoint == MESSAGES:
        deltas = (named("content_block_delta", index=0, delta={"type": "text_delta", "text": each}) for each in text)
        return (
            named("message_start", message={"id": "msg_1", "role": "assistant", "content": []}),
            *deltas,
            named("message_delta", delta={"stop_reason": "end_turn"}),
            named("message_stop"),
        )
    return (*(event(number) for number in range(len(text))), DONE)


def whole_of(endpoint: str, engine: str, response_id: str = "resp_1") -> dict[str, Any]:
    """A whole answer, which says which engine gave it."""
    if endpoint == RESPONSES:
        return {**response(response_id, "ok"), "engine": engine}
    if endpoint in ANTHROPICS:
        return {"type": "message", "content": [{"type": "text", "text": "ok"}], "engine": engine}
    return {"engine": engine}


async def answer_in_shape(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The endpoint's own answer; a response has an id that no other has."""
    response_id = f"resp_{engine.name}{len(engine.received)}"
    if not body.get("stream") or request.path not in STREAMED:
        return web.json_response(whole_of(request.path, engine.name, response_id))
    stream = await start_stream(request)
    for each in events_of(request.path, response_id):
        await stream.write(each)
    return stream
