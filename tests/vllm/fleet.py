"""Real parts around real vLLM engines: a Valkey, agents, a gateway, each a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from nodeagent.engines.vllm.launch import EngineLaunch
from tests.free_port import free_port
from tests.warmroute.fleets import until

MODEL = "smollm2-135m-instruct"
CHUNK_TOKENS, BLOCK_TOKENS = 256, 32
START_BOUND_S = 60.0
ANSWER_BOUND_S = 180.0


@dataclass(frozen=True)
class Answer:
    """What came back: the text, the prompt's tokens, those the engine reports as cached, those that were predicted."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    predicted: Mapping[str, int] = field(default_factory=dict)
    engine: str = ""
    reason: str = ""

    @property
    def predicted_tokens(self) -> int:
        return sum(self.predicted.values())


PATIENT = {"WARMROUTE_TIMEOUTS__PROBE_S": "60"}
"""Of a gateway: engines that share two cores may take long for a token, and don't hang."""


class Process:
    """A part in its own session, with its log; ended with all it started."""

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self.log = folder / f"{name}.log"
        self._arguments = arguments
        self._environment = {**os.environ, **(PATIENT if arguments[0] == "gateway" else {})}
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "warmroute.cli", *self._arguments]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs: it keeps its connections and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)


class AgentProcess(Process):
    """One host's agent, with all tiers, everything written through."""

    def __init__(self, host: str, folder: Path, redis_url: str, dram_gb: float, nvme_gb: float) -> None:
        self.host = host
        self.door = folder / f"{host}.sock"
        self.nvme = folder / f"{host}-nvme"
        self.port = free_port()
        tiers = ("--dram-gb", f"{dram_gb:g}", "--nvme", str(self.nvme), "--nvme-gb", f"{nvme_gb:g}")
        place = ("--door", str(self.door), "--redis", redis_url, "--port", str(self.port))
        super().__init__(host, folder, "agent", "--host", host, *place, *tiers, "--nvme-write", "through")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = httpx.get(f"{self.url}/status", trust_env=False).json()
        return status

    def engine(self, name: str) -> dict[str, Any]:
        return next((each for each in self.status()["engines"] if each["engine"] == name), {})

    def is_attached(self, name: str) -> bool:
        """Whether the engine is there, and the memory that is made once it is."""
        with contextlib.suppress(httpx.HTTPError):
            return bool(self.engine(name).get("is_connected") and self.status()["tiers"]["dram"]["slots"])
        return False

    def restart(self, *engines: str) -> None:
        """kill -9, and wait until its engines are attached to its successor, which knows its files again."""
        self.kill()
        self.start()
        until(lambda: all(map(self.is_attached, engines)), START_BOUND_S, "the engines are attached again")
        until(lambda: not self.status()["tiers"]["nvme"]["is_restoring"], START_BOUND_S, "the files are known again")

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def until_written(self, chunks: int) -> None:
        """All of so many chunks are in DRAM and in files."""

        def is_written() -> bool:
            tiers = self.status()["tiers"]
            return bool(tiers["nvme"]["chunks"] >= chunks and not tiers["nvme"]["queued_writes"])

        until(is_written, 60, f"{chunks} chunks are written")


class GatewayProcess(Process):
    """The gateway."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.port = free_port()
        super().__init__("gateway", folder, "gateway", "--redis", redis_url, "--port", str(self.port))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def engines(self) -> dict[str, dict[str, Any]]:
        with contextlib.suppress(httpx.HTTPError):
            table = httpx.get(f"http://127.0.0.1:{self.port + 1}/fleet", trust_env=False).json()
            return {row["engine"]: row for row in table["engines"]}
        return {}

    def until_ready(self, *engines: str) -> None:
        def are_ready() -> bool:
            rows = self.engines()
            return all(
                name in rows
                and rows[name]["state"] == "ready"
                and rows[name]["encoding"] == "exact"
                and rows[name]["placements"] == "believed"
                for name in engines
            )

        until(are_ready, START_BOUND_S, "the gateway knows its engines")


def ask(url: str, prompt: str | list[dict[str, str]], max_tokens: int = 48, **fields: Any) -> Answer:
    """A greedy completion of a text, or a chat of messages."""
    kind = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
    path = "/v1/completions" if isinstance(prompt, str) else "/v1/chat/completions"
    body = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, **kind, **fields}
    answer = httpx.post(
        f"{url}{path}", json=body, headers={"x-warmroute-explain": "1"}, timeout=ANSWER_BOUND_S, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    decoded = answer.json()
    choice, usage = decoded["choices"][0], decoded["usage"]
    tiers = answer.headers.get("x-warmroute-tier-tokens", "none")
    return Answer(
        choice["text"] if isinstance(prompt, str) else choice["message"]["content"],
        usage["prompt_tokens"],
        (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        {} if tiers == "none" else {name: int(n) for name, n in (each.split("=") for each in tiers.split(","))},
        answer.headers.get("x-warmroute-engine", ""),
        answer.headers.get("x-warmroute-reason", ""),
    )


def reset(engine: EngineLaunch, with_staging: bool = True) -> None:
    """Empty an engine's prefix cache, and its staging rows, behind everybody's back."""

    def is_done() -> bool:
        query = "?reset_external=true" if with_staging else ""
        answer = httpx.post(f"{engine.url}/reset_prefix_cache{query}", timeout=30, trust_env=False)
        return answer.status_code == 200 and answer.json()["success"] is True

    until(is_done, 30, "the engine resets its cache")


def document(topic: str, sentences: int = 90) -> str:
    """About twelve tokens a sentence."""
    return " ".join(f"Sentence {number} about {topic} says that it is good." for number in range(sentences))


@contextlib.contextmanager
def parts(*made: Callable[[], Process]) -> Iterator[list[Process]]:
    """Processes, ended in the order opposite to that of their starts."""
    with contextlib.ExitStack() as stack:
        started = []
        for make in made:
            part = make()
            stack.callback(part.end)
            started.append(part)
        yield started
