"""An engine that injects faults: real HTTP over real sockets, made-up answers."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import orjson
from aiohttp import web

from gateway.openai_schema import ENDPOINTS, FORMS, PLAIN, RESPONSES
from tests.gateway.samples import MODEL

PASSED = "/v1/passed"
"""A path that gateways pass on only where they are told to."""
Behaviour = Callable[["MockEngine", web.Request, dict[str, Any]], Any]


class MockEngine:
    """Answers requests to every endpoint as `behaviour` says; remembers what it received.

    `stored` are the questions about responses that it keeps: it answers each with its method and path, or as
    `show_stored` says.
    """

    def __init__(self, name: str, behaviour: Behaviour | None = None) -> None:
        self.name = name
        self.behaviour = behaviour or answer_well
        self.received: list[tuple[bytes, dict[str, str]]] = []
        self.stored: list[str] = []
        self.show_stored: Behaviour | None = None
        self.is_well = True
        self.models = [MODEL]
        self.adapters: dict[str, str] = {}
        self.gone = asyncio.Event()
        self.connections: set[int] = set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**28)
        for endpoint in (*ENDPOINTS, *PLAIN, *FORMS, PASSED):
            app.router.add_post(endpoint, self._infer)
        app.router.add_route("*", RESPONSES + "/{tail:.*}", self._stored)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.connections.add(id(request.transport))
        self.received.append((body, {name.lower(): value for name, value in request.headers.items()}))
        try:
            fields = {} if request.content_type == "multipart/form-data" else orjson.loads(body)
            answer: web.StreamResponse = await self.behaviour(self, request, fields)
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise
        return answer

    async def _stored(self, request: web.Request) -> web.StreamResponse:
        self.stored.append(f"{request.method} {request.path_qs}")
        if self.show_stored is not None:
            shown: web.StreamResponse = await self.show_stored(self, request, {})
            return shown
        return web.json_response({"engine": self.name, "asked": self.stored[-1]}, headers={"x-engine": self.name})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_well else 503)

    async def _models(self, request: web.Request) -> web.Response:
        adapters = [{"id": model, "parent": parent} for model, parent in self.adapters.items()]
        return web.json_response({"object": "list", "data": [{"id": model} for model in self.models] + adapters})


def prompt_tokens(fields: dict[str, Any]) -> int:
    """What the assembly's tokenizer counts, a token a byte, of what its template makes of a chat."""
    if isinstance(fields.get("prompt"), str):
        return len(fields["prompt"].encode())
    messages = [each for each in fields.get("messages", ()) if isinstance(each.get("content"), str)]
    return sum(len(f"{each['role']}:{each['content']};".encode()) for each in messages)


def completion_body(engine: MockEngine, cached: int = 0, tokens: int = 9) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    return {"id": engine.name, "choices": [{"message": {"role": "assistant", "content": "ok"}}], "usage": usage}


async def answer_well(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("stream"):
        answer = completion_body(engine, tokens=prompt_tokens(body))
        return web.json_response(answer, headers={"x-engine": engine.name})
    response = await start_stream(request)
    for number in range(3):
        await response.write(event(number))
    await response.write(b"data: [DONE]\n\n")
    return response


async def start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


def event(number: int) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number


def cut(request: web.Request) -> None:
    """Break the connection as a killed process does."""
    assert request.transport is not None
    request.transport.abort()


async def drop_connection(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    cut(request)
    return web.Response()


def answer_status(status: int) -> Behaviour:
    async def behave(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"{engine.name} says {status}"}}, status=status)

    return behave


async def break_off_body(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Send half of a JSON body, then die."""
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
    await response.prepare(request)
    await response.write(b'{"half":')
    await asyncio.sleep(0)
    cut(request)
    return response


async def break_off_stream(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Send two events and the beginning of a third, then die."""
    response = await start_stream(request)
    await response.write(event(0) + event(1))
    await response.write(b'data: {"choices":[{"del')
    await asyncio.sleep(0.05)
    cut(request)
    return response


async def never_answer(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def stream_for_ever(engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await start_stream(request)
    while True:
        await response.write(event(0))
        await asyncio.sleep(0.01)
