"""Wires between a client and its server: one that holds a request back, and one that loses packets."""

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import Self

READ_BYTES = 65_536
PACKET_BYTES = 1_460
RETRANSMIT_S = 0.2
"""What TCP on Linux waits before it sends a lost packet again, at least; twice as long each further time."""
LOSSES_MAX = 5
"""Then the connection is given up."""


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """One connection through a wire."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter


class Wire:
    """Passes bytes between clients and the server at `target_port`. Use as `async with`; clients connect to `port`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._attend, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def pass_request(self, data: bytes, passage: Passage) -> None:
        """Pass what a client sent."""
        passage.server.write(data)

    async def pass_reply(self, data: bytes, passage: Passage) -> None:
        """Pass what the server sent."""
        passage.client.write(data)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        target: asyncio.StreamWriter | None = None
        try:
            replies, target = await asyncio.open_connection("127.0.0.1", self._target_port)
            passage = Passage(writer, target)
            requests = asyncio.create_task(self._pump_requests(reader, passage))
            try:
                await self._pump_replies(replies, passage)
            finally:
                requests.cancel()
                await asyncio.gather(requests, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            return
        finally:
            for each in (writer, target):
                if each is not None:
                    each.transport.abort()

    async def _pump_requests(self, source: asyncio.StreamReader, passage: Passage) -> None:
        while data := await source.read(READ_BYTES):
            await self.pass_request(data, passage)
            await passage.server.drain()
        passage.server.write_eof()

    async def _pump_replies(self, source: asyncio.StreamReader, passage: Passage) -> None:
        while data := await source.read(READ_BYTES):
            await self.pass_reply(data, passage)
            with contextlib.suppress(ConnectionError):  # The client may have given up; what it asked for is done.
                await passage.client.drain()


class HoldingWire(Wire):
    """Holds back one request, with all that follows it on its connection; it arrives though its sender has given up."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self._marker: bytes | None = None
        self._late: Passage | None = None
        self._let_go = asyncio.Event()
        self.held = asyncio.Event()
        """Set once a request is held."""
        self.answered = asyncio.Event()
        """Set once the server has answered the late request."""

    def hold(self, marker: bytes) -> None:
        """Hold the next request that contains `marker`."""
        self._marker = marker

    def let_go(self) -> None:
        self._let_go.set()

    async def pass_request(self, data: bytes, passage: Passage) -> None:
        if self._marker is not None and self._marker in data:
            self._marker = None
            self.held.set()
            await self._let_go.wait()
            self._late = passage
        passage.server.write(data)

    async def pass_reply(self, data: bytes, passage: Passage) -> None:
        if passage is self._late:
            self.answered.set()
        passage.client.write(data)


class LossyWire(Wire):
    """Loses packets in both directions as a bad network does: TCP sends them again, ever later, and then gives up."""

    def __init__(self, target_port: int, seed: int) -> None:
        super().__init__(target_port)
        self._random = random.Random(seed)
        self.loss = 0.0
        """The share of packets that are lost."""

    async def pass_request(self, data: bytes, passage: Passage) -> None:
        await self._pass(data, passage.server)

    async def pass_reply(self, data: bytes, passage: Passage) -> None:
        await self._pass(data, passage.client)

    async def _pass(self, data: bytes, sink: asyncio.StreamWriter) -> None:
        for start in range(0, len(data), PACKET_BYTES):
            losses = 0
            while self._random.random() < self.loss:
                losses += 1
                if losses > LOSSES_MAX:
                    raise ConnectionResetError("too many losses")
                await asyncio.sleep(RETRANSMIT_S * 2 ** (losses - 1))
            sink.write(data[start : start + PACKET_BYTES])
