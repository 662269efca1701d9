"""A real vLLM engine for as long as a test needs it; at most two at a time, each takes 3.4 GB."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from nodeagent.engines.vllm.launch import EngineLaunch, launch_line
from nodeagent.engines.vllm.package import NAME, build
from tests.warmroute.fleets import free_port, until
from warmroute.process_group import end_group, members, remains
from warmroute.processes import die_with_parent
from warmroute.vllm.installation import VllmInstallation, launch_environment

MODEL = "smollm2"
START_BOUND_S = 300.0
STOP_BOUND_S = 30.0
REQUEST_BOUND_S = 240.0
LOG_TAIL_LINES = 60


@dataclass(frozen=True)
class RunningVllm:
    launch: EngineLaunch
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return self.launch.url

    @property
    def pids(self) -> list[int]:
        """API server, engine core, worker, and Python's tracker of shared memory."""
        return members(self.process.pid)

    def complete(self, prompt: str | list[int], max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
        """The answer to a completion, greedy unless `fields` say otherwise."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=REQUEST_BOUND_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def reset_prefix_cache(self, *, reset_external: bool = False) -> None:
        """Empty the engine's cache; with `reset_external` its staging rows as well."""
        query = {"reset_external": "true"} if reset_external else {}
        answer = httpx.post(f"{self.url}/reset_prefix_cache", params=query, timeout=REQUEST_BOUND_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"success": True}


def cached_tokens(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def new_launch(
    vllm: VllmInstallation, scratch: Path, name: str, *, door: Path | None = None, **changes: Any
) -> EngineLaunch:
    """A launch on a free port. With a door, its connector talks to the agent there; `changes` are fields of the launch.

    `scratch` must have a short path: sockets are made in it.
    """
    package = scratch / "engine_side" if door is not None else None
    if package is not None and not (package / NAME).exists():
        build(package)
    launch = EngineLaunch(vllm.command, vllm.model, MODEL, name, free_port(), scratch, package, door)
    return replace(launch, **changes)


@contextlib.contextmanager
def running_vllm(launch: EngineLaunch, log: Path) -> Iterator[RunningVllm]:
    """The engine, once it serves. At the end it is ended with all its processes and files, however many still live.

    When something fails in between, the end of its log is printed.
    """
    line = launch_line(launch)
    with log.open("ab") as output:
        process = subprocess.Popen(
            line.arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**launch_environment(os.environ), **line.environment},
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    engine = RunningVllm(launch, process, log)
    try:
        until(lambda: _serves(engine), START_BOUND_S, f"{launch.name} serves")
        yield engine
    except BaseException:
        print(f"--- the end of {log}:\n{tail(log)}")
        raise
    finally:
        _end(engine)


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def _serves(engine: RunningVllm) -> bool:
    assert engine.process.poll() is None, f"{engine.launch.name} ended with {engine.process.returncode}"
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{engine.url}/health", trust_env=False).status_code == 200
    return False


def _end(engine: RunningVllm) -> None:
    seen = remains(engine.process.pid)
    engine.process.terminate()
    try:
        engine.process.wait(STOP_BOUND_S)
    except subprocess.TimeoutExpired:
        engine.process.kill()
        engine.process.wait()
    for pause_s in end_group(seen):
        time.sleep(pause_s)
    engine.launch.staging_file.unlink(missing_ok=True)
