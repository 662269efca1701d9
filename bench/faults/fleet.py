"""Three engines that can be killed, one router over them, and what is asked of it."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from bench.fleet.engine_host import EnginePorts
from bench.fleet.scale import Scale
from bench.fleet.stacks import NO_PROXY, STACKS, Site
from bench.gateway.client import Load, Outcome, run_load
from bench.gateway.engine import Behaviour, Told
from bench.gateway.prompts import conversations
from bench.gateway.site import PEERS, WARMROUTE, SiteFailed, tell, told
from warmroute.free_ports import free_ports
from warmroute.processes import Part, Supervisor, die_with_parent

ENGINES = 3
START_TIMEOUT_S = 60.0
POLL_S = 0.1
ROUTERS = (WARMROUTE, *PEERS)


class Engine:
    """One engine in a process of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Begin, and wait until it answers. Raises `SiteFailed`."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.gateway.engine", str(self.port)),
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                return await tell(self.port, Behaviour())
            if asyncio.get_running_loop().time() > deadline:
                raise SiteFailed(f"an engine didn't come to serve at port {self.port}")
            await asyncio.sleep(POLL_S)

    async def kill(self) -> None:
        """It is gone at once, as a machine is."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def behave(self, behaviour: Behaviour) -> None:
        """It does so from now on."""
        await tell(self.port, behaviour)

    async def told(self) -> Told:
        """What it has seen since then."""
        return await told(self.port)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A router at `port`, and its engines; faults are the `victim`'s."""

    port: int
    engines: tuple[Engine, ...]

    @property
    def victim(self) -> Engine:
        """The one that fails."""
        return self.engines[1]

    async def behave(self, behaviour: Behaviour) -> None:
        """All engines do so."""
        for engine in self.engines:
            await engine.behave(behaviour)

    async def ask(
        self,
        connections: int,
        requests: int | None = None,
        lasts_s: float | None = None,
        tokens: int = 16,
        is_streamed: bool = False,
        timeout_s: float = 15.0,
        pause_s: float = 0.01,
    ) -> Outcome:
        """What becomes of such requests."""
        bodies = [each.body for each in conversations(100, 64, tokens, is_streamed)]
        return await run_load(self.port, Load(bodies, connections, requests, lasts_s, timeout_s, pause_s))

    async def open(self) -> int:
        """Requests that engines are at work on."""
        return sum([(await engine.told()).open for engine in self.engines])


@contextlib.asynccontextmanager
async def standing(router: str, folder: Path) -> AsyncIterator[Fleet]:
    """Fresh engines and a fresh router that asks them in turn, else with its default options. Raises `SiteFailed`."""
    ports = free_ports()
    engines = tuple(Engine(next(ports)) for _ in range(ENGINES))
    places = [EnginePorts(each.port, 0, 0) for each in engines]
    site = Site(folder, next(ports), next(ports), next(ports), sys.executable, Scale(), places)
    supervisor = Supervisor(lambda text: print(text, file=sys.stderr))
    part = _router_part(router, site)
    try:
        for engine in engines:
            await engine.start()
        await supervisor.start(part)
        fleet = Fleet(site.port, engines)
        await _until_all_serve(fleet, part)
        yield fleet
    finally:
        await supervisor.close()
        for engine in engines:
            await engine.kill()


def _router_part(router: str, site: Site) -> Part:
    log = site.folder / f"{router}.log"
    if router in PEERS:
        (part,) = STACKS[PEERS[router]].after(site)
        words = ["round_robin" if word == "cache_aware" else word for word in part.arguments]
        return Part(router, words, log, NO_PROXY)
    engines = [word for url in site.urls for word in ("--engine", url)]
    ports = ("--port", str(site.port), "--admin-port", str(site.side_port))
    server = ("--redis", f"redis://127.0.0.1:{site.directory_port}")  # nobody is there: these engines have no agent
    command = (site.python, "-m", "warmroute.cli", "gateway", *server, *ports, *engines, "--log-level", "error")
    return Part(router, command, log, {**NO_PROXY, "WARMROUTE_ROUTING__POLICY": "round-robin"})


async def _until_all_serve(fleet: Fleet, part: Part) -> None:
    """A dozen good answers in a row, and each engine has given some."""
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while True:
        await fleet.behave(Behaviour())
        outcome = await fleet.ask(1, 12, timeout_s=2.0)
        if outcome.good == 12 and all([(await engine.told()).requests for engine in fleet.engines]):
            return
        if asyncio.get_running_loop().time() > deadline:
            raise SiteFailed(f"{part.name} didn't come to serve: {part.last_words()}")
        await asyncio.sleep(POLL_S)
