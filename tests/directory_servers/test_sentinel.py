"""A master that dies with writes that no replica has: nobody is misled for longer than it takes to announce anew."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from directory.redis_schema import record_key
from tests.directory.servers import SentinelGroup
from tests.directory_servers.agents import ON_HOST, Agent, working_agents
from tests.directory_servers.agreement import differences, incarnations, until_equal
from tests.directory_servers.corpus import Corpus, passing_key
from tests.directory_servers.gateway_view import GatewayView, until, until_rate
from tests.directory_servers.installation import redis_server_binary

AGENTS = 4
CORPUS = Corpus(prompts=40, chunks=100, agents=AGENTS)
TAIL_KEYS = 64
SETTLED_BOUND_S = 60.0
LATE = "late"
"""The agent whose registration no replica has."""


@pytest.fixture
def group() -> Iterator[SentinelGroup]:
    with SentinelGroup(binary=redis_server_binary()) as group:
        yield group


def hold_replication_back(group: SentinelGroup) -> None:
    """From now on the replica gets nothing: its link is cut, and it may not ask for another."""
    group.wait_until_replicated()
    client = group.master().client()
    client.execute_command("ACL", "SETUSER", "default", "-psync", "-sync")
    client.execute_command("CLIENT", "KILL", "TYPE", "replica")


class Names:
    """Whose each incarnation ever seen was; fails where one is two parties'."""

    def __init__(self) -> None:
        self.of: dict[bytes, str] = {}

    def note(self, seen: dict[bytes, str]) -> None:
        for life, owner in seen.items():
            assert self.of.setdefault(life, owner) == owner, "an incarnation is shared"


@pytest.mark.timeout(150)
async def test_a_dead_master_takes_its_last_writes_with_it_and_one_walk_puts_all_right(group: SentinelGroup) -> None:
    gone = [passing_key(0, number) for number in range(TAIL_KEYS)]
    come = [passing_key(1, number) for number in range(TAIL_KEYS)]
    names = Names()
    async with AsyncExitStack() as stack:
        holdings = [CORPUS.held_by(number) for number in range(AGENTS)]
        agents = await stack.enter_async_context(working_agents(group.url, holdings))
        for key in gone:
            agents[0].host.record(key, ON_HOST)
        view = await stack.enter_async_context(GatewayView(group.url))
        asked = await stack.enter_async_context(view.asking(CORPUS.all_prompts()))
        await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
        await until(lambda: all(agent.is_settled for agent in agents), "all settled", SETTLED_BOUND_S)
        names.note(await incarnations(view.directory))

        # The tail: withdrawals, placements and an agent's beginning that only the master knows of.
        old = group.master()
        hold_replication_back(group)
        late = await stack.enter_async_context(Agent(group.url, LATE))
        for key in gone:
            agents[0].host.record(key, 0)
        for key in come:
            agents[1].host.record(key, ON_HOST)
        late.host.record(come[0], ON_HOST)
        await until(lambda: all(agent.is_settled for agent in (*agents, late)), "the tail is written", SETTLED_BOUND_S)
        assert await differences(view.directory, [*agents, late], gone) == []
        names.note(await incarnations(view.directory))

        first = len(asked)
        walks = [sum(agent.walks().values()) for agent in (*agents, late)]
        copy = group.replica().client()
        assert all(copy.mget([record_key(key) for key in gone])), "the replica hasn't heard of the withdrawals"
        assert not any(copy.mget([record_key(key) for key in come]))
        old.kill()
        new = await asyncio.to_thread(group.wait_for_new_master, old)
        phantoms = sum(map(bool, new.client().mget([record_key(key) for key in gone])))
        print(f"{phantoms} withdrawals of {len(gone)} are lost when the new master is there")
        await until_equal(view.directory, [*agents, late], gone + come, SETTLED_BOUND_S)
        names.note(await incarnations(view.directory))
        await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
        walked = [sum(agent.walks().values()) - before for agent, before in zip((*agents, late), walks, strict=True)]
        print(f"{len(asked) - first} lookups since the death; walks of each agent: {walked}")
        assert max(walked) <= 2, "one walk of each of an agent's two publishers puts all right"

        # The old master comes back as a replica, and isn't listened to.
        old.start()
        await until(lambda: old.client().info("replication")["role"] == "slave", "the old one follows", SETTLED_BOUND_S)
        assert group.master() is new
        agents[0].host.record(come[0], ON_HOST)
        await until_equal(view.directory, [*agents, late], gone + come, SETTLED_BOUND_S)
        names.note(await incarnations(view.directory))
