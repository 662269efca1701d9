"""A TCP proxy that cuts, half-closes or stalls a connection at a chosen byte, or answers late, never, or garbage."""

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import Literal, Self

READ_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Cut:
    """What happens to one request: after `after_bytes` bytes of the request or of its answer have passed.

    `reset` sends an RST, `close` a FIN (the other direction lives on), `stall` passes nothing more.
    """

    how: Literal["reset", "close", "stall"]
    after_bytes: int
    side: Literal["request", "answer"] = "answer"


class _Passage:
    """One connection through the proxy."""

    def __init__(self, proxy: "FaultyProxy", client: asyncio.StreamWriter, target: asyncio.StreamWriter) -> None:
        self.proxy, self.client, self.target = proxy, client, target
        self.cut: Cut | None = None
        self.passed = {"request": 0, "answer": 0}

    async def pump(self, side: Literal["request", "answer"], source: asyncio.StreamReader) -> None:
        sink = self.target if side == "request" else self.client
        while data := await source.read(READ_BYTES):
            if side == "request" and data.startswith(self.proxy.subject):
                self.passed = {"request": 0, "answer": 0}
                self.cut = self.proxy.claim()
            if side == "answer":
                if self.proxy.garbage is not None:
                    data = self.proxy.garbage
                if self.proxy.is_silent:
                    continue
                if self.proxy.delay_s:
                    await asyncio.sleep(self.proxy.delay_s)
            cut = self.cut
            if cut is None or cut.side != side or self.passed[side] + len(data) < cut.after_bytes:
                self.passed[side] += len(data)
                sink.write(data)
                await sink.drain()
                continue
            sink.write(data[: max(0, cut.after_bytes - self.passed[side])])
            await sink.drain()
            self.proxy.cuts_made += 1
            if cut.how == "stall":
                await asyncio.Event().wait()
            if cut.how == "close":
                sink.write_eof()
                return
            self.reset()
            return
        if not sink.transport.is_closing():
            sink.write_eof()

    def reset(self) -> None:
        for writer in (self.client, self.target):
            if not writer.transport.is_closing():
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()


class FaultyProxy:
    """Listens on a port of its own and passes bytes to `port` on this machine.

    A request that begins with `subject` claims the next of `cuts`; other bytes pass (health checks, say). `delay_s`,
    `is_silent` and `garbage` hold for all answers while they are set.
    """

    def __init__(self, port: int, subject: bytes = b"POST ") -> None:
        self._target_port, self.subject = port, subject
        self.cuts: list[Cut] = []
        self.cuts_made = 0
        self.delay_s = 0.0
        self.is_silent = False
        self.garbage: bytes | None = None
        self.port = 0
        self.accepted = 0
        self._passages: set[_Passage] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._attend, sock=socket.socket(fileno=listener.detach()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def claim(self) -> Cut | None:
        """The cut for the request that begins now."""
        return self.cuts.pop(0) if self.cuts else None

    def break_idle(self, how: Literal["reset", "close"]) -> None:
        """Break every open connection where nothing is under way."""
        for passage in list(self._passages):
            if how == "reset":
                passage.reset()
            else:
                passage.client.write_eof()

    async def _attend(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.accepted += 1
        target: asyncio.StreamWriter | None = None
        try:
            answers, target = await asyncio.open_connection("127.0.0.1", self._target_port)
            passage = _Passage(self, client, target)
            self._passages.add(passage)
            try:
                pumps = (passage.pump("request", reader), passage.pump("answer", answers))
                await asyncio.gather(*pumps)
            finally:
                self._passages.discard(passage)
        except (OSError, asyncio.CancelledError):
            return
        finally:
            for writer in (client, target):
                if writer is not None:
                    writer.transport.abort()
