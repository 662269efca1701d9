"""A cluster that loses a master serves long prompts nearly as before; a slot that moves costs nothing."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from directory.redis_schema import PARTITION_TAGS
from tests.directory.servers import ClusterOfThree
from tests.directory_servers.agents import Agent, churning, working_agents
from tests.directory_servers.agreement import until_equal
from tests.directory_servers.corpus import Corpus, passing_key
from tests.directory_servers.gateway_view import Asked, GatewayView, hit_rate, until_rate
from tests.directory_servers.installation import redis_server_binary

AGENTS = 4
CORPUS = Corpus(prompts=40, chunks=150, agents=AGENTS)
SETTLED_BOUND_S = 60.0
DOWN_S = 6.5
"""Longer than a term: registrations that weren't renewed would have lapsed."""
RATE_KEPT = 0.90
LATE = ("directory_unavailable", "gateway_late")
LATE_SHARE = 0.05
"""A busy machine may be late with a lookup; what is answered must be whole."""
MOVED_SLOTS = 6
MOVED_AT_ONCE = 20
PASSING = [passing_key(agent, number) for agent in range(AGENTS) for number in range(256)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterOfThree]:
    with ClusterOfThree(binary=redis_server_binary()) as cluster:
        yield cluster


@asynccontextmanager
async def fleet(cluster: ClusterOfThree) -> AsyncIterator[tuple[list[Agent], GatewayView, list[Asked]]]:
    """Agents, a gateway's view, and what it has asked so far; everything is found when this begins."""
    for master in cluster.masters:
        master.client().flushall()
    holdings = [CORPUS.held_by(number) for number in range(AGENTS)]
    async with working_agents(cluster.url, holdings) as agents, GatewayView(cluster.url) as view:
        async with view.asking(CORPUS.all_prompts()) as asked:
            await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
            yield agents, view, asked


@pytest.mark.parametrize(
    "which", [0, 1, 2], ids=["first, with the registrations", "second, with their mirror", "third"]
)
async def test_long_prompts_keep_their_hits_while_one_of_three_masters_is_dead(
    cluster: ClusterOfThree, which: int
) -> None:
    async with fleet(cluster) as (agents, view, asked):
        async with churning(agents):
            before = hit_rate(asked[-CORPUS.prompts :])
            cluster.masters[which].kill()
            first, killed_s = len(asked), time.monotonic()
            while time.monotonic() - killed_s < DOWN_S:
                await asyncio.sleep(0.1)
            while_down = asked[first:]
            partial = sum(each.degraded == "partial_directory" for each in while_down)
            share = hit_rate(while_down) / before
            print(f"{share:.1%} of the hits while down; {len(while_down)} lookups, {partial} partial")
            assert len(while_down) >= CORPUS.prompts, "every prompt was asked for"
            assert share >= RATE_KEPT
            cluster.masters[which].start()
            cluster.wait_until_ok()
            await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
        await until_equal(view.directory, agents, PASSING, SETTLED_BOUND_S)


async def test_slots_that_move_under_load_change_nothing(cluster: ClusterOfThree) -> None:
    async with fleet(cluster) as (agents, view, asked):
        walks = [agent.walks() for agent in agents]
        async with churning(agents):
            first = len(asked)
            for tag in PARTITION_TAGS[:MOVED_SLOTS]:
                slot = int(cluster.masters[0].client().execute_command("CLUSTER KEYSLOT", f"{{{tag}}}"))
                source = cluster.owner(slot)
                target = next(master for master in cluster.masters if master is not source)
                cluster.begin_migration(slot, source, target)
                while await asyncio.to_thread(cluster.move_keys, slot, source, target, MOVED_AT_ONCE):
                    await asyncio.sleep(0.02)
                cluster.end_migration(slot, source, target)
            meanwhile = asked[first:]
        late = [each for each in meanwhile if each.degraded in LATE]
        print(f"{hit_rate(meanwhile):.2%} hits in {len(meanwhile)} lookups, {len(late)} late")
        assert len(meanwhile) >= CORPUS.prompts, "the slots moved under load"
        assert len(late) <= LATE_SHARE * len(meanwhile)
        fewer = [(each.degraded, each.hit_chunks) for each in meanwhile if each.hit_chunks < each.chunks]
        assert len(fewer) == len(late), fewer
        await until_equal(view.directory, agents, PASSING, SETTLED_BOUND_S)
        assert [agent.walks() for agent in agents] == walks, "nothing was in doubt"
