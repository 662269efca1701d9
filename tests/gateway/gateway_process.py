"""`warmroute gateway` as a process with a file of its own, for tests whose engines live in theirs."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.free_port import free_port
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

BOUND_S = 60.0
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


@dataclass
class GatewayProcess:
    """A gateway that runs, its file, and a client."""

    process: subprocess.Popen[bytes]
    port: int
    file: Path
    client: httpx.AsyncClient

    async def chat(self, **more: Any) -> httpx.Response:
        return await self.client.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json={**CHAT, **more})

    async def admin(self, path: str) -> httpx.Response:
        return await self.client.get(f"http://127.0.0.1:{self.port + 1}{path}")

    async def metric(self, series: str) -> float:
        lines = (await self.admin("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))

    async def engines(self) -> dict[str, str]:
        """Each engine's state."""
        return {row["engine"]: row["state"] for row in (await self.admin("/fleet")).json()["engines"]}

    def write(self, content: str) -> None:
        """Change its file, and tell it so."""
        self.file.write_text(content)
        self.process.send_signal(signal.SIGHUP)

    async def ended(self) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self.process.wait, BOUND_S)


def file_for(*engines: MockEngine, **more: Any) -> str:
    return json.dumps({"engines": [{"url": engine.url, "name": engine.name} for engine in engines], **more})


@contextlib.asynccontextmanager
async def running_gateway(folder: Path, content: str, *flags: str) -> AsyncIterator[GatewayProcess]:
    """One whose directory isn't there; it is ready when this begins."""
    file, port = folder / "gateway.yaml", free_port()
    file.write_text(content)
    with started("--config", str(file), "--port", str(port), *flags) as process:
        try:
            # Each request on a connection of its own: with several workers each may then get it.
            limits = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=BOUND_S) as client:
                gateway = GatewayProcess(process, port, file, client)
                await until(lambda: is_ready(gateway))
                yield gateway
        finally:
            if process.poll() is None:
                process.kill()


def started(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "warmroute.cli", "gateway", "--redis", f"redis://127.0.0.1:{free_port()}"]
    return subprocess.Popen([*command, *arguments])


async def is_ready(gateway: GatewayProcess) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await gateway.admin("/readyz")).status_code == 200
    return False


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what another process does."""
    async with asyncio.timeout(BOUND_S):
        while not await holds():
            await asyncio.sleep(0.02)
