"""Responses stay with the engine that made them: what goes on from one, and questions about one."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai_schema import RESPONSES
from gateway.response_homes import RESPONSE_KEPT_S, ResponseHomes, read_response_id
from gateway.stored_responses import read_path
from tests.gateway import mock_engine as mock
from tests.gateway.api_answers import answer_in_shape, events_of, named
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

EXPLAIN = {"x-warmroute-explain": "1"}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        yield client


@pytest.fixture
async def four() -> AsyncIterator[tuple[list[MockEngine], TestGateway]]:
    engines = [MockEngine(name, answer_in_shape) for name in "abcd"]
    async with engines[0], engines[1], engines[2], engines[3], gateway_for(engines) as gateway:
        yield engines, gateway


async def respond(client: httpx.AsyncClient, gateway: TestGateway, **fields: Any) -> tuple[str, str]:
    """The engine that answers, and the response's id."""
    asked = {"model": MODEL, "input": "hello", **fields}
    answer = await client.post(gateway.url + RESPONSES, json=asked, headers=EXPLAIN)
    assert answer.status_code == 200, answer.text
    response_id = read_response_id(answer.content)
    assert response_id is not None
    return answer.headers["x-warmroute-engine"], response_id


async def reason_of(client: httpx.AsyncClient, gateway: TestGateway, previous: str) -> str:
    asked = {"model": MODEL, "input": "hello", "previous_response_id": previous}
    return str((await client.post(gateway.url + RESPONSES, json=asked, headers=EXPLAIN)).headers["x-warmroute-reason"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_goes_on_from_a_response_goes_to_its_engine_however_busy(
    client: httpx.AsyncClient, four: tuple[list[MockEngine], TestGateway], stream: bool
) -> None:
    _, gateway = four
    homes, reasons = set(), set()
    for session in range(8):
        home, previous = await respond(client, gateway, input=f"session {session}", stream=stream)
        homes.add(home)
        busy = [gateway.ledger.book(home, 100.0) for _ in range(20)]
        for _ in range(3):
            engine, previous = await respond(client, gateway, previous_response_id=previous, stream=stream)
            assert engine == home
        reasons.add(await reason_of(client, gateway, previous))
        for booking in busy:
            gateway.ledger.release(booking)
    assert len(homes) > 1
    assert reasons == {"response-affinity"}
    assert await reason_of(client, gateway, "resp_from_elsewhere") == "session-affinity"


async def test_an_unknown_response_is_routed_by_session_and_the_engine_has_the_word(
    client: httpx.AsyncClient, four: tuple[list[MockEngine], TestGateway]
) -> None:
    _, gateway = four
    seen = {await respond(client, gateway, previous_response_id="resp_from_elsewhere") for _ in range(4)}
    assert len({engine for engine, _ in seen}) == 1


async def test_when_the_home_is_gone_another_engine_says_what_it_has_to_say(
    client: httpx.AsyncClient, four: tuple[list[MockEngine], TestGateway]
) -> None:
    engines, gateway = four
    home, response_id = await respond(client, gateway)
    for engine in engines:
        engine.is_well = engine.name != home
    for _ in range(2):
        await gateway.fleet.check_health()
    engine, _ = await respond(client, gateway, previous_response_id=response_id)
    assert engine != home


async def test_a_home_in_doubt_is_still_the_only_one_to_ask(
    client: httpx.AsyncClient, four: tuple[list[MockEngine], TestGateway]
) -> None:
    _, gateway = four
    home, response_id = await respond(client, gateway)
    gateway.fleet.note_failure(home)
    engine, _ = await respond(client, gateway, previous_response_id=response_id)
    assert engine == home


async def test_a_home_that_drops_the_connection_is_followed_by_another_engine(
    client: httpx.AsyncClient, four: tuple[list[MockEngine], TestGateway]
) -> None:
    engines, gateway = four
    home, response_id = await respond(client, gateway)
    next(engine for engine in engines if engine.name == home).behaviour = mock.drop_connection
    engine, _ = await respond(client, gateway, previous_response_id=response_id)
    assert engine != home


async def test_a_home_that_is_full_says_so_and_no_other_is_asked_instead(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", answer_in_shape) as a, MockEngine("b", answer_in_shape) as b:
        async with gateway_for([a, b]) as gateway:
            home, response_id = await respond(client, gateway)
            full, other = (a, b) if home == "a" else (b, a)
            full.behaviour, before = mock.answer_status(429), len(other.received)
            asked = {"model": MODEL, "input": "x", "previous_response_id": response_id}
            answer = await client.post(gateway.url + RESPONSES, json=asked)
            assert answer.status_code == 429
            assert len(other.received) == before


async def test_questions_about_a_response_go_to_its_engine_and_are_answered_in_its_words(
    client: httpx.AsyncClient, four: tuple[list[MockEngine], TestGateway]
) -> None:
    engines, gateway = four
    home, response_id = await respond(client, gateway)
    url = f"{gateway.url}{RESPONSES}/{response_id}"
    shown = await client.get(url, params={"stream": "false", "starting_after": "3"})
    cancelled = await client.post(url + "/cancel")
    deleted = await client.delete(url)
    expected = [
        f"GET {RESPONSES}/{response_id}?stream=false&starting_after=3",
        f"POST {RESPONSES}/{response_id}/cancel",
        f"DELETE {RESPONSES}/{response_id}",
    ]
    for answer, asked in zip((shown, cancelled, deleted), expected, strict=True):
        assert answer.status_code == 200
        assert answer.json() == {"engine": home, "asked": asked}
        assert answer.headers["x-request-id"]
    assert [engine.stored for engine in engines if engine.name == home] == [expected]
    assert sum(len(engine.stored) for engine in engines) == 3
    assert (await client.get(url)).status_code == 404, "it is forgotten"
    label = RESPONSES + "/{id}"
    assert gateway.count("warmroute_requests_total", model="other", endpoint=label, status="200") == 2


async def test_an_unknown_response_is_404_and_other_methods_are_405(
    client: httpx.AsyncClient, four: tuple[list[MockEngine], TestGateway]
) -> None:
    _, gateway = four
    url = f"{gateway.url}{RESPONSES}/resp_x"
    for answer in (await client.get(url), await client.delete(url), await client.post(url + "/cancel")):
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "response_id"
    for method, path, allowed in (("POST", url, "GET, DELETE"), ("GET", url + "/cancel", "POST")):
        answer = await client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    for path in ("/resp_x/input_items", "/", "/a%20b", "/" + "x" * 300):
        assert (await client.get(gateway.url + RESPONSES + path)).status_code in (404, 405)


async def test_a_response_that_is_not_to_be_stored_is_not_remembered(
    client: httpx.AsyncClient, four: tuple[list[MockEngine], TestGateway]
) -> None:
    _, gateway = four
    _, response_id = await respond(client, gateway, store=False)
    assert (await client.get(f"{gateway.url}{RESPONSES}/{response_id}")).status_code == 404


async def test_an_engine_that_is_away_costs_a_503_and_one_that_drops_the_connection_a_502(
    client: httpx.AsyncClient,
) -> None:
    async with MockEngine("a", answer_in_shape) as engine, gateway_for([engine]) as gateway:
        _, response_id = await respond(client, gateway)
        await engine.__aexit__()
        url = f"{gateway.url}{RESPONSES}/{response_id}"
        assert (await client.get(url)).status_code == 502
        assert gateway.fleet.table.engines["a"].state == "failing"
        away = await client.get(url)
        assert (away.status_code, away.headers["retry-after"]) == (503, "1")


async def test_a_kept_response_is_streamed_again_and_ends_whole_or_with_an_error_event(
    client: httpx.AsyncClient,
) -> None:
    events = events_of(RESPONSES)

    async def stream(engine: MockEngine, request: Any, fields: Any) -> Any:
        answer = await mock.start_stream(request)
        await answer.write(b"".join(events[:sent]) + events[sent][:5] if sent < len(events) else b"".join(events))
        if sent < len(events):
            mock.cut(request)
        return answer

    async with MockEngine("a", answer_in_shape) as engine, gateway_for([engine]) as gateway:
        engine.show_stored = stream
        _, response_id = await respond(client, gateway)
        for sent in (len(events), 3):
            answer = await client.get(f"{gateway.url}{RESPONSES}/{response_id}?stream=true")
            assert answer.content.startswith(b"".join(events[:sent]))
            rest = answer.content.removeprefix(b"".join(events[:sent]))
            assert (not rest) == (sent == len(events))
            if rest:
                assert rest.startswith(b"event: error\ndata: {")
                assert b'"sequence_number":3' in rest
                assert rest.count(b"\n\n") == 1


async def test_the_prefill_of_a_streamed_response_counts_until_its_first_token(client: httpx.AsyncClient) -> None:
    events = events_of(RESPONSES)
    may_go_on = asyncio.Event()

    async def announce_and_wait(engine: MockEngine, request: Any, fields: Any) -> Any:
        stream = await mock.start_stream(request)
        await stream.write(events[0] + events[1])
        await may_go_on.wait()
        await stream.write(b"".join(events[2:-1]))
        await never.wait()

    never = asyncio.Event()
    async with MockEngine("a", announce_and_wait) as engine, gateway_for([engine]) as gateway:
        asked = {"model": MODEL, "input": "hello", "stream": True}
        async with client.stream("POST", gateway.url + RESPONSES, json=asked) as answer:
            pieces = answer.aiter_raw()
            assert (await anext(pieces)).startswith(b"event: response.created")
            assert gateway.ledger.prefills("a") == 1
            assert gateway.count("warmroute_ttft_seconds_count", model=MODEL, cache="miss") == 0
            may_go_on.set()
            await anext(pieces)
            await eventually(lambda: gateway.ledger.prefills("a") == 0)
            assert gateway.ledger.running("a") == 1
            assert gateway.count("warmroute_ttft_seconds_count", model=MODEL, cache="miss") == 1
        await eventually(lambda: gateway.ledger.engines() == ())


def test_homes_expire_and_the_oldest_go_first() -> None:
    now = 0.0
    homes = ResponseHomes(lambda: now, responses_max=3)
    for number in range(5):
        homes.note(f"resp_{number}", "a")
    assert [homes.find(f"resp_{number}") for number in range(5)] == [None, None, "a", "a", "a"]
    now = RESPONSE_KEPT_S / 2
    homes.note("resp_2", "b")
    now = RESPONSE_KEPT_S
    assert [homes.find(f"resp_{number}") for number in range(2, 5)] == ["b", None, None]
    homes.note("resp_9", "a")
    assert len(homes) == 2
    homes.forget("resp_9")
    homes.forget("resp_9")
    assert homes.find("resp_9") is None


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        pytest.param(b'{"id":"resp_1","object":"response"}', "resp_1", id="whole"),
        pytest.param(b"".join(events_of(RESPONSES, "resp_2")), "resp_2", id="stream"),
        pytest.param(b": ping\n\n" + named("response.created", response={"id": "resp_3"}), "resp_3", id="comment"),
        pytest.param(b'{"instructions":"\\"id\\":\\"resp_x\\"","id":"resp_4"}', "resp_4", id="quoted"),
        pytest.param(b'{"id":"resp_1"', None, id="cut"),
        pytest.param(b'{"id":7}', None, id="number"),
        pytest.param(b'{"id":""}', None, id="empty"),
        pytest.param(b'{"response":{"id":null}}', None, id="null"),
        pytest.param(b"[]", None, id="list"),
        pytest.param(b'{"id":"' + b"x" * 300 + b'"}', None, id="long"),
    ],
)
def test_the_id_of_a_response_is_read(piece: bytes, expected: str | None) -> None:
    assert read_response_id(piece) == expected


@given(st.binary(max_size=60))
def test_whatever_an_engine_answers_has_an_id_or_none(piece: bytes) -> None:
    assert read_response_id(b"data:" + piece) is None or piece


def test_a_path_names_a_response_and_nothing_else() -> None:
    asked = read_path(RESPONSES + "/resp_1/cancel")
    assert asked is not None
    assert (asked.response_id, asked.is_cancel, asked.path) == ("resp_1", True, RESPONSES + "/resp_1/cancel")
    assert asked.label == RESPONSES + "/{id}/cancel"
    for path in (RESPONSES, RESPONSES + "/", RESPONSES + "/a/b", RESPONSES + "/a/cancel/", RESPONSES + "/a\n"):
        assert read_path(path) is None
