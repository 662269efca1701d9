"""How a node agent is set up."""

from dataclasses import dataclass

from nodeagent.publisher import WALK_INTERVAL_S

GIB = 1 << 30
NVME_WRITES = ("hit", "through")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """One agent. Chunk sizes, models and identities are not here: engines tell them at the door.

    `host` names the machine in the directory; `door` is the path of the Unix socket; `dram_bytes` is the quota of the
    DRAM tier, for all engines together. `nvme_path` is a folder of the agent's own for the NVMe tier, with the quota
    `nvme_bytes`, which counts whole files and what was there before; `nvme_write` says what is written to it: "hit",
    what was hit in DRAM, or "through", every chunk. `port` 0 takes a free one. `agent_url` is under what gateways
    reach this agent's HTTP; by default `bind` and the port. Raises `ValueError`, which names the field.
    """

    host: str
    door: str
    redis_url: str
    dram_bytes: int = 1 * GIB
    nvme_path: str | None = None
    nvme_bytes: int | None = None
    nvme_write: str = "hit"
    bind: str = "127.0.0.1"
    port: int = 0
    agent_url: str | None = None
    walk_interval_s: float = WALK_INTERVAL_S

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host must not be empty")
        if not self.door:
            raise ValueError("door must be a path")
        if self.dram_bytes < 1:
            raise ValueError(f"dram_bytes must be positive, not {self.dram_bytes}")
        if self.nvme_path is not None and not self.nvme_path:
            raise ValueError("nvme_path must be a folder")
        if (self.nvme_path is None) != (self.nvme_bytes is None):
            raise ValueError("nvme_path and nvme_bytes go together: a tier on disk has a quota")
        if self.nvme_bytes is not None and self.nvme_bytes < 1:
            raise ValueError(f"nvme_bytes must be positive, not {self.nvme_bytes}")
        if self.nvme_write not in NVME_WRITES:
            raise ValueError(f"nvme_write must be one of {', '.join(NVME_WRITES)}, not {self.nvme_write!r}")
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be between 0 and 65535, not {self.port}")
        if self.walk_interval_s <= 0:
            raise ValueError(f"walk_interval_s must be positive, not {self.walk_interval_s}")
