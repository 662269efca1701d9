"""No more requests are served at once than may; others wait in turn, not too many and not for long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission import Admission
from gateway.config import LimitsConfig
from gateway.errors import TooManyRequests
from gateway.metrics import GatewayMetrics
from gateway.openai_schema import COMPLETIONS
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import eventually, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL
from tests.gateway.views import view

BODY = {"model": MODEL, "prompt": "q"}


class Held:
    """Answers when it is let; counts who is there."""

    def __init__(self) -> None:
        self.may_end, self.here, self.most = asyncio.Event(), 0, 0

    async def __call__(self, engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
        self.here += 1
        self.most = max(self.most, self.here)
        try:
            await self.may_end.wait()
            await asyncio.sleep(0)
        finally:
            self.here -= 1
        return await mock.answer_well(engine, request, fields)


@contextlib.asynccontextmanager
async def held(engines: int = 1, **limits: Any) -> AsyncIterator[tuple[Any, httpx.AsyncClient, list[Held]]]:
    behaviours = [Held() for _ in range(engines)]
    async with contextlib.AsyncExitStack() as stack:
        mocks = [
            await stack.enter_async_context(MockEngine(f"e{number}", behaviour))
            for number, behaviour in enumerate(behaviours)
        ]
        gateway = await stack.enter_async_context(gateway_for(mocks, limits=LimitsConfig(**limits)))
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=gateway.url, trust_env=False, timeout=60, limits=httpx.Limits(max_connections=99)
            )
        )
        stack.callback(lambda: [each.may_end.set() for each in behaviours])
        yield gateway, client, behaviours


async def test_what_is_beyond_the_places_waits_and_what_is_beyond_the_queue_is_refused() -> None:
    async with held(requests_max=2, queue_max=3) as (gateway, client, (engine,)):
        asked = [asyncio.create_task(client.post(COMPLETIONS, json=BODY)) for _ in range(2)]
        await eventually(lambda: engine.here == 2)
        asked += [asyncio.create_task(client.post(COMPLETIONS, json=BODY)) for _ in range(3)]
        await eventually(lambda: gateway.completion.admission.waiting == 3)
        refused = await client.post(COMPLETIONS, json=BODY)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        engine.may_end.set()
        assert [(await each).status_code for each in asked] == [200] * 5
        assert engine.most == 2
        assert gateway.count("warmroute_admission_refused_total", reason="queue_full") == 1
        assert (gateway.completion.admission.open, gateway.completion.admission.waiting) == (0, 0)


async def test_no_engine_has_more_than_it_may_and_the_others_take_them_before_any_waits() -> None:
    async with held(engines=2, engine_requests_max=2) as (gateway, client, engines):
        asked = [asyncio.create_task(client.post(COMPLETIONS, json=BODY)) for _ in range(7)]
        await eventually(lambda: gateway.completion.admission.waiting == 3)
        await eventually(lambda: [each.here for each in engines] == [2, 2])
        for each in engines:
            each.may_end.set()
        assert [(await each).status_code for each in asked] == [200] * 7
        assert [each.most for each in engines] == [2, 2]


async def test_who_waits_for_too_long_is_refused() -> None:
    async with held(requests_max=1, queue_s=0.05) as (gateway, client, (engine,)):
        first = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
        await eventually(lambda: engine.here == 1)
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 429
        engine.may_end.set()
        assert (await first).status_code == 200
        assert gateway.count("warmroute_admission_refused_total", reason="queue_deadline") == 1


async def test_a_client_that_goes_while_it_waits_leaves_its_turn_to_the_next() -> None:
    async with held(requests_max=1) as (gateway, client, (engine,)):
        first = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
        await eventually(lambda: engine.here == 1)
        gone = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
        await eventually(lambda: gateway.completion.admission.waiting == 1)
        last = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
        await eventually(lambda: gateway.completion.admission.waiting == 2)
        gone.cancel()
        await eventually(lambda: gateway.completion.admission.waiting == 1)
        engine.may_end.set()
        assert [(await each).status_code for each in (first, last)] == [200, 200]


async def test_limits_that_are_raised_let_in_who_waits() -> None:
    async with held(requests_max=1) as (gateway, client, (engine,)):
        asked = [asyncio.create_task(client.post(COMPLETIONS, json=BODY)) for _ in range(3)]
        await eventually(lambda: gateway.completion.admission.waiting == 2)
        gateway.completion.admission.configure(LimitsConfig(requests_max=5))
        await eventually(lambda: engine.here == 3)
        engine.may_end.set()
        assert [(await each).status_code for each in asked] == [200] * 3


STEPS = st.lists(st.tuples(st.sampled_from(["come", "end", "go", "turn"]), st.integers(0, 50)), max_size=60)


@settings(max_examples=60)
@given(STEPS, st.integers(1, 3), st.integers(1, 2))
def test_places_are_neither_lost_nor_given_twice(steps: list[tuple[str, int]], places: int, per_engine: int) -> None:
    asyncio.run(play(steps, places, per_engine))


async def play(steps: list[tuple[str, int]], places: int, per_engine: int) -> None:
    running: dict[str, int] = {"a": 0, "b": 0}
    limits = LimitsConfig(requests_max=places, engine_requests_max=per_engine, queue_max=8, queue_s=3600)
    admission = Admission(limits, lambda engine: running[engine], GatewayMetrics())
    served: list[asyncio.Event] = []

    async def request(engine: str) -> None:
        with contextlib.suppress(TooManyRequests):
            async with admission.admitted() as deadline:
                assert admission.open <= places
                (chosen,) = await admission.with_room([view(engine)], deadline)
                running[chosen.engine] += 1
                assert running[chosen.engine] <= per_engine
                end = asyncio.Event()
                served.append(end)
                try:
                    await end.wait()
                finally:
                    served.remove(end)
                    running[chosen.engine] -= 1
                    admission.note_freed()

    tasks: list[asyncio.Task[None]] = []
    for what, which in steps:
        if what == "come":
            tasks.append(asyncio.create_task(request("ab"[which % 2])))
        elif what == "end" and served:
            served[which % len(served)].set()
        elif what == "go" and tasks:
            tasks[which % len(tasks)].cancel()
        for _ in range(which % 4 if what == "turn" else 1):
            await asyncio.sleep(0)
    async with asyncio.timeout(30):
        while not all(task.done() for task in tasks):
            for end in list(served):
                end.set()
            await asyncio.sleep(0)
    assert (admission.open, admission.waiting, running) == (0, 0, {"a": 0, "b": 0})
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert result is None or isinstance(result, asyncio.CancelledError), result
