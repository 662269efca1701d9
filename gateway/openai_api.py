"""The OpenAI-compatible door: a raw ASGI application that reads and bounds the body, hands over, and shapes errors.

It is served on `ClientConnection`s.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

import orjson

from gateway.access_log import AccessLog, RequestNote
from gateway.client_connection import DOWNSTREAM, Departure, Downstream
from gateway.completion import Completion
from gateway.config import GatewayConfig
from gateway.error_shapes import bug_answer, error_answer
from gateway.errors import (
    BodyTooLarge,
    GatewayError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    RequestTimeout,
    UnsupportedEncoding,
    quoted,
)
from gateway.fleet import Fleet
from gateway.header_rules import Headers, with_request_id
from gateway.logs import REQUEST_ID
from gateway.metrics import GatewayMetrics
from gateway.model_list import ModelList
from gateway.openai_schema import ENDPOINTS, FORMS, PLAIN, InferenceRequest, parse_passed, parse_request
from gateway.preparation import Incoming
from gateway.stored_responses import StoredPath, StoredResponses, read_path

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CLIENT_GONE = 499
REQUEST_ID_CHARS_MAX = 200
JSON_HEADERS = [(b"content-type", b"application/json")]


class AsgiSink:
    """The client's end of an answer. Adds the request id; sends each piece at once."""

    def __init__(self, send: Send, request_id: bytes, downstream: Downstream, clock: Callable[[], float]) -> None:
        self._send, self.request_id, self.departure, self._clock = send, request_id, downstream.departure, clock
        self.push = downstream.push
        """See `Sink`."""
        self.status: int | None = None
        self.started_at: float | None = None
        """When the head was sent."""

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """See `Sink`."""
        self.status, self.started_at = status, self._clock()
        headers = with_request_id(headers, self.request_id)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        """See `Sink`."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def finish(self) -> None:
        """See `Sink`."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


ADMIN_PATHS = frozenset({"/fleet", "/metrics", "/route/explain", "/openapi.json"})
"""Sought here by those who know routers with one port."""


class OpenAiApi:
    """The endpoints of `openai_schema`, responses that engines keep, `/v1/models`, and the probes."""

    def __init__(
        self,
        completion: Completion,
        stored: StoredResponses,
        fleet: Fleet,
        models: ModelList,
        metrics: GatewayMetrics,
        access: AccessLog,
        config: GatewayConfig,
        clock: Callable[[], float],
        is_draining: Callable[[], bool],
    ) -> None:
        self._completion, self._stored, self._fleet, self._metrics = completion, stored, fleet, metrics
        self._models, self._access = models, access
        self._clock, self._is_draining = clock, is_draining
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """These limits and further paths are in force for requests that come from now on."""
        self._limits = config.limits
        self._passed = frozenset((*PLAIN, *FORMS, *config.models.pass_through))

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        headers: Headers = scope["headers"]
        sink = AsgiSink(send, _request_id(headers), scope["extensions"][DOWNSTREAM], self._clock)
        REQUEST_ID.set(sink.request_id.decode())
        path, method = scope["path"], scope["method"]
        stored = read_path(path)
        is_inference = path in ENDPOINTS or path in self._passed
        methods = ("POST",) if is_inference else stored.methods if stored else _methods(path)
        if not methods:
            there = "; it is on the admin port" if path in ADMIN_PATHS else ""
            await _answer(sink, NotFound.status, NotFound(f"{quoted(path)} is not served here{there}").body())
        elif method not in methods:
            wrong = MethodNotAllowed(f"{method} isn't served at {quoted(path)}; it takes {' and '.join(methods)}")
            await _answer(sink, wrong.status, error_answer(wrong, path), (b"allow", ", ".join(methods).encode()))
        elif is_inference:
            await self._infer(path, scope["query_string"], headers, receive, sink)
        elif stored:
            await self._show_response(stored, method, scope["query_string"], headers, sink)
        elif path == "/v1/models":
            await _answer(sink, 200, orjson.dumps({"object": "list", "data": self._models.rows()}))
        elif path.startswith("/v1/models/"):
            await self._show_model(path.removeprefix("/v1/models/"), sink)
        else:
            is_well = path == "/healthz" or is_ready(self._fleet, self._is_draining())
            await _answer(sink, 200 if is_well else 503, orjson.dumps({"status": "ok" if is_well else "not ready"}))

    async def _infer(self, path: str, query: bytes, headers: Headers, receive: Receive, sink: AsgiSink) -> None:
        """Serve and count: 499 where the client went away first."""
        note = RequestNote(self._clock())
        model, is_gone = await self._serve(path, query, headers, receive, sink, note)
        status = CLIENT_GONE if is_gone else sink.status or 500
        self._metrics.requests.labels(model if self._models.is_known(model) else "other", path, status).inc()
        self._access.add(path, model, status, sink.started_at, note)

    async def _serve(
        self, path: str, query: bytes, headers: Headers, receive: Receive, sink: AsgiSink, note: RequestNote
    ) -> tuple[str, bool]:
        """The model asked for, and whether the client went away."""
        model = ""
        try:
            body = await self._read_body(headers, receive)
            if body is None:
                return model, True
            request = self._parsed(path, body, headers)
            model = request.model
            kept = with_request_id(headers, sink.request_id)
            incoming = Incoming(request, kept, note.arrived_at, query, _wants_explanation(headers), note)
            if not await _unless_gone(self._completion.serve(incoming, sink), sink.departure):
                return model, True
        except GatewayError as error:
            await self._fail(sink, error.status, error_answer(error, path), *_headers_of(error))
        except Exception:  # the edge of a request: the client gets an answer, the log gets the trace
            logger.exception("a request failed for a reason that is a bug")
            await self._fail(sink, 500, bug_answer(path))
        return model, False

    def _parsed(self, path: str, body: bytes, headers: Headers) -> InferenceRequest:
        if path in ENDPOINTS:
            return parse_request(path, body)
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        return parse_passed(path, body, content_type.decode("latin-1"))

    async def _show_response(
        self, asked: StoredPath, method: str, query: bytes, headers: Headers, sink: AsgiSink
    ) -> None:
        """Pass on what the engine says that made the response, and count; what is sent with the question is left."""
        is_gone, note = False, RequestNote(self._clock())
        try:
            work = self._stored.serve(asked, method, query, with_request_id(headers, sink.request_id), sink)
            is_gone = not await _unless_gone(work, sink.departure)
        except GatewayError as error:
            await self._fail(sink, error.status, error.body(), *_headers_of(error))
        except Exception:  # the edge of a request: the client gets an answer, the log gets the trace
            logger.exception("a request failed for a reason that is a bug")
            await self._fail(sink, 500, bug_answer(asked.path))
        status = CLIENT_GONE if is_gone else sink.status or 500
        self._metrics.requests.labels("other", asked.label, status).inc()
        self._access.add(asked.label, "", status, sink.started_at, note)

    async def _fail(self, sink: AsgiSink, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        if sink.status is None:
            await _answer(sink, status, body, *headers)

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body, or `None` if the client went. The bound holds while reading, whatever the header says."""
        for name, value in headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise UnsupportedEncoding("a body with a content-encoding isn't taken; send it uncompressed")
        limit = self._limits.body_bytes_max
        too_large = BodyTooLarge(f"the body is larger than {limit} bytes")
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise too_large
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size > limit:
                        raise too_large
                    pieces.append(piece)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise RequestTimeout(f"the body didn't arrive within {self._limits.body_timeout_s:g} s") from None
        if not size:
            raise InvalidRequest("the body is empty; it must be a JSON object")
        return b"".join(pieces)

    async def _show_model(self, model: str, sink: AsgiSink) -> None:
        for row in self._models.rows():
            if row["id"] == model:
                return await _answer(sink, 200, orjson.dumps(row))
        missing = ModelNotFound(f"the model {quoted(model)} is not served here", "model")
        return await _answer(sink, missing.status, missing.body())


def is_ready(fleet: Fleet, is_draining: bool) -> bool:
    """Whether this gateway may get traffic: it isn't going, and an engine is ready."""
    return not is_draining and bool(fleet.table.models())


async def _unless_gone(work: Awaitable[None], departure: Departure) -> bool:
    """Run `work` to its end, or cancel it when the client goes; whether it came to its end.

    Tasks of their own for the work and for the client's going would cost 16 us a request.
    """
    try:
        async with asyncio.timeout(None) as wait:
            with departure.told(partial(wait.reschedule, 0.0)):
                await work
    except TimeoutError:
        if not wait.expired():
            raise
        return False
    return True


def _methods(path: str) -> tuple[str, ...]:
    """With which methods a path is served; none for a path that isn't."""
    is_served = path in ("/v1/models", "/healthz", "/readyz") or path.startswith("/v1/models/")
    return ("GET", "HEAD") if is_served else ()


def _headers_of(error: GatewayError) -> list[tuple[bytes, bytes]]:
    """What an error says in headers. The rest of a body that is late isn't waited for: its connection ends."""
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, RequestTimeout):
        headers.append((b"connection", b"close"))
    return headers


async def _answer(sink: AsgiSink, status: int, body: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode()), *more]
    await sink.start(status, headers)
    await sink.write(body)
    await sink.finish()


def _request_id(headers: Headers) -> bytes:
    """The client's `x-request-id` if it is printable and short, else a new one."""
    for name, value in headers:
        is_usable = 0 < len(value) <= REQUEST_ID_CHARS_MAX and value.isascii() and value.decode("latin-1").isprintable()
        if name == b"x-request-id" and is_usable:
            return value
    return b"req-" + secrets.token_hex(12).encode()


def _wants_explanation(headers: Headers) -> bool:
    return (b"x-warmroute-explain", b"1") in headers
