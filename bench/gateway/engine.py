"""Engines that compute nothing: `python -m bench.gateway.engine PORT...`, one engine a port, all in one process.

They answer as vLLM does, as late as they are told, and badly where they are told to (`POST /bench/behave`). A request's
`user` field says how many tokens its prompt has: counting them would cost more than the routers under test.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from typing import Any, cast

import httptools
import msgspec
import orjson
import uvloop

MODEL = "bench"
CONTEXT_TOKENS = 131_072
TOKENS_DEFAULT = 16
REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 408: b"Request Timeout", 429: b"Too Many Requests"}
TEXT = "the quick brown fox jumps over the lazy dog"


class Behaviour(msgspec.Struct, frozen=True):
    """What an engine does from now on. `status`: it answers so; `is_hung`: it never answers, nor does its health where
    `is_health_hung`; `drops`: it closes without an answer; `cuts_after`: so many tokens, then it closes; `renders`: it
    says which token ids a chat has, as vLLM's `/render` does.
    """

    ttft_s: float = 0.0
    token_s: float = 0.0
    status: int = 200
    retry_after_s: int | None = None
    is_hung: bool = False
    is_health_hung: bool = False
    drops: bool = False
    cuts_after: int | None = None
    renders: bool = False


class Told(msgspec.Struct):
    """What an engine has seen: requests that came, that are open, and whose clients went before their answer ended."""

    requests: int = 0
    open: int = 0
    left: int = 0


class Engine:
    """One engine's state."""

    def __init__(self) -> None:
        self.behaviour, self.told = Behaviour(), Told()


class Answering(asyncio.Protocol):
    """One connection; requests on it come one after the other. The methods named `on_` are httptools'."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._url, self._pieces = b"", list[bytes]()
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_open:
            self._engine.told.left += 1
            self._end()
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        path, body = self._url.partition(b"?")[0], b"".join(self._pieces)
        self._url, self._pieces = b"", []
        engine = self._engine
        if path == b"/bench/behave":
            engine.behaviour, engine.told = msgspec.json.decode(body, type=Behaviour), Told(open=engine.told.open)
            self._answer(b"{}")
        elif path == b"/bench/told":
            self._answer(msgspec.json.encode(engine.told))
        elif path.endswith((b"/render", b"/tokenize")):
            self._answer(
                _rendered(body) if engine.behaviour.renders else b"{}", 200 if engine.behaviour.renders else 404
            )
        elif path.endswith(b"/completions"):
            self._serve(body)
        elif not (path.startswith(b"/health") and engine.behaviour.is_health_hung):
            self._answer(orjson.dumps(SHOWN.get(path.decode(), {})))

    def _serve(self, body: bytes) -> None:
        engine, behaviour = self._engine, self._engine.behaviour
        engine.told.requests += 1
        if behaviour.drops:
            self._transport.close()
            return
        if behaviour.status != 200:
            more = b"" if behaviour.retry_after_s is None else b"retry-after: %d\r\n" % behaviour.retry_after_s
            said = orjson.dumps({"error": {"message": "told to", "type": "bench", "code": behaviour.status}})
            self._answer(said, behaviour.status, more)
            return
        self._is_open = True
        engine.told.open += 1
        if not behaviour.is_hung:
            self._timer = self._loop.call_later(behaviour.ttft_s, self._begin, orjson.loads(body))

    def _begin(self, request: Mapping[str, Any]) -> None:
        tokens = (
            request.get("max_tokens") or request.get("max_completion_tokens") or TOKENS_DEFAULT
        )  # a router renames it
        prompt_tokens = int(request.get("user") or 1)
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens, "completion_tokens": tokens}
        if not request.get("stream"):
            self._end()
            message = {"role": "assistant", "content": TEXT}
            choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
            self._answer(orjson.dumps({**COMMON, "object": "chat.completion", "choices": choices, "usage": usage}))
            return
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        last = [DONE, b"0\r\n\r\n"]
        if (request.get("stream_options") or {}).get("include_usage"):
            last.insert(0, _event({**COMMON, "object": "chat.completion.chunk", "choices": [], "usage": usage}))
        self._transport.write(head + TOKEN)
        self._go_on(1, tokens, b"".join(last), self._loop.time())

    def _go_on(self, sent: int, tokens: int, last: bytes, at: float) -> None:
        """`sent` tokens are sent, the last one at `at`."""
        behaviour = self._engine.behaviour
        while sent < tokens:
            if sent == behaviour.cuts_after:
                self._transport.close()
                return
            if behaviour.token_s:
                at += behaviour.token_s
                self._timer = self._loop.call_at(at, self._send_token, sent, tokens, last, at)
                return
            self._transport.write(TOKEN)
            sent += 1
        self._end()
        self._transport.write(last)

    def _send_token(self, sent: int, tokens: int, last: bytes, at: float) -> None:
        self._transport.write(TOKEN)
        self._go_on(sent + 1, tokens, last, at)

    def _end(self) -> None:
        self._is_open = False
        self._engine.told.open -= 1

    def _answer(self, body: bytes, status: int = 200, more: bytes = b"") -> None:
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n" % (status, REASONS.get(status, b"Failed"))
        self._transport.write(b"%bcontent-length: %d\r\n%b\r\n%b" % (head, len(body), more, body))


def _event(data: Mapping[str, Any]) -> bytes:
    return _chunk(b"data: %b\n\n" % orjson.dumps(data))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _rendered(body: bytes) -> bytes:
    """Token ids that only depend on the text: a token for four bytes of it."""
    padded = body + b"\0" * (-len(body) % 4)
    ids = [each >> 15 for each in memoryview(padded).cast("I")]
    return orjson.dumps({"request_id": "r", "model": MODEL, "count": len(ids), "token_ids": ids})


COMMON = {"id": "chatcmpl-bench", "created": 1_700_000_000, "model": MODEL}
CHOICE = {"index": 0, "delta": {"content": " bebe"}, "logprobs": None, "finish_reason": None}
TOKEN = _event({**COMMON, "object": "chat.completion.chunk", "choices": [CHOICE]})
DONE = _chunk(b"data: [DONE]\n\n")
MODEL_ROW = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "max_model_len": CONTEXT_TOKENS}
ABOUT = {"model_path": MODEL, "served_model_name": MODEL, "model_id": MODEL, "is_generation": True, "version": "0.11.0"}
SHOWN: Mapping[str, Any] = {
    "/v1/models": {"object": "list", "data": [MODEL_ROW]},
    "/version": {"version": "0.11.0"},
    "/get_model_info": ABOUT,
    "/model_info": ABOUT,
    "/get_server_info": ABOUT | {"tp_size": 1, "dp_size": 1, "status": "ready"},
    "/server_info": ABOUT | {"tp_size": 1, "dp_size": 1, "status": "ready"},
}


async def serve(ports: list[int]) -> None:
    """Until SIGTERM."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    async with contextlib.AsyncExitStack() as stack:
        for port in ports:
            engine = Engine()
            server = await loop.create_server(lambda engine=engine: Answering(engine, loop), "127.0.0.1", port)  # type: ignore[misc]
            stack.callback(server.close)
        await ended.wait()


if __name__ == "__main__":
    uvloop.run(serve([int(each) for each in sys.argv[1:]]))
