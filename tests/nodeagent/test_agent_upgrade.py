"""An agent's end loses its DRAM tier, on purpose: its memory comes back soon, and nothing wrong is ever read of it."""

import logging
import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from nodeagent import client as client_module
from nodeagent import old_arenas, session
from nodeagent.arena_map import ArenaMap
from nodeagent.client import ChunkClient, PutResult
from nodeagent.messages import ArenaOffer
from nodeagent.old_arenas import OLD_ARENA_S, OldArenas
from nodeagent.tiers import dram
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.machine_memory import PAGE_BYTES, MachineMemory
from tests.nodeagent.forks import arenas_anywhere, arenas_of, forking, is_there
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

KILLS = 20


@contextmanager
def client_of(door, gpu=()):
    """A client, whether or not there is an agent, or an arena."""
    client = ChunkClient(door, make_hello(), lambda: list(gpu))
    try:
        yield client
    finally:
        client.stop()


def time_passes(client):
    """Everything old is due, and the client's thread has a look."""
    old = client._old_arenas
    old._arenas = [replace(each, due_at=0.0) for each in old._arenas]
    client.report_load(0, 0, 1.0)


@pytest.fixture(scope="module")
def forking_process():
    with forking() as process:
        yield process


@pytest.fixture
def forks(forking_process):
    yield forking_process
    forking_process.kill_all()


def put(client, name):
    return client.put(label(name), payload(name), WAIT_S)


def read_open(client, chunk):
    """The bytes of a chunk that is open already; `None` for a miss."""
    target = bytearray(chunk.length)
    return bytes(target) if client.read_into(chunk, memoryview(target)) else None


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_memory_of_an_agent_that_has_ended_is_given_back_at_once_where_nothing_is_open(tmp_path, forks, end):
    first = forks.start("agent", str(tmp_path))
    with connected(str(tmp_path / "door.sock")) as client:
        assert put(client, "a") is PutResult.STORED
        assert read(client, "a") == payload("a")
        arenas = arenas_of(first)
        assert arenas
        assert arenas <= arenas_of()
        os.kill(first, end)
        eventually(lambda: not arenas & arenas_anywhere(), "the memory's return", OLD_ARENA_S)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_what_was_open_stays_readable_for_a_while_then_it_is_a_miss_and_nvme_refills(
    tmp_path, forks, monkeypatch, caplog, end
):
    monkeypatch.setattr(old_arenas, "OLD_ARENA_S", 1e6)
    (tmp_path / "nvme").mkdir()
    first = forks.start("agent", str(tmp_path))
    with connected(str(tmp_path / "door.sock")) as client:
        assert put(client, "a") is PutResult.STORED
        eventually(lambda: [each for each in (tmp_path / "nvme").glob("*/*/*") if not each.suffix], "the file")
        held = client.open([storage_key("a")], WAIT_S)
        arenas = arenas_of(first)
        os.kill(first, end)
        eventually(lambda: not client.is_connected, "the loss")
        assert read_open(client, held[0]) == payload("a")
        eventually(lambda: not is_there(first), "the agent's end")
        forks.start("agent", str(tmp_path))
        assert client.wait_connected(WAIT_S)
        assert arenas & arenas_of(), "what is open keeps the old arena"
        found = []
        eventually(lambda: found.extend(client.open([storage_key("a")], WAIT_S)) or found, "the folder's index")
        assert [chunk.tier for chunk in found] == ["nvme"], "the new tier was empty"
        assert read_open(client, found[0]) == payload("a")
        time_passes(client)
        eventually(lambda: not arenas & arenas_anywhere(), "the old arena's end")
        assert read_open(client, held[0]) is None
        assert read_open(client, found[0]) == payload("a"), "the new arena is another"
        client.close([*held, *found])
        assert put(client, "b") is PutResult.STORED
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_connection_that_is_lost_alone_costs_nothing_of_what_is_open(tmp_path, monkeypatch):
    monkeypatch.setattr(old_arenas, "OLD_ARENA_S", 1e6)
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        put(client, "a")
        held = client.open([storage_key("a")], WAIT_S)
        lost = client._attachment
        lost.link.shut()
        eventually(lambda: client._attachment not in (None, lost), "the reconnect")
        assert client._old_arenas.let_go(1e12) is None, "its agent was met again"
        assert read_open(client, held[0]) == payload("a")
        client.close(held)


def arena_map() -> ArenaMap:
    arena = Arena(2 * PAGE_BYTES, PAGE_BYTES)
    try:
        offer = ArenaOffer(arena.header_bytes, arena.slot_bytes, arena.slots)
        return ArenaMap(offer, os.dup(arena.read_only_fd), os.dup(arena.writable_fd))
    finally:
        arena.close()


def test_an_old_arena_goes_when_it_is_due_and_not_before():
    old, arena = OldArenas(), arena_map()
    assert old.let_go(0.0) is None
    old.add(b"life", arena, 100.0)
    assert old.let_go(100.0) == OLD_ARENA_S
    assert not arena.is_closed
    assert old.let_go(100.0 + OLD_ARENA_S) is None
    assert arena.is_closed
    with pytest.raises(ValueError, match=r"closed|released"):
        arena.generation(0)
    with pytest.raises(ValueError, match="closed"):
        arena.read_into(0, memoryview(bytearray(8)))


def test_an_old_arena_that_nobody_refers_to_is_gone_already():
    old = OldArenas()
    before = arenas_of()
    old.add(b"life", arena_map(), 0.0)
    assert arenas_of() == before
    assert old.let_go(0.0) is None


def test_only_the_arenas_of_a_life_that_is_met_again_are_kept():
    old, met, lost = OldArenas(), arena_map(), arena_map()
    old.add(b"met", met, 0.0)
    old.add(b"lost", lost, 0.0)
    old.keep(b"met")
    old.let_go(1e9)
    assert (met.is_closed, lost.is_closed) == (False, True)


def test_an_arena_from_which_bytes_are_copied_is_unmapped_after_the_copy():
    old, arena = OldArenas(), arena_map()
    copying, go_on = threading.Event(), threading.Event()

    def copy() -> None:
        with memoryview(arena._read_only):
            copying.set()
            go_on.wait(WAIT_S)

    thread = threading.Thread(target=copy)
    thread.start()
    assert copying.wait(WAIT_S)
    old.add(b"life", arena, 0.0)
    assert old.let_go(1e9) == old_arenas.COPY_WAIT_S
    assert arena.is_closed
    assert arenas_of()
    go_on.set()
    thread.join()
    assert old.let_go(1e9) is None
    assert not arenas_of()


@pytest.fixture
def short_of_memory(monkeypatch):
    """Others hold this machine's memory, until the test sets this."""
    is_back = threading.Event()
    real = MachineMemory.available_bytes
    monkeypatch.setattr(MachineMemory, "available_bytes", lambda self: real(self) if is_back.is_set() else 1 << 20)
    return is_back


def test_an_agent_waits_for_memory_that_others_hold_and_serves_its_engines_meanwhile(tmp_path, short_of_memory, caplog):
    with running_agent(tmp_path) as agent:
        with client_of(agent.config.door, [b"g" * 16]) as client:
            eventually(lambda: agent.believed(b"g" * 16), "the gpu placement")
            eventually(lambda: "waiting up to" in caplog.text, "the log's word")
            assert not client.is_connected
            assert client.open([storage_key("a")], WAIT_S) == []
            assert put(client, "a") is PutResult.REFUSED
            short_of_memory.set()
            assert client.wait_connected(WAIT_S)
            assert put(client, "a") is PutResult.STORED
    assert caplog.text.count("waiting up to") == 1


def test_an_engine_that_was_refused_for_memory_is_offered_it_later(tmp_path, short_of_memory, monkeypatch, caplog):
    monkeypatch.setattr(dram, "MEMORY_WAIT_S", 0.05)
    monkeypatch.setattr(dram, "MEMORY_ASK_S", 0.01)
    monkeypatch.setattr(session, "ARENA_AGAIN_S", 0.05)
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        assert "works without the host's dram tier" in caplog.text
        assert put(client, "a") is PutResult.REFUSED
        assert agent.metric("warmroute_degraded_total", reason="dram_unavailable") == 1
        short_of_memory.set()
        eventually(lambda: put(client, "a") is PutResult.STORED, "the offer")
        assert agent.metric("warmroute_degraded_total", reason="dram_unavailable") == 1


def test_an_agent_that_ends_while_it_waits_for_memory_ends_at_once(tmp_path, short_of_memory, monkeypatch, caplog):
    monkeypatch.setattr(dram, "MEMORY_WAIT_S", 1e6)
    before = open_fds()
    with running_agent(tmp_path) as agent, client_of(agent.config.door):
        eventually(lambda: "waiting up to" in caplog.text, "the wait")
    eventually(lambda: open_fds() == before, "the end of all that was opened")


def test_twenty_engines_killed_in_the_middle_lose_no_slot(tmp_path, forks):
    with running_agent(tmp_path) as agent:
        with connected(agent.config.door, make_hello("writer")) as client:
            assert put(client, "a") is PutResult.STORED
            arenas, fds = arenas_of(), open_fds()
            for number in range(KILLS):
                victim = forks.start("engine", agent.config.door, f"victim-{number}", "a")
                assert agent.tier()["reservations"] >= 1
                assert arenas <= arenas_of(victim)
                os.kill(victim, signal.SIGKILL)
                eventually(lambda: agent.tier()["reservations"] < SLOTS - 1, "room for the next")
            eventually(lambda: (agent.tier()["references"], agent.tier()["reservations"]) == (0, 0), "their end")
            assert agent.tier()["bytes_used"] == CHUNK_BYTES
            names = [f"again {number}" for number in range(SLOTS)]
            assert [put(client, name) for name in names] == [PutResult.STORED] * SLOTS
            assert [read(client, name) for name in names] == [payload(name) for name in names]
            eventually(lambda: open_fds() == fds, "the end of all that was opened for them")


def test_twenty_agents_killed_under_an_engine_leave_no_memory_and_never_a_wrong_byte(tmp_path, forks, monkeypatch):
    monkeypatch.setattr(old_arenas, "OLD_ARENA_S", 0.1)
    monkeypatch.setattr(client_module, "RECONNECT_MIN_S", 0.01)
    seen, held = set(), []
    with client_of(str(tmp_path / "door.sock")) as client:
        for number in range(KILLS):
            agent = forks.start("agent", str(tmp_path))
            assert client.wait_connected(WAIT_S)
            for name in (f"{number}", "a"):
                assert put(client, name) is not PutResult.REFUSED
                held += client.open([storage_key(name)], WAIT_S)
            ours = arenas_of(agent)
            assert ours
            assert not ours & seen
            seen |= ours
            os.kill(agent, signal.SIGKILL if number % 4 else signal.SIGTERM)
            eventually(lambda: not client.is_connected, "the loss")
            eventually(lambda agent=agent: not is_there(agent), "the agent's end")
            for chunk in held:
                assert read_open(client, chunk) in (None, payload(_name_of(chunk, number)))
        assert len(held) == 2 * KILLS
        assert len(seen) == KILLS
        eventually(lambda: not seen & arenas_anywhere(), "the memory's return")
        assert [read_open(client, chunk) for chunk in held] == [None] * len(held)
        client.close(held)
    assert not [name for name in os.listdir("/dev/shm") if "warmroute" in name]


def _name_of(chunk, last):
    return next(name for name in ("a", *map(str, range(last + 1))) if storage_key(name) == chunk.storage_key)
