"""A server that answers with exact bytes, or breaks off after any of them; it reads requests with h11."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import h11

Step = bytes | Literal["close", "reset", "stall"]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@dataclass(frozen=True, slots=True)
class Seen:
    """A request, and on which connection it came."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    connection: int


class ScriptedServer:
    """The n-th request is answered with the n-th of `answers`, all later ones with the last.

    `close` ends the connection, `reset` does so with an RST, `stall` waits until the client ends it. `greeting` is sent
    to who connects.
    """

    def __init__(
        self,
        *answers: Sequence[Step],
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        greeting: bytes = b"",
    ) -> None:
        self.answers: list[Sequence[Step]] = list(answers) or [[OK]]
        self.seen: list[Seen] = []
        self.accepted = self.open = 0
        self._host, self._tls, self._greeting = host, tls, greeting
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._attend, self._host, 0, ssl=self._tls)
        self.port: int = self._server.sockets[0].getsockname()[1]
        named = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{'https' if self._tls else 'http'}://{named}:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def say(self, data: bytes) -> None:
        """Send something on every open connection, unasked."""
        for writer in self._writers:
            writer.write(data)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        number = self.accepted
        self.accepted += 1
        self.open += 1
        self._writers.append(writer)
        writer.write(self._greeting)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while await self._answer_one(reader, writer, number):
                pass
        self.open -= 1
        self._writers.remove(writer)
        writer.transport.abort()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        seen = await read_request(reader, number)
        if seen is None:
            return False
        self.seen.append(seen)
        for step in self.answers[min(len(self.seen), len(self.answers)) - 1]:
            if step == "close":
                writer.write_eof() if writer.can_write_eof() else writer.close()
                await reader.read()
                return False
            if step == "reset":
                reset(writer)
                return False
            if step == "stall":
                while await reader.read(65_536):
                    pass
                return False
            assert isinstance(step, bytes)
            writer.write(step)
            await writer.drain()
        return True


@contextlib.asynccontextmanager
async def served(
    attend: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The URL of a server that attends to its connections in a way of its own."""
    tasks: set[asyncio.Task[None]] = set()

    async def attend_to_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            await attend(reader, writer)
        tasks.discard(task)
        writer.transport.abort()

    server = await asyncio.start_server(attend_to_the_end, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with an RST."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def read_request(reader: asyncio.StreamReader, number: int) -> Seen | None:
    """A whole request; nothing when the client has gone."""
    parser = h11.Connection(h11.SERVER)
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(65_536)
            if not data:
                return None
            parser.receive_data(data)
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            assert not parser.trailing_data[0], "a client doesn't pipeline"
            headers = tuple((bytes(name), bytes(value)) for name, value in head.headers)
            return Seen(head.method.decode(), bytes(head.target), headers, bytes(body), number)
