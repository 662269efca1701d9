"""A cluster that loses a master serves long prompts nearly as before; a slot that moves costs nothing."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from directory.redis_directory import RedisDirectory
from directory.redis_schema import PARTITION_TAGS
from tests.directory.servers import ClusterOfThree
from tests.directory_servers.agents import Agent, working_agents
from tests.directory_servers.agreement import differences
from tests.directory_servers.corpus import Corpus, passing_key
from tests.directory_servers.gateway_view import Asked, GatewayView, hit_rate, until_rate
from tests.directory_servers.installation import redis_server_binary

AGENTS = 4
CORPUS = Corpus(prompts=40, chunks=150, agents=AGENTS)
SETTLED_BOUND_S = 60.0
DOWN_S = 6.5
"""Longer than a term: registrations that weren't renewed would have lapsed."""
RATE_KEPT = 0.90
MOVED_SLOTS = 6
MOVED_AT_ONCE = 20
PASSING = [passing_key(agent, number) for agent in range(AGENTS) for number in range(256)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterOfThree]:
    with ClusterOfThree(binary=redis_server_binary()) as cluster:
        yield cluster


@asynccontextmanager
async def fleet(cluster: ClusterOfThree) -> AsyncIterator[tuple[list[Agent], GatewayView, list[Asked]]]:
    """Agents at work, a gateway's view, and what it has asked so far; all found at first."""
    for master in cluster.masters:
        master.client().flushall()
    holdings = [CORPUS.held_by(number) for number in range(AGENTS)]
    async with working_agents(cluster.url, holdings) as agents, GatewayView(cluster.url) as view:
        async with AsyncExitStack() as stack:
            asked = await stack.enter_async_context(view.asking(CORPUS.all_prompts()))
            churning = [asyncio.create_task(agent.churn(number)) for number, agent in enumerate(agents)]
            for task in churning:
                stack.callback(task.cancel)
            await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
            yield agents, view, asked


async def until_equal(directory: RedisDirectory, agents: list[Agent]) -> None:
    """Wait until the directory says what the agents hold."""
    ends_at = time.monotonic() + SETTLED_BOUND_S
    while found := await differences(directory, agents, PASSING):
        assert time.monotonic() < ends_at, found[:5]
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "which", [0, 1, 2], ids=["first, with the registrations", "second, with their mirror", "third"]
)
async def test_long_prompts_keep_their_hits_while_one_of_three_masters_is_dead(
    cluster: ClusterOfThree, which: int
) -> None:
    async with fleet(cluster) as (agents, view, asked):
        before = hit_rate(asked[-CORPUS.prompts :])
        cluster.masters[which].kill()
        first, killed_s = len(asked), time.monotonic()
        while time.monotonic() - killed_s < DOWN_S:
            await asyncio.sleep(0.1)
        while_down = asked[first:]
        print(f"{hit_rate(while_down) / before:.1%} of the hits while down, {len(while_down)} lookups, "
              f"{sum(each.degraded == 'partial_directory' for each in while_down)} partial")  # fmt: skip
        assert len(while_down) >= CORPUS.prompts, "every prompt was asked for"
        assert hit_rate(while_down) >= RATE_KEPT * before
        cluster.masters[which].start()
        cluster.wait_until_ok()
        await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
        await until_equal(view.directory, agents)


async def test_slots_that_move_under_load_change_nothing(cluster: ClusterOfThree) -> None:
    async with fleet(cluster) as (agents, view, asked):
        walks = [agent.walks() for agent in agents]
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
        partial = sum(each.degraded is not None for each in meanwhile)
        print(f"{hit_rate(meanwhile):.2%} of {len(meanwhile)} lookups, {partial} degraded")
        await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
        assert [agent.walks() for agent in agents] == walks, "nothing was in doubt"
        assert len(meanwhile) >= CORPUS.prompts, "the slots moved under load"
        assert hit_rate(meanwhile) == 1.0
        await until_equal(view.directory, agents)
