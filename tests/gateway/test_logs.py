"""What is logged: lines that machines read, each about a request with its id, and none with what was asked or a key."""

import asyncio
import io
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import orjson
import pytest
from pydantic import SecretStr

from gateway.access_log import AccessLog, RequestNote
from gateway.config import EngineConfig, LogsConfig
from gateway.logs import FIELDS, REQUEST_ID, JsonLines, TextLines, use_lines
from gateway.openai_schema import CHAT, RESPONSES
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

PROMPT = "a word that nobody may log"
KEY = "sk-a-clients-key"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the process logs, in JSON."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel("INFO")
    before = [each.formatter for each in root.handlers]
    use_lines("json")
    yield written
    for each, formatter in zip(root.handlers, before, strict=True):
        each.setFormatter(formatter)
    root.removeHandler(handler)
    root.setLevel(level)


def rows(lines: io.StringIO, logger: str = "gateway.access_log") -> list[dict[str, Any]]:
    read = [orjson.loads(line) for line in lines.getvalue().splitlines()]
    return [row for row in read if row["logger"] == logger]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], **fields}


async def test_each_request_has_a_line_with_its_id_its_engine_and_what_it_took(
    client: httpx.AsyncClient, lines: io.StringIO
) -> None:
    async with MockEngine("a") as engine, gateway_for([engine], logs=LogsConfig(access=True)) as gateway:
        answer = await client.post(gateway.url + CHAT, json=chat(), headers={"x-request-id": "mine"})
        streamed = await client.post(gateway.url + CHAT, json=chat(stream=True))
        await client.post(gateway.url + CHAT, json=chat(model="x" * 500))
        await client.post(gateway.url + CHAT, content=b"{")
        await client.get(gateway.url + RESPONSES + "/resp_1")
        await settled(lambda: len(rows(lines)) == 5)
    whole, stream, unknown, wrong, stored = rows(lines)
    assert engine.received[0][1]["x-request-id"] == "mine" == answer.headers["x-request-id"]
    assert (whole["request_id"], whole["model"], whole["engine"], whole["status"]) == ("mine", MODEL, "a", 200)
    assert whole["prompt_tokens"] == len(f"user:{PROMPT};")
    assert (whole["cached_tokens"], whole["output_tokens"], whole["attempts"]) == (0, 1, 1)
    assert 0 <= whole["first_byte_ms"] <= whole["duration_ms"]
    assert "served_model" not in whole
    assert stream["request_id"] == streamed.headers["x-request-id"] == engine.received[1][1]["x-request-id"]
    assert (unknown["status"], unknown["model"], unknown["attempts"]) == (404, "x" * 100, 0)
    assert "served_model" not in wrong
    assert (wrong["status"], wrong["model"]) == (400, "")
    assert (stored["endpoint"], stored["status"]) == (RESPONSES + "/{id}", 404)
    for row in rows(lines):
        assert row["time"].endswith("Z")
        assert row["level"] == "info"


async def test_a_client_that_goes_and_an_engine_that_fails_are_told_with_the_id(
    client: httpx.AsyncClient, lines: io.StringIO
) -> None:
    async with MockEngine("a", mock.never_answer) as engine:
        async with gateway_for([engine], logs=LogsConfig(access=True)) as gateway:
            asking = asyncio.create_task(client.post(gateway.url + CHAT, json=chat(), headers={"x-request-id": "gone"}))
            await settled(lambda: bool(engine.received))
            asking.cancel()
            await settled(lambda: bool(rows(lines)))
            engine.behaviour = mock.drop_connection
            await client.post(gateway.url + CHAT, json=chat(), headers={"x-request-id": "dropped"})
            await settled(lambda: len(rows(lines)) == 2)
    gone, dropped = rows(lines)
    assert (gone["request_id"], gone["status"]) == ("gone", 499)
    assert "first_byte_ms" not in gone
    assert (dropped["request_id"], dropped["status"], dropped["engine"]) == ("dropped", 502, "a")
    assert rows(lines, "gateway.completion")[0]["request_id"] == "dropped"


async def settled(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


async def test_no_line_has_a_prompt_or_a_key_at_any_level(client: httpx.AsyncClient, lines: io.StringIO) -> None:
    logging.getLogger().setLevel("DEBUG")
    async with MockEngine("a") as a, MockEngine("b") as b:
        static = [EngineConfig(url=each.url, api_key=SecretStr("sk-an-engines-key")) for each in (a, b)]
        async with gateway_for([], static=static, logs=LogsConfig(access=True)) as gateway:
            behaviours = (
                *(mock.answer_well, mock.drop_connection, mock.break_off_body, mock.break_off_stream),
                *(mock.answer_status(status) for status in (400, 429, 503)),
            )
            for behaviour in behaviours:
                a.behaviour = b.behaviour = behaviour
                await gateway.fleet.check_health()
                for fields in ({}, {"stream": True}, {"tools": PROMPT}, {"messages": [PROMPT]}, {"model": [PROMPT]}):
                    headers = {"authorization": f"Bearer {KEY}", "x-api-key": KEY}
                    await client.post(gateway.url + CHAT, json=chat(**fields), headers=headers)
            await client.post(gateway.url + CHAT, content=b'{"messages": "' + PROMPT.encode() + b"}")
    said = lines.getvalue()
    assert len(rows(lines)) > 30
    assert PROMPT not in said
    assert KEY not in said
    assert "sk-an-engines-key" not in said


@pytest.mark.parametrize(("every", "expected"), [(1, 10), (4, 2), (100, 0)])
def test_one_in_so_many_has_its_line_and_every_failure(every: int, expected: int, lines: io.StringIO) -> None:
    log = AccessLog(LogsConfig(access=True, access_every=every), lambda: 7.0)
    for _ in range(10):
        log.add(CHAT, "m", 200, 6.0, RequestNote(arrived_at=5.0, model="n"))
    assert len(rows(lines)) == expected
    log.add(CHAT, "m", 503, None, RequestNote(arrived_at=5.0, model="n"))
    last = rows(lines)[-1]
    assert (last["status"], last["served_model"], last["duration_ms"]) == (503, "n", 2000.0)
    assert rows(lines)[0].get("first_byte_ms") == (1000.0 if expected else None)
    log.configure(LogsConfig())
    log.add(CHAT, "m", 503, None, RequestNote())
    assert len(rows(lines)) == expected + 1


def record(message: str, exc_info: Any = None, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("a.logger", logging.WARNING, "file", 1, message, (), exc_info)
    made.__dict__[FIELDS] = fields
    return made


def test_text_lines_end_with_fields_that_cannot_be_mistaken() -> None:
    line = TextLines().format(record("said", status=200, model='a b"\n', empty="", engine="x:1"))
    assert line.endswith("WARNING a.logger said status=200 model='a b\"\\n' empty='' engine=x:1")
    token = REQUEST_ID.set("id-1")
    try:
        assert TextLines().format(record("said")).endswith("said request_id=id-1")
    finally:
        REQUEST_ID.reset(token)


def test_json_lines_are_single_lines_whatever_they_say() -> None:
    try:
        raise ValueError("line\nbreak")
    except ValueError:
        line = JsonLines().format(record("a\nb \udc80 ü", sys.exc_info(), status=200))
    assert "\n" not in line
    row = orjson.loads(line)
    assert (row["message"], row["status"], row["level"]) == ("a\nb ? ü", 200, "warning")
    assert "ValueError: line\nbreak" in row["exception"]
    assert "request_id" not in row
