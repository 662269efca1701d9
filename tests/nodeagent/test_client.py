"""The client's promises: checked reads, puts that never raise, and an agent that may go and come."""

import os
import socket
import threading
import time

import pytest

from nodeagent import client as client_module
from nodeagent.client import ChunkClient, ChunkLabel, PutResult
from nodeagent.link import Link
from nodeagent.messages import Opened, Reserve
from tests.nodeagent.running import (
    CHUNK_BYTES,
    SLOTS,
    WAIT_S,
    connected,
    eventually,
    label,
    make_hello,
    open_fds,
    payload,
    read,
    running_agent,
    storage_key,
)


@pytest.fixture
def agent(tmp_path):
    with running_agent(tmp_path) as running:
        yield running


@pytest.fixture
def client(agent):
    with connected(agent.config.door) as connected_client:
        yield connected_client


def put(client, name, **fields):
    return client.put(label(name, **fields), payload(name), WAIT_S)


def arena_of(agent):
    return agent.agent._tier.hierarchy.arena


def test_what_was_put_is_read_back(client):
    assert put(client, "a") is PutResult.STORED
    assert read(client, "a") == payload("a")
    assert put(client, "a") is PutResult.ALREADY


def test_other_bytes_under_a_key_are_refused_and_counted(agent, client):
    put(client, "a")
    assert client.put(label("a"), payload("b"), WAIT_S) is PutResult.REFUSED
    assert agent.metric("warmroute_put_conflicts_total") == 1
    assert read(client, "a") == payload("a")


def test_the_leading_run_is_opened(client):
    for name in ("a", "b", "d"):
        put(client, name)
    keys = [storage_key(name) for name in ("a", "b", "c", "d")]
    chunks = client.open(keys, WAIT_S)
    assert [chunk.storage_key for chunk in chunks] == keys[:2]
    assert {(chunk.tier, chunk.length) for chunk in chunks} == {("dram", CHUNK_BYTES)}
    client.close(chunks)
    assert client.open([], WAIT_S) == []


def test_a_prefix_of_three_hundred_chunks_is_read_back_byte_for_byte(tmp_path):
    names = [f"{number}" for number in range(300)]
    with running_agent(tmp_path, dram_bytes=320 * CHUNK_BYTES) as agent, connected(agent.config.door) as client:
        for position, name in enumerate(names):
            chunk = label(name, names[position - 1] if position else None, position)
            assert client.put(chunk, payload(name), WAIT_S) is PutResult.STORED
        chunks = client.open([storage_key(name) for name in names], WAIT_S)
        assert len(chunks) == 300
        target = bytearray(CHUNK_BYTES)
        for name, chunk in zip(names, chunks, strict=True):
            assert client.read_into(chunk, memoryview(target))
            assert target == payload(name)
        client.close(chunks)


def test_bytes_that_changed_in_the_slot_are_a_miss_and_the_chunk_goes(agent, client):
    put(client, "a")
    chunk = client.open([storage_key("a")], WAIT_S)[0]
    with arena_of(agent).view(chunk.slot, 100) as slot:
        slot[50] ^= 1
    assert not client.read_into(chunk, memoryview(bytearray(chunk.length)))
    client.close([chunk])
    eventually(lambda: agent.tier()["chunks"] == 0, "the chunk's end")
    assert agent.metric("warmroute_checksum_failures_total") == 1
    assert agent.metric("warmroute_evictions_total", tier="dram", reason="corrupt") == 1
    assert put(client, "a") is PutResult.STORED
    assert read(client, "a") == payload("a")


def test_another_generation_is_a_miss_even_if_the_bytes_check(agent, client):
    put(client, "a")
    chunk = client.open([storage_key("a")], WAIT_S)[0]
    target = bytearray(chunk.length)
    arena_of(agent)._shared_generations[chunk.slot] += 1
    assert not client.read_into(chunk, memoryview(target))
    assert target == payload("a"), "only the generation tells"
    arena_of(agent)._shared_generations[chunk.slot] -= 1
    assert client.read_into(chunk, memoryview(target))
    client.close([chunk])
    eventually(lambda: agent.tier()["references"] == 0, "the check's end")
    assert agent.tier()["chunks"] == 1, "the slot's bytes are good, so the chunk stays"


def test_a_slot_that_does_not_hold_what_was_promised_is_never_indexed(agent, client, monkeypatch):
    write = client_module.ArenaMap.write

    def torn(self, slot, data):
        write(self, slot, data[: data.nbytes // 2])

    monkeypatch.setattr(client_module.ArenaMap, "write", torn)
    assert put(client, "a") is PutResult.REFUSED
    monkeypatch.undo()
    assert agent.metric("warmroute_checksum_failures_total") == 1
    assert client.open([storage_key("a")], WAIT_S) == []
    assert agent.tier()["bytes_used"] == 0
    assert put(client, "a") is PutResult.STORED


def test_a_chunk_of_another_length_than_the_target_is_a_miss(client):
    put(client, "a")
    chunk = client.open([storage_key("a")], WAIT_S)[0]
    assert not client.read_into(chunk, memoryview(bytearray(chunk.length - 1)))
    assert not client.read_into(chunk, memoryview(bytearray(chunk.length + 1)))
    client.close([chunk])


def test_closing_twice_and_reading_after_it_do_nothing(agent, client):
    put(client, "a")
    chunks = client.open([storage_key("a")], WAIT_S)
    client.close(chunks)
    client.close(chunks)
    assert not client.read_into(chunks[0], memoryview(bytearray(CHUNK_BYTES)))
    again = client.open([storage_key("a")], WAIT_S)
    client.close(chunks)
    assert agent.tier()["references"] == 1, "an old close must not end a new reference"
    client.close(again)
    eventually(lambda: agent.tier()["references"] == 0, "the close")


def test_tokens_requested_are_tokens_hit_and_tokens_missed(agent, client):
    for name in ("a", "b"):
        put(client, name)
    for names in ("ab", "abc", "x", "ba"):
        chunks = client.open([storage_key(name) for name in names], WAIT_S)
        for chunk in chunks:
            assert client.read_into(chunk, memoryview(bytearray(chunk.length)))
        client.close(chunks)
    eventually(lambda: agent.tier()["references"] == 0, "the close")
    hit = agent.metric("warmroute_tier_hit_tokens_total", tier="dram", source="local")
    missed = agent.metric("warmroute_tier_missed_tokens_total")
    assert (hit, missed) == (6 * 16, 2 * 16)
    assert agent.metric("warmroute_tier_tokens_requested_total") == hit + missed


def test_many_threads_may_use_one_client(agent, client):
    failures = []

    def use(number: int) -> None:
        for turn in range(30):
            name = f"{(number + turn) % (2 * SLOTS)}"
            put(client, name)
            found = read(client, name)
            if found is not None and found != payload(name):
                failures.append(name)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []
    eventually(lambda: agent.tier()["references"] == 0, "the closes")
    assert agent.tier()["reservations"] == 0
    assert agent.metric("warmroute_checksum_failures_total") == 0


def test_payloads_may_be_of_any_shape_but_contiguous(client):
    grid = memoryview(bytearray(CHUNK_BYTES)).cast("B", (2, CHUNK_BYTES // 2))
    assert client.put(label("grid"), grid, WAIT_S) is PutResult.STORED
    assert client.put(label("gaps"), memoryview(bytearray(64))[::2], WAIT_S) is PutResult.REFUSED
    assert client.put(label("large"), memoryview(bytearray(2 * CHUNK_BYTES)), WAIT_S) is PutResult.REFUSED
    assert client.put(label("empty"), memoryview(b""), WAIT_S) is PutResult.REFUSED
    short = ChunkLabel(b"short", None, None, 0)
    assert client.put(short, payload("a"), WAIT_S) is PutResult.REFUSED
    assert client.open([b"short"], WAIT_S) == []
    client.report_gpu([b"short"], [])
    assert put(client, "after") is PutResult.STORED, "the connection lives on"


def test_without_an_agent_nothing_is_found_and_nothing_raised(tmp_path):
    client = ChunkClient(str(tmp_path / "none.sock"), make_hello(), list)
    try:
        assert not client.wait_connected(0.05)
        assert not client.is_connected
        assert client.open([storage_key("a")], 0.1) == []
        assert put(client, "a") is PutResult.REFUSED
        client.report_gpu([b"k" * 16], [])
        client.report_load(1, 2, 3.0)
    finally:
        client.stop()
        client.stop()


def test_after_a_restart_of_the_agent_the_client_comes_back_and_old_chunks_are_harmless(tmp_path):
    with running_agent(tmp_path) as agent:
        client = ChunkClient(agent.config.door, make_hello(), lambda: [b"g" * 16])
        assert client.wait_connected(WAIT_S)
        put(client, "a")
        old = client.open([storage_key("a")], WAIT_S)
    eventually(lambda: not client.is_connected, "the loss")
    assert client.open([storage_key("a")], 0.1) == []
    with running_agent(tmp_path) as agent:
        assert client.wait_connected(WAIT_S)
        assert client.open([storage_key("a")], WAIT_S) == []
        put(client, "b")
        target = bytearray(CHUNK_BYTES)
        if client.read_into(old[0], memoryview(target)):
            assert target == payload("a")
        client.close(old)
        assert read(client, "b") == payload("b")
        eventually(lambda: agent.believed(b"g" * 16) == 1, "the whole gpu inventory")
        client.stop()


def test_a_lost_connection_is_made_again_and_references_are_given_back_over_the_new_one(agent, client):
    put(client, "a")
    chunks = client.open([storage_key("a")], WAIT_S)
    client._attachment.link.shut()
    eventually(lambda: not client.is_connected, "the loss")
    target = bytearray(CHUNK_BYTES)
    assert client.read_into(chunks[0], memoryview(target))
    assert target == payload("a")
    client.close(chunks)
    assert client.wait_connected(WAIT_S)
    eventually(lambda: agent.tier()["references"] == 0, "the references' end")
    assert len(agent.status()["engines"][0]["incarnations"]) == 1


def test_an_answer_that_comes_too_late_is_given_back(agent, client):
    put(client, "a")
    link = client._attachment.link
    release = threading.Event()
    agent._loop.call_soon_threadsafe(release.wait, WAIT_S)
    assert client.open([storage_key("a")], 0.0) == []
    chunk = label("b")
    link.request(lambda number: Reserve(number, chunk.storage_key, None, None, 0, 64, b"c" * 16), 0.0)
    release.set()
    eventually(lambda: agent.metric("warmroute_tier_tokens_requested_total") == 16, "the late open")
    eventually(lambda: agent.tier()["references"] == 0, "the reference given back")
    eventually(lambda: agent.tier()["reservations"] == 0, "the reservation given back")


def test_what_was_granted_in_an_answer_that_got_lost_is_given_back_and_what_is_held_stays(agent, client, monkeypatch):
    for name in "ab":
        put(client, name)
    held = client.open([storage_key("a")], WAIT_S)
    hand_over = Link._hand_over
    monkeypatch.setattr(
        Link, "_hand_over", lambda self, message: isinstance(message, Opened) or hand_over(self, message)
    )
    assert client.open([storage_key("b")], 0.1) == []
    eventually(lambda: agent.tier()["references"] == 2, "the grant")
    monkeypatch.undo()
    client._attachment.link.shut()
    eventually(lambda: agent.tier()["references"] == 1, "the lost reference given back")
    target = bytearray(CHUNK_BYTES)
    assert client.read_into(held[0], memoryview(target))
    client.close(held)
    eventually(lambda: agent.tier()["references"] == 0, "the close")


def test_calls_end_within_their_time_when_the_agent_hangs(tmp_path):
    path = str(tmp_path / "deaf.sock")
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        put(client, "a")
        release = threading.Event()
        agent._loop.call_soon_threadsafe(release.wait, WAIT_S)
        started = time.monotonic()
        assert client.open([storage_key("a")], 0.2) == []
        assert client.put(label("b"), payload("b"), 0.2) is PutResult.REFUSED
        client.report_gpu([b"k" * 16], [])
        assert time.monotonic() - started < WAIT_S / 2
        release.set()
        eventually(lambda: read(client, "a") == payload("a"), "the agent's return")
        eventually(lambda: agent.tier()["references"] == 0, "late answers given back")
    assert not os.path.exists(path)


def test_gpu_reports_become_placements(agent):
    gpu = [b"1" * 16]
    with connected(agent.config.door, gpu=gpu) as client:
        eventually(lambda: agent.believed(b"1" * 16) == 1, "the inventory")
        client.report_gpu([b"2" * 16], [])
        client.report_gpu([], [b"1" * 16])
        eventually(lambda: agent.believed(b"2" * 16) == 1, "the placement")
        eventually(lambda: agent.believed(b"1" * 16) == 0, "the removal")
    eventually(lambda: agent.believed(b"2" * 16) == 0, "the engine's goodbye")


def test_too_many_changes_at_once_become_a_whole_report(agent, monkeypatch):
    monkeypatch.setattr(client_module, "GPU_CHANGES_MAX", 10)
    gpu: list[bytes] = []
    with connected(agent.config.door, gpu=gpu) as client:
        keys = [os.urandom(16) for _ in range(100)]
        gpu.extend(keys[50:])
        client.report_gpu(keys, [])
        client.report_gpu([], keys[:50])
        eventually(lambda: agent.believed(keys[99]) == 1, "the placements")
        eventually(lambda: agent.status()["engines"][0]["gpu_chunks"] == 50, "the removals")


def test_an_inventory_that_raises_does_not_end_the_client(agent):
    calls = []

    def inventory():
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("not now")
        return [b"k" * 16]

    client = ChunkClient(agent.config.door, make_hello(), inventory)
    try:
        eventually(lambda: agent.believed(b"k" * 16) == 1, "the inventory")
    finally:
        client.stop()


def test_an_agent_that_talks_nonsense_is_left_and_tried_again(tmp_path):
    path = str(tmp_path / "nonsense.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(WAIT_S)
        client = ChunkClient(path, make_hello(), list)
        try:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"\x00\x00\x00\x05hello")
                    connection.settimeout(WAIT_S)
                    while connection.recv(65_536):
                        pass
            assert not client.is_connected
        finally:
            client.stop()


def test_a_stopped_client_leaves_no_thread_and_no_descriptor(agent):
    with connected(agent.config.door) as client:
        put(client, "warm up")
    before, threads = open_fds(), threading.active_count()
    for _ in range(5):
        with connected(agent.config.door) as client:
            put(client, "a")
            assert read(client, "a") == payload("a")
        del client
    eventually(lambda: open_fds() <= before, "the descriptors' end")
    eventually(lambda: threading.active_count() <= threads, "the threads' end")
