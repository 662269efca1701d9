"""What is stored while the directory is late, silent, strange or gone is announced afterwards: nothing more or less."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from directory.redis_directory import RedisDirectory
from nodeagent.client import PutResult
from tests.directory.stands import running_valkey
from tests.faulty_proxy import Cut, FaultyProxy
from tests.nodeagent.agreement import differences, directory_comes_to_equal_inventories, inventories
from tests.nodeagent.running import (
    CHUNK_BYTES,
    WAIT_S,
    RunningAgent,
    connected,
    eventually,
    label,
    payload,
    read,
    running_agent,
)

SLOTS = 24


class ProxyThread:
    """A `FaultyProxy` on an event loop of its own."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self.proxy = FaultyProxy(port, subject=b"*")
        asyncio.run_coroutine_threadsafe(self.proxy.__aenter__(), self._loop).result(WAIT_S)

    def do(self, change: Callable[[FaultyProxy], None]) -> None:
        async def call() -> None:
            change(self.proxy)

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(WAIT_S)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.proxy.__aexit__(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


@pytest.fixture(scope="module")
def valkey() -> Iterator[int]:
    with running_valkey() as server:
        yield server.port


@contextmanager
def proxied(port: int) -> Iterator[ProxyThread]:
    thread = ProxyThread(port)
    try:
        yield thread
    finally:
        thread.stop()


def late(proxy: FaultyProxy) -> None:
    proxy.delay_s = 0.3


def too_late(proxy: FaultyProxy) -> None:
    proxy.delay_s = 1.3


def silent(proxy: FaultyProxy) -> None:
    proxy.is_silent = True


def another_shape(proxy: FaultyProxy) -> None:
    proxy.garbage = b"*2\r\n$1\r\na\r\n:7\r\n"


def no_protocol(proxy: FaultyProxy) -> None:
    proxy.garbage = b"HTTP/1.1 400 Bad Request\r\n\r\n"


def hanging_up(proxy: FaultyProxy) -> None:
    proxy.cuts = [Cut("reset", 0)] * 10_000


def half_closing(proxy: FaultyProxy) -> None:
    proxy.cuts = [Cut("close", 1)] * 10_000


def well(proxy: FaultyProxy) -> None:
    proxy.delay_s, proxy.is_silent, proxy.garbage, proxy.cuts = 0.0, False, None, []


def failed_calls(agent: RunningAgent) -> float:
    return sum(agent.metric("warmroute_directory_errors_total", op=op) for op in ("place", "withdraw"))


FAULTS = [late, too_late, silent, another_shape, no_protocol, hanging_up, half_closing]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_was_stored_and_evicted_meanwhile_is_said_afterwards(tmp_path, valkey, fault):
    url = f"redis://127.0.0.1:{valkey}"
    with redis.Redis(port=valkey) as raw:
        raw.flushall()
    gpu = [bytes([number]) * 16 for number in range(20)]
    with proxied(valkey) as proxy:
        remote = RedisDirectory.connect(f"redis://127.0.0.1:{proxy.proxy.port}")
        with running_agent(tmp_path, dram_bytes=4_096 + SLOTS * CHUNK_BYTES, directory=remote) as agent:
            with connected(agent.config.door, gpu=gpu[:8]) as client:
                for number in range(12):
                    assert (
                        client.put(label(f"before {number}"), payload(f"before {number}"), WAIT_S) is PutResult.STORED
                    )
                directory_comes_to_equal_inventories(url, agent)
                held_before, failures_before = inventories(agent), failed_calls(agent)

                proxy.do(fault)
                for number in range(20):  # more than there is room for: some of the first are evicted
                    name = f"during {number}"
                    assert client.put(label(name), payload(name), WAIT_S) is PutResult.STORED
                    assert read(client, name) == payload(name), "the tier serves on"
                client.report_gpu(gpu[8:], gpu[:4])
                eventually(lambda: len(inventories(agent)["engine-1"]) == 16, "the gpu tier")
                assert inventories(agent) != held_before
                assert len(inventories(agent)["host-1"]) == SLOTS
                if fault is not late:
                    eventually(lambda: failed_calls(agent) > failures_before, "the fault's effect")

                proxy.do(well)
                directory_comes_to_equal_inventories(url, agent)
                eventually(lambda: agent.agent._host.is_settled, "nothing more to say")
            agent.call(remote.aclose())


def test_a_full_server_is_shown_by_the_agent_and_in_the_fleets_table(tmp_path, valkey):
    async def full_for(directory: RedisDirectory) -> set[str]:
        rows = [each for each in await directory.members() if each.is_live and each.load.is_directory_full]
        return {getattr(row.registration, "engine", row.registration.host) for row in rows}

    with redis.Redis(port=valkey) as raw:
        raw.flushall()
        remote = RedisDirectory.connect(f"redis://127.0.0.1:{valkey}")
        with running_agent(tmp_path, directory=remote) as agent, connected(agent.config.door) as client:
            client.put(label("a"), payload("a"), WAIT_S)
            client.report_gpu([b"g" * 16], [])
            eventually(lambda: agent.agent._host.is_settled, "all is said")
            assert agent.call(full_for(remote)) == set()
            try:
                raw.config_set("maxmemory", "1")
                client.put(label("b"), payload("b"), WAIT_S)
                client.report_gpu([b"h" * 16], [])
                eventually(lambda: agent.call(full_for(remote)) == {"host-1", "engine-1"}, "both say it")
                status = agent.status()
                assert {status["directory"], *(row["directory"] for row in status["engines"])} == {
                    "the directory is full: placements are refused"
                }
            finally:
                raw.config_set("maxmemory", "0")
            eventually(lambda: agent.call(full_for(remote)) == set(), "there is room")
            assert agent.status()["directory"] == "ok"
            agent.call(remote.aclose())


def test_the_comparison_sees_what_is_missing_and_what_is_too_much(tmp_path, valkey):
    url = f"redis://127.0.0.1:{valkey}"
    with redis.Redis(port=valkey) as raw:
        raw.flushall()
        remote = RedisDirectory.connect(url)
        with running_agent(tmp_path, directory=remote) as agent:
            with connected(agent.config.door) as client:
                client.put(label("a"), payload("a"), WAIT_S)
                directory_comes_to_equal_inventories(url, agent)
                key = next(iter(inventories(agent)["host-1"]))
                agent.on_loop(lambda: agent.agent._host.inventory.set(key, 0))
                assert "is said in 2, held in 0" in differences(url, agent)[0]
                agent.on_loop(lambda: agent.agent._host.inventory.set(b"m" * 16, 2))
                assert any("is said in 0, held in 2" in each for each in differences(url, agent))
            agent.call(remote.aclose())
