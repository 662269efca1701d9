"""While chunks come from disk: who waits and who doesn't, what a deadline costs, and what hints may take."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from directory.tiers import Tier
from nodeagent.client import PutResult
from nodeagent.session import READING_OPENS_MAX
from nodeagent.tiers import promotion as promotion_module
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.load_cost import CLASS_READS_MIN, LoadCost
from tests.nodeagent.running import (
    CHUNK_BYTES,
    SLOTS,
    WAIT_S,
    connected,
    eventually,
    label,
    make_hello,
    payload,
    read,
    running_agent,
    storage_key,
)
from tests.nodeagent.test_nvme_agent import NAMES, nvme, nvme_status, put_chain

TOKENS = 16
DROPPED = "warmroute_prefetches_dropped_total"


class Gate:
    """Reads from disk that begin, and end once the gate is open."""

    def __init__(self, monkeypatch) -> None:
        self._entered = threading.Semaphore(0)
        self._open = threading.Event()
        read_into = FolderStore.read_into

        def gated(store, key, target):
            self._entered.release()
            assert self._open.wait(WAIT_S)
            return read_into(store, key, target)

        monkeypatch.setattr(FolderStore, "read_into", gated)

    def wait_for_read(self) -> None:
        assert self._entered.acquire(timeout=WAIT_S)

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


@contextmanager
def cold_agent(folder, monkeypatch, **changes):
    """An agent whose chunks `NAMES` are on disk only, and the gate that holds their reads."""
    with running_agent(folder, **nvme(folder)) as agent, connected(agent.config.door) as client:
        put_chain(agent, client)
    with running_agent(folder, **nvme(folder), **changes) as agent:
        eventually(lambda: nvme_status(agent)["chunks"] == len(NAMES), "the index")
        gate = Gate(monkeypatch)
        try:
            yield agent, gate
        finally:
            gate.open()


def keys(*names):
    return [storage_key(name) for name in names]


def count(agent, name, **labels):
    return agent.metric(f"warmroute_{name}_total", **labels)


def nothing_is_held(agent):
    tier = agent.tier()
    return (tier["references"], tier["reservations"], nvme_status(agent)["reads"]) == (0, 0, 0)


def test_an_open_that_reads_delays_neither_its_own_session_nor_another(tmp_path, monkeypatch):
    with (
        cold_agent(tmp_path, monkeypatch) as (agent, gate),
        connected(agent.config.door) as client,
        connected(agent.config.door, make_hello("engine-2")) as other,
        ThreadPoolExecutor(1) as thread,
    ):
        opening = thread.submit(client.open, keys(NAMES[0]), WAIT_S)
        gate.wait_for_read()
        for each, name in ((client, "mine"), (other, "theirs")):
            assert each.put(label(name), payload(name), WAIT_S) is PutResult.STORED
            assert read(each, name) == payload(name)
        assert not opening.done()
        gate.open()
        chunks = opening.result(WAIT_S)
        assert [chunk.tier for chunk in chunks] == ["nvme"]
        client.close(chunks)
        eventually(lambda: nothing_is_held(agent), "the closes")


def test_more_reading_opens_than_the_bound_take_what_is_in_dram(tmp_path, monkeypatch):
    with (
        cold_agent(tmp_path, monkeypatch) as (agent, gate),
        connected(agent.config.door) as client,
        ThreadPoolExecutor(READING_OPENS_MAX) as threads,
    ):
        opening = [threads.submit(client.open, keys(NAMES[0]), WAIT_S) for _ in range(READING_OPENS_MAX)]
        gate.wait_for_read()
        session = agent.agent._roster.engines[0].connection
        eventually(lambda: session._reading_opens == READING_OPENS_MAX, "the opens")
        assert client.open(keys(NAMES[0]), WAIT_S) == []
        gate.open()
        for each in opening:
            chunks = each.result(WAIT_S)
            assert len(chunks) == 1
            client.close(chunks)
        assert agent.metric("warmroute_tier_read_seconds_count", tier="nvme") == 1


def test_a_read_past_its_deadline_is_a_miss_and_its_bytes_are_in_dram_for_the_next(tmp_path, monkeypatch):
    with cold_agent(tmp_path, monkeypatch) as (agent, gate), connected(agent.config.door) as client:
        assert client.open(keys(NAMES[0]), 0.05) == []
        gate.wait_for_read()
        eventually(lambda: count(agent, "deadline_misses") == 1, "the miss")
        eventually(lambda: count(agent, "tier_missed_tokens") == count(agent, "tier_tokens_requested") == TOKENS)
        gate.open()
        eventually(lambda: agent.tier()["chunks"] == 1, "the late bytes")
        chunks = client.open(keys(NAMES[0]), WAIT_S)
        assert [chunk.tier for chunk in chunks] == ["dram"]
        target = bytearray(CHUNK_BYTES)
        assert client.read_into(chunks[0], memoryview(target))
        assert target == payload(NAMES[0])
        client.close(chunks)
        eventually(lambda: nothing_is_held(agent), "the close")


@pytest.mark.parametrize("how", ["goodbye", "its connection breaks"])
def test_a_client_that_leaves_while_it_waits_is_lent_nothing(tmp_path, monkeypatch, how):
    with cold_agent(tmp_path, monkeypatch) as (agent, gate), ThreadPoolExecutor(1) as thread:
        with connected(agent.config.door) as client:
            opening = thread.submit(client.open, keys(NAMES[0]), WAIT_S)
            gate.wait_for_read()
            if how == "goodbye":
                client.stop()
            else:
                client._stopping.set()
                client._attachment.link.shut()
            assert opening.result(WAIT_S) == []
            if how == "goodbye":
                eventually(lambda: not agent.status()["engines"], "the goodbye's arrival")
            gate.open()
            eventually(lambda: agent.tier()["chunks"] == 1, "the bytes")
            eventually(lambda: nothing_is_held(agent), "the end of all holds")
        with connected(agent.config.door, make_hello("engine-2")) as other:
            assert read(other, NAMES[0]) == payload(NAMES[0])
            assert agent.tier()["references"] <= 1, "only the other's, until its close arrives"
            eventually(lambda: nothing_is_held(agent), "the end of all holds")


def prefetch(agent, *names):
    return agent.on_loop(lambda: agent.agent._lower.prefetch([storage_key(name)[:16] for name in names]))


def test_hints_beyond_the_queue_are_dropped_and_counted_and_the_rest_is_read(tmp_path, monkeypatch):
    with cold_agent(tmp_path, monkeypatch) as (agent, gate), connected(agent.config.door) as client:
        assert prefetch(agent, *NAMES) == SLOTS // 2
        assert agent.metric(DROPPED, reason="queue_full") == len(NAMES) - SLOTS // 2
        gate.open()
        eventually(lambda: count(agent, "prefetched_chunks") == SLOTS // 2, "the loads")
        assert read(client, NAMES[-1]) == payload(NAMES[-1])
        eventually(lambda: nothing_is_held(agent), "the close")


def test_hints_for_chunks_that_are_unknown_or_there_already_cost_nothing(tmp_path, monkeypatch):
    with cold_agent(tmp_path, monkeypatch) as (agent, gate), connected(agent.config.door) as client:
        gate.open()
        assert read(client, NAMES[0]) == payload(NAMES[0])
        assert prefetch(agent, "unknown", NAMES[0], "another") == 0
        assert agent.agent._promotion._hints == {}
        assert agent.metric("warmroute_tier_read_seconds_count", tier="nvme") == 1


def test_hints_find_no_room_where_every_chunk_is_referenced_and_cost_only_themselves(tmp_path, monkeypatch):
    with cold_agent(tmp_path, monkeypatch) as (agent, gate), connected(agent.config.door) as client:
        gate.open()
        held = client.open(keys(*NAMES[:SLOTS]), WAIT_S)
        assert len(held) == SLOTS
        assert prefetch(agent, *NAMES[SLOTS : SLOTS + 2]) == 2
        eventually(lambda: agent.metric(DROPPED, reason="no_room") == 2, "the drops")
        target = bytearray(CHUNK_BYTES)
        for name, chunk in zip(NAMES, held, strict=False):
            assert client.read_into(chunk, memoryview(target))
            assert target == payload(name)
        client.close(held)
        eventually(lambda: nothing_is_held(agent), "the closes")
        assert prefetch(agent, *NAMES[SLOTS : SLOTS + 2]) == 2
        eventually(lambda: count(agent, "prefetched_chunks") == 2, "the loads")


def test_hints_give_way_to_opens_that_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(promotion_module, "PREFETCH_LOADS_MAX", 1)
    with (
        cold_agent(tmp_path, monkeypatch) as (agent, gate),
        connected(agent.config.door) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        opening = thread.submit(client.open, keys(NAMES[0]), WAIT_S)
        gate.wait_for_read()
        assert prefetch(agent, NAMES[1]) == 1
        eventually(lambda: agent.metric(DROPPED, reason="busy") == 1, "the drop")
        gate.open()
        client.close(opening.result(WAIT_S))
        eventually(lambda: nothing_is_held(agent), "the close")


def test_hints_before_any_engine_came_are_dropped_and_counted(tmp_path, monkeypatch):
    with cold_agent(tmp_path, monkeypatch) as (agent, _):
        assert prefetch(agent, *NAMES[:3]) == 0
        assert agent.metric(DROPPED, reason="no_arena") == 3


def test_the_rate_of_the_disk_that_engines_report_is_the_measured_one(tmp_path, monkeypatch):
    """Bytes per second: at least what came in all the time that the test saw, at most what the gate let through."""
    with (
        cold_agent(tmp_path, monkeypatch) as (agent, gate),
        connected(agent.config.door) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        engine = agent.agent._roster.engines[0]
        tested = agent.agent._nvme.drives[0].tested
        assert agent.agent._nvme.read_cost == LoadCost(tested.read_fixed_s, tested.read_bytes_per_s)
        seen = []
        for name in NAMES[:CLASS_READS_MIN]:
            began = time.monotonic()
            opening = thread.submit(client.open, keys(name), WAIT_S)
            gate.wait_for_read()
            held_from = time.monotonic()
            assert read(client, "not there") is None
            held_s = time.monotonic() - held_from
            gate.open()
            client.close(opening.result(WAIT_S))
            eventually(lambda: nothing_is_held(agent), "the close")
            seen.append((held_s, time.monotonic() - began))
            gate.close()
        gate.open()
        measured = agent.agent._nvme.read_cost
        assert min(held for held, _ in seen) <= measured.seconds(CHUNK_BYTES) <= max(whole for _, whole in seen)
        rates = agent.on_loop(engine.load).rates
        assert rates.bytes_per_s[Tier.NVME] == pytest.approx(
            1 / (1 / measured.bytes_per_s + 1 / rates.bytes_per_s[Tier.DRAM])
        )
        assert rates.fixed_s[Tier.NVME] == pytest.approx(measured.fixed_s + rates.fixed_s[Tier.DRAM])
        host = agent.on_loop(agent.agent._load).rates
        assert host.flops == engine.flops
        assert host.fixed_s.keys() == host.bytes_per_s.keys() == {Tier.DRAM, Tier.NVME}
        assert agent.status()["load_costs"]["nvme"]["bytes_per_s"] == round(host.bytes_per_s[Tier.NVME])


def cancel(agent, *names):
    return agent.on_loop(lambda: agent.agent._lower.cancel([storage_key(name)[:16] for name in names]))


def test_hints_that_are_taken_back_are_not_read_unless_others_gave_them_or_the_read_has_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(promotion_module, "PREFETCH_WORKERS", 1)
    with cold_agent(tmp_path, monkeypatch) as (agent, gate), connected(agent.config.door) as client:
        assert prefetch(agent, *NAMES[:4]) == 4
        gate.wait_for_read()
        assert prefetch(agent, NAMES[0], NAMES[1]) == 0
        assert cancel(agent, *NAMES[:3], "unknown") == 1
        assert agent.metric(DROPPED, reason="cancelled") == 1
        gate.open()
        eventually(lambda: count(agent, "prefetched_chunks") == 3, "what is begun, and what others want")
        tiers = {name: [chunk.tier for chunk in opened(client, name)] for name in NAMES[:4]}
        assert tiers == {NAMES[0]: ["dram"], NAMES[1]: ["dram"], NAMES[2]: ["nvme"], NAMES[3]: ["dram"]}
        eventually(lambda: nothing_is_held(agent), "the closes")


def opened(client, name):
    chunks = client.open(keys(name), WAIT_S)
    client.close(chunks)
    return chunks


def test_hints_leave_the_last_slots_to_engines(tmp_path, monkeypatch):
    with cold_agent(tmp_path, monkeypatch) as (agent, gate), connected(agent.config.door) as client:
        gate.open()
        held = client.open(keys(*NAMES[: SLOTS - 1]), WAIT_S)
        assert prefetch(agent, NAMES[-1]) == 1
        eventually(lambda: agent.metric(DROPPED, reason="no_room") == 1, "the drop")
        client.close(held)
        eventually(lambda: nothing_is_held(agent), "the closes")
        assert prefetch(agent, NAMES[-1]) == 1
        eventually(lambda: count(agent, "prefetched_chunks") == 1, "the load")


def test_another_host_is_given_what_is_on_disk_while_no_engine_here_waits_for_a_read(tmp_path, monkeypatch):
    def given(identities, wait_s=WAIT_S):
        async def ask():
            run = await agent.agent._lower.open_labelled(storage_key(NAMES[1])[:16], identities, wait_s)
            names = list(run.keys)
            run.let_go()
            return names

        return agent.call(ask())

    with (
        cold_agent(tmp_path, monkeypatch) as (agent, gate),
        connected(agent.config.door) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        identities = [agent.agent._roster.engines[0].identity_digest]
        opening = thread.submit(client.open, keys(NAMES[0]), WAIT_S)
        gate.wait_for_read()
        assert given(identities, 0.05) == []
        assert nvme_status(agent)["reads"] == 1, "the engine's own"
        gate.open()
        client.close(opening.result(WAIT_S))
        eventually(lambda: nothing_is_held(agent), "the close")
        assert given([bytes(32)]) == []
        assert given(identities) == keys(NAMES[1])
        monkeypatch.setattr(promotion_module, "PEER_READS_MAX", 0)
        assert given(identities) == []
