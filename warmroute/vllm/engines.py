"""vLLM engines of the local fleet: how each is started beside the agent of its host, and what it takes of the machine.

Measured with vLLM 0.32 and SmolLM2-135M in float32: about 3.4 GB of memory an engine (proportional set size of its
processes), of which 0.8 GB may lie in /dev/shm: two rings of vLLM's own, and the staging rows.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from nodeagent.engines.vllm.launch import SHARED_MEMORY, EngineLaunch, launch_line
from nodeagent.engines.vllm.package import build
from warmroute.processes import Part
from warmroute.vllm.installation import VllmInstallation

ENGINE_BYTES = 3.6e9
"""Memory of an engine with its agent, the agent's DRAM tier aside."""
SHARED_BYTES = 0.9e9
START_TIMEOUT_S = 420.0
"""Two engines that start at once on two busy cores take two minutes."""
CONTEXT_TOKENS = 8192
"""The model's own. Its KV takes 0.38 GB, so it fits into an engine's cache, and into its staging rows."""


@dataclass(frozen=True, slots=True)
class VllmEngines:
    """The engines of one fleet; `folder` is the fleet's own, `engines` how many share the machine's cores."""

    installation: VllmInstallation
    folder: Path
    model_name: str
    engines: int

    def build_package(self) -> None:
        """Write what the engines import of ours. Raises `OSError`."""
        build(self._package)

    def part(self, name: str, port: int, door: Path, log_path: Path) -> tuple[Part, str]:
        """An engine, and where it will serve."""
        launch = EngineLaunch(
            command=self.installation.command,
            model=self.installation.model,
            served_model_name=self.model_name,
            name=name,
            port=port,
            scratch=self.folder,
            package=self._package,
            door=door,
            context_tokens=CONTEXT_TOKENS,
            threads=max(1, (os.cpu_count() or 1) // self.engines),
        )
        line = launch_line(launch)
        return Part(name, line.arguments, log_path, line.environment, (launch.staging_file,)), launch.url

    @property
    def _package(self) -> Path:
        return self.folder / "engine_side"


def shared_bytes_free() -> int:
    """What /dev/shm has left. Raises `OSError` where there is none."""
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize
