"""The engine's HTTP face: OpenAI's endpoints, `/tokenize` as vLLM has it, `/health` and `/metrics`.

An answer begins when its first token is known, so a failure before that has a status of its own, and the first byte
tells a gateway that the prefill is over. A client that goes away stops its request at the next token.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nodeagent.engines.reference.errors import EngineError, InvalidRequest
from nodeagent.engines.reference.event_stream import EventStream, until_gone
from nodeagent.engines.reference.generation import GenerationRequest
from nodeagent.engines.reference.metrics import CONTENT_TYPE
from nodeagent.engines.reference.openai_answers import Answer, error_body, error_status
from nodeagent.engines.reference.openai_schema import (
    NAME_CHARS_MAX,
    check_model,
    parse_body,
    read_flag,
    read_options,
    read_prompt,
    resolve_max_tokens,
)
from nodeagent.engines.reference.render import read_chat
from nodeagent.engines.reference.service import EngineService, Steps

BODY_BYTES_MAX = 16 << 20
BODY_TIMEOUT_S = 60.0
CLIENT_GONE = 499


def create_app(service: EngineService) -> FastAPI:
    """The application around a service, which it starts and stops."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title="warmroute reference engine", lifespan=lifespan)

    @app.exception_handler(EngineError)
    async def refuse(_: Request, error: EngineError) -> Response:
        return _json(error_body(error), error_status(error))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path[:NAME_CHARS_MAX]}: {error.detail}"
        answer = _json(error_body(InvalidRequest(said)), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(ClientDisconnect)
    async def forget(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(service, request, is_chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue a text or a list of token ids."""
        return await _answer(service, request, is_chat=False)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or of a conversation."""
        return _json(await _tokenize(service, parse_body(await _read_body(request))))

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model there is."""
        return _json(service.models())

    _add_operating(app, service)
    return app


def _add_operating(app: FastAPI, service: EngineService) -> None:
    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Empty the engine's own cache, as vLLM does; the host's tiers stay."""
        service.reset_prefix_cache()
        return _json({"success": True})

    @app.get("/health")
    async def health() -> Response:
        """200 while the model's thread lives."""
        return Response(status_code=200 if service.is_healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.metrics_text(), media_type=CONTENT_TYPE)


async def _answer(service: EngineService, request: Request, *, is_chat: bool) -> Response:
    """Encode, queue, and answer in one piece or as a stream."""
    body = parse_body(await _read_body(request))
    check_model(body, service.loaded.name)
    options = read_options(body, is_chat=is_chat)
    tokens = await _encode(service, body, is_chat=is_chat)
    max_tokens = resolve_max_tokens(
        options, len(tokens), service.loaded.context_tokens, "messages" if is_chat else "prompt"
    )
    answer = Answer(service.loaded.name, is_chat, len(tokens))
    steps = service.generate(
        GenerationRequest(
            tokens=np.array(tokens, dtype=np.uint32),
            max_tokens=max_tokens,
            sampling=options.sampling,
            scope=options.scope,
            stops=options.stops,
            ignore_eos=options.ignore_eos,
        )
    )
    if options.stream:
        return EventStream(answer, steps, include_usage=options.include_usage)
    gone = asyncio.ensure_future(until_gone(request.receive))
    text = asyncio.ensure_future(_whole(answer, steps))
    try:
        await asyncio.wait((gone, text), return_when=asyncio.FIRST_COMPLETED)
        return _json(text.result()) if text.done() else Response(status_code=CLIENT_GONE)
    finally:
        steps.cancel()
        gone.cancel()
        text.cancel()
        await asyncio.gather(gone, text, return_exceptions=True)


async def _whole(answer: Answer, steps: Steps) -> dict[str, Any]:
    text = ""
    while True:
        step = await steps.next()
        text += step.text
        if step.finish_reason is not None:
            return answer.whole(text, step.finish_reason, step.completion_tokens, step.cached_tokens)


async def _encode(service: EngineService, body: dict[str, Any], *, is_chat: bool) -> list[int]:
    if is_chat:
        text = service.loaded.renderer.render(read_chat(body))
        return await service.encode(text, "messages")
    prompt = read_prompt(body, service.loaded.tokenizer.vocabulary_size)
    return await service.encode(prompt, "prompt") if isinstance(prompt, str) else prompt


async def _tokenize(service: EngineService, body: dict[str, Any]) -> dict[str, Any]:
    check_model(body, service.loaded.name)
    prompt = body.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise InvalidRequest("prompt must be a string", "prompt")
    if prompt is None and body.get("messages") is None:
        raise InvalidRequest("either prompt or messages must be given", "prompt")
    wants_spellings = read_flag(body, "return_token_strs")
    tokens = await _encode(service, body, is_chat=prompt is None)
    spellings = [service.loaded.tokenizer.spelling(token) for token in tokens] if wants_spellings else None
    return {
        "count": len(tokens),
        "max_model_len": service.loaded.context_tokens,
        "tokens": tokens,
        "token_strs": spellings,
    }


async def _read_body(request: Request) -> bytes:
    """The whole body, bounded in size and time while it is read. Raises `InvalidRequest` (408, 413, 415)."""
    if request.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise InvalidRequest("a body with a content-encoding isn't taken; send it uncompressed", status=415)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for block in request.stream():
                body += block
                if len(body) > BODY_BYTES_MAX:
                    raise InvalidRequest(f"the body is larger than {BODY_BYTES_MAX} bytes", status=413)
    except TimeoutError:
        raise InvalidRequest(f"the body didn't arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
    return bytes(body)


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")
