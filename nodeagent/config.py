"""How a node agent is set up."""

from dataclasses import dataclass

from nodeagent.publisher import WALK_INTERVAL_S

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """One agent. Chunk sizes, models and identities are not here: engines tell them at the door.

    `host` names the machine in the directory; `door` is the path of the Unix socket; `dram_bytes` is the quota of the
    DRAM tier, for all engines together; `port` 0 takes a free one. `agent_url` is under what gateways reach this
    agent's HTTP; by default `bind` and the port. Raises `ValueError`, which names the field.
    """

    host: str
    door: str
    redis_url: str
    dram_bytes: int = 1 * GIB
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
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be between 0 and 65535, not {self.port}")
        if self.walk_interval_s <= 0:
            raise ValueError(f"walk_interval_s must be positive, not {self.walk_interval_s}")
