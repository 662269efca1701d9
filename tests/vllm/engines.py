"""Real vLLM engines for tests: installed once, each in a process group of its own, and nothing left of them."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx

from nodeagent.engines.vllm import package
from nodeagent.engines.vllm.launch import EngineLaunch, launch_line
from tests.free_port import free_port
from tests.vllm.fleet import MODEL
from tests.warmroute.fleets import until
from warmroute.local_fleet import find_model
from warmroute.process_group import end_group, remains
from warmroute.vllm.installation import VllmInstallation, install, launch_environment

START_BOUND_S = 300.0


@functools.cache
def installation() -> VllmInstallation:
    """vLLM and its model; made now if they aren't there. Fails where they can't be had."""
    return install(find_model(None), say=lambda line: print(line, file=sys.stderr, flush=True))


def model_folder() -> Path:
    return installation().model


def python_of_vllm() -> str:
    return str(installation().python)


@contextlib.contextmanager
def models_folder() -> Iterator[Path]:
    """For models that a test makes: a place where nobody else changes the folders above, as for models that are served.

    The temporary folders of pytest get entries whenever anybody tests, and an engine couldn't tell that from a move.
    """
    place = Path(tempfile.mkdtemp(prefix="test-", dir=model_folder().parent))
    try:
        (place / "models").mkdir()
        yield place / "models"
    finally:
        shutil.rmtree(place)


class RunningEngine:
    """One engine: its launch, its log, and its processes."""

    def __init__(self, launch: EngineLaunch, log: Path) -> None:
        self.launch = launch
        self.log = log
        self.process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return self.launch.url

    def begin(self) -> None:
        """Start it; it serves in about a minute. What a killed one left in /dev/shm goes, as its supervisor sees to."""
        self.launch.staging_file.unlink(missing_ok=True)
        line = launch_line(self.launch)
        environment = launch_environment(os.environ) | dict(line.environment)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                line.arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_serving(self) -> bool:
        assert self.process.poll() is None, f"the engine ended:\n{self.tail()}"
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        return False

    def start(self) -> None:
        """Start it, and wait until it serves."""
        self.begin()
        until(self.is_serving, START_BOUND_S, "the engine serves")

    def kill(self) -> None:
        """kill -9 of every process at once, as a crash of the container; its files in /dev/shm stay."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """End it in good order, or by force; then whatever it left."""
        seen = remains(self.process.pid)
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        for pause_s in end_group(seen):
            time.sleep(pause_s)
        self.launch.staging_file.unlink(missing_ok=True)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


@contextlib.contextmanager
def running_engines(
    folder: Path,
    doors: Mapping[str, Path | None],
    *,
    models: Mapping[str, Path] | None = None,
    flags: tuple[str, ...] = (),
    flags_of: Mapping[str, tuple[str, ...]] | None = None,
    events: Mapping[str, object] | None = None,
    when_begun: Callable[[dict[str, "RunningEngine"]], None] = lambda engines: None,
) -> Iterator[dict[str, RunningEngine]]:
    """Engines by name, each at its agent's door (None: a plain engine), started side by side.

    `when_begun` is called once all have been started, before any serves.
    """
    made: dict[str, RunningEngine] = {}
    plugin = folder / "plugin"
    package.build(plugin)
    try:
        for name, door in doors.items():
            launch = EngineLaunch(
                command=installation().command,
                model=(models or {}).get(name, model_folder()),
                served_model_name=MODEL,
                name=name,
                port=free_port(),
                scratch=folder,
                package=plugin if door is not None else None,
                door=door,
                threads=1,
                flags=(*flags, *(flags_of or {}).get(name, ())),
                events=events or {},
            )
            engine = RunningEngine(launch, folder / f"{name}.log")
            engine.begin()
            made[name] = engine
        when_begun(made)
        for engine in made.values():
            until(engine.is_serving, START_BOUND_S, "the engine serves")
        yield made
    finally:
        for engine in made.values():
            engine.end()
