"""What a client process holds, it holds until it closes or is gone: never less, and never longer."""

import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from nodeagent.client import PutResult
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
    storage_key,
)

NAMES = [f"chunk {number}" for number in range(SLOTS)]


@contextmanager
def engine_process(door: str, engine: str, what: str, *names: str):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.nodeagent.engine_process", door, engine, what, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


@pytest.fixture
def agent(tmp_path):
    with running_agent(tmp_path) as running:
        yield running


@pytest.fixture
def client(agent):
    with connected(agent.config.door, make_hello("writer")) as connected_client:
        yield connected_client


def fill(client, names=NAMES):
    for name in names:
        assert client.put(label(name), payload(name), WAIT_S) is PutResult.STORED


def test_references_end_when_their_process_is_killed_and_not_before(agent, client):
    fill(client)
    with engine_process(agent.config.door, "reader", "open", NAMES[0]) as reader:
        assert reader.stdout.readline() == "held 1\n"
        fill(client, [f"more {number}" for number in range(2 * SLOTS)])
        assert read(client, NAMES[0]) == payload(NAMES[0])
        reader.send_signal(signal.SIGKILL)
        eventually(lambda: agent.tier()["references"] == 0, "the references' end")
    fill(client, [f"again {number}" for number in range(SLOTS)])
    assert client.open([storage_key(NAMES[0])], WAIT_S) == []


def test_a_stopped_process_keeps_its_references(agent, client):
    fill(client)
    with engine_process(agent.config.door, "reader", "open", *NAMES[:1]) as reader:
        assert reader.stdout.readline() == "held 1\n"
        reader.send_signal(signal.SIGSTOP)
        fill(client, [f"more {number}" for number in range(2 * SLOTS)])
        assert agent.tier()["references"] == 1
        assert read(client, NAMES[0]) == payload(NAMES[0])
        reader.send_signal(signal.SIGKILL)
        eventually(lambda: agent.tier()["references"] == 0, "the references' end")


def test_a_lost_connection_alone_frees_nothing(agent, client):
    fill(client)
    with engine_process(agent.config.door, "reader", "drop", NAMES[0]) as reader:
        assert reader.stdout.readline() == "held 1\n"
        eventually(lambda: all(each["engine"] != "reader" for each in agent.status()["engines"]), "the engine's end")
        assert agent.tier()["references"] == 1
        fill(client, [f"more {number}" for number in range(2 * SLOTS)])
        assert read(client, NAMES[0]) == payload(NAMES[0])
        reader.kill()
        eventually(lambda: agent.tier()["references"] == 0, "the references' end")


def test_the_slots_of_a_writer_that_dies_are_free_again_and_its_keys_writable(agent, client):
    fill(client, NAMES[:1])
    with engine_process(agent.config.door, "late", "reserve", "x", "y") as late:
        assert late.stdout.readline() == "held 2\n"
        assert agent.tier()["reservations"] == 2
        assert client.put(label("x"), payload("x"), WAIT_S) is PutResult.REFUSED
        late.send_signal(signal.SIGKILL)
        eventually(lambda: agent.tier()["reservations"] == 0, "the reservations' end")
    assert client.put(label("x"), payload("x"), WAIT_S) is PutResult.STORED
    assert agent.tier()["bytes_used"] == 2 * 8_192


def test_what_one_engine_stored_is_a_hit_for_another_and_one_quota_bounds_both(agent, client):
    with engine_process(agent.config.door, "other", "put", *NAMES) as other:
        assert [other.stdout.readline() for _ in NAMES] == ["STORED\n"] * SLOTS
        for name in NAMES:
            assert read(client, name) == payload(name)
        fill(client, ["mine"])
        assert agent.tier()["bytes_used"] == SLOTS * 8_192
        assert agent.tier()["chunks"] == SLOTS
        other.kill()
        eventually(lambda: all(each["engine"] != "other" for each in agent.status()["engines"]), "the engine's end")
    assert read(client, NAMES[-1]) == payload(NAMES[-1]), "what it stored is the host's"


def test_a_second_process_can_not_take_a_living_engines_name(agent, client):
    with engine_process(agent.config.door, "writer", "put", "x") as thief:
        eventually(lambda: agent.metric("warmroute_hellos_refused_total") >= 1, "a refusal")
        assert len(agent.status()["engines"]) == 1
        thief.kill()


def test_an_engine_that_is_killed_and_restarted_gets_its_name_back(agent):
    for life in range(3):
        with engine_process(agent.config.door, "phoenix", "put", f"x{life}") as engine:
            assert engine.stdout.readline() == "STORED\n"
            engine.send_signal(signal.SIGKILL)
            engine.wait(WAIT_S)
    eventually(lambda: agent.status()["engines"] == [], "the engine's end")
