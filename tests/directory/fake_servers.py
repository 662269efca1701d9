"""Servers that answer as they are told: members of a cluster that send a caller on, sentinels that name a master."""

import asyncio
import re
from collections import Counter

READ_BYTES_MAX = 65536
HANGS = -1
"""The port of the master that a sentinel names which never answers."""

_COMMAND = re.compile(rb"\*\d+\r\n\$\d+\r\n([A-Z_]+)\r\n")


class FakeServer:
    """Answers each command with what is in `answers` under its name, or `+OK`; `asked` counts them. An `async with`."""

    def __init__(self) -> None:
        self.answers: dict[bytes, bytes] = {}
        self.asked: Counter[bytes] = Counter()
        self.hangs = False
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> "FakeServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    def answer(self, name: bytes, command: bytes) -> bytes:
        """To `command`, whose first word is `name`."""
        return self.answers.get(name, b"+OK\r\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        while data := await reader.read(READ_BYTES_MAX):
            starts = [found.start() for found in _COMMAND.finditer(data)]
            for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
                found = _COMMAND.match(data, start)
                assert found is not None
                self.asked[found[1]] += 1
                if not self.hangs:
                    writer.write(self.answer(found[1], data[start:end]))
        self._writers.discard(writer)
        writer.close()


class FakeNode(FakeServer):
    """Says that `names` share the slots, at first it alone, under `called`."""

    def __init__(self, called: bytes = b"") -> None:
        super().__init__()
        self.called = called
        self.names: list[FakeNode] = [self]

    def answer(self, name: bytes, command: bytes) -> bytes:
        """Its division of the slots, unless `answers` has another one."""
        return super().answer(name, command) if name != b"CLUSTER" or name in self.answers else self._slots()

    def _slots(self) -> bytes:
        host = b"$%d\r\n%s\r\n" % (len(self.called), self.called)
        share = 16384 // len(self.names)
        ranges = [
            b"*3\r\n:%d\r\n:%d\r\n*3\r\n%s:%d\r\n$2\r\nid\r\n"
            % (first * share, (first + 1) * share - 1, host, node.port)
            for first, node in enumerate(self.names)
        ]
        return b"*%d\r\n%s" % (len(ranges), b"".join(ranges))


class FakeSentinel(FakeServer):
    """Names the master of `the-master` at `master_port`: `None` knows none, `HANGS` never answers."""

    def __init__(self, master_port: int | None) -> None:
        super().__init__()
        self.master_port = master_port

    def answer(self, name: bytes, command: bytes) -> bytes:
        """The master's address, unless `answers` has another one."""
        if name != b"SENTINEL" or name in self.answers:
            return super().answer(name, command)
        if self.master_port == HANGS:
            return b""
        if self.master_port is None or b"the-master" not in command:
            return b"*-1\r\n"
        port = str(self.master_port).encode()
        return b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%s\r\n" % (len(port), port)
