"""Engines that end every answer as they are told to, in this process and without time; and a client's side."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

from gateway.encoding.encoder import Encoding
from gateway.fleet import EngineView
from gateway.header_rules import Headers
from gateway.ids_sender import IdsSender
from gateway.openai_schema import CHAT, InferenceRequest, parse_request
from gateway.preparation import Incoming
from gateway.upstream import EngineFailed
from tests.gateway.samples import MODEL

STATUSES = {"answers": 200, "refuses": 400, "lacks it": 404, "is busy": 429, "is down": 503}
FAILURES = {"drops the connection": {"is_connection": True}, "is too late": {"is_timeout": True}}
BREAKS = {"streams": 5, "breaks before an event": 0, "breaks midway": 2}
BUG = "meets a bug"
HANGS = "hangs"
ENDINGS = (*STATUSES, *FAILURES, *BREAKS, BUG)
"""How an engine's answer may end by itself."""
EVENTS = (*(b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(3)), b"data: [DONE]\n\n")


class ABug(Exception):
    """Something that nobody foresaw."""


class ScriptedAnswer:
    """Stands for `gateway.upstream.Answer`."""

    def __init__(self, ending: str, on_close: Callable[["ScriptedAnswer"], None]) -> None:
        self._events_max = BREAKS.get(ending)
        self._on_close, self._passed = on_close, 0
        self.status = STATUSES.get(ending, 200)
        self.content_type = "application/json" if self._events_max is None else "text/event-stream"
        self.is_end_told = True
        self.has_ids = False
        self.first = b"{}" if self._events_max is None else b""

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", self.content_type.encode())]

    async def pass_to(self, take: Callable[[bytes], bool]) -> bool:
        for number in range(self._passed, len(EVENTS)):
            await asyncio.sleep(0)
            if number == self._events_max:
                raise EngineFailed("broke off", is_connection=True)
            self._passed += 1
            if not take(EVENTS[number]):
                return False
        return True

    async def read_whole(self) -> bytes:
        await asyncio.sleep(0)
        return b"{}"

    def close(self) -> None:
        self._on_close(self)


class ScriptedSender(IdsSender):
    """Every attempt ends as `next_ending` says. `open` are the attempts that haven't ended."""

    def __init__(self, next_ending: Callable[[EngineView], str]) -> None:
        self.next_ending = next_ending
        self.open: set[object] = set()
        self.sent: list[str] = []

    async def send(
        self, view: EngineView, path: str, headers: Headers, encoding: Encoding | None, request: InferenceRequest
    ) -> Any:
        ending = self.next_ending(view)
        self.sent.append(view.engine)
        attempt = object()
        self.open.add(attempt)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            if ending == HANGS:
                await asyncio.Event().wait()
            if ending == BUG:
                raise ABug
            if ending in FAILURES:
                raise EngineFailed(ending, **FAILURES[ending])
            answer = ScriptedAnswer(ending, self.open.discard)
            self.open.add(answer)
            return answer
        finally:
            self.open.discard(attempt)


class Client:
    """The sink of a client that takes its time, and may be one that a bug is met with."""

    def __init__(self, bug_at: int = -1) -> None:
        self.calls, self._bug_at = 0, bug_at
        self.status = 0

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._take()

    async def write(self, piece: bytes) -> None:
        await self._take()

    def push(self, piece: bytes) -> bool:
        if self.calls % 2:  # it is behind now and then
            return False
        self._count()
        return True

    async def finish(self) -> None:
        await self._take()

    async def _take(self) -> None:
        await asyncio.sleep(0)
        self._count()

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self._bug_at:
            raise ABug


def incoming(text: str = "hello", endpoint: str = CHAT, **fields: Any) -> Incoming:
    """A request as it came from a client."""
    body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **fields})
    return Incoming(parse_request(endpoint, body), [(b"x-request-id", b"r")], 0.0)
