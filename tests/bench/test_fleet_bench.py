"""The head-to-head bench, small: what its engines tell is what vLLM tells, and what they take is what was computed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence

import aiohttp
import msgspec
import pytest
import tokenizers
import zmq.asyncio
from aiohttp import web

from bench import peers
from bench.fleet import load, prompts, report
from bench.fleet.engine import SimulatedEngine
from bench.fleet.engine_api import EngineApi, Known
from bench.fleet.kv_events import TOPIC, Event, KvEventPublisher
from bench.fleet.scale import Scale
from bench.fleet.words import CHAT_TEMPLATE, NotOurText, chat_text, encode, some_words, tokenizer_files
from directory.chunks import chunk_keys, directory_key, pack_tokens
from directory.costs import Rates, prefill_s
from nodeagent.engines.vllm.engine_metrics import read_metrics
from nodeagent.engines.vllm.events import decode_batch
from nodeagent.engines.vllm.gpu_table import GpuChanges, GpuTable
from nodeagent.engines.vllm.saved_table import SavedTable
from nodeagent.engines.vllm.subscriber import GpuUnknown, KvEventSubscriber
from nodeagent.messages import KvEventSource
from warmroute.replay.hardware import FleetPlan, TierBlocks
from warmroute.replay.trace import TracedRequest, block_key

SCALE = Scale(trace_tokens=8, real_s=0.001)
PLAN = FleetPlan(nodes=1, blocks=TierBlocks(gpu=5, dram=0, nvme=0), interference=0.0)
"""Room for two prompts of two full blocks and a rest."""
ROOT = bytes(32)
"""Where the agent's chunk keys begin; a real one is a fleet digest."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Heard:
    """What the agent's reader makes of the events."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.changed_once = asyncio.Event()

    def changed(self, changes: GpuChanges) -> None:
        self.held |= set(changes.stored)
        self.held -= set(changes.removed)
        self.changed_once.set()

    def unknown(self, unknown: GpuUnknown) -> None:
        raise AssertionError(unknown.reason)


def ids_of(words: int, seed: str = "a") -> list[int]:
    return encode(some_words(seed, words))


def engine_with(events: list[Sequence[Event]], clock: Clock) -> SimulatedEngine:
    return SimulatedEngine(PLAN, SCALE, 1.0, events.append, clock)


def held_after(events: list[Sequence[Event]]) -> set[bytes]:
    table, held = GpuTable(ROOT, SCALE.block_tokens, lambda name: None), set[bytes]()
    for number, each in enumerate(events):
        changes = table.apply(decode_batch(msgspec.msgpack.encode([float(number), each, 0])))
        held = (held | set(changes.stored)) - set(changes.removed)
    return held


def keys_of(ids: Sequence[int]) -> list[bytes]:
    return [directory_key(key) for key in chunk_keys(ROOT, pack_tokens(ids), SCALE.block_tokens)]


def test_the_engines_encode_as_the_tokenizer_that_routers_load():
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_files()["tokenizer.json"].decode())
    text = chat_text([{"role": "user", "content": some_words("a", 300)}])
    assert encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert len(encode(some_words("b", 300))) == 300


def test_text_that_is_not_the_benchs_is_refused():
    with pytest.raises(NotOurText):
        encode(" bebe!")


def test_the_chat_template_gives_the_text_that_engines_encode():
    import jinja2

    messages = [{"role": "system", "content": " bebe"}, {"role": "user", "content": " bibi"}]
    rendered = jinja2.Template(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    assert rendered == chat_text(messages)


def test_a_scaled_engine_takes_the_traces_seconds():
    of_trace = prefill_s(PLAN.model.shape, PLAN.model.rates, 8 * 1000, 8 * 64)
    scaled = prefill_s(SCALE.shape(PLAN.model), Rates(SCALE.flops(PLAN.model)), 1000, 64)
    assert scaled == pytest.approx(of_trace * SCALE.real_s)


async def test_an_engine_takes_the_seconds_and_the_blocks_that_were_computed_by_hand():
    events: list[Sequence[Event]] = []
    clock = Clock()
    engine = engine_with(events, clock)
    ids = ids_of(130)
    first = engine.submit(ids, 3)
    # 1,040 tokens of the trace: 2 * 8e9 * 1040 + 2 * 32 * 4096 * 1040**2 = 1.692e13 operations, at 4e14 a second.
    clock.now = 0.99 * 0.0423088 * SCALE.real_s
    engine.catch_up()
    assert (first.pieces.empty(), engine.running, engine.waiting) == (True, 1, 0)
    clock.now = 1.01 * 0.0423088 * SCALE.real_s
    engine.catch_up()
    assert first.pieces.get_nowait() == 1
    assert held_after(events) == set(keys_of(ids))
    clock.now = 100 * SCALE.real_s
    second = engine.submit(ids, 1)
    assert [first.pieces.get_nowait() for _ in range(2)] == [2, 0]
    assert (engine.counters.prefill_tokens, engine.counters.cached_tokens) == (130, 0)
    clock.now = 200 * SCALE.real_s
    engine.catch_up()
    assert engine.cached_tokens(second.job) == 128  # both full blocks
    assert engine.counters.prefill_s == pytest.approx((0.0423088 + second.job.service_s) * SCALE.real_s, rel=1e-3)


async def test_evicted_blocks_are_told_before_those_that_displace_them():
    events: list[Sequence[Event]] = []
    clock = Clock()
    engine = engine_with(events, clock)
    for number, seed in enumerate("abc"):
        clock.now = number * 100 * SCALE.real_s
        engine.submit(ids_of(130, seed), 1)
    clock.now = 400 * SCALE.real_s
    engine.catch_up()
    assert [each["type"] for each in events[-1]] == ["BlockRemoved"] * 2 + ["BlockStored"]
    assert held_after(events) == {*keys_of(ids_of(130, "b")), *keys_of(ids_of(130, "c"))}


async def test_the_agents_reader_follows_the_events_and_their_replay(tmp_path):
    context = zmq.asyncio.Context()
    source = KvEventSource(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay", TOPIC.decode(), SCALE.block_tokens)
    publisher = KvEventPublisher(context, source.endpoint, source.replay_endpoint or "")
    clock, heard = Clock(), Heard()
    engine = SimulatedEngine(PLAN, SCALE, 1.0, publisher.publish, clock, has_long_hashes=True)
    for number, seed in enumerate("ab"):  # before anybody listens: only the replay tells of it
        clock.now = number * 100 * SCALE.real_s
        engine.submit(ids_of(130, seed), 1)
    clock.now = 300 * SCALE.real_s
    engine.catch_up()
    table = GpuTable(ROOT, SCALE.block_tokens, lambda name: None)
    subscriber = KvEventSubscriber(source, SavedTable(table, 0, b""), heard, context)
    tasks = [asyncio.create_task(publisher.answer_replays()), asyncio.create_task(subscriber.run())]
    async with asyncio.timeout(10):
        await heard.changed_once.wait()
    assert heard.held == {*keys_of(ids_of(130, "a")), *keys_of(ids_of(130, "b"))}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    publisher.close()
    context.destroy(linger=0)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[SimulatedEngine, int]]:
    engine = SimulatedEngine(PLAN, SCALE, 1.0, lambda events: None, asyncio.get_running_loop().time)
    runner = web.AppRunner(EngineApi(engine, Known()).app(), shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    running = asyncio.create_task(engine.run())
    try:
        yield engine, runner.addresses[0][1]
    finally:
        running.cancel()
        await asyncio.wait([running])
        await runner.cleanup()


async def test_the_client_reads_what_an_engine_streams():
    async with serving() as (_, port):
        request = prompts.TextRequest(0.0, prompts.chat_body(some_words("a", 100), 5))
        first, again = await load.run_load(port, [request]), await load.run_load(port, [request])
    assert [each.error for each in first + again] == ["", ""]
    assert (first[0].prompt_tokens, first[0].output_tokens) == (103, 5)
    assert [each.cached_tokens for each in first + again] == [0, 64]
    assert first[0].first_token_s is not None
    assert first[0].ended_s is not None
    assert first[0].first_token_s < first[0].ended_s


async def test_an_engine_renders_tokenizes_and_refuses_as_vllm_does():
    chat = {"model": "m", "messages": [{"role": "user", "content": some_words("a", 9)}]}
    ids = encode(chat_text(chat["messages"]))
    async with serving() as (engine, port), aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        async with http.post("/v1/chat/completions/render", json=chat) as response:
            assert (await response.json())["token_ids"] == ids
        async with http.post("/tokenize", json=chat) as response:
            assert await response.json() == {"count": len(ids), "max_model_len": 131_072, "tokens": ids}
        async with http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}) as response:
            assert response.status == 400
        async with http.post("/v1/completions", json={"prompt": ids, "max_tokens": 2}) as response:
            assert (await response.json())["usage"]["prompt_tokens"] == len(ids)
        async with http.get("/metrics") as response:
            seen = read_metrics(await response.text())
    assert (seen.running, seen.prefill_tokens, seen.is_asleep) == (0, len(ids), False)
    assert seen.prefill_s == pytest.approx(engine.counters.prefill_s)


def test_equal_blocks_of_a_trace_are_equal_text():
    shared, own = block_key(1), block_key(2)
    traced = [TracedRequest(0.0, 1030, 8, (shared, own)), *[TracedRequest(1.0, 800, 8, (shared,))] * 2]
    made = prompts.text_requests(traced, SCALE)
    texts = [json.loads(each.body)["messages"][0]["content"] for each in made]
    first, second, third = (encode(text) for text in texts)
    assert first[:64] == second[:64]
    assert (len(first), len(second)) == (129, 100)
    assert second[:64] == third[:64]
    assert second[64:] != third[64:]
    assert made[1].at_s == pytest.approx(SCALE.real_s)


def test_a_slice_begins_in_the_middle_and_is_sped_up():
    traced = [TracedRequest(float(second), 600, 8, (block_key(1),)) for second in range(10)]
    assert [each.arrival_s for each in prompts.slice_of(traced, speed=2.0, seconds=2.0)] == [0.0, 0.5, 1.0, 1.5]


def test_figures_are_in_the_traces_seconds_and_failures_cost_goodput():
    scale = Scale(real_s=0.5)
    answers = [
        load.Answer(0.0, 0.001, 0.5, 2.0, prompt_tokens=100, cached_tokens=64, output_tokens=1),
        load.Answer(2.0, 0.001, 1.5, 3.0, prompt_tokens=100, cached_tokens=0, output_tokens=1),
        load.Answer(2.5, 0.001, error="status 503"),
    ]
    watched = report.Watched([0.0, 0.001], [100, 36], {"engines": 0.5, "router": 0.25}, 0.9)
    run = report.run_figures("t", "r", answers, watched, scale, slo_s=2.0)
    assert (run.ttft_mean, run.ttft_p50, run.ttft_p99) == (2.0, 1.0, 3.0)
    assert (run.errors, run.in_slo, run.goodput) == (1, pytest.approx(1 / 3), pytest.approx(1 / 10))
    assert run.added_ms == pytest.approx(100)  # of a mean of 1 s on the clock
    assert (run.hit_rate, run.busiest) == (0.32, pytest.approx(100 / 68))
    assert not run.is_late
    assert "r  " in report.table([run])


def test_peers_are_kept_below_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peer = peers.Peer("some-router", "1.2.3")
    assert peer.folder.parent == tmp_path / "warmroute" / "peers"
    (peer.folder / "bin").mkdir(parents=True)
    (peer.folder / "complete").touch()
    assert peer.installed() == peer.folder / "bin"
