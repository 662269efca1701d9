"""Endpoints of which only the model is read: JSON, forms and binary answers pass byte for byte, on one code path."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import EngineConfig, ModelsConfig
from gateway.errors import InvalidRequest
from gateway.form_body import form_fields
from gateway.openai_schema import FORMS, PLAIN, parse_passed
from tests import bad_input
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import PASSED, MockEngine, answer_status, start_stream
from tests.gateway.samples import MODEL

SOUND = bytes(range(256)) * 64 + b"\r\n--not the boundary\r\n\r\n"
TYPE = "multipart/form-data; boundary=xyz"


def form(*parts: tuple[str, bytes]) -> bytes:
    """Each part by what stands behind `form-data`, and its value."""
    rows = (b"--xyz\r\nContent-Disposition: form-data%s\r\n\r\n%s\r\n" % (head.encode(), said) for head, said in parts)
    return b"".join(rows) + b"--xyz--\r\n"


async def echo(engine: MockEngine, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    return web.Response(body=SOUND, content_type="audio/mpeg", headers={"x-engine": engine.name})


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        yield client


async def test_every_passed_endpoint_is_answered_by_an_engine_of_its_model_and_counted(
    client: httpx.AsyncClient,
) -> None:
    async with MockEngine("a", echo) as a, MockEngine("b", echo) as b:
        b.models = ["whisper"]
        models = ModelsConfig(pass_through=(PASSED,))
        async with gateway_for([a], models=models, static=[EngineConfig(url=b.url)]) as gateway:
            for endpoint in (*PLAIN, PASSED):
                answer = await client.post(gateway.url + endpoint, json={"x": [1, 2.50], "model": MODEL, "odd": None})
                assert (answer.status_code, answer.content) == (200, SOUND), endpoint
                assert a.received[-1][0] == answer.request.content, "byte for byte"
                assert gateway.count("warmroute_requests_total", model=MODEL, endpoint=endpoint, status="200") == 1
            for endpoint in (*FORMS, PASSED):
                body = form(('; name="file"; filename="a.mp3"', SOUND), ("; name=model", MODEL.encode()))
                answer = await client.post(gateway.url + endpoint, content=body, headers={"content-type": TYPE})
                assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/mpeg"), endpoint
                assert answer.content == SOUND
                assert (a.received[-1][0], a.received[-1][1]["content-type"]) == (body, TYPE), "byte for byte"
            assert gateway.ledger.engines() == ()
        assert not b.received


async def test_a_path_that_nobody_configured_stays_unknown(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", echo) as engine, gateway_for([engine]) as gateway:
        for path in (PASSED, "/v1/realtime", "/v1/files", "/v1/batches", "/tokenize/", "/v1/audio"):
            answer = await client.post(gateway.url + path, json={"model": MODEL})
            assert answer.status_code == 404, path
            assert bad_input.check_error_shape(answer.content)["code"] == "not_found"
        wrong = await client.get(gateway.url + "/tokenize")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert not engine.received


@pytest.mark.parametrize("endpoint", ["/tokenize", "/v1/audio/transcriptions"])
async def test_an_engine_that_refuses_is_replaced_at_passed_endpoints_too(
    client: httpx.AsyncClient, endpoint: str
) -> None:
    async with MockEngine("a", answer_status(503)) as bad, MockEngine("b", echo) as good:
        async with gateway_for([bad, good]) as gateway:
            for number in range(8):
                text = f"question {number}"
                sent: dict[str, Any] = {"json": {"model": MODEL, "prompt": text}}
                if endpoint in FORMS:
                    sent = {"data": {"model": MODEL}, "files": {"file": text.encode() * 99}}
                answer = await client.post(gateway.url + endpoint, **sent)
                assert answer.status_code == 200
            assert bad.received
            assert gateway.ledger.engines() == ()


async def test_a_transcription_streams(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", stream_words) as engine, gateway_for([engine]) as gateway:
        sent = {"data": {"model": MODEL, "stream": "true"}, "files": {"file": SOUND}}
        answer = await client.post(gateway.url + FORMS[0], **sent)  # type: ignore[arg-type]
        assert answer.content == mock.event(0) + b"data: [DONE]\n\n"


async def stream_words(engine: MockEngine, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    stream = await start_stream(request)
    await stream.write(mock.event(0) + b"data: [DONE]\n\n")
    return stream


async def test_speech_is_heard_before_it_ends(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", speak_for_ever) as engine, gateway_for([engine]) as gateway:
        asked = {"model": MODEL, "input": "hello", "voice": "x"}
        async with client.stream("POST", gateway.url + "/v1/audio/speech", json=asked) as answer:
            heard = answer.aiter_bytes()
            assert await anext(heard) == SOUND
            assert gateway.ledger.engines() == ("a",)
        await asyncio.wait_for(engine.gone.wait(), 30)


async def speak_for_ever(engine: MockEngine, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "audio/wav"})
    await answer.prepare(request)
    await answer.write(SOUND)
    await asyncio.Event().wait()
    return answer


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (form((';name="file"; filename="a"', b"x")), TYPE, "model must be"),
        (form((';name="model"', b"")), TYPE, "model must be"),
        (form((';name="model"', b"tiny"))[:-4], TYPE, "ends before its last boundary"),
        (form((';name="model"', b"tiny")), "multipart/form-data", "must name its boundary"),
        (form((';name="model"', b"tiny")), TYPE + "z", "doesn't begin with the boundary"),
        (b"--xyz\r\n\r\n" * 1200 + b"--xyz--", TYPE, "the form"),
        (form(*[(";name=x", b"y")] * 1001), TYPE, "more than 1000 parts"),
        (b"--xyz\r\n" + b"a" * 9000 + b"\r\n\r\n\r\n--xyz--", TYPE, "without a head"),
        (b"\x00\xff", TYPE, "doesn't begin"),
        (b"\x00\xff", "application/octet-stream", "not valid JSON"),
    ],
)
async def test_a_malformed_form_is_refused_in_words(
    client: httpx.AsyncClient, body: bytes, content_type: str, says: str
) -> None:
    async with MockEngine("a", echo) as engine, gateway_for([engine]) as gateway:
        answer = await client.post(gateway.url + FORMS[0], content=body, headers={"content-type": content_type})
        assert answer.status_code == 400
        assert says in bad_input.check_error_shape(answer.content)["message"]
        assert not engine.received


def test_a_forms_fields_are_read_and_its_files_are_not() -> None:
    body = form(
        ('; name="file"; filename="model.mp3"', b"\r\n--xy\r\n" + SOUND),
        ("; name=model", "größe".encode()),
        ('; filename*=x; name="stream"', b"true"),
        ('; NAME="prompt"', b""),
    )
    read = parse_passed("/x", b"preamble\r\n" + body + b"epilogue", 'Multipart/Form-Data; a=b; boundary="xyz"')
    assert (read.model, read.stream, read.fields) == ("größe", False, {"model": "größe", "prompt": ""})
    assert read.text_bytes < len(read.body) / 60


@given(st.binary(max_size=80) | st.lists(st.sampled_from([b"--xyz", b"--", b"\r\n", b"\r\n\r\n", b"name=model", b"x"])))
def test_no_bytes_make_a_form_fail_otherwise_than_in_words(given: bytes | list[bytes]) -> None:
    body = given if isinstance(given, bytes) else b"".join(given)
    with contextlib.suppress(InvalidRequest):
        for field in form_fields(b"--xyz\r\n" + body, TYPE):
            assert 7 <= field.start <= field.end <= len(body) + 7
