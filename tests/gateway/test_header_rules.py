"""Which headers pass, on both ways and at endpoints of every kind."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web
from multidict import CIMultiDict
from pydantic import SecretStr

from gateway.config import EngineConfig
from gateway.header_rules import towards_client, towards_engine, with_request_id
from gateway.openai_schema import CHAT, FORMS
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

SENT = [
    ("x-session-id", "s"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("tracestate", "a=1,b=2"),
    ("x-custom", "1"),
    ("x-custom", "2"),
    ("authorization", "Bearer client"),
    ("openai-organization", "org"),
    ("x-request-id", "mine"),
    ("x-request-id", "again"),
]
ENDING = [
    ("connection", "keep-alive, X-Hop"),
    ("x-hop", "1"),
    ("keep-alive", "timeout=5"),
    ("proxy-authorization", "Basic x"),
    ("proxy-connection", "close"),
    ("te", "trailers"),
    ("upgrade", "h2c"),
    ("accept-encoding", "br"),
    ("x-warmroute-explain", "1"),
]


async def answer_with_many(engine: MockEngine, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    headers = CIMultiDict[str]()
    for name, value in (
        ("Server", "first"),
        ("Server", "second"),
        ("X-Request-Id", "of the engine"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Authenticate", "Basic"),
        ("Connection", "X-Hop"),
        ("X-Hop", "1"),
        ("X-Engine", "a"),
    ):
        headers.add(name, value)
    return web.json_response({}, headers=headers)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        yield client


@pytest.mark.parametrize("endpoint", [CHAT, "/tokenize", FORMS[0]])
async def test_end_to_end_headers_pass_and_the_others_end_here_on_both_ways(
    client: httpx.AsyncClient, endpoint: str
) -> None:
    sent: dict[str, Any] = {"json": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}}
    if endpoint in FORMS:
        sent = {"data": {"model": MODEL}, "files": {"file": b"x"}}
    async with MockEngine("a", answer_with_many) as engine, gateway_for([engine]) as gateway:
        answer = await client.post(gateway.url + endpoint, headers=SENT + ENDING, **sent)
        seen = engine.received[-1][1]
        for name, value in SENT[:3] + SENT[5:8]:
            assert seen[name] == value
        assert not seen.keys() & {name for name, _ in ENDING} - {"connection"}
        assert seen["host"] == engine.url.removeprefix("http://")
        assert answer.status_code == 200
        told = [(name.lower(), value) for name, value in answer.headers.multi_items()]
        names = [name for name, _ in told]
        assert [value for name, value in told if name == "server"] == ["first"]
        assert [value for name, value in told if name == "x-request-id"] == ["mine"]
        assert names.count("set-cookie") == 2
        assert names.count("x-engine") == 1
        assert not {"x-hop", "keep-alive", "proxy-authenticate"} & set(names)
        assert answer.headers["x-warmroute-engine"] == "a"


@pytest.mark.parametrize("endpoint", [CHAT, "/tokenize", FORMS[0]])
async def test_an_engines_own_key_stands_in_for_the_clients_at_every_kind_of_endpoint(
    client: httpx.AsyncClient, endpoint: str
) -> None:
    sent: dict[str, Any] = {"json": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}}
    if endpoint in FORMS:
        sent = {"data": {"model": MODEL}, "files": {"file": b"x"}}
    credentials = {"authorization": "Bearer client", "x-api-key": "client", "api-key": "client"}
    async with MockEngine("a") as engine:
        static = [EngineConfig(url=engine.url, name="a", api_key=SecretStr("its-own"))]
        async with gateway_for([], static=static) as gateway:
            await client.post(gateway.url + endpoint, headers=credentials, **sent)
    seen = engine.received[-1][1]
    assert seen["authorization"] == "Bearer its-own"
    assert "client" not in seen.values()


def test_what_connection_names_ends_whatever_its_case_and_empty_names_are_none() -> None:
    headers = [(b"Connection", b" x-A ,,close"), (b"X-a", b"1"), (b"", b"2"), (b"X-B", b"3")]
    assert towards_engine(headers, None) == [(b"x-b", b"3")]
    assert towards_client(headers) == [(b"X-B", b"3")]


def test_a_request_keeps_its_id_whatever_connection_names() -> None:
    headers = [(b"connection", b"x-request-id, x-a"), (b"x-a", b"1"), (b"x-request-id", b"mine")]
    assert towards_engine(headers, None) == [(b"x-request-id", b"mine")]


def test_a_value_that_http_cannot_tell_is_left_out() -> None:
    assert towards_client([(b"a", b"x\r\nb: y"), (b"c", b"tab\tis fine"), (b"d", b"\x00")]) == [(b"c", b"tab\tis fine")]


def test_there_is_one_request_id() -> None:
    many = [(b"X-Request-ID", b"1"), (b"a", b"b"), (b"x-request-id", b"2")]
    assert with_request_id(many, b"3") == [(b"a", b"b"), (b"x-request-id", b"3")]
