"""The connection to an engine breaks at any byte: what a client sees, what is counted, and what is used again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from directory.tiers import Tier
from gateway.config import RoutingConfig, TimeoutsConfig
from gateway.openai_schema import CHAT
from tests.faulty_proxy import Cut, FaultyProxy
from tests.gateway.assembly import TestGateway, gateway_for
from tests.gateway.byte_engine import DONE, EVENTS, TEXT, WHOLE, ByteEngine, Framing, answer_bytes
from tests.gateway.samples import MODEL
from tests.virtual_time import QuietTimeLoop

PROMPT = "hello there"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
ROUTING = RoutingConfig(on_its_way_s=0)
"""What `b` computed in the place of `a` says nothing of the next request."""
SHORT = TimeoutsConfig(connect_s=0.3, first_byte_s=0.3, idle_s=0.3)
FRAMINGS: tuple[Framing, ...] = ("length", "chunked", "close")


class Setting:
    """Engine `a`, which a proxy hides and which holds the prompt; perhaps engine `b`; a gateway and a client."""

    def __init__(self, gateway: TestGateway, client: httpx.AsyncClient, proxy: FaultyProxy, a: ByteEngine) -> None:
        self.gateway, self.client, self.proxy, self.a = gateway, client, proxy, a

    def broken_streams(self) -> float:
        return self.gateway.count("warmroute_degraded_total", reason="stream_broken")

    def answered(self) -> float:
        return self.gateway.count("warmroute_requests_total", model=MODEL, endpoint=CHAT, status="200")

    async def post(self, stream: bool) -> httpx.Response:
        return await self.client.post(
            self.gateway.url + CHAT, json={**BODY, "stream": stream}, headers={"x-warmroute-explain": "1"}
        )

    async def check_after(self) -> None:
        """Nothing is held, and what the fleet says of the engine is true: well again without anything restarted."""
        assert self.gateway.ledger.engines() == ()
        self.proxy.cuts.clear()
        # A request that stalled right after its last byte was answered: its connection is kept, and black.
        self.proxy.break_idle("reset")
        await self.gateway.fleet.check_health()
        assert self.gateway.fleet.table.engines["a"].state == "ready"
        again = await self.post(False)
        assert (again.status_code, again.headers["x-warmroute-engine"]) == (200, "a")
        assert again.content == WHOLE


@contextlib.asynccontextmanager
async def setting(*, alone: bool = False, timeouts: TimeoutsConfig | None = None) -> AsyncIterator[Setting]:
    async with ByteEngine("a") as a, ByteEngine("b") as b, FaultyProxy(a.port) as proxy:
        a.url = proxy.url
        async with gateway_for([a] if alone else [a, b], timeouts, routing=ROUTING) as gateway:
            await gateway.hold(f"user:{PROMPT};", "a", Tier.GPU)
            async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
                yield Setting(gateway, client, proxy, a)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """In quiet time: only a stall lasts as long as a timeout, however busy the machine is."""
    with asyncio.Runner(loop_factory=QuietTimeLoop) as runner:
        yield runner


@pytest.fixture(scope="module")
def pair(loop: asyncio.Runner) -> Iterator[Setting]:
    """One setting for all examples: each must leave it as it found it."""
    context = setting(timeouts=SHORT)
    yield loop.run(context.__aenter__())
    loop.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def single(loop: asyncio.Runner) -> Iterator[Setting]:
    context = setting(alone=True, timeouts=SHORT)
    yield loop.run(context.__aenter__())
    loop.run(context.__aexit__(None, None, None))


hows = st.sampled_from(["reset", "reset", "close", "close", "stall"])
ANSWER_BYTES_MAX = max(len(answer_bytes(framing, True)) for framing in FRAMINGS) + 1
spots = st.integers(0, ANSWER_BYTES_MAX) | st.integers(0, 200)
FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@FEW
@given(hows, spots, st.sampled_from(FRAMINGS), st.booleans())
def test_a_whole_answer_never_fails_where_another_engine_can_give_it(
    loop: asyncio.Runner, pair: Setting, how: Any, after: int, framing: Framing, before_is_reused: bool
) -> None:
    async def check() -> None:
        pair.a.framing = framing
        if before_is_reused:
            assert (await pair.post(False)).content == WHOLE
        answered, broken = pair.answered(), pair.broken_streams()
        pair.proxy.cuts = [Cut(how, after)]
        answer = await pair.post(False)
        assert answer.status_code == 200
        assert answer.content == WHOLE
        assert pair.answered() == answered + 1
        assert pair.broken_streams() == broken
        await pair.check_after()

    loop.run(check())


@FEW
@given(hows, st.integers(0, 400), st.booleans())
def test_a_request_that_breaks_while_it_is_sent_goes_to_another_engine(
    loop: asyncio.Runner, pair: Setting, how: Any, after: int, stream: bool
) -> None:
    async def check() -> None:
        pair.a.framing = "length"
        pair.proxy.cuts = [Cut(how, after, "request")]
        answer = await pair.post(stream)
        assert answer.status_code == 200
        assert answer.content == (b"".join([*EVENTS, DONE]) if stream else WHOLE)
        await pair.check_after()

    loop.run(check())


def parsed(stream: bytes) -> tuple[str, list[dict[str, Any]], bool]:
    """The text of a stream, its error events, and whether it ended with [DONE]; every event must be well-formed."""
    assert stream.endswith(b"\n\n")
    text, errors, is_done = "", [], False
    for each in stream.removesuffix(b"\n\n").split(b"\n\n"):
        assert not errors, "nothing follows an error"
        assert not is_done, "nothing follows [DONE]"
        assert each.startswith(b"data: ")
        if each == DONE.strip():
            is_done = True
            continue
        value = orjson.loads(each[6:])
        if "error" in value:
            assert value["error"].keys() == {"message", "type", "param", "code"}
            errors.append(value["error"])
        else:
            text += value["choices"][0]["delta"]["content"]
    return text, errors, is_done


def check_stream(answer: httpx.Response, broken: float) -> None:
    assert answer.status_code == 200
    text, errors, is_done = parsed(answer.content)
    assert TEXT.startswith(text), "never a text twice, never another's"
    assert is_done == (not errors), "a stream ends with [DONE] or with one error, never silently"
    assert broken == len(errors)
    if is_done:
        assert text == TEXT
    else:
        assert errors[0]["code"] == "stream_broken"


@FEW
@example("close", len(answer_bytes("close", True)) - 2, "close")
@example("close", len(answer_bytes("close", True)) - 1, "close")
@example("reset", len(answer_bytes("close", True)) - 2, "close")
@example("close", len(answer_bytes("chunked", True)) - 1, "chunked")
@example("reset", len(answer_bytes("length", True)) - 1, "length")
@given(hows, spots, st.sampled_from(FRAMINGS))
def test_a_stream_ends_whole_or_with_one_error_event(
    loop: asyncio.Runner, pair: Setting, how: Any, after: int, framing: Framing
) -> None:
    async def check() -> None:
        pair.a.framing = framing
        answered, broken = pair.answered(), pair.broken_streams()
        pair.proxy.cuts = [Cut(how, after)]
        answer = await pair.post(True)
        check_stream(answer, pair.broken_streams() - broken)
        assert pair.answered() == answered + 1
        if after <= answer_bytes(framing, True).index(EVENTS[0]) + len(EVENTS[0]) - 1:
            assert parsed(answer.content)[2], "before its first event a stream goes to another engine"
        await pair.check_after()

    loop.run(check())


@FEW
@given(hows, spots, st.sampled_from(FRAMINGS), st.booleans())
def test_an_engine_that_stands_alone_has_readable_errors_and_is_used_again(
    loop: asyncio.Runner, single: Setting, how: Any, after: int, framing: Framing, stream: bool
) -> None:
    async def check() -> None:
        single.a.framing = framing
        broken = single.broken_streams()
        single.proxy.cuts = [Cut(how, after), Cut(how, after)]  # the second for the retry of a kept connection
        answer = await single.post(stream)
        if answer.status_code == 200 and stream:
            check_stream(answer, single.broken_streams() - broken)
        elif answer.status_code == 200:
            assert answer.content == WHOLE
        else:
            assert answer.status_code in (502, 504)
            assert answer.json()["error"]["code"] in ("upstream_error", "upstream_timeout")
        await single.check_after()

    loop.run(check())


EDGE = len(answer_bytes("chunked", True).split(EVENTS[1])[0])
"""Bytes before the second event."""


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("how", ["reset", "close", "stall"])
@pytest.mark.parametrize("inside", [0, 17], ids=["between events", "in an event"])
def test_the_official_client_raises_its_own_error_for_a_broken_stream(
    loop: asyncio.Runner, single: Setting, framing: Framing, how: Any, inside: int
) -> None:
    async def check() -> None:
        single.a.framing = framing
        after = len(answer_bytes(framing, True).split(EVENTS[1])[0]) + inside
        single.proxy.cuts = [Cut(how, after)]
        async with openai.AsyncOpenAI(base_url=single.gateway.url + "/v1", api_key="k", max_retries=0) as client:
            text = ""
            with pytest.raises(openai.APIError, match="failed while it was answering") as broken:
                stream = await client.chat.completions.create(model=MODEL, messages=BODY["messages"], stream=True)
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
            assert text == TEXT[:1]
            assert broken.value.code == "stream_broken"
        await single.check_after()

    loop.run(check())


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_an_idle_connection_that_breaks_costs_nobody_anything(how: Any) -> None:
    async with setting(alone=True) as single:
        for _ in range(3):
            assert (await single.post(False)).content == WHOLE
            single.proxy.break_idle(how)
            assert single.gateway.fleet.table.engines["a"].state == "ready"
        assert (await single.post(False)).content == WHOLE
        assert single.gateway.fleet.table.engines["a"].state == "ready"


async def test_an_engine_in_doubt_is_tried_where_no_other_is_ready() -> None:
    async with setting() as pair:
        pair.gateway.fleet.note_failure("a")
        pair.gateway.fleet.note_failure("b")
        assert (await pair.post(False)).content == WHOLE


async def test_a_broken_stream_puts_its_engine_in_doubt_until_a_check_passes() -> None:
    async with setting() as pair:
        pair.proxy.cuts = [Cut("reset", EDGE)]
        pair.a.framing = "chunked"
        assert parsed((await pair.post(True)).content)[1]
        assert pair.gateway.fleet.table.engines["a"].state == "failing"
        assert (await pair.post(False)).headers["x-warmroute-engine"] == "b"
        await pair.check_after()
