"""The launch line of a vLLM engine beside an agent, as `warmroute up` and the tests start it: for the CPU, on loopback.

What may differ between engines is in `EngineLaunch`; the rest is written here, once. A line without a door is that of
a plain engine, which still publishes its KV events.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nodeagent.engines.vllm.package import NAME

BLOCK_TOKENS = 32
"""The CPU backend takes multiples of 32, and would take 128."""
TOPIC = "kv"
SHARED_MEMORY = Path("/dev/shm")
_BIND = "127.0.0.1"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Whole hashes name the chunks; a seed of one's own would make them differ from one start to the next.
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    "PYTHONHASHSEED": "0",
    # Left to itself, every engine of a machine binds its threads to the first core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The routes that reset the prefix cache, and put an engine to sleep.
    "VLLM_SERVER_DEV_MODE": "1",
}


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """One engine. `command` is vLLM's, `model` a folder that it loads, `name` the engine's in the fleet.

    `scratch` takes its sockets, which vLLM leaves lying there; its path must be short. `package` is the folder that
    `package.build` wrote into, `door` the agent's socket: both, or neither for a plain engine. `staging_gb` is in GB
    (10^9 bytes). `events` are fields of vLLM's event configuration. `flags` come last and so win; `environment` wins
    as well.
    """

    command: Path
    model: Path
    served_model_name: str
    name: str
    port: int
    scratch: Path
    package: Path | None = None
    door: Path | None = None
    staging_gb: float = 0.4
    kv_bytes: int = 512 << 20
    context_tokens: int = 4096
    requests_max: int = 4
    threads: int = 2
    flags: tuple[str, ...] = ()
    events: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://{_BIND}:{self.port}"

    @property
    def events_endpoint(self) -> str:
        """Where it publishes its KV events.

        vLLM binds to ipc:// and to tcp://*, which is open to the network; to any other address it connects, and would
        be heard by nobody.
        """
        return f"ipc://{self.scratch / self.name}.events"

    @property
    def replay_endpoint(self) -> str:
        """Where it repeats them."""
        return f"ipc://{self.scratch / self.name}.replay"

    @property
    def engine_id(self) -> str:
        """What vLLM calls it: the name, and the port, so that two fleets of one machine differ."""
        return f"{self.name}-{self.port}"

    @property
    def staging_file(self) -> Path:
        """Its staging rows; an engine that is killed leaves them behind, and its successor would trip over them."""
        return SHARED_MEMORY / f"vllm_offload_{self.engine_id}.mmap"


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A command, and what its environment has beside what it inherits."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def launch_line(launch: EngineLaunch) -> LaunchLine:
    """How the engine is started."""
    assert (launch.door is None) == (launch.package is None), "the connector needs its package, and a door"
    arguments = [str(launch.command), "serve", str(launch.model), "--served-model-name", launch.served_model_name]
    arguments += ["--host", _BIND, "--port", str(launch.port)]
    # float32: greedy answers are the same wherever their KV comes from. Eager: nothing is compiled at the start.
    arguments += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS)]
    arguments += ["--kv-cache-memory-bytes", str(launch.kv_bytes), "--max-num-seqs", str(launch.requests_max)]
    arguments += ["--max-model-len", str(launch.context_tokens), "--enable-prompt-tokens-details"]
    arguments += ["--kv-events-config", json.dumps(_events(launch))]
    environment = {**_ENVIRONMENT, "OMP_NUM_THREADS": str(launch.threads), "TMPDIR": str(launch.scratch)}
    # Always said, so that a path of the parent's doesn't reach into the engine's interpreter.
    environment["PYTHONPATH"] = str(launch.package) if launch.package is not None else ""
    if launch.door is not None:
        arguments += ["--kv-transfer-config", json.dumps(_transfer(launch))]
    return LaunchLine((*arguments, *launch.flags), {**environment, **launch.environment})


def _events(launch: EngineLaunch) -> dict[str, object]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": launch.events_endpoint,
        "replay_endpoint": launch.replay_endpoint,
        "topic": TOPIC,
        **launch.events,
    }


def _transfer(launch: EngineLaunch) -> dict[str, object]:
    return {
        "kv_connector": "WarmrouteConnector",
        "kv_connector_module_path": f"{NAME}.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": launch.engine_id,
        "kv_connector_extra_config": {
            "door": str(launch.door),
            "engine": launch.name,
            "url": launch.url,
            "staging_gb": launch.staging_gb,
        },
    }
