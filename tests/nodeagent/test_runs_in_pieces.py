"""A run longer than DRAM, opened in pieces: all of it is served, and each token is counted once."""

import pytest

from nodeagent.opened_chunk import NO_ANSWER
from tests.nodeagent.running import (
    CHUNK_BYTES,
    SLOTS,
    WAIT_S,
    connected,
    eventually,
    label,
    make_hello,
    payload,
    running_agent,
    storage_key,
)
from tests.nodeagent.test_nvme_agent import NAMES, nvme, path_of, put_chain

TOKENS = 16


@pytest.fixture
def agent(tmp_path):
    with running_agent(tmp_path, **nvme(tmp_path)) as running:
        yield running


@pytest.fixture
def client(agent):
    with connected(agent.config.door) as connected_client:
        put_chain(agent, connected_client)
        yield connected_client


def keys(names):
    return [storage_key(name) for name in names]


def copy(client, chunks, names):
    for name, chunk in zip(names, chunks, strict=True):
        target = bytearray(CHUNK_BYTES)
        assert client.read_into(chunk, memoryview(target))
        assert target == payload(name)


def read_in_pieces(client, names):
    """How many chunks each piece held."""
    sizes = []
    goes_on = True
    while goes_on:
        done = sum(sizes)
        piece = client.open_piece(keys(names[done:]), WAIT_S)
        copy(client, piece.chunks, names[done : done + len(piece.chunks)])
        client.close(piece.chunks)
        sizes.append(len(piece.chunks))
        goes_on = piece.goes_on
    return sizes


def tokens(agent, name, **labels):
    return agent.metric(f"warmroute_tier_{name}_tokens_total", **labels) / TOKENS


def hits(agent):
    return sum(tokens(agent, "hit", tier=tier, source="local") for tier in ("dram", "nvme"))


def test_a_run_longer_than_dram_is_served_whole_and_each_token_is_requested_once(agent, client):
    sizes = read_in_pieces(client, NAMES)
    assert sum(sizes) == len(NAMES)
    assert max(sizes) <= SLOTS
    eventually(lambda: hits(agent) == len(NAMES), "the hits")
    assert (tokens(agent, "missed"), requested(agent)) == (0, len(NAMES))


def requested(agent):
    return agent.metric("warmroute_tier_tokens_requested_total") / TOKENS


def test_what_no_tier_has_is_missed_in_the_last_piece(agent, client):
    assert sum(read_in_pieces(client, [*NAMES, "unknown", "another"])) == len(NAMES)
    eventually(lambda: hits(agent) == len(NAMES), "the hits")
    assert (tokens(agent, "missed"), requested(agent)) == (2, len(NAMES) + 2)


def test_a_bad_file_ends_the_run_where_it_lies(tmp_path, agent, client):
    bad = 2 * SLOTS + 3
    path_of(tmp_path, NAMES[bad]).write_bytes(b"\0" * 100)
    assert sum(read_in_pieces(client, NAMES)) == bad
    eventually(lambda: hits(agent) == bad, "the hits")
    assert hits(agent) + tokens(agent, "missed") == requested(agent) == len(NAMES)


def test_who_opens_once_is_told_nothing_and_the_rest_is_missed(agent, client):
    piece = client._open(keys(NAMES), WAIT_S, in_pieces=False)
    assert 1 <= len(piece.chunks) <= SLOTS
    assert not piece.goes_on
    assert tokens(agent, "missed") == len(NAMES) - len(piece.chunks)
    assert requested(agent) == len(NAMES)
    client.close(piece.chunks)


def test_where_others_hold_all_of_dram_a_run_ends_and_says_so(agent, client):
    names = [f"held{number}" for number in range(SLOTS)]
    with connected(agent.config.door, make_hello("engine-2")) as other:
        for name in names:
            other.put(label(name), payload(name), WAIT_S)
        held = [chunk for name in names for chunk in other.open(keys([name]), WAIT_S)]
        assert len(held) == SLOTS
        piece = client.open_piece(keys(NAMES), WAIT_S)
        assert (piece.chunks, piece.goes_on, piece.is_answered) == ([], False, True)
        copy(other, held, names)
        other.close(held)
    assert sum(read_in_pieces(client, NAMES)) == len(NAMES)


def test_chunks_given_back_unread_are_missed_and_not_suspected(agent, client):
    chunks = client.open(keys(NAMES[:3]), WAIT_S)
    copy(client, chunks[:1], NAMES[:1])
    client.close(chunks)
    eventually(lambda: agent.tier()["references"] == 0, "the close")
    assert (hits(agent), tokens(agent, "missed")) == (1, 2)
    assert agent.metric("warmroute_degraded_total", reason="read_failed") == 0


def test_without_an_agent_there_is_no_answer(tmp_path):
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        agent.stop()
        eventually(lambda: not client.is_connected, "the loss")
        assert client.open_piece(keys(NAMES), WAIT_S) is NO_ANSWER
