"""What the correction of engines' rates is worth, in replays of engines that aren't as fast as they register."""

import random

import pytest

from warmroute.replay.hardware import FleetPlan, Imperfection
from warmroute.replay.report import report
from warmroute.replay.simulation import replay
from warmroute.replay.trace import TracedRequest, block_key

REQUESTS = 250


def unique_prompts(seed: int) -> list[TracedRequest]:
    """Prompts of 2 to 16 thousand tokens that have nothing in common, for about 0.7 of four engines' time."""
    drawn, at, requests = random.Random(seed), 0.0, []
    for number in range(REQUESTS):
        at += drawn.expovariate(6.0)
        tokens = drawn.randint(2_000, 16_000)
        keys = tuple(block_key(1000 * number + block) for block in range(tokens // 512))
        requests.append(TracedRequest(at, tokens, 20, keys))
    return requests


def mean_ttft_s(spread: float, corrects_rates: bool, seed: int) -> float:
    """Of the policy that goes by the account of waits alone, so that nothing else is compared."""
    plan = FleetPlan(4, imperfection=Imperfection(engine_spread=spread), corrects_rates=corrects_rates)
    return report("least-load", replay(unique_prompts(seed), plan, "least-load", seed), 2.0).ttft.mean


@pytest.mark.parametrize("seed", [1, 2])
def test_waits_are_shorter_where_unequal_engines_are_known_as_they_are(seed: int) -> None:
    assert mean_ttft_s(0.5, True, seed) < 0.97 * mean_ttft_s(0.5, False, seed)


def test_correction_costs_nothing_where_engines_are_as_fast_as_they_say() -> None:
    assert mean_ttft_s(0.0, True, 1) < 1.02 * mean_ttft_s(0.0, False, 1)
