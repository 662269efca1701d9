"""Usage is asked for in a client's stead, and its event taken out: that one, whole, and no other byte."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.placements import Reach
from gateway.events import whole_events
from gateway.fleet import EngineView
from gateway.openai_schema import CHAT, COMPLETIONS, RESPONSES, InferenceRequest, parse_request
from gateway.parity.stream_usage import REMEMBERED_S, StreamUsage, UsageFilter
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL
from tests.gateway.views import view

USAGE = b'{"prompt_tokens":17,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}}'
USAGE_EVENTS = [
    b'data: {"id":"x","choices":[],"created":1,"usage":%b}\n\n' % USAGE,
    b'data: {"id": "x", "choices": [], "usage": %b}\r\n\r\n' % USAGE,
    b'id: 7\nevent: usage\ndata: {"choices":[],\ndata: "usage":%b}\n\n' % USAGE,
    b'data:{"usage":%b,"choices":[]}\n\n' % USAGE,
    b'data: {"choices":[],"usage":{"prompt_tokens":-1,"completion_tokens":null}}\n\n',
]
OTHER_EVENTS = [
    b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"hi"}}],"usage":null}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\"choices\\":[],\\"usage\\":{\\"prompt_tokens\\":1}"}}]}\r\n\r\n',
    b'data: {"choices":[{"delta":{}}],"usage":%b}\n\n' % USAGE,
    b'data: {"choices":[],"usage":null}\n\n',
    b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tok\n\n',
    b'data: {"x":{"choices":[]},"usage":%b}\n\n' % USAGE,
    b'data: {"choices":[],"usage":"17 tokens"}\n\n',
    b": ping\n\n",
    b'data: {"error":{"message":"choices\\":[]"}}\n\n',
]
FIRST = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def filtered(pieces: list[bytes]) -> bytes:
    async def give() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    usage = UsageFilter()
    return b"".join([usage.take(events) async for events in whole_events(give(), True)])


@given(
    events=st.lists(st.sampled_from([*OTHER_EVENTS, *USAGE_EVENTS]), max_size=8),
    cuts=st.lists(st.integers(0, 2_000), max_size=12),
)
def test_usage_events_go_and_every_other_byte_stays_however_they_are_cut(events: list[bytes], cuts: list[int]) -> None:
    stream = FIRST + b"".join(events) + DONE
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[start:end] for start, end in pairwise(places)]
    wanted = FIRST + b"".join(event for event in events if event not in USAGE_EVENTS) + DONE
    assert asyncio.run(filtered(pieces)) == wanted


@pytest.mark.parametrize("event", USAGE_EVENTS, ids=["vllm", "spaces and CRLF", "several lines", "no space", "wrong"])
def test_usage_that_ends_a_stream_without_a_terminator_goes_too(event: bytes) -> None:
    assert asyncio.run(filtered([FIRST + event.rstrip()])) == FIRST


def test_an_engine_that_tells_usage_all_along_is_left_alone() -> None:
    always = b'data: {"choices":[{"delta":{}}],"usage":%b}\n\n' % USAGE
    stream = always + USAGE_EVENTS[0] + DONE
    assert asyncio.run(filtered([stream])) == stream
    assert asyncio.run(filtered([always, USAGE_EVENTS[0], DONE])) == stream
    ping = b": ping\n\n"
    assert asyncio.run(filtered([ping, ping + stream])) == ping * 2 + stream


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"x"}],"n":123456789012345678901234567890}',
        b' \n{ "stream":true,"messages":[{"role":"user","content":"{"}], "model":"tiny" }\n',
    ],
    ids=["large numbers", "white space"],
)
def test_the_field_is_put_in_and_no_other_byte_changes(body: bytes) -> None:
    sent = StreamUsage(lambda: 0.0).body_for(parse_request(CHAT, body), view("a"))
    assert sent.replace(b'"stream_options":{"include_usage":true},', b"", 1) == body
    assert orjson.loads(sent)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (CHAT, {"stream": False}),
        (CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {"stream": True, "stream_options": {"include_usage": False}}),
        (COMPLETIONS, {"stream": True, "stream_options": {}}),
        (COMPLETIONS, {"stream": True, "stream_options": None}),
        (RESPONSES, {"stream": True}),
    ],
)
def test_where_the_client_decided_or_the_api_tells_it_anyway_nothing_is_asked(
    endpoint: str, fields: dict[str, Any]
) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
    request = parse_request(endpoint, orjson.dumps({"model": MODEL, **prompt, **fields}))
    assert StreamUsage(lambda: 0.0).body_for(request, view("a")) is request.body


class Streams:
    """An engine that streams, with usage where it is asked for; one that `refuses` says 400 to the question."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses

    async def __call__(self, engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
        if (self.refuses and "stream_options" in fields) or fields.get("temperature", 0) > 2:
            return mock.web.json_response({"error": {"message": "no"}}, status=400)
        response = await mock.start_stream(request)
        await response.write(mock.event(0))
        if fields.get("stream_options", {}).get("include_usage"):
            await response.write(USAGE_EVENTS[0][:30])
            await asyncio.sleep(0)
            await response.write(USAGE_EVENTS[0][30:])
        await response.write(DONE)
        return response


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hello there"}], **fields}


async def test_a_client_sees_usage_exactly_when_it_asked() -> None:
    async with (
        MockEngine("a", Streams()) as engine,
        gateway_for([engine]) as gateway,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        unasked = await client.post(gateway.url + CHAT, json=chat())
        assert unasked.content == mock.event(0) + DONE
        asked = await client.post(gateway.url + CHAT, json=chat(stream_options={"include_usage": True}))
        assert asked.content == mock.event(0) + USAGE_EVENTS[0] + DONE
        refused = await client.post(gateway.url + CHAT, json=chat(stream_options={"include_usage": False}))
        assert refused.content == mock.event(0) + DONE
        assert gateway.count("warmroute_parity_total", kind="usage", result="match") == 2
        assert gateway.count("warmroute_parity_total", kind="usage", result="unreported") == 1


async def test_an_engine_that_refuses_the_question_is_asked_once_and_its_clients_see_nothing_of_it() -> None:
    async with (
        MockEngine("a", Streams(refuses=True)) as engine,
        gateway_for([engine]) as gateway,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        for _ in range(3):
            answer = await client.post(gateway.url + CHAT, json=chat())
            assert (answer.status_code, answer.content) == (200, mock.event(0) + DONE)
        assert [b"stream_options" in body for body, _ in engine.received] == [True, False, False, False]


async def test_a_bad_request_is_told_in_the_engines_words_and_teaches_nothing() -> None:
    async with (
        MockEngine("a", Streams()) as engine,
        gateway_for([engine]) as gateway,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        for temperature in (9, 0, 9):
            answer = await client.post(gateway.url + CHAT, json=chat(temperature=temperature))
            assert answer.status_code == (400 if temperature else 200)
        # The first one might have been refused for the question; the last one can't have been.
        assert [b"stream_options" in body for body, _ in engine.received] == [True, False, True, True]


@dataclass
class Said:
    status: int

    def close(self) -> None:
        pass


class Place:
    """Where one engine answers after another; `asked` tells which requests asked for usage."""

    def __init__(self) -> None:
        self.takes, self.asked = True, list[bool]()

    async def __call__(self, request: InferenceRequest) -> Any:
        self.asked.append(b"stream_options" in request.body)
        return Said(200 if self.takes or not self.asked[-1] else 400)


async def test_an_engine_without_an_agent_may_be_another_at_any_time() -> None:
    now, engine = [1000.0], Place()
    reach = Reach("a", frozenset(), frozenset())
    usage, seen = StreamUsage(lambda: now[0]), EngineView("a", "http://e:1", (MODEL,), None, "", reach, None)
    request = parse_request(CHAT, orjson.dumps(chat()))

    async def ask() -> tuple[int, bool]:
        answer, is_asked = await usage.send(request, seen, engine)
        return answer.status, is_asked

    assert await ask() == (200, True)
    engine.takes = False
    assert await ask() == (200, False), "what came in its place refuses the question, and no request is lost"
    assert await ask() == (200, False)
    engine.takes = True
    now[0] += REMEMBERED_S
    assert await ask() == (200, True), "no refusal is believed for ever"
    assert engine.asked == [True, True, False, False, True]
