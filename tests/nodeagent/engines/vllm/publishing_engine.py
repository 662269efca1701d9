"""An engine's side of KV events over real sockets, as vLLM's publisher has it: numbers from 0, a replay buffer."""

import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from nodeagent.engines.vllm.events import Event
from nodeagent.messages import KvEventSource
from tests.nodeagent.engines.vllm.recorded import payload

BLOCK_TOKENS = 2
WAIT_S = 20.0
END = (-1).to_bytes(8, "big", signed=True)


async def until(is_true: Callable[[], Any], what: str = "the condition") -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_true():
            await asyncio.sleep(0.002)


class PublishingEngine:
    """PUB (an XPUB, so that a test knows when somebody listens) and ROUTER. `clock` makes payloads differ."""

    def __init__(self, context: zmq.asyncio.Context, topic: str = "kv", buffer_batches: int = 10_000) -> None:
        self.context = context
        self.topic = topic
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self.requests: list[int] = []
        self.is_replay_mute = False
        self.drop_replies: set[int] = set()
        self.before_replies: Awaitable[None] | None = None
        self.before_end: Awaitable[None] | None = None
        self.next = 0
        self._life = 0
        self._clock = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="kv")
        self._open()

    @property
    def source(self) -> KvEventSource:
        return KvEventSource(self._endpoint("events"), self._endpoint("replay"), self.topic, BLOCK_TOKENS)

    async def listened_to(self) -> None:
        """Wait until a subscriber's subscription is here."""
        async with asyncio.timeout(WAIT_S):
            while (await self.publisher.recv())[:1] != b"\x01":
                pass

    def publish(self, *events: Event, is_lost: bool = False, raw: bytes | None = None, rank: int | None = 0) -> None:
        """The next batch; it is in the buffer even if it is lost on the way."""
        self._clock += 1.0
        data = payload(*events, ts=self._clock, rank=rank) if raw is None else raw
        if not is_lost:
            self.send([self.topic.encode(), self.next.to_bytes(8, "big"), data])
        self.buffer.append((self.next, data))
        self.next += 1

    def send(self, frames: list[bytes]) -> None:
        """Never waits, as vLLM's doesn't."""
        self.publisher.send_multipart(frames, zmq.NOBLOCK)

    def restart(self) -> None:
        """Another process at the same endpoints, with nothing in its memory."""
        self._close()
        self.buffer.clear()
        self.next = 0
        self._open()

    async def serve(self) -> None:
        while True:
            if not await self.replay.poll(20):
                continue
            client, _, start = await self.replay.recv_multipart()
            self.requests.append(int.from_bytes(start, "big"))
            buffer = list(self.buffer)
            if self.before_replies is not None:
                await self.before_replies
                self.before_replies = None
            if self.is_replay_mute:
                continue
            for sequence, data in buffer:
                if sequence >= self.requests[-1] and sequence not in self.drop_replies:
                    reply = [client, b"", self.topic.encode(), sequence.to_bytes(8, "big"), data]
                    await self.replay.send_multipart(reply)
            self.drop_replies = set()
            if self.before_end is not None:
                await self.before_end
                self.before_end = None
            await self.replay.send_multipart([client, b"", b"", END, b""])

    def close(self) -> None:
        self._close()
        self._folder.cleanup()

    def _open(self) -> None:
        self.publisher = self.context.socket(zmq.XPUB)
        self.publisher.setsockopt(zmq.XPUB_VERBOSE, 1)  # tell of each subscription, not of each new topic
        self.replay = self.context.socket(zmq.ROUTER)
        for socket, name in ((self.publisher, "events"), (self.replay, "replay")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 100_000)
            self._bind(socket, self._endpoint(name))
        self._server = asyncio.get_running_loop().create_task(self.serve())

    def _endpoint(self, name: str) -> str:
        """Not TCP: who connects to a loopback port that nobody has may get that very port, and keep it."""
        return f"ipc://{self._folder.name}/{name}"

    def _bind(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        for _ in range(1000):  # it is free once the closed socket's thread has let it go
            try:
                socket.bind(endpoint)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                zmq.select([], [], [], 0.005)
        raise AssertionError("the endpoint stays taken")

    def _close(self) -> None:
        self._server.cancel()
        self.publisher.close()
        self.replay.close()


@asynccontextmanager
async def publishing(**options: Any) -> AsyncIterator[PublishingEngine]:
    context = zmq.asyncio.Context()
    engine = PublishingEngine(context, **options)
    try:
        yield engine
    finally:
        engine.close()
        await asyncio.gather(engine._server, return_exceptions=True)
        context.term()
