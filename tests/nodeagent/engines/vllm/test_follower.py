"""A foreign engine beside a running agent: its `gpu` tier from its events, its chunks joined with their labels."""

import asyncio
import os
from pathlib import Path

import pytest
from aiohttp import web

from directory.interface import Batch
from directory.memory import MemoryDirectory
from directory.tiers import Tier
from nodeagent.client import PutResult
from nodeagent.engines.vllm import follower as vllm_follower
from nodeagent.engines.vllm.events import AllBlocksCleared
from nodeagent.engines.vllm.process_life import process_life
from nodeagent.engines.vllm.saved_table import load_table
from tests.nodeagent.engines.vllm.attached import (
    BLOCKS,
    CHUNK_TOKENS,
    DIGEST,
    KEYS,
    TOKENS,
    TWO_CHUNKS,
    followed,
    hello_of,
    names,
    put,
    soon,
    tiers_of,
)
from tests.nodeagent.engines.vllm.publishing_engine import publishing
from tests.nodeagent.engines.vllm.recorded import removed, stored
from tests.nodeagent.running import (
    WAIT_S,
    RunningAgent,
    connected,
    fast_clock,
    running_agent,
)


async def test_the_gpu_tier_is_what_the_events_say_and_not_what_the_door_says(tmp_path: Path) -> None:
    async with publishing() as engine, followed(tmp_path, engine) as (agent, client):
        await engine.listened_to()
        engine.publish(TWO_CHUNKS)
        await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
        client.report_gpu([b"x" * 16], [KEYS[0]])
        engine.publish(removed(BLOCKS[3]))
        await soon(lambda: tiers_of(agent) == [Tier.GPU, 0], "one chunk in gpu")
        assert agent.believed(b"x" * 16) == 0
        engine.publish(AllBlocksCleared())
        await soon(lambda: tiers_of(agent) == [0, 0], "none")


@pytest.mark.parametrize("is_label_first", [True, False], ids=["label first", "bytes first"])
async def test_bytes_and_labels_are_joined_whichever_comes_first(tmp_path: Path, is_label_first: bool) -> None:
    async with publishing() as engine, followed(tmp_path, engine) as (agent, client):
        await engine.listened_to()
        if is_label_first:
            engine.publish(TWO_CHUNKS)
            await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "the labels")
        assert [await asyncio.to_thread(put, client, index) for index in (1, 0)] == [PutResult.STORED] * 2
        if not is_label_first:
            assert await asyncio.to_thread(tiers_of, agent) == [0, 0], "served, and not announced"
            assert len(client.open([names(0), names(1)], WAIT_S)) == 2
            engine.publish(TWO_CHUNKS)
        both = Tier.GPU | Tier.DRAM
        await soon(lambda: tiers_of(agent) == [both, both], "both tiers")
        engine.publish(AllBlocksCleared())
        await soon(lambda: tiers_of(agent) == [Tier.DRAM, Tier.DRAM], "what is stored stays")
        hierarchy = agent.agent._tier.hierarchy
        assert hierarchy is not None
        entry = hierarchy.find(names(1))
        assert entry is not None
        assert (entry.label.parent, entry.label.position) == (names(0), 1), "so that a prefix is evicted from its end"


async def test_what_is_skipped_of_the_events_is_counted(tmp_path: Path) -> None:
    async with publishing() as engine, followed(tmp_path, engine) as (agent, _):
        await engine.listened_to()
        offloaded = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": []}
        engine.publish({**offloaded, "block_size": 0, "medium": "CPU"}, {"type": "BlockMoved"}, TWO_CHUNKS)  # type: ignore[arg-type]
        await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
        for reason in ("other_medium", "unknown_event"):
            await soon(lambda: agent.metric("warmroute_kv_events_skipped_total", reason=reason) == 1, reason)  # noqa: B023
        assert agent.metric("warmroute_kv_events_skipped_total", reason="malformed_event") == 0


class StoppedDirectory(MemoryDirectory):
    """A server that is stopped: while it is, nothing that is asked of it ever comes back."""

    is_stopped = False

    async def place(self, batch: Batch) -> int:
        while self.is_stopped:
            await asyncio.sleep(0.01)
        return await super().place(batch)

    async def withdraw(self, batch: Batch) -> int:
        while self.is_stopped:
            await asyncio.sleep(0.01)
        return await super().withdraw(batch)


async def test_a_flood_of_events_with_the_directory_stopped_is_drained_and_nothing_piles_up(tmp_path: Path) -> None:
    directory = StoppedDirectory(fast_clock)
    async with publishing() as engine, followed(tmp_path, engine, directory=directory) as (agent, _):
        await engine.listened_to()
        engine.publish(TWO_CHUNKS)
        await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
        directory.is_stopped = True
        for _ in range(2_000):  # the same two chunks come and go: states, of which only the newest is kept
            engine.publish(removed(BLOCKS[3]), removed(BLOCKS[1]))
            engine.publish(stored([BLOCKS[1]], TOKENS[8:16], BLOCKS[0]), stored([BLOCKS[3]], TOKENS[24:], BLOCKS[2]))
        engine.publish(removed(BLOCKS[3]))
        follower = agent.agent._follower
        await soon(
            lambda: follower._followed["engine-1"].subscriber.next_sequence == engine.next, "the socket is drained"
        )
        status = agent.status()["engines"][0]
        assert status["pending_keys"] <= 2 * len(KEYS), "what is in flight, and the newest"
        assert (status["gpu_chunks"], follower._followed["engine-1"].subscriber.held_batches) == (1, 0)
        directory.is_stopped = False
        await soon(lambda: tiers_of(agent) == [Tier.GPU, 0], "the newest state")


async def test_other_bits_for_a_chunk_that_is_held_are_had_and_alarm_nobody(tmp_path: Path) -> None:
    async with publishing() as engine, followed(tmp_path, engine) as (agent, client):
        assert await asyncio.to_thread(put, client, 0) is PutResult.STORED
        assert await asyncio.to_thread(put, client, 0, "other bits") is PutResult.ALREADY
        assert agent.metric("warmroute_admission_refused_total", reason="other_bits") == 1
        assert agent.metric("warmroute_put_conflicts_total") == 0


async def test_an_agent_that_restarts_knows_what_prefix_hits_do_not_tell(tmp_path: Path) -> None:
    async with publishing(buffer_batches=2) as engine:
        directory = MemoryDirectory(fast_clock)
        async with followed(tmp_path, engine, directory=directory) as (agent, _):
            await engine.listened_to()
            engine.publish(TWO_CHUNKS)
            for _ in range(5):
                engine.publish()
            await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
        engine.publish(removed(BLOCKS[3]))
        async with followed(tmp_path, engine, directory=directory) as (agent, _):
            await soon(lambda: tiers_of(agent) == [Tier.GPU, 0], "the saved table, and the event since")
            assert agent.metric("warmroute_degraded_total", reason="gpu_unknown") == 0


def saved_in(agent: RunningAgent) -> bytes | None:
    files = list(agent.config.state.glob("*.gpu"))
    return files[0].read_bytes() if files else None


async def test_a_reset_is_on_disk_before_it_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an agent that is killed then doesn't claim again what an idle engine says nothing of."""
    monkeypatch.setattr(vllm_follower, "SAVE_INTERVAL_S", 0.1)
    async with publishing() as engine:
        directory = MemoryDirectory(fast_clock)
        async with followed(tmp_path, engine, directory=directory) as (agent, _):
            await engine.listened_to()
            engine.publish(TWO_CHUNKS)
            await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
            await soon(lambda: saved_in(agent), "the save")
            monkeypatch.setattr(vllm_follower, "SAVE_INTERVAL_S", 1e6)
            follower = agent.agent._follower
            await asyncio.to_thread(lambda: agent.call(follower.was_reset("engine-1")))
            killed = saved_in(agent)
        (path,) = agent.config.state.glob("*.gpu")
        assert killed is not None
        path.write_bytes(killed)
        async with followed(tmp_path, engine, directory=directory) as (agent, _):
            await soon(lambda: agent.status()["engines"][0]["gpu_is_known"], "it is in step")
            assert tiers_of(agent) == [0, 0]
            assert agent.status()["engines"][0]["gpu_chunks"] == 0


async def test_a_saved_table_outlives_an_agent_that_never_came_into_step(tmp_path: Path) -> None:
    async with publishing() as engine:
        directory = MemoryDirectory(fast_clock)
        async with followed(tmp_path, engine, directory=directory) as (agent, _):
            await engine.listened_to()
            engine.publish(TWO_CHUNKS)
            await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
        engine.buffer.clear()  # nothing is repeated but to whoever has what was saved
        engine.publish()
        engine.is_replay_mute = True
        async with followed(tmp_path, engine, directory=directory) as (agent, _):
            await soon(lambda: len(engine.requests) > 1, "it asks, and isn't answered")
        data = saved_in(agent)
        assert data is not None
        life = process_life(os.getpid())
        saved = load_table(data, life=life, fleet_digest=DIGEST, chunk_tokens=CHUNK_TOKENS, adapters={}.get)
        assert saved is not None
        assert saved.table.held == set(KEYS)


async def test_a_gap_that_the_engine_cannot_close_leaves_nothing_claimed(tmp_path: Path) -> None:
    async with publishing(buffer_batches=2) as engine:
        directory = MemoryDirectory(fast_clock)
        async with followed(tmp_path, engine, directory=directory) as (agent, _):
            await engine.listened_to()
            engine.publish(TWO_CHUNKS)
            await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
        for _ in range(5):
            engine.publish()
        async with followed(tmp_path, engine, directory=directory) as (agent, _):
            await soon(lambda: agent.metric("warmroute_degraded_total", reason="gpu_unknown") == 1, "the gap is seen")
            await soon(lambda: tiers_of(agent) == [0, 0], "nothing is claimed")


async def test_metrics_reach_the_registration_and_sleep_empties_the_gpu_tier(tmp_path: Path) -> None:
    shown = {"awake": 1}

    async def metrics(_: web.Request) -> web.Response:
        lines = ["# TYPE vllm:num_requests_running gauge", "vllm:num_requests_running 3"]
        lines += ["# TYPE vllm:engine_sleep_state gauge"]
        lines += [f'vllm:engine_sleep_state{{sleep_state="awake"}} {shown["awake"]}']
        return web.Response(text="\n".join(lines) + "\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with publishing() as engine:
            with running_agent(tmp_path) as agent, connected(agent.config.door, hello_of(engine, url=url)):
                await engine.listened_to()
                engine.publish(TWO_CHUNKS)
                await soon(lambda: tiers_of(agent) == [Tier.GPU, Tier.GPU], "both chunks in gpu")
                await soon(lambda: agent.status()["engines"][0]["running"] == 3, "the load")
                assert agent.status()["engines"][0]["gpu_is_known"]
                shown["awake"] = 0
                await soon(lambda: tiers_of(agent) == [0, 0], "its KV is gone")
    finally:
        await runner.cleanup()


def test_a_life_is_one_processs() -> None:
    assert process_life(os.getpid()) == process_life(os.getpid())
    assert process_life(os.getpid()) != process_life(os.getppid())
    assert process_life(2**22 + 1) != process_life(2**22 + 1), "an unknown process is nobody's"
