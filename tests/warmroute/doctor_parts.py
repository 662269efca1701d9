"""A small real fleet in one process for the doctor to look at: engines of a made-up model, an agent, a gateway.

All run on one event loop in a thread of its own; the directory's server is a process. The doctor runs in the test.
"""

import asyncio
import contextlib
import dataclasses
import io
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

import gateway.app
import nodeagent.agent
from gateway.config import GatewayConfig
from nodeagent.config import AgentConfig
from nodeagent.engines.reference.loaded_model import LoadedModel
from nodeagent.engines.reference.serve import build_service
from nodeagent.engines.reference.server import create_app
from nodeagent.engines.reference.service import EngineService
from tests.free_port import free_port
from tests.warmroute.fleets import until
from warmroute.cli import main

WAIT_S = 30.0
GPU_CHUNKS = 64


@dataclass(frozen=True)
class Report:
    """What the doctor printed as JSON."""

    status: int
    findings: list[dict[str, str]]

    def of(self, check: str, verdict: str = "wrong") -> list[dict[str, str]]:
        return [each for each in self.findings if (each["check"], each["verdict"]) == (check, verdict)]

    def words(self, check: str, verdict: str = "wrong", subject: str | None = None) -> str:
        """All that it says of one check (and one part), with the mends."""
        found = [each for each in self.of(check, verdict) if subject in (None, each["subject"])]
        return "\n".join(f"{each['subject']}: {each['says']} -> {each['mend']}" for each in found)


def doctor(*words: str) -> Report:
    """Run the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["doctor", *words, "--json"])
    assert out.getvalue(), err.getvalue()
    answer = json.loads(out.getvalue())
    assert answer["status"] == status
    return Report(status, answer["findings"])


class Parts:
    """Parts on an event loop in a thread; each ends with its context."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="parts")

    def __enter__(self) -> "Parts":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    @contextlib.contextmanager
    def engine(
        self,
        loaded: LoadedModel,
        name: str = "engine-1",
        door: str | None = None,
        use_cache: bool = True,
        change: Callable[[EngineService], None] = lambda service: None,
        change_app: Callable[[Any], Any] | None = None,
    ) -> Iterator[str]:
        """A reference engine that serves; `change` is done to it before. Gives its URL."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            service = build_service(loaded, engine=name, url=url, door=door, gpu_chunks=GPU_CHUNKS, use_cache=use_cache)
            change(service)
            app = create_app(service)
            with self._served(app if change_app is None else change_app(app), listener, change_app is None):
                yield url

    @contextlib.contextmanager
    def app(self, app: Any) -> Iterator[str]:
        """Any application that serves. Gives its URL."""
        with socket.create_server(("127.0.0.1", 0)) as listener, self._served(app, listener, True):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"

    @contextlib.contextmanager
    def _served(self, app: Any, listener: socket.socket, tells_date: bool) -> Iterator[None]:
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="auto", date_header=tells_date)
        )
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        with self._running(server.serve(sockets=[listener]), lambda: setattr(server, "should_exit", True)):
            until(lambda: server.started, WAIT_S, "the application serves")
            yield

    @contextlib.contextmanager
    def agent(self, config: AgentConfig) -> Iterator[str]:
        """An agent as `warmroute agent` runs it. Gives its URL."""
        ready = threading.Event()
        with self._until_signalled(nodeagent.agent.run(config, ready=ready.set)):
            assert ready.wait(WAIT_S)
            yield f"http://127.0.0.1:{config.listen.port}"

    @contextlib.contextmanager
    def gateway(self, config: GatewayConfig, engines: int) -> Iterator[str]:
        """A gateway as `warmroute gateway` runs it, once it sends requests to so many engines. Gives its URL."""
        ready = threading.Event()
        admin = f"http://127.0.0.1:{config.listen.admin}"

        def is_serving() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                rows = httpx.get(f"{admin}/fleet", trust_env=False).json()["engines"]
                ready_rows = [row for row in rows if row["state"] == "ready" and row["encoding"] == "exact"]
                return len([row for row in ready_rows if row["placements"] == "believed"]) >= engines
            return False

        with self._until_signalled(gateway.app.run(config, ready.set)):
            assert ready.wait(WAIT_S)
            until(is_serving, WAIT_S, "the gateway knows its engines")
            yield f"http://127.0.0.1:{config.listen.port}"

    @contextlib.contextmanager
    def _until_signalled(self, run: Coroutine[Any, Any, Any]) -> Iterator[None]:
        """A part that ends when it is signalled. Only a process's first thread is, so its handler is called here."""
        handlers: list[Callable[[], None]] = []

        async def with_signals() -> None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler = lambda number, handler, *given: handlers.append(  # type: ignore[method-assign,assignment]
                lambda: handler(*given)
            )
            loop.remove_signal_handler = lambda number: True  # type: ignore[method-assign]
            await run

        with self._running(with_signals(), lambda: handlers[0]()):
            yield

    @contextlib.contextmanager
    def _running(self, run: Coroutine[Any, Any, Any], stop: Callable[[], None]) -> Iterator[None]:
        future = asyncio.run_coroutine_threadsafe(run, self._loop)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(stop)
            future.result(WAIT_S)


def agent_config(folder: Path, redis_url: str, host: str = "host-1", **more: Any) -> AgentConfig:
    return AgentConfig.model_validate(
        {
            "host": host,
            "door": str(folder / f"{host}.sock"),
            "listen": {"port": free_port()},
            "directory": {"url": redis_url},
            "dram": {"gb": 0.001},
            **more,
        }
    )


def gateway_config(folder: Path, redis_url: str) -> GatewayConfig:
    return GatewayConfig.model_validate(
        {
            "listen": {"port": free_port()},
            "directory": {"url": redis_url},
            "files_folder": str(folder / "files"),
            "limits": {"drain_s": 0},
        }
    )


def write_files(folder: Path, loaded: LoadedModel) -> Path:
    """The model's tokenizer files in a folder, as an operator has them."""
    folder.mkdir()
    for name, content in loaded.files.as_mapping().items():
        (folder / name).write_bytes(content)
    return folder


def changed(loaded: LoadedModel, **fields: Any) -> LoadedModel:
    """A model of which something differs from what its files say."""
    return dataclasses.replace(loaded, **fields)
