"""One strange engine, agent or directory reply costs itself: the loops live on, and the others are served."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from directory.members import Member, draw_incarnation
from directory.memory import MemoryDirectory
from gateway import health
from gateway.encoding.encoder import Encoders
from gateway.encoding.files import TokenizerFiles
from gateway.encoding.model_files import ModelFiles
from gateway.fleet import Fleet
from gateway.health import HealthCheck, Target
from gateway.prefetch import Hint, Prefetcher
from tests.gateway.assembly import eventually
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import ENGINE_LOAD, MODEL, engine_registration
from tests.virtual_time import in_quiet_time

WAIT_S = 20.0

GOOD = b'{"data":[{"id":"tiny"}]}'
STRANGE_LISTS: dict[str, bytes] = {
    "empty": b"",
    "deep": b"[" * 100_000,
    "bad utf-8": b'{"data":[{"id":"\xff"}]}',
    "a number": b"7",
    "null": b"null",
    "rows of another kind": b'{"data":[7,null,[],{"id":7},{"id":null},{}]}',
    "an object for a list": b'{"data":{"id":"tiny"}}',
    "huge": b" " * (health.ANSWER_BYTES_MAX + 1),
}


@pytest.mark.parametrize("content", STRANGE_LISTS.values(), ids=STRANGE_LISTS.keys())
async def test_an_engine_with_a_strange_list_of_models_never_joins_and_hinders_nobody(content: bytes) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=content if request.url.host == "strange" else GOOD)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        targets = [Target("s", "http://strange:1", (MODEL,)), Target("g", "http://good:1", (MODEL,))]
        found = await HealthCheck(client).check(targets)
    assert found["g"].state == "ready"
    assert found["s"].state != "ready"
    assert len(found["s"].state) > 10


@pytest.mark.parametrize("url", ["http://[::1", "http://a:b", "not a url", "", "http://\x00", "http://" + "a" * 300])
async def test_an_engine_with_a_strange_url_never_joins_and_hinders_nobody(url: str) -> None:
    async with MockEngine("g") as good, httpx.AsyncClient(trust_env=False) as client:
        found = await HealthCheck(client).check([Target("s", url, ()), Target("g", good.url, (MODEL,))])
    assert found["g"].state == "ready"
    assert found["s"].state.startswith("unreachable")


@in_quiet_time
async def test_an_engine_that_answers_a_byte_at_a_time_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            writer.transport.abort()
            has_ended.set()

    has_ended = asyncio.Event()

    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 0.2)
    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with server, MockEngine("g") as good, httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        check = HealthCheck(client).check([Target("s", url, ()), Target("g", good.url, (MODEL,))])
        found = await asyncio.wait_for(check, WAIT_S)
        await asyncio.wait_for(has_ended.wait(), WAIT_S)
    assert found["g"].state == "ready"
    assert found["s"].state == "unreachable: TimeoutError"


class StrangeDirectory(MemoryDirectory):
    """Raises what no directory should, once."""

    is_strange = True

    async def members(self) -> tuple[Member, ...]:
        if self.is_strange:
            self.is_strange = False
            raise TypeError("a reply of another shape")
        return await super().members()


async def test_a_fault_while_the_table_is_read_is_said_and_the_next_read_repairs_it() -> None:
    def now() -> float:
        return asyncio.get_running_loop().time()

    states: list[str] = []

    async def brief(_: float) -> None:
        states.append(fleet.directory_state)
        await asyncio.sleep(0)

    async with MockEngine("a") as engine, httpx.AsyncClient(trust_env=False) as client:
        directory = StrangeDirectory(now)
        await directory.register(draw_incarnation(), engine_registration("a", engine.url), ENGINE_LOAD)
        fleet = Fleet(directory, HealthCheck(client), now, sleep=brief)
        running = asyncio.create_task(fleet.run())
        await eventually(lambda: fleet.table.serving(MODEL))
        assert any("fault" in state for state in states)
        assert fleet.directory_state == "ok"
        running.cancel()
        await asyncio.wait({running})


FILES: list[Any] = [
    pytest.param({"chat_template.jinja": b"{% for %}"}, id="a template that doesn't compile"),
    pytest.param({"chat_template.jinja": b"\xff"}, id="a template that isn't text"),
    pytest.param({"tokenizer_config.json": b"[]"}, id="settings of another shape"),
    pytest.param({"tokenizer_config.json": b"{"}, id="settings that aren't JSON"),
    pytest.param({"tokenizer.json": b"{}"}, id="no tokenizer"),
    pytest.param({"tokenizer.json": b"[" * 100_000}, id="a deep tokenizer"),
    pytest.param({"tokenizer.json": b'{"model":{"vocab":7}}'}, id="a tokenizer of another shape"),
]


@pytest.mark.parametrize("changed", FILES)
async def test_files_that_cant_be_used_cost_their_own_engine_the_encoding(
    tmp_path: Path, changed: dict[str, bytes]
) -> None:
    from tests.test_two_renderers import CONTENTS

    contents = {**CONTENTS, **changed}
    served = {hashlib.sha256(content).hexdigest(): content for content in contents.values()}
    named = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    strange = ModelFiles("reference", tuple(sorted(named.items())))

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=served[request.url.path.removeprefix("/files/")])

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        encoders = Encoders(TokenizerFiles(tmp_path, client))
        encoders.want([(strange, "http://agent:1")])
        running = asyncio.create_task(encoders.run())
        await eventually(lambda: encoders.state(strange) != "loading", 60)
        assert encoders.state(strange) != "exact"
        assert not running.done(), "the others' encoders are still loaded"
        running.cancel()
        await asyncio.wait({running})
        encoders.close()


async def test_a_hint_to_a_strange_agent_is_lost_and_the_next_is_sent() -> None:
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.url.host)
        return httpx.Response(202)

    strange: Sequence[str] = ["http://[::1", "http://a:b", "nothing", "http://\x00"]
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        prefetcher = Prefetcher(client)
        for url in [*strange, *strange, "http://agent:1"]:
            prefetcher.send(Hint(url, (b"k" * 16,)))
        running = asyncio.create_task(prefetcher.run())
        await eventually(lambda: "agent" in sent)
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})
