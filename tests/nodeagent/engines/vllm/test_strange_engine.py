"""One engine's strange words cost that engine alone: the agent lives on, and another engine's knowledge with it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from directory.memory import MemoryDirectory
from directory.tiers import Tier
from nodeagent.engines.vllm import follower as vllm_follower
from nodeagent.engines.vllm.events import AllBlocksCleared
from nodeagent.engines.vllm.follower import VllmFollower
from nodeagent.messages import KvEventSource
from nodeagent.roster import AttachedEngine
from tests.nodeagent.engines.vllm.attached import TWO_CHUNKS, followed, hello_of, soon, tiers_of
from tests.nodeagent.engines.vllm.publishing_engine import publishing
from tests.nodeagent.engines.vllm.recorded import payload
from tests.nodeagent.running import connected, eventually, fast_clock, running_agent

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Answer, method: str = "GET", path: str = "/metrics") -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e300"])
async def test_metrics_that_cannot_be_true_cost_the_metrics_only(tmp_path: Path, value: str) -> None:
    asked = 0

    async def metrics(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text=f"vllm:num_requests_running {value}\n")

    async with serving(metrics) as url, publishing() as engine:
        with running_agent(tmp_path) as agent, connected(agent.config.door, hello_of(engine, url=url)):
            await engine.listened_to()
            engine.publish(TWO_CHUNKS)
            await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
            await soon(lambda: asked > 2, "it is asked again")
            await soon(lambda: agent.metric("warmroute_degraded_total", reason="engine_metrics") == 1, "it is counted")
            assert tiers_of(agent) == [Tier.GPU, Tier.GPU]
            assert agent.metric("warmroute_degraded_total", reason="engine_fault") == 0


@pytest.mark.parametrize("kind", ["compressed", "endless", "trickling"])
async def test_metrics_that_are_no_answer_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(vllm_follower, "SCRAPE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(vllm_follower, "METRICS_BYTES_MAX", 10_000)
    monkeypatch.setattr(vllm_follower, "SCRAPES_FAILED_MAX", 2)

    async def metrics(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        if kind == "compressed":
            answer.headers["content-encoding"] = "gzip"
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(1 if kind == "compressed" else 10**6):
                await answer.write(b"#\n" * (1_000 if kind == "endless" else 1))
                await asyncio.sleep(0.01)
        return answer

    async with serving(metrics) as url, publishing() as engine:
        with running_agent(tmp_path) as agent, connected(agent.config.door, hello_of(engine, url=url)):
            await soon(lambda: agent.metric("warmroute_degraded_total", reason="engine_metrics") == 1, "it is counted")


async def test_a_batch_numbered_minus_one_is_no_batch(tmp_path: Path) -> None:
    async with publishing() as engine, followed(tmp_path, engine) as (agent, _):
        await engine.listened_to()
        engine.publish(TWO_CHUNKS)
        await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
        for number in (2**64 - 1, 2**63, 2**63 - 1):
            engine.send([b"kv", number.to_bytes(8, "big"), payload(AllBlocksCleared(), ts=9.0)])
        await soon(lambda: agent.metric("warmroute_kv_events_skipped_total", reason="malformed_message") == 3, "all")
        assert tiers_of(agent) == [Tier.GPU, Tier.GPU]


async def test_a_fault_of_one_follower_costs_its_engine_only_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = 0
    follow = VllmFollower.__call__

    async def faulty(self: VllmFollower, engine: AttachedEngine, source: KvEventSource) -> None:
        nonlocal faults
        if engine.name == "strange" and faults < 3:
            faults += 1
            engine.change_gpu([b"x" * 16], [])
            raise RuntimeError("a word that nobody foresaw")
        await follow(self, engine, source)

    monkeypatch.setattr(VllmFollower, "__call__", faulty)
    async with publishing() as engine, publishing() as other:
        with running_agent(tmp_path) as agent, connected(agent.config.door, hello_of(engine)):
            await engine.listened_to()
            engine.publish(TWO_CHUNKS)
            await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
            with connected(agent.config.door, hello_of(other, "strange")):
                await soon(lambda: agent.metric("warmroute_degraded_total", reason="engine_fault") == 3, "the faults")
                await soon(lambda: agent.believed(b"x" * 16) == 0, "what it said isn't believed")
                assert tiers_of(agent) == [Tier.GPU, Tier.GPU]
                await other.listened_to()
                await soon(lambda: all(each["gpu_is_known"] for each in agent.status()["engines"]), "it is followed")


async def test_the_agent_ends_in_order_where_its_task_group_is_ending_already(tmp_path: Path) -> None:
    """A bug in the agent itself: engines' lives are retired all the same."""

    class Counting(MemoryDirectory):
        retired = 0

        async def retire(self, incarnation: bytes) -> None:
            Counting.retired += 1
            await super().retire(incarnation)

    async def break_down() -> None:
        raise ValueError("a bug")

    directory = Counting(fast_clock)
    async with publishing() as engine:
        with running_agent(tmp_path, directory=directory) as agent:
            with connected(agent.config.door, hello_of(engine)):
                await engine.listened_to()
                await soon(lambda: agent.status()["engines"][0]["incarnations"], "its life")
                roster = agent.agent._roster
                agent.on_loop(lambda: roster._group.create_task(break_down()) and None)
                eventually(lambda: not agent._thread.is_alive(), "the agent ends")
            failure, agent._failure = agent._failure, None
    assert isinstance(failure, ExceptionGroup)
    assert [str(each) for each in failure.exceptions] == ["a bug"]
    assert Counting.retired == 2, "the engine's life, and the host's"
