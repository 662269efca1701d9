"""An engine that answers with exact bytes, in every way HTTP has to say where a body ends."""

import asyncio
import contextlib
from typing import Any, Literal, Self

import orjson

from tests.gateway.mock_engine import event
from tests.gateway.samples import MODEL

Framing = Literal["length", "chunked", "close"]
TEXT = "abcdefg"
WHOLE = orjson.dumps({"id": "byte-engine", "choices": [{"message": {"role": "assistant", "content": TEXT}}]})
EVENTS = [b'data: {"choices":[{"index":0,"delta":{"content":"%c"}}]}\n\n' % letter for letter in TEXT.encode()]
DONE = b"data: [DONE]\n\n"
assert event(1).startswith(EVENTS[0][:10])


def framed(pieces: list[bytes], content_type: str, framing: Framing) -> bytes:
    """A whole answer as it goes over the wire."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n"
    body = b"".join(pieces)
    if framing == "length":
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    if framing == "close":
        return f"{head}connection: close\r\n\r\n".encode() + body
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


def answer_bytes(framing: Framing, stream: bool, events: tuple[bytes, ...] = (*EVENTS, DONE)) -> bytes:
    """What the engine answers to a request."""
    if stream:
        return framed(list(events), "text/event-stream", framing)
    return framed([WHOLE[:40], WHOLE[40:]], "application/json", framing)


class ByteEngine:
    """Healthy, and serves `MODEL`. `framing` and what is streamed may be changed at any time."""

    def __init__(self, name: str) -> None:
        self.name, self.url = name, ""
        self.framing: Framing = "length"
        self.events: tuple[bytes, ...] = (*EVENTS, DONE)
        self.served = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._attend, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def answer(self, head: bytes, body: dict[str, Any]) -> bytes:
        """All that is sent back, as it goes over the wire."""
        return answer_bytes(self.framing, bool(body.get("stream")), self.events)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._answer_one(reader, writer):
                pass
        writer.transport.abort()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        asked = await reader.readuntil(b"\r\n\r\n")
        head = asked.lower()
        if head.startswith(b"get /health"):
            writer.write(framed([b"{}"], "application/json", "length"))
            return True
        if head.startswith(b"get /v1/models"):
            writer.write(framed([orjson.dumps({"data": [{"id": MODEL}]})], "application/json", "length"))
            return True
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        body = orjson.loads(await reader.readexactly(length))
        self.served += 1
        writer.write(self.answer(asked, body))
        await writer.drain()
        if self.framing == "close":
            writer.write_eof()
            return False
        return True
