"""One run: fresh engines and a fresh router, the load, and what all of it took."""

import asyncio
import contextlib
import os
import random
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from bench.fleet.engine_host import EnginePorts, HostPlan
from bench.fleet.load import Answer, run_load, send
from bench.fleet.prompts import TextRequest, chat_body
from bench.fleet.report import CLIENT, OTHERS, Watched
from bench.fleet.scale import Scale
from bench.fleet.stacks import Site, Stack
from bench.fleet.words import some_words
from warmroute.processes import Part, Supervisor

ENGINES = 8
PORTS = range(20_000, 32_000)
START_TIMEOUT_S = 60.0
POLL_S = 0.1
WARM_UP_REQUESTS, WARM_UP_WORDS = 32, 8
SETTLE_S = 2.0
"""Between the first good answers and the load: events, metrics and health checks have had their turn."""
_BUSY = (1, 2, 3, 6, 7, 8)  # of /proc/stat's first line: user, nice, system, irq, softirq, steal
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class FleetSize:
    """What every run has alike."""

    scale: Scale
    gpu_blocks: int
    engine_spread: float = 0.1
    seed: int = 0


class StackFailed(Exception):
    """A router didn't come to serve; the message says what it said last."""


async def run_stack(stack: Stack, size: FleetSize, requests: Sequence[TextRequest]) -> tuple[list[Answer], Watched]:
    """Raises `StackFailed`."""
    with tempfile.TemporaryDirectory(prefix="wr-bench-") as folder:
        async with _running(stack, size, Path(folder)) as (site, parts):
            warmed_up = await _ask_engines(site)
            before, began = _cpu_s(parts), time.monotonic()
            answers = await run_load(site.port, requests)
            lasted_s = time.monotonic() - began
            cores = {name: (cpu - before[name]) / lasted_s for name, cpu in _cpu_s(parts).items()}
            cores[OTHERS] = max(0.0, 2 * cores[OTHERS] - sum(cores.values()))
            told = await _ask_engines(site)
    late = [each for engine in told for each in engine.lateness_s]
    served = sum(engine.requests for engine in told) - sum(engine.requests for engine in warmed_up)
    waited_s = sum(engine.ttft_s for engine in told) - sum(engine.ttft_s for engine in warmed_up)
    return answers, Watched(late, [engine.computed_tokens for engine in told], cores, waited_s / max(1, served))


class EngineTold(msgspec.Struct):
    """What an engine's `/bench` says."""

    lateness_s: list[float]
    computed_tokens: int
    requests: int
    ttft_s: float


@contextlib.asynccontextmanager
async def _running(stack: Stack, size: FleetSize, folder: Path) -> AsyncIterator[tuple[Site, list[Part]]]:
    ports = free_ports()
    engines = [EnginePorts(next(ports), next(ports), next(ports)) for _ in range(ENGINES)]
    site = Site(folder, next(ports), next(ports), next(ports), sys.executable, size.scale, engines)
    supervisor, parts = Supervisor(lambda text: print(text, file=sys.stderr)), stack.before(site)
    try:
        for part in parts:
            await supervisor.start(part)
        if stack.has_agent:
            await _until(parts, site.door.exists, "the agent has its door")
        parts.append(_engine_part(stack, size, site))
        await supervisor.start(parts[-1])
        await _until(parts, lambda: _all_answer(site), "the engines serve")
        for part in stack.after(site):
            parts.append(part)
            await supervisor.start(part)
        await _until(parts, lambda: _is_ready(stack, site), "the router serves")
        await _warm_up(site)
        yield site, parts
    finally:
        await supervisor.close()


def _engine_part(stack: Stack, size: FleetSize, site: Site) -> Part:
    plan = HostPlan(
        ports=list(site.engines),
        gpu_blocks=size.gpu_blocks,
        trace_tokens=size.scale.trace_tokens,
        real_s=size.scale.real_s,
        engine_spread=size.engine_spread,
        seed=size.seed,
        door=str(site.door) if stack.has_agent else None,
    )
    file = site.folder / "engines.json"
    file.write_bytes(msgspec.json.encode(plan))
    return site.part("engines", site.python, "-m", "bench.fleet.engine_host", str(file))


async def _all_answer(site: Site) -> bool:
    async with httpx.AsyncClient(trust_env=False) as http:
        answers = [await _status(http, f"{url}/health") for url in site.urls]
    return all(answer == 200 for answer in answers)


async def _is_ready(stack: Stack, site: Site) -> bool:
    """It answers; warmroute says, besides, that it knows its engines and encodes exactly for them."""
    if not stack.has_agent:
        answer = await send(site.port, _short_request("is it ready"), time.monotonic())
        return not answer.error
    async with httpx.AsyncClient(trust_env=False) as http:
        try:
            rows = (await http.get(f"http://127.0.0.1:{site.side_port}/fleet")).json()["engines"]
        except httpx.HTTPError:
            return False
    ready = [
        row for row in rows if (row["state"], row["encoding"], row["placements"]) == ("ready", "exact", "believed")
    ]
    return len(ready) == ENGINES


async def _warm_up(site: Site) -> None:
    """Short prompts of nobody's, so that connections and code are warm. Raises `StackFailed` where one fails."""
    requests = [_short_request(f"warm-up {number}") for number in range(WARM_UP_REQUESTS)]
    answers = await asyncio.gather(*(send(site.port, request, time.monotonic()) for request in requests))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise StackFailed(f"{len(failed)} of {WARM_UP_REQUESTS} warm-up requests failed: {failed[0]}")
    await asyncio.sleep(SETTLE_S)


def _short_request(seed: str) -> TextRequest:
    return TextRequest(0.0, chat_body(some_words(seed, WARM_UP_WORDS), 2))


async def _ask_engines(site: Site) -> list[EngineTold]:
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
        bodies = [(await http.get(f"{url}/bench")).content for url in site.urls]
    return [msgspec.json.decode(body, type=EngineTold) for body in bodies]


async def _status(http: httpx.AsyncClient, url: str) -> int:
    try:
        return (await http.get(url)).status_code
    except httpx.HTTPError:
        return 0


async def _until(parts: Sequence[Part], is_so: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        answer = is_so()
        if answer if isinstance(answer, bool) else await answer:
            return
        if time.monotonic() > deadline:
            said = "; ".join(f"{part.name}: {part.last_words()}" for part in parts)
            raise StackFailed(f"gave up after {START_TIMEOUT_S:g} s of waiting until {what} ({said})")
        await asyncio.sleep(POLL_S)


def _cpu_s(parts: Sequence[Part]) -> dict[str, float]:
    """CPU seconds so far of each part's session (with children that have ended), of the client, and of the machine."""
    spent = {part.pid: 0.0 for part in parts}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(words[3]) in spent:
                    spent[int(words[3])] += sum(map(int, words[11:15])) * _TICK_S
    used = resource.getrusage(resource.RUSAGE_SELF)
    whole = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    busy = sum(int(whole[place]) for place in _BUSY) * _TICK_S
    return {part.name: spent[part.pid] for part in parts} | {CLIENT: used.ru_utime + used.ru_stime, OTHERS: busy}


def free_ports() -> Iterator[int]:
    """Ports that nobody listens on just now. Raises `StackFailed` when there are no more."""
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
            yield port
    raise StackFailed(f"all ports from {PORTS.start} to {PORTS.stop - 1} are taken")
