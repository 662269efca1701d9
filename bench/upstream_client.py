"""CPU time of the way to an engine and back: the gateway's own HTTP client beside aiohttp's.

    python -m bench.upstream_client [--pairs 20] [--only 100,8k,32k,stream]

Both do what `gateway/upstream.py` asks of them: the client's end-to-end headers, a timeout for the first byte and one
for each piece, a pool. The engine is a process of its own, so what is shown is one side's CPU, system calls included.
Pairs of short runs take turns; medians with quartiles, and those of each pair's ratio.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import aiohttp
import uvloop
from yarl import URL

from gateway.config import TimeoutsConfig
from gateway.header_rules import Headers
from gateway.upstream import Upstream

HEADERS = (
    (b"host", b"gateway:8080"),
    (b"user-agent", b"AsyncOpenAI/Python 2.1.0"),
    (b"accept", b"application/json"),
    (b"content-type", b"application/json"),
    (b"authorization", b"Bearer 0123456789abcdef"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"x-request-id", b"0123456789abcdef0123456789abcdef"),
)
EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"delta":{"content":" token"}}]}\n\n'
TOKENS, TOKEN_S = 100, 0.008
WHOLE = b'{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"content":"%s"}}]}' % (
    b"word " * 60
)
WHOLE_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(WHOLE),
    WHOLE,
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

Ask = Callable[[bytes, bool], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` of `body_bytes`, so many at once; a stream's cost is counted by token."""

    body_bytes: int
    requests: int
    at_once: int
    is_stream: bool = False


WORKLOADS = {
    "100": Workload(450, 400, 16),
    "8k": Workload(32_000, 400, 16),
    "32k": Workload(128_000, 200, 16),
    "stream": Workload(450, 64, 64, is_stream=True),
}


class Engine(asyncio.Protocol):
    """Answers when a whole request has come."""

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._left = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        if self._left < 0 and (end := self._waiting.find(b"\r\n\r\n")) >= 0:
            length = bytes(self._waiting).lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._left = end + 4 + int(length)
        if 0 <= self._left <= len(self._waiting):
            is_stream = self._waiting.endswith(b'"stream":true}')
            self._waiting.clear()
            self._left = -1
            self._transport.write(STREAM_HEAD if is_stream else WHOLE_ANSWER)
            if is_stream:
                self._say(TOKENS)

    def _say(self, left: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT) if left else b"0\r\n\r\n")
        if left:
            asyncio.get_running_loop().call_later(TOKEN_S, self._say, left - 1)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def ask_by_own(upstream: Upstream, url: str, body: bytes, is_stream: bool) -> None:
    answer = await upstream.send(url, HEADERS, body)
    try:
        answer.headers()
        assert (answer.content_type == "text/event-stream") == is_stream
        if is_stream:
            async for _ in answer.pieces():
                pass
        else:
            await answer.read_whole()
    finally:
        answer.close()


def end_to_end(headers: Headers) -> dict[str, str]:
    left_out = ("host", "content-length", "connection", "transfer-encoding", "accept-encoding")
    return {name.decode(): value.decode() for name, value in headers if name.decode().lower() not in left_out}


async def ask_by_aiohttp(session: aiohttp.ClientSession, url: str, body: bytes, timeouts: TimeoutsConfig) -> None:
    async with asyncio.timeout(timeouts.first_byte_s):
        answer = await session.request(
            "POST", URL(url, encoded=True), data=body, headers=end_to_end(HEADERS), allow_redirects=False
        )
        piece = await answer.content.readany()
    while piece:
        async with asyncio.timeout(timeouts.idle_s):
            piece = await answer.content.readany()
    answer.release()


async def cpu_s(workload: Workload, ask: Ask) -> float:
    """CPU seconds of this process for the whole workload."""
    ending = b'"stream":true}' if workload.is_stream else b'"stream":false}'
    body = b"x" * (workload.body_bytes - len(ending)) + ending
    left = iter(range(workload.requests))

    async def work() -> None:
        for _ in left:
            await ask(body, workload.is_stream)

    began_s = time.process_time()
    await asyncio.gather(*(work() for _ in range(workload.at_once)))
    return time.process_time() - began_s


def spread(values: Sequence[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


async def compare(port: int, names: Sequence[str], pairs: int) -> None:
    url, timeouts = f"http://127.0.0.1:{port}/v1/chat/completions", TimeoutsConfig()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    session = aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
    async with session, Upstream(timeouts) as upstream:
        ways: dict[str, Ask] = {
            "aiohttp": lambda body, is_stream: ask_by_aiohttp(session, url, body, timeouts),
            "own": lambda body, is_stream: ask_by_own(upstream, url, body, is_stream),
        }
        print("| workload | aiohttp, us | own, us | ratio |\n|---|---|---|---|")
        for name in names:
            workload = WORKLOADS[name]
            count = workload.requests * (TOKENS if workload.is_stream else 1)
            took: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(pairs + 1):  # the first opens connections
                for way in sorted(ways, reverse=number % 2 == 0):
                    us = await cpu_s(workload, ways[way]) / count * 1e6
                    if number:
                        took[way].append(us)
            ratios = [own / other for own, other in zip(took["own"], took["aiohttp"], strict=True)]
            cells = [spread(took["aiohttp"], ".1f"), spread(took["own"], ".1f"), spread(ratios, ".2f")]
            print(f"| {name}{', a token' if workload.is_stream else ''} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        uvloop.run(serve())
        return
    command = [sys.executable, "-m", "bench.upstream_client", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        try:
            uvloop.run(compare(int(engine.stdout.readline()), asked.only.split(","), asked.pairs))
        finally:
            engine.kill()


if __name__ == "__main__":
    main()
