"""A directory that pauses, stops, is full or loses packets: requests flow on, it is said, and it passes by itself."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.directory.servers import ServerProcess
from tests.directory_servers.corpus import passing_key
from tests.directory_servers.gateway_fleet import Answer, GatewayFleet, running_gateway
from tests.directory_servers.gateway_view import until
from tests.directory_servers.standalone import url_of
from tests.directory_servers.wires import LossyWire

PAUSE_S = 30.0
STOPPED_S = 8.0
"""Longer than a term: every registration lapses."""
LOSSY_S = 12.0
FULL_KEYS = 40
FULL_ANSWERS = 20
RECOVERY_BOUND_S = 20.0
UNANSWERED = ("directory_unavailable", "directory_paused", "partial_directory")


@pytest.fixture
async def fleet(redis_server: ServerProcess, tmp_path: Path) -> AsyncIterator[GatewayFleet]:
    async with running_gateway(url_of(redis_server), tmp_path) as fleet:
        yield fleet


async def unanswered(fleet: GatewayFleet) -> int:
    degraded = await fleet.degraded()
    return sum(degraded[reason] for reason in UNANSWERED)


def check_served(answers: list[Answer], at_least: int) -> None:
    assert {each.status for each in answers} == {200}
    assert len(answers) >= at_least, "requests kept flowing"


async def until_full_for(fleet: GatewayFleet, names: list[str]) -> None:
    """Wait until `/fleet` says whose placements are refused."""
    async with asyncio.timeout(RECOVERY_BOUND_S):
        while (await fleet.shown())["directory_full_for"] != names:
            await asyncio.sleep(0.1)


async def test_a_pause_of_thirty_seconds_costs_hits_and_no_request(
    fleet: GatewayFleet, redis_server: ServerProcess
) -> None:
    before = await unanswered(fleet)
    async with fleet.asking() as answers:
        redis_server.client().client_pause(round(PAUSE_S * 1000))
        paused_s = time.monotonic()
        await until(lambda: any("directory" in each.reason for each in answers), "it is explained", PAUSE_S)
        while time.monotonic() - paused_s < PAUSE_S / 2:
            await asyncio.sleep(0.1)
        assert (await fleet.shown())["directory"] != "ok"
        assert {row["state"] for row in (await fleet.shown())["engines"]} == {"ready"}
        assert await unanswered(fleet) > before
        took_s = await fleet.until_warm(PAUSE_S + RECOVERY_BOUND_S)
        assert time.monotonic() - paused_s >= PAUSE_S
    print(f"warm {took_s:.1f} s after half of the pause; {len(answers)} answers")
    check_served(answers, round(PAUSE_S))


async def test_a_stopped_server_costs_hits_and_no_request(fleet: GatewayFleet, redis_server: ServerProcess) -> None:
    before = await unanswered(fleet)
    async with fleet.asking() as answers:
        redis_server.pause()
        stopped_s = time.monotonic()
        try:
            while time.monotonic() - stopped_s < STOPPED_S:
                await asyncio.sleep(0.1)
            assert (await fleet.shown())["directory"].startswith("unavailable")
            assert await unanswered(fleet) > before
            assert all(agent.metric("warmroute_degraded_total", reason="directory") for agent in fleet.agents)
        finally:
            redis_server.resume()
        took_s = await fleet.until_warm(RECOVERY_BOUND_S)
    print(f"warm {took_s:.1f} s after the stop; {len(answers)} answers")
    check_served(answers, round(STOPPED_S))


async def test_a_full_server_takes_no_placements_and_costs_neither_hits_nor_requests(
    fleet: GatewayFleet, redis_server: ServerProcess
) -> None:
    agent, raw = fleet.agents[0], redis_server.client()
    async with fleet.asking() as answers:
        raw.config_set("maxmemory", "1")
        for number in range(FULL_KEYS):
            agent.host.record(passing_key(0, number), 2)
        await until(
            lambda: agent.metric("warmroute_degraded_total", reason="directory_full") == 1,
            "it is said",
            RECOVERY_BOUND_S,
        )
        full_from = len(answers)
        await until_full_for(fleet, [agent.host.lives.name])
        await until(
            lambda: sum(each.is_warm for each in answers[full_from:]) >= FULL_ANSWERS,
            "what was placed before is believed",
            RECOVERY_BOUND_S,
        )
        cold = {each.reason for each in answers[full_from:] if not each.is_warm}
        assert cold <= {"directory-unavailable"}, "a lookup may be late on a busy machine"
        assert not agent.is_settled
        raw.config_set("maxmemory", "0")
        await until(lambda: agent.is_settled, "what waited has been placed", RECOVERY_BOUND_S)
        await until_full_for(fleet, [])
    check_served(answers, 20)


async def test_a_network_that_loses_half_of_its_packets_costs_hits_and_no_request(
    redis_server: ServerProcess, tmp_path: Path
) -> None:
    async with LossyWire(redis_server.port, seed=1) as wire, running_gateway(wire.url, tmp_path) as fleet:
        before = await unanswered(fleet)
        async with fleet.asking() as answers:
            wire.loss = 0.5
            lossy_s = time.monotonic()
            while time.monotonic() - lossy_s < LOSSY_S:
                await asyncio.sleep(0.1)
            wire.loss = 0.0
            assert await unanswered(fleet) > before
            took_s = await fleet.until_warm(RECOVERY_BOUND_S)
        warm = sum(each.is_warm for each in answers)
        print(f"warm {took_s:.1f} s after the losses; {len(answers)} answers, {warm} of them warm")
        check_served(answers, round(LOSSY_S))
