"""Four engines of one host, each a process with the real client: one cache, one quota."""

import pytest

from tests.nodeagent.engine_processes import engines
from tests.nodeagent.running import CHUNK_BYTES, SLOTS, eventually, running_agent

ENGINES = 4


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """An agent and its engines, whose processes take seconds to start: one host for all tests of this file."""
    with running_agent(tmp_path_factory.mktemp("host")) as agent:
        with engines(agent.config.door, *(f"engine-{number}" for number in range(ENGINES))) as running:
            yield agent, running


def test_what_one_engine_stored_is_a_dram_hit_for_the_three_others(host):
    agent, all_four = host
    for writer in all_four:
        name = f"of-{writer.name}"
        assert writer.ask("put", name) == ["STORED"]
        for reader in all_four:
            assert reader.ask("open", name) == ["held", "1", "dram"]
        # All four hold it at once.
        assert agent.tier()["references"] == ENGINES
        for reader in all_four:
            assert reader.ask("read") == ["good"]
        for other in all_four:
            assert other.ask("put", name) == ["ALREADY"], "nobody writes it again"
    assert agent.tier()["chunks"] == ENGINES
    eventually(
        lambda: agent.metric("warmroute_tier_hit_tokens_total", tier="dram", source="local") == ENGINES * ENGINES * 16,
        "the hits",
    )


def test_one_quota_holds_while_four_put_more_than_it_at_once(host):
    agent, all_four = host
    each, before = 4 * SLOTS, agent.metric("warmroute_tier_write_bytes_total", tier="dram")
    for one in all_four:
        one.tell("put", *(f"{one.name}-{number}" for number in range(each)))
    seen = []

    def are_done():
        seen.append(agent.tier()["bytes_used"])
        return agent.metric("warmroute_tier_write_bytes_total", tier="dram") - before >= ENGINES * each * CHUNK_BYTES

    eventually(are_done, "the puts")
    assert [one.answer() for one in all_four] == [["STORED"] * each] * ENGINES
    tier = agent.tier()
    assert max(seen) <= SLOTS * CHUNK_BYTES < tier["bytes_limit"]
    assert (tier["chunks"], tier["bytes_used"], tier["reservations"]) == (SLOTS, SLOTS * CHUNK_BYTES, 0)
    arena = agent.agent._tier.hierarchy.arena
    assert arena.total_bytes <= tier["bytes_limit"], "there is one arena, and it is within the quota"
    # The newest of all are there for everybody.
    found = [one.ask("open", f"{other.name}-{each - 1}") for one in all_four for other in all_four]
    assert found.count(["held", "1", "dram"]) >= ENGINES
