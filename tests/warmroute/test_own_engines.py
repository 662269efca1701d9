"""`warmroute up --engine`: engines of one's own, without an agent, behind the official client."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.free_port import free_port
from tests.gateway import mock_engine as mock
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL
from tests.warmroute.fleets import children, left_behind, refused, up

MESSAGES: Any = [{"role": "user", "content": "hello"}]


async def test_two_plain_servers_serve_chat_streams_and_errors_behind_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_DIRECTORY__KEY_PREFIX", "team-b")

    async def refuse_tools(engine: MockEngine, request: Any, fields: Any) -> Any:
        if fields.get("tools"):
            return await mock.answer_status(400)(engine, request, fields)
        return await mock.answer_well(engine, request, fields)

    async with MockEngine("a", refuse_tools) as a, MockEngine("b", refuse_tools) as b:
        port = free_port()
        process = up(tmp_path, "--engine", a.url, "--engine", b.url, port=port)
        try:
            assert process.stdout is not None
            lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(2)]
            assert f"http://127.0.0.1:{port}/v1" in lines[1]
            told = [Path(f"/proc/{each}/environ").read_bytes().split(b"\0") for each in children(process.pid)]
            (gateway,) = (each for each in told if any(word.startswith(b"WARMROUTE_DIRECTORY__URL=") for word in each))
            assert b"WARMROUTE_DIRECTORY__KEY_PREFIX=team-b" in gateway
            async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
                assert [model.id async for model in client.models.list()] == [MODEL]
                for number in range(40):  # sessions are hashed: so many miss an engine once in 10**12
                    messages: Any = [{"role": "user", "content": f"session {number}"}]
                    answer = await client.chat.completions.create(model=MODEL, messages=messages)
                    assert answer.choices[0].message.content == "ok"
                assert a.received
                assert b.received
                stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
                assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "012"
                with pytest.raises(openai.BadRequestError):
                    await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[{"type": "function"}])  # type: ignore[list-item]
                with pytest.raises(openai.NotFoundError):
                    await client.chat.completions.create(model="other", messages=MESSAGES)
                await a.__aexit__()  # one engine goes: the other serves on
                for number in range(6):
                    messages = [{"role": "user", "content": f"session {number}"}]
                    answer = await client.chat.completions.create(model=MODEL, messages=messages)
                    assert answer.id == "b"
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 0
    assert f"{a.url}: ready ({MODEL})" in errors
    assert left_behind(tmp_path) == []


def test_what_makes_no_sense_with_own_engines_is_refused(tmp_path: Path) -> None:
    assert "--demo" in refused(tmp_path, "--engine", "http://127.0.0.1:1", "--demo")


def test_a_wrong_url_is_one_sentence(tmp_path: Path) -> None:
    process = up(tmp_path, "--engine", "ftp://x")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors == "warmroute up: --engine ftp://x: must be http://host:port or https://host:port, without /v1\n"
