"""A real gateway process in front of byte engines, whose agents announce one prompt each: requests meet a directory."""

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from directory.chunks import chunk_keys, directory_key, pack_tokens
from directory.members import HostRegistration
from tests.directory_servers.agents import CHUNK_TOKENS, Agent, engine_registration
from tests.free_port import free_port
from tests.gateway.byte_engine import ByteEngine

ENGINES = 3
CHUNKS = 64
ASK_PAUSE_S = 0.05
START_BOUND_S = 60.0
REQUEST_TIMEOUT_S = 10.0
END_BOUND_S = 20.0
IDENTITY = engine_registration("x").identity
MODEL = engine_registration("x").models[0]


def _byte_tokenizer() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return str(tokenizer.to_str())


FILES = {
    "tokenizer.json": _byte_tokenizer(),
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
}
"""One token a byte."""

_DIGESTS = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in FILES.items()}


def prompt_text(number: int) -> str:
    """A prompt of `CHUNKS` full chunks and one token that is always computed."""
    text = f"the long prompt that host {number} holds, again and again; " * (CHUNK_TOKENS * CHUNKS // 32)
    return text[: CHUNK_TOKENS * CHUNKS] + "?"


def prompt_keys(number: int) -> list[bytes]:
    """The directory keys of a prompt's chunks."""
    tokens = Tokenizer.from_str(FILES["tokenizer.json"]).encode(prompt_text(number)).ids
    return [directory_key(key) for key in chunk_keys(IDENTITY.fleet_digest(), pack_tokens(tokens), CHUNK_TOKENS)]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw: `is_warm` says that the prompt's holder was chosen for what it holds."""

    begun_s: float
    took_s: float
    status: int
    reason: str
    is_warm: bool


@dataclass
class GatewayFleet:
    """The gateway and the agents of its engines."""

    url: str
    admin_url: str
    agents: Sequence[Agent]
    client: httpx.AsyncClient

    async def ask(self, number: int) -> Answer:
        begun_s = time.monotonic()
        body = {"model": MODEL, "prompt": prompt_text(number)}
        headers = {"x-warmroute-explain": "1"}
        answer = await self.client.post(f"{self.url}/v1/completions", json=body, headers=headers)
        reason, engine = (answer.headers.get(f"x-warmroute-{name}", "") for name in ("reason", "engine"))
        is_warm = (reason, engine) == ("prefix", f"engine-{number}")
        return Answer(begun_s, time.monotonic() - begun_s, answer.status_code, reason, is_warm)

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[list[Answer]]:
        """Ask for each agent's prompt in turn, for as long as the block lasts: the list grows."""
        answers: list[Answer] = []

        async def ask_on() -> None:
            while True:
                for number in range(len(self.agents)):
                    answers.append(await self.ask(number))
                    await asyncio.sleep(ASK_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(ask_on())
            yield answers
            task.cancel()

    async def degraded(self) -> Counter[str]:
        """The gateway's `degraded_total`, by reason."""
        found: Counter[str] = Counter()
        for line in (await self.client.get(f"{self.admin_url}/metrics")).text.splitlines():
            if line.startswith("warmroute_degraded_total{"):
                found[line.split('"')[1]] += int(float(line.rsplit(" ", 1)[1]))
        return found

    async def shown(self) -> dict[str, Any]:
        shown: dict[str, Any] = (await self.client.get(f"{self.admin_url}/fleet")).json()
        return shown

    async def until_warm(self, bound_s: float) -> float:
        """Seconds until every prompt finds its holder and all is said to be well."""
        begun_s = time.monotonic()
        while True:
            answers = [await self.ask(number) for number in range(len(self.agents))]
            shown = await self.shown()
            states = (shown["directory"], shown["lookups"])
            if all(each.is_warm for each in answers) and states == ("ok", "ok"):
                return time.monotonic() - begun_s
            assert time.monotonic() - begun_s < bound_s, (answers, shown)
            await asyncio.sleep(ASK_PAUSE_S)


@contextlib.asynccontextmanager
async def running_gateway(url: str, folder: Path) -> AsyncIterator[GatewayFleet]:
    """A gateway whose directory, and its agents', is at `url`; warm when this begins."""
    async with contextlib.AsyncExitStack() as stack:
        agent_url = await stack.enter_async_context(_served_files())
        agents = []
        for number in range(ENGINES):
            engine = await stack.enter_async_context(ByteEngine(str(number)))
            registration = engine_registration(str(number), engine.url, tokenizer_files=_DIGESTS)
            agent = Agent(url, str(number), host=HostRegistration(f"host-{number}", agent_url), engine=registration)
            agents.append(await stack.enter_async_context(agent))
            for key in prompt_keys(number):
                agent.host.record(key, 2)
        port = free_port()
        await stack.enter_async_context(_gateway_process(url, port, folder))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=REQUEST_TIMEOUT_S))
        fleet = GatewayFleet(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}", agents, client)
        async with asyncio.timeout(START_BOUND_S):
            while not await _is_ready(fleet):
                await asyncio.sleep(ASK_PAUSE_S)
        await fleet.until_warm(START_BOUND_S)
        yield fleet


async def _is_ready(fleet: GatewayFleet) -> bool:
    with contextlib.suppress(httpx.HTTPError, KeyError):
        rows = (await fleet.shown())["engines"]
        return len(rows) == ENGINES and all((row["state"], row["encoding"]) == ("ready", "exact") for row in rows)
    return False


@contextlib.asynccontextmanager
async def _gateway_process(url: str, port: int, folder: Path) -> AsyncIterator[None]:
    words = ["-m", "warmroute.cli", "gateway", "--redis", url, "--port", str(port), "--log-level", "error"]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
    process = await asyncio.create_subprocess_exec(sys.executable, *words, env=environment)
    try:
        yield
        assert process.returncode is None, "the gateway ended by itself"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(END_BOUND_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def _served_files() -> AsyncIterator[str]:
    """The URL of somebody who has the tokenizer's files, and takes hints, as an agent does."""

    async def get_file(request: web.Request) -> web.Response:
        contents = {_DIGESTS[name]: content for name, content in FILES.items()}
        return web.Response(text=contents[request.match_info["digest"]])

    async def take_hint(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/files/{digest}", get_file)
    app.router.add_post("/prefetch", take_hint)
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
