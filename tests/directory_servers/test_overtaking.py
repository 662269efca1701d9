"""A request that a network held back arrives after its successor, and changes nothing."""

import asyncio

import pytest

from directory.placements import partition_of, unpack_holders
from directory.redis_schema import attempts_key, record_key
from directory.tiers import Tier
from tests.directory.servers import ServerProcess
from tests.directory_servers.agents import ON_HOST, Agent
from tests.directory_servers.corpus import Corpus, passing_key
from tests.directory_servers.gateway_view import until
from tests.directory_servers.wires import HoldingWire

BOUND_S = 20.0
KEY = passing_key(0, 0)


@pytest.mark.parametrize(("before", "newest"), [(0, 0), (ON_HOST, 0), (ON_HOST, int(Tier.NVME))],
                         ids=["come and gone", "gone", "gone from dram"])  # fmt: skip
async def test_a_state_that_arrives_after_its_successor_leaves_no_phantom(
    redis_server: ServerProcess, before: int, newest: int
) -> None:
    client = redis_server.client()
    async with HoldingWire(redis_server.port) as wire, Agent(wire.url, "a") as agent:
        agent.hold(Corpus(1, 64, 1).held_by(0))
        agent.host.record(KEY, before)
        await until(lambda: agent.is_settled, "the agent settled", BOUND_S)
        (life,) = agent.host.lives.incarnations
        wire.hold(record_key(KEY))
        agent.host.record(KEY, int(Tier.DRAM))
        async with asyncio.timeout(BOUND_S):
            await wire.held.wait()
        agent.host.record(KEY, newest)
        await until(lambda: agent.is_settled, "the newest state went out on another connection", BOUND_S)
        expected = [(life, newest)] if newest else []
        assert unpack_holders(client.get(record_key(KEY)) or b"") == expected
        attempt = client.hget(attempts_key(partition_of(KEY)), life)
        wire.let_go()
        async with asyncio.timeout(BOUND_S):
            await wire.answered.wait()
        assert unpack_holders(client.get(record_key(KEY)) or b"") == expected
        assert client.hget(attempts_key(partition_of(KEY)), life) == attempt
        assert agent.walks() == {"start": 2.0}, "nothing was in doubt"
