"""A wire that stalls: a proxy in front of a server which passes a limited number of the reply's bytes."""

import asyncio
import ssl
from contextlib import suppress

READ_BYTES_MAX = 65536


class StallingWire:
    """Use as `async with`. Passes everything until `stall_after` limits how many more reply bytes come through."""

    def __init__(self, server_port: int, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is what clients meet; the server behind is reached in the clear."""
        self._server_port, self._tls = server_port, tls
        self._left: int | None = None
        self._resumed = asyncio.Event()
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "StallingWire":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def stall_after(self, reply_bytes: int) -> None:
        self._left = reply_bytes
        self._resumed.clear()

    def resume(self) -> None:
        self._left = None
        self._resumed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            with suppress(ConnectionError):
                async with asyncio.TaskGroup() as group:
                    forth = group.create_task(self._pass_requests(reader, to_writer))
                    back = group.create_task(self._pass_replies(to_reader, writer))
                    await asyncio.wait((forth, back), return_when=asyncio.FIRST_COMPLETED)
                    forth.cancel()
                    back.cancel()
        finally:
            self._tasks.discard(task)
            to_writer.close()
            writer.close()

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES_MAX):
            writer.write(data)
            await writer.drain()

    async def _pass_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES_MAX):
            if self._left is not None:
                passed, data = data[: self._left], data[self._left :]
                self._left -= len(passed)
                writer.write(passed)
                if data:
                    await self._resumed.wait()
            writer.write(data)
            await writer.drain()
