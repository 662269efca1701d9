"""A reader or a writer that is stopped (SIGSTOP) in the midst of its copy, past every timeout, and then goes on.

Meanwhile its connection is lost, an hour passes for the agent, and the arena is filled anew again and again. Its own
slots are its own for as long as its process lives: that is the promise. The last tests break it on purpose, since
what stands behind it (generation and checksum) must hold by itself.
"""

import socket
import time
from contextlib import ExitStack

import pytest
import xxhash

from nodeagent.client import PutResult
from tests.nodeagent.engine_processes import engine
from tests.nodeagent.running import (
    SLOTS,
    WAIT_S,
    connected,
    eventually,
    label,
    make_hello,
    payload,
    read,
    running_agent,
)

NAMES = [f"chunk {number}".replace(" ", "-") for number in range(SLOTS)]
HOUR_S = 3_600.0


@pytest.fixture
def agent(tmp_path):
    with running_agent(tmp_path) as running:
        yield running


@pytest.fixture
def client(agent):
    with connected(agent.config.door, make_hello("healthy")) as connected_client:
        yield connected_client


def cut_off(agent, name):
    """The stopped engine's connection is lost, and then an hour passes."""

    def shut():
        for each in agent.agent._roster.engines:
            if each.name == name:
                each.connection._connection.shutdown(socket.SHUT_RDWR)
        agent.agent._tier.hierarchy._clock = lambda: time.monotonic() + HOUR_S

    agent.on_loop(shut)
    eventually(lambda: all(not each["is_connected"] for each in agent.status()["engines"] if each["engine"] == name))


def refill(client, rounds=3):
    """Everything that can be evicted is, several times over."""
    for number in range(rounds):
        for slot in range(SLOTS):
            name = f"new-{number}-{slot}"
            assert client.put(label(name), payload(name), WAIT_S) is PutResult.STORED


def release(agent, name):
    """What must never happen: slots are given away while their process lives."""

    def force():
        hierarchy = agent.agent._tier.hierarchy
        for holder in list(hierarchy._holds):
            if holder.process.pid == name.process.pid:
                hierarchy.release_holder(holder)

    agent.on_loop(force)


def check_slots(agent):
    """Every chunk that is found has its own bytes."""

    def bad():
        hierarchy = agent.agent._tier.hierarchy
        found = []
        for entry in hierarchy._entries.values():
            with hierarchy.arena.view(entry.slot, entry.length) as view:
                if xxhash.xxh3_128_digest(view) != entry.checksum:
                    found.append(entry)
        return found

    assert agent.on_loop(bad) == []


def test_a_reader_that_is_stopped_past_every_timeout_reads_what_it_opened(agent, client):
    client.put(label(NAMES[0]), payload(NAMES[0]), WAIT_S)
    with engine(agent.config.door, "reader") as reader:
        assert reader.ask("open", NAMES[0]) == ["held", "1", "dram"]
        reader.tell("halt")
        reader.tell("read")
        reader.wait_stopped()
        cut_off(agent, "reader")
        refill(client)
        assert agent.tier()["references"] == 1
        reader.go_on()
        assert reader.answer() == ["good"]


def test_a_reader_that_is_stopped_while_the_agent_restarts_reads_what_it_opened(tmp_path):
    with ExitStack() as engines:
        with running_agent(tmp_path) as agent, connected(agent.config.door, make_hello("healthy")) as client:
            client.put(label(NAMES[0]), payload(NAMES[0]), WAIT_S)
            reader = engines.enter_context(engine(agent.config.door, "reader"))
            assert reader.ask("open", NAMES[0]) == ["held", "1", "dram"]
            reader.tell("halt")
            reader.tell("read")
            reader.wait_stopped()
        with running_agent(tmp_path) as agent, connected(agent.config.door, make_hello("healthy")) as client:
            refill(client)
            reader.go_on()
            assert reader.answer() == ["good"], "the arena of the run before is still mapped"
            assert client.put(label("x"), payload("x"), WAIT_S) is PutResult.STORED


def test_a_writer_that_is_stopped_past_every_timeout_changes_no_byte_of_another_chunk(agent, client):
    with engine(agent.config.door, "writer") as writer:
        writer.tell("halt")
        writer.tell("put", "late")
        writer.wait_stopped()
        assert client.put(label("late"), payload("late"), WAIT_S) is PutResult.REFUSED, "it is being put"
        cut_off(agent, "writer")
        assert client.put(label("late"), payload("late"), WAIT_S) is PutResult.STORED
        refill(client)
        assert agent.tier()["chunks"] == SLOTS - 1, "one slot is the writer's"
        writer.go_on()
        assert writer.answer() == ["REFUSED"]
        check_slots(agent)
        writer.process.kill()
        eventually(lambda: agent.tier()["reservations"] == 0, "the reservation's end")
        refill(client, 1)
        assert agent.tier()["chunks"] == SLOTS


def test_a_writer_that_goes_on_after_the_agent_restarted_changes_no_byte_of_any_chunk(tmp_path):
    with ExitStack() as engines:
        with running_agent(tmp_path) as agent, connected(agent.config.door, make_hello("healthy")):
            writer = engines.enter_context(engine(agent.config.door, "writer"))
            writer.tell("halt")
            writer.tell("put", "late")
            writer.wait_stopped()
        with running_agent(tmp_path) as agent, connected(agent.config.door, make_hello("healthy")) as client:
            refill(client)
            writer.go_on()
            assert writer.answer() == ["REFUSED"]
            check_slots(agent)
            assert agent.tier()["chunks"] == SLOTS
            assert read(client, "late") is None


def test_a_reader_whose_slot_was_given_away_all_the_same_gets_a_miss(agent, client):
    client.put(label(NAMES[0]), payload(NAMES[0]), WAIT_S)
    with engine(agent.config.door, "reader") as reader:
        assert reader.ask("open", NAMES[0]) == ["held", "1", "dram"]
        reader.tell("halt")
        reader.tell("read")
        reader.wait_stopped()
        release(agent, reader)
        refill(client)
        reader.go_on()
        assert reader.answer() == ["miss"]


def test_what_a_late_writer_wrote_into_a_slot_that_was_given_away_is_a_miss_for_all_and_goes(agent, client):
    with engine(agent.config.door, "writer") as writer:
        writer.tell("halt")
        writer.tell("put", "late")
        writer.wait_stopped()
        release(agent, writer)
        refill(client)
        writer.go_on()
        assert writer.answer() == ["REFUSED"]
        names = [f"new-2-{slot}" for slot in range(SLOTS)]
        found = {name: read(client, name) for name in names}
        assert sorted(found.values(), key=lambda data: data is None)[-1] is None
        assert [data == payload(name) for name, data in found.items() if data is not None] == [True] * (SLOTS - 1)
        eventually(lambda: agent.metric("warmroute_checksum_failures_total") == 1, "the recheck")
        assert agent.tier()["chunks"] == SLOTS - 1
