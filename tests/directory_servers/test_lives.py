"""Many lives on one key are all reported, and the dead are believed no longer than their term, flood or none."""

import asyncio
import time
from contextlib import ExitStack

import pytest

from directory.members import POLL_INTERVAL_S, TERM_S, HostRegistration, Load, draw_incarnation
from directory.placements import PARTITIONS, unpack_holders
from directory.redis_directory import RedisDirectory
from directory.redis_schema import REGISTRATIONS_KEY, attempts_key, record_key
from directory.tiers import Tier
from gateway.lookup import ChunkChain
from tests.directory.fleet_samples import batch
from tests.directory.servers import ServerProcess
from tests.directory_servers.agent_process import AgentProcess
from tests.directory_servers.agents import ENGINE_LOAD, ON_HOST, engine_registration
from tests.directory_servers.corpus import Corpus, passing_key
from tests.directory_servers.gateway_view import GatewayView, until_rate
from tests.directory_servers.standalone import url_of
from tests.gateway.samples import MODEL

HOLDERS = 64
AGENTS = 8
VICTIMS = (1, 4, 6)
CORPUS = Corpus(prompts=24, chunks=64, agents=AGENTS, shared=2)
FLOOD = 40
"""Keys of each agent that come or go at once: 200 a second."""
SETTLED_BOUND_S = 60.0
ROUND_TRIP_S = 0.25
"""What a poll itself, and noticing its end, may take on a busy machine."""
FORGOTTEN_MS = 660_000


async def test_64_holders_in_three_tiers_of_one_key_are_all_reported(server: ServerProcess) -> None:
    key = passing_key(0, 0)
    directory = RedisDirectory.connect(url_of(server))
    for number in range(HOLDERS):
        name, host, engine = str(number), draw_incarnation(), draw_incarnation()
        await directory.register(host, HostRegistration(f"host-{name}", "http://127.0.0.1:1"), Load(), SETTLED_BOUND_S)
        await directory.register(engine, engine_registration(name), ENGINE_LOAD, SETTLED_BOUND_S)
        await directory.place(batch(host, 0, {key: ON_HOST}))
        if number % 2:
            await directory.place(batch(engine, 0, {key: int(Tier.GPU)}))
    async with GatewayView(url_of(server)) as view:
        await view.fleet.refresh()
        await view.fleet.check_health()
        views = view.fleet.table.serving(MODEL)
        (group,) = view.lookup.grouped(MODEL, views)
        holders = await view.lookup.find([ChunkChain((key,), group)], 1.0)
    await directory.aclose()
    expected = {f"engine-{number}": (Tier.GPU if number % 2 else Tier.DRAM,) for number in range(HOLDERS)}
    assert {engine: match.tiers for engine, match in holders.matches.items()} == expected
    masks = [mask for _, mask in unpack_holders(server.client().get(record_key(key)) or b"")]
    assert sorted(masks) == [int(Tier.GPU)] * (HOLDERS // 2) + [ON_HOST] * HOLDERS


@pytest.mark.timeout(150)
async def test_three_dead_agents_are_believed_for_a_term_and_leave_no_trace(redis_server: ServerProcess) -> None:
    url = url_of(redis_server)
    with ExitStack() as processes:
        agents = [
            processes.enter_context(AgentProcess(url, CORPUS, (number,), churned=FLOOD)) for number in range(AGENTS)
        ]
        async with GatewayView(url) as view, view.asking(CORPUS.all_prompts()) as asked:
            await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
            names = {f"{role}-{number}" for number in VICTIMS for role in ("host", "engine")}
            for number in VICTIMS:
                agents[number].kill()
            killed_s = time.monotonic()
            dead = await lives_of(view.directory, names)
            for number in VICTIMS:
                agents[number].start()
            await until_rate(asked, CORPUS.prompts, 1.0, SETTLED_BOUND_S)
            while time.monotonic() - killed_s < TERM_S + 2 * POLL_INTERVAL_S + 2 * ROUND_TRIP_S:
                await asyncio.sleep(0.1)
            misled = [each.begun_s - killed_s for each in asked if each.reached & dead and each.begun_s > killed_s]
            print(f"the dead were believed for {max(misled):.2f} s; {len(asked)} lookups")
            assert max(misled) <= TERM_S + POLL_INTERVAL_S + ROUND_TRIP_S

            forget(redis_server, dead)
            for agent in agents:
                agent.walk()
            await until_bounded(view.directory)


async def lives_of(directory: RedisDirectory, names: set[str]) -> frozenset[bytes]:
    """The incarnations, retired ones aside, of hosts and engines."""
    found = set()
    for member in await directory.members():
        registration = member.registration
        name = registration.host if isinstance(registration, HostRegistration) else registration.engine
        if name in names and not member.retired:
            found.add(member.incarnation)
    return frozenset(found)


def forget(server: ServerProcess, lives: frozenset[bytes]) -> None:
    """Put the end of lives so far back that nobody remembers them, as ten minutes would."""
    client = server.client()
    for life in lives:
        expires, retired = client.hget(REGISTRATIONS_KEY, b"t" + life).split(b":")
        moments = (int(moment) and int(moment) - FORGOTTEN_MS for moment in (expires, retired))
        client.hset(REGISTRATIONS_KEY, b"t" + life, ":".join(map(str, moments)))
        for partition in range(PARTITIONS):
            attempt = client.hget(attempts_key(partition), life)
            if attempt is not None:
                number, _, heard_ms = attempt.partition(b":")
                client.hset(attempts_key(partition), life, number + b":%d" % (int(heard_ms) - FORGOTTEN_MS))


async def until_bounded(directory: RedisDirectory) -> None:
    """Wait until the records of what everybody holds name each living holder once, and nobody else."""
    keys = [key for prompt in range(CORPUS.shared) for key in CORPUS.keys(prompt)]
    ends_at = time.monotonic() + SETTLED_BOUND_S
    while True:
        living = {member.incarnation for member in await directory.members() if member.is_live}
        records = (await directory.lookup(keys, 1.0)).records
        holders = [[life for life, _ in unpack_holders(record or b"")] for record in records]
        lengths = {len(each) for each in holders}
        if all(set(each) <= living for each in holders) and lengths == {AGENTS, 2 * AGENTS}:
            return
        assert time.monotonic() < ends_at, f"records of {sorted(lengths)} holders"
        await asyncio.sleep(0.2)
