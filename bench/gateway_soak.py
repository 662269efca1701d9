"""A gateway through requests of every ending, mixed: whether anything is left of them.

    python -m bench.gateway_soak [--requests 20000] [--minutes 20] [--json FILE]

Real processes: engines that fail in turn in every way, a real directory, exact encoding, and clients that finish, go
away at any moment, read slowly or send what is wrong; each prompt has a text of its own. After each tenth all is let
settle, and looked at: open requests and booked work must be none, tasks and file descriptors as many as before, and
memory flat. The exit status is 1 where something is left.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import uvloop

from bench.gateway.client import MARK
from bench.gateway.engine import Behaviour
from bench.gateway.prompts import conversations
from bench.gateway.site import WARMROUTE, Ground, Router, SiteFailed, standing, tell

AT_ONCE = 24
TENTHS = 10
WELL = Behaviour(ttft_s=0.005, token_s=0.001, renders=True)
ILL = (
    Behaviour(status=500, renders=True),
    Behaviour(status=503, renders=True),
    Behaviour(status=429, retry_after_s=1, renders=True),
    Behaviour(status=400, renders=True),
    Behaviour(drops=True, renders=True),
    Behaviour(ttft_s=0.005, token_s=0.001, cuts_after=3, renders=True),
    Behaviour(is_hung=True, renders=True),
    Behaviour(ttft_s=0.5, token_s=0.01, renders=True),
)
"""How an engine may be, one at a time and for a moment."""
ILL_FOR_S = 0.2
ENDINGS = {
    "whole": 30,
    "streamed": 30,
    "leaves while sending": 4,
    "leaves waiting": 8,
    "leaves a stream": 8,
    "reads slowly": 2,
    "bad json": 4,
    "unknown model": 4,
    "unknown path": 4,
    "too large": 3,
    "bad head": 3,
}
"""What clients do, with weights."""
TOO_LARGE_BYTES = 2**30
CLIENT_TIMEOUT_S = 3.0
"""A client gives up then: an ending as well."""
SETTLE_TIMEOUT_S = 60.0
SETTLE_POLL_S = 0.5
FIRST_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")
DESCRIPTORS_SLACK, TASKS_SLACK = 24, 24
"""Idle connections to engines and the directory come and go."""
RSS_SLACK_BYTES, RSS_SLACK_SHARE = 16 * 2**20, 0.1


@dataclass(frozen=True, slots=True)
class Look:
    """The gateway when nothing was asked of it. `cache_bytes` are of its memory, and bounded by `encoding.cache_mb`.

    `seen` counts what clients saw until then.
    """

    requests: int
    rss_bytes: int
    descriptors: int
    tasks: float
    inflight: float
    booked_s: float
    cache_bytes: float
    seen: dict[str, int]


class Client:
    """Sends requests, each on a connection of its own, each to an ending drawn by chance."""

    def __init__(self, port: int, seed: int, seen: Counter[str]) -> None:
        self._port, self._chance, self._seen, self._sent = port, random.Random(seed), seen, 0
        self._bodies = {each: conversations(700, 32, 12, each) for each in (False, True)}

    async def run(self, requests: int) -> None:
        """So many, one after the other."""
        for _ in range(requests):
            (ending,) = self._chance.choices(list(ENDINGS), list(ENDINGS.values()))
            try:
                async with asyncio.timeout(CLIENT_TIMEOUT_S):
                    said = await self._ask(ending)
            except TimeoutError:
                said = "gave up"
            except OSError:
                said = "connection failed"
            self._seen[f"{ending}: {said}"] += 1

    async def _ask(self, ending: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            request = self._request(ending)
            if ending == "leaves while sending":
                writer.write(request[: self._chance.randrange(1, len(request))])
                return "left"
            writer.write(request)
            await writer.drain()
            if ending == "leaves waiting":
                await asyncio.sleep(self._chance.choice((0.0, 0.002, 0.01)))
                return "left"
            answer = await reader.read(4096)
            if ending == "leaves a stream":
                return "left"
            while piece := await reader.read(64 if ending == "reads slowly" else 65_536):
                answer += piece
                if ending == "reads slowly":
                    await asyncio.sleep(0.001)
            status = FIRST_STATUS.match(answer)
            return status[1].decode() if status else "no answer"
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _request(self, ending: str) -> bytes:
        is_streamed = ending in ("streamed", "leaves a stream", "reads slowly") or self._chance.random() < 0.5
        is_streamed = is_streamed and ending != "whole"
        self._sent += 1
        mark = b"%d %d" % (id(self), self._sent)
        body = self._chance.choice(self._bodies[is_streamed]).body.replace(MARK, mark)
        path, length = b"/v1/chat/completions", None
        if ending == "bad json":
            body = body[:-1]
        elif ending == "unknown model":
            body = body.replace(b'"model": "', b'"model": "%d' % self._sent)
        elif ending == "unknown path":
            path = b"/v1/%d" % self._sent
        elif ending == "too large":
            length = TOO_LARGE_BYTES
        head = b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n" % path
        if ending == "bad head":
            return head + b"not a header\r\n\r\n"
        return head + b"content-length: %d\r\n\r\n" % (length or len(body)) + body


async def soak(requests: int, minutes: float = 0.0, seed: int = 0) -> list[Look]:
    """Looks after each tenth of the requests; more rounds of as many follow until so many minutes are over."""
    looks, sent, seen = list[Look](), 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="wr-bench-") as folder:
        async with standing([WARMROUTE], Path(folder)) as ground:
            (router,) = ground.routers
            ends_at = time.monotonic() + minutes * 60
            while sent < requests or time.monotonic() < ends_at:
                each = max(1, requests // TENTHS // AT_ONCE)
                spoiling = asyncio.create_task(_spoil(ground, random.Random(seed + sent)))
                clients = [Client(router.port, seed + sent + number, seen) for number in range(AT_ONCE)]
                await asyncio.gather(*(client.run(each) for client in clients))
                spoiling.cancel()
                await asyncio.wait({spoiling})
                await ground.behave(WELL)
                sent += each * AT_ONCE
                looks.append(await _settled(router, sent, seen))
                print(_line(looks[-1]), flush=True)
    return looks


def left_over(looks: Sequence[Look]) -> list[str]:
    """What the last look has more of than the third one had; caches are full by then, and pools open."""
    first, last = looks[min(2, len(looks) - 1)], looks[-1]
    left = [f"{last.inflight:g} requests in the ledger"] if last.inflight else []
    left += [f"{last.booked_s:g} s of booked work"] if last.booked_s else []
    if last.descriptors > first.descriptors + DESCRIPTORS_SLACK:
        left.append(f"{last.descriptors - first.descriptors} more file descriptors")
    if last.tasks > first.tasks + TASKS_SLACK:
        left.append(f"{last.tasks - first.tasks:g} more tasks")
    if last.rss_bytes > first.rss_bytes * (1 + RSS_SLACK_SHARE) + RSS_SLACK_BYTES:
        left.append(f"{(last.rss_bytes - first.rss_bytes) / 2**20:.0f} MiB more memory")
    return left


async def _spoil(ground: Ground, chance: random.Random) -> None:
    """One engine after the other is ill for a moment."""
    while True:
        port = chance.choice(ground.engine_ports)
        await tell(port, chance.choice(ILL))
        await asyncio.sleep(ILL_FOR_S)
        await tell(port, WELL)


async def _settled(router: Router, requests: int, seen: Counter[str]) -> Look:
    """The gateway once nothing is open any more, or when that took too long."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            text = (await client.get(f"http://127.0.0.1:{router.side_port}/metrics")).text
            inflight, booked_s = _sum(text, "warmroute_inflight_requests"), _sum(text, "warmroute_booked_seconds")
            if (not inflight and not booked_s) or time.monotonic() > deadline:
                break
            await asyncio.sleep(SETTLE_POLL_S)
    descriptors = len(os.listdir(f"/proc/{router.part.pid}/fd"))
    return Look(
        requests,
        router.rss_bytes(),
        descriptors,
        _sum(text, "warmroute_tasks"),
        inflight,
        booked_s,
        _sum(text, "warmroute_tokenizer_cache_bytes"),
        dict(seen),
    )


def _sum(text: str, name: str) -> float:
    lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] == name]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _line(look: Look) -> str:
    return (
        f"{look.requests:>8,} requests: {look.rss_bytes / 2**20:.1f} MiB ({look.cache_bytes / 2**20:.1f} of cached "
        f"text), {look.descriptors} descriptors, {look.tasks:g} tasks, {look.inflight:g} open, "
        f"{look.booked_s:g} s booked"
    )


def main() -> int:
    """Run it; 2 where something stands in the way."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gateway_soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on until then (20 for a long soak)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        looks = uvloop.run(soak(options.requests, options.minutes))
    except (SiteFailed, OSError) as error:
        print(f"bench.gateway_soak: {error}", file=sys.stderr)
        return 2
    for what, count in sorted(looks[-1].seen.items()):
        print(f"{count:>8,} {what}")
    left = left_over(looks)
    print("nothing is left" if not left else f"left: {'; '.join(left)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(look) for look in looks]))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
