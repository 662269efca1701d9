"""However a request ends, and wherever it is cancelled, nothing of it stays booked."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import cycle
from typing import Any

import httpx
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.members import draw_incarnation
from gateway.errors import GatewayError
from gateway.openai_schema import ENDPOINTS, RESPONSES
from gateway.routing.policies import Seconds
from gateway.routing.query import RoutingDecision, RoutingQuery
from tests.gateway.api_answers import PROMPTS, STREAMED, answer_in_shape
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.mock_engine import MockEngine, event, start_stream
from tests.gateway.samples import ENGINE_LOAD, MODEL, engine_registration
from tests.gateway.scripted_engine import ENDINGS, HANGS, ABug, Client, ScriptedSender, incoming

ABORTED = 10_000
AT_ONCE = 250
TICKS_MAX = 45
"""More turns of the event loop than any request needs that doesn't hang."""


class Stand:
    """A gateway before two engines that end answers by a script, in an event loop of its own."""

    def __init__(self, gateway: TestGateway, sender: ScriptedSender, loop: asyncio.AbstractEventLoop) -> None:
        self.gateway, self.sender, self._loop = gateway, sender, loop

    def play(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def check(self) -> None:
        """What is booked is what is open, and nothing is negative."""
        ledger = self.gateway.ledger
        assert sum(map(ledger.running, "ab")) == len(self.sender.open)
        for engine in "ab":
            assert 0 <= ledger.prefills(engine) <= ledger.running(engine)
            assert 0 <= ledger.queued_tokens(engine) <= ledger.active_tokens(engine)
            assert ledger.wait_s(engine) >= 0

    def check_nothing_is_booked(self) -> None:
        ledger = self.gateway.ledger
        assert ledger.engines() == ()
        for engine in "ab":
            assert (ledger.wait_s(engine), ledger.queued_tokens(engine), ledger.active_tokens(engine)) == (0, 0, 0)

    async def serve(self, ticks: int | None, client: Client, **fields: Any) -> None:
        """One request, cancelled after so many turns of the event loop if it is still there."""
        task = asyncio.ensure_future(self.gateway.completion.serve(incoming(**fields), client))
        for _ in range(TICKS_MAX if ticks is None else ticks):
            if task.done():
                break
            await asyncio.sleep(0)
        if ticks is not None:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, GatewayError, ABug):
            await task


@contextlib.asynccontextmanager
async def scripted(next_ending: Callable[[Any], str], **other: Any) -> AsyncIterator[tuple[TestGateway, Any]]:
    sender = ScriptedSender(next_ending)
    async with MockEngine("a") as a, MockEngine("b") as b, gateway_for([a, b], sender=sender, **other) as gateway:
        yield gateway, sender


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        gateway, sender = runner.run(stack.enter_async_context(scripted(lambda view: "answers")))
        yield Stand(gateway, sender, runner.get_loop())
        runner.run(stack.aclose())


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from((*ENDINGS, HANGS)), min_size=1, max_size=3),
        st.integers(0, TICKS_MAX),
        st.booleans(),
        st.sampled_from((-1, -1, 1, 2, 3)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(requests=REQUESTS)
def test_whatever_requests_end_by_the_ledger_is_empty_again(
    stand: Stand, requests: list[tuple[list[str], int, bool, int]]
) -> None:
    async def play() -> None:
        scripts = cycle([ending for endings, *_ in requests for ending in endings])
        stand.sender.next_ending = lambda view: next(scripts)
        working = [
            asyncio.ensure_future(stand.serve(ticks, Client(bug_at), stream=is_streamed))
            for _, ticks, is_streamed, bug_at in requests
        ]
        while not all(task.done() for task in working):
            stand.check()
            await asyncio.sleep(0)
        for task in working:
            task.result()
        stand.check_nothing_is_booked()

    stand.play(play())


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_every_ending_releases_what_was_booked(stand: Stand, ending: str, is_streamed: bool) -> None:
    stand.sender.next_ending = lambda view: ending
    stand.sender.sent.clear()
    stand.play(stand.serve(None, Client(), stream=is_streamed))
    assert stand.sender.sent
    stand.check_nothing_is_booked()


@pytest.mark.parametrize("ending", ["answers", "streams", "is down", HANGS])
def test_a_request_may_be_cancelled_at_every_await(stand: Stand, ending: str) -> None:
    stand.sender.next_ending = lambda view: ending
    seen = set()
    for ticks in range(TICKS_MAX):
        client = Client()
        stand.play(stand.serve(ticks, client, stream=ending == "streams"))
        stand.check_nothing_is_booked()
        seen.add(client.calls)
    assert 0 in seen
    assert ending == HANGS or len(seen) > 2, "some were cancelled in the middle of their answer"


def test_ten_thousand_aborted_requests_leave_the_ledger_at_zero(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "gateway.completion")
    drawn = random.Random(7)
    endings = [*ENDINGS, HANGS, HANGS]
    stand.sender.next_ending = lambda view: drawn.choice(endings)
    stand.sender.sent.clear()

    async def play() -> None:
        for _ in range(ABORTED // AT_ONCE):
            working = [
                asyncio.ensure_future(
                    stand.serve(drawn.randrange(TICKS_MAX), Client(), text="x" * drawn.randrange(9), stream=True)
                )
                for _ in range(AT_ONCE)
            ]
            while not all(task.done() for task in working):
                stand.check()
                await asyncio.sleep(0)
            await asyncio.gather(*working)

    stand.play(play())
    assert len(stand.sender.sent) > ABORTED / 2, "most were cancelled on an engine"
    stand.check_nothing_is_booked()


class Watching(Seconds):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[RoutingQuery] = []

    def route(self, query: RoutingQuery) -> RoutingDecision:
        self.asked.append(query)
        return super().route(query)


@pytest.mark.parametrize("ending", ["is down", "drops the connection", "is too late", "breaks before an event"])
async def test_a_retry_sees_the_load_without_the_failed_attempt(ending: str) -> None:
    policy, scripts = Watching(), iter([ending, "streams"])
    async with scripted(lambda view: next(scripts), policy=policy) as (gateway, sender):
        await gateway.completion.serve(incoming(stream=True), Client())
        first, again = policy.asked
        assert len(sender.sent) == 2
        assert len(first.candidates) == 2
        for candidate in again.candidates:
            assert (candidate.wait_s, candidate.prefills, candidate.running, candidate.queued_tokens) == (0, 0, 0, 0)


async def test_what_is_booked_are_the_tokens_to_compute_and_those_of_the_prompt() -> None:
    async with scripted(lambda view: HANGS) as (gateway, _):
        text = "a" * 40
        serving = asyncio.ensure_future(gateway.completion.serve(incoming(text), Client()))
        await eventually(lambda: gateway.ledger.engines())
        (engine,) = gateway.ledger.engines()
        tokens = len(f"user:{text};")
        assert gateway.ledger.active_tokens(engine) == gateway.ledger.queued_tokens(engine) == tokens
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        yield client


class Held:
    """An engine that answers in two halves, the second when it is let."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def __call__(self, engine: MockEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("stream"):
            response = await start_stream(request)
            await response.write(event(0))
            self.has_begun.set()
            await self.may_end.wait()
            await response.write(b"data: [DONE]\n\n")
            return response
        self.has_begun.set()
        await self.may_end.wait()
        return await answer_in_shape(engine, request, body)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_every_endpoint_books_its_request_to_the_end_of_its_body(
    endpoint: str, client: httpx.AsyncClient
) -> None:
    held = Held()
    async with MockEngine("a", held) as engine, gateway_for([engine]) as gateway:
        is_streamed = endpoint in STREAMED
        body = {"model": MODEL, **PROMPTS[endpoint], **({"stream": True} if is_streamed else {})}
        asking = asyncio.ensure_future(client.post(gateway.url + endpoint, json=body))
        await held.has_begun.wait()
        if is_streamed:
            await eventually(lambda: gateway.ledger.prefills("a") == 0)
        assert gateway.ledger.running("a") == 1
        held.may_end.set()
        assert (await asking).status_code == 200
        await eventually(lambda: gateway.ledger.engines() == ())


async def test_a_question_about_a_kept_response_is_an_open_request_and_no_work(client: httpx.AsyncClient) -> None:
    held = Held()
    async with MockEngine("a", answer_in_shape) as engine, gateway_for([engine]) as gateway:
        body = {"model": MODEL, **PROMPTS[RESPONSES]}
        kept = (await client.post(gateway.url + RESPONSES, json=body)).json()["id"]
        engine.show_stored = held
        asking = asyncio.ensure_future(client.get(f"{gateway.url}{RESPONSES}/{kept}"))
        await held.has_begun.wait()
        assert (gateway.ledger.running("a"), gateway.ledger.prefills("a"), gateway.ledger.wait_s("a")) == (1, 0, 0)
        asking.cancel()
        await eventually(lambda: gateway.ledger.engines() == ())


async def test_probes_and_new_registrations_leave_the_ledger_as_it_is() -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        booking = gateway.ledger.book("a", 5.0, new_tokens=10, held_tokens=10)
        life = draw_incarnation()
        await gateway.directory.register(life, engine_registration("a", engine.url, "host-a"), ENGINE_LOAD)
        await gateway.directory.retire(gateway.lives["a"])
        for is_well in (False, True):
            engine.is_well = is_well
            await gateway.fleet.refresh()
            await gateway.fleet.check_health()
            assert (gateway.ledger.running("a"), gateway.ledger.queued_tokens("a")) == (1, 10)
        assert gateway.fleet.table.engines["a"].reach.own == {life}
        gateway.ledger.release(booking)
        assert gateway.ledger.engines() == ()
