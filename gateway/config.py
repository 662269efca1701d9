"""What a gateway is told at its start; everything about engines comes from the directory."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from gateway.upstream import Timeouts


def cache_folder() -> Path:
    """Where files fetched by digest are kept: `$XDG_CACHE_HOME/warmroute/files`, or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "warmroute" / "files"


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """One gateway. Admin endpoints (`/fleet`, `/metrics`, ...) stand on a port of their own."""

    redis_url: str
    port: int
    admin_port: int
    bind: str = "127.0.0.1"
    body_bytes_max: int = 64 * 2**20
    body_timeout_s: float = 60.0
    drain_s: float = 30.0
    timeouts: Timeouts = field(default_factory=Timeouts)
    files_folder: Path = field(default_factory=cache_folder)
