"""The real engine behind a connection that breaks: its texts come whole, or break off with one error event."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
import uvicorn

from gateway.config import EngineConfig
from nodeagent.engines.reference.loaded_model import LoadedModel, load
from nodeagent.engines.reference.serve import _listen
from nodeagent.engines.reference.server import create_app
from tests.faulty_proxy import Cut, FaultyProxy
from tests.gateway.assembly import eventually, gateway_for
from tests.nodeagent.engines import tiny_model
from tests.nodeagent.engines.fakes import build_service

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "hello world",
    "temperature": 0,
    "max_tokens": 24,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tiny_model.write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")
    return load(path, "tiny", threads=1, chunk_tokens=tiny_model.CHUNK_TOKENS)


@asynccontextmanager
async def running(tiny: LoadedModel) -> AsyncIterator[int]:
    listener = _listen("127.0.0.1", 0)
    config = uvicorn.Config(create_app(build_service(tiny)), log_config=None, lifespan="on", access_log=False)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await eventually(lambda: server.started, 30)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def text_of(stream: bytes) -> tuple[str, list[Any]]:
    """The text of all whole events, and the errors."""
    events = [each for each in stream.split(b"\n\n") if each and each != b"data: [DONE]"]
    values = [orjson.loads(each.removeprefix(b"data: ")) for each in events]
    text = "".join(value["choices"][0]["text"] for value in values if "choices" in value)
    return text, [value["error"] for value in values if "error" in value]


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_cut_at_any_place_loses_no_whole_answer_and_doubles_no_text(tiny: LoadedModel, how: Any) -> None:
    async with running(tiny) as first, running(tiny) as second, FaultyProxy(first) as proxy:
        static = [EngineConfig(url=proxy.url, name="a"), EngineConfig(url=f"http://127.0.0.1:{second}", name="b")]
        async with gateway_for([], static=static) as gateway, httpx.AsyncClient(trust_env=False, timeout=30) as client:

            async def ask(stream: bool, after: int | None) -> httpx.Response:
                proxy.cuts = [] if after is None else [Cut(how, after)]
                answer = await client.post(gateway.url + COMPLETIONS, json={**BODY, "stream": stream}, headers=headers)
                assert answer.status_code == 200
                assert gateway.ledger.engines() == ()
                await gateway.fleet.check_health()
                assert {view.state for view in gateway.fleet.table.engines.values()} == {"ready"}
                return answer

            headers = {"x-warmroute-explain": "1", "x-session-id": "0"}
            while (await ask(False, None)).headers["x-warmroute-engine"] != "a":
                headers["x-session-id"] += "0"  # some session belongs to the engine behind the proxy
            whole = (await ask(False, None)).json()["choices"][0]["text"]
            for after in (0, 10, 100, 150, 200, 300, 400, 500):
                assert (await ask(False, after)).json()["choices"][0]["text"] == whole
            for after in (0, 10, 100, 160, 200, 300, 450, 700, 1_500, 3_000):
                answer = await ask(True, after)
                text, errors = text_of(answer.content)
                assert whole.startswith(text)
                assert answer.content.endswith(b"data: [DONE]\n\n") == (not errors)
                assert errors or text == whole
                assert len(errors) <= 1
            assert proxy.cuts_made > 4, "the engine behind the proxy was asked again and again"
