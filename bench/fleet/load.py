"""The client: sends requests at their moments, whatever the answers do, and notes when the first token came.

Each request has a connection of its own. On one that is kept, a router that leaves Nagle's algorithm on and a kernel
that delays acknowledgements hold back the first token for 40 ms, which scaled seconds would make five times as long.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools

from bench.fleet.prompts import TextRequest

ANSWER_TIMEOUT_S = 120.0
TAIL_BYTES = 4096
_DATA, _DONE = b"data: ", b"data: [DONE]"


@dataclass(slots=True)
class Answer:
    """What became of the request that was due `at_s` after the start. Times are real seconds after that moment.

    `error` is empty where all went well.
    """

    at_s: float = 0.0
    late_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


@dataclass(eq=False, slots=True)
class _Exchange(asyncio.Protocol):
    """One request on one connection. `due_at` is its moment on the loop's clock."""

    head: bytes
    body: bytes
    due_at: float
    ended: asyncio.Future[None]
    answer: Answer = field(default_factory=Answer)
    parser: httptools.HttpResponseParser = field(init=False)
    tail: bytes = b""

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self.head + self.body)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        self.tail = (self.tail + body)[-TAIL_BYTES:]
        if self.answer.first_token_s is None and _DATA in body:
            self.answer.first_token_s = time.monotonic() - self.due_at

    def on_message_complete(self) -> None:
        self.answer.ended_s = time.monotonic() - self.due_at
        status = self.parser.get_status_code()
        if status != 200:
            self._end(f"status {status}: {self.tail[:200].decode(errors='replace')}")
        elif _DONE not in self.tail:
            self._end("the stream broke off")
        else:
            self._read_usage()
            self._end("" if self.answer.output_tokens else "no usage")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the connection was lost: {error}")

    def _read_usage(self) -> None:
        for line in self.tail.split(b"\n"):
            if line.startswith(_DATA) and b'"usage"' in line:
                usage = json.loads(line[len(_DATA) :]).get("usage") or {}
                self.answer.prompt_tokens = usage.get("prompt_tokens", 0)
                self.answer.output_tokens = usage.get("completion_tokens", 0)
                self.answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def _end(self, error: str) -> None:
        if not self.ended.done():
            self.answer.error = error
            self.ended.set_result(None)


async def send(port: int, request: TextRequest, due_at: float) -> Answer:
    """Send one request now; it was due at `due_at` on the monotonic clock."""
    late_s = time.monotonic() - due_at
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(request.body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    exchange = _Exchange(head.encode(), request.body, due_at, loop.create_future())
    transport = None
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            transport, _ = await loop.create_connection(lambda: exchange, "127.0.0.1", port)
            await exchange.ended
    except TimeoutError:
        exchange.answer.error = f"no whole answer in {ANSWER_TIMEOUT_S:g} s"
    except OSError as error:
        exchange.answer.error = f"can't connect: {error}"
    finally:
        if transport is not None:
            transport.abort()
    exchange.answer.at_s, exchange.answer.late_s = request.at_s, late_s
    return exchange.answer


async def run_load(port: int, requests: Sequence[TextRequest]) -> list[Answer]:
    """All of them, each at its moment from now on; returns when the last has ended."""
    start = time.monotonic()

    async def one(request: TextRequest) -> Answer:
        await asyncio.sleep(max(0.0, start + request.at_s - time.monotonic()))
        return await send(port, request, start + request.at_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in requests]
    return [task.result() for task in tasks]
