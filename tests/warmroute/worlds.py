"""Small worlds for tests: fleets of 8B engines in simulated time, and the requests that are sent to them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from warmroute.replay.hardware import FleetPlan, Imperfection, TierBlocks
from warmroute.replay.trace import BLOCK_TOKENS, TracedRequest, block_key
from warmroute.replay.world import Outcome, World

EXACT = Imperfection(service_error=0.0, engine_spread=0.0)
OWN_IDS = 10_000_000
"""Blocks from this id on belong to one prompt only."""


def fleet(nodes: int, gpu: int = 800, dram: int = 2000, nvme: int = 0, **other: object) -> FleetPlan:
    imperfection = other.pop("imperfection", Imperfection())
    return FleetPlan(nodes, blocks=TierBlocks(gpu, dram, nvme), imperfection=imperfection, **other)  # type: ignore[arg-type]


def prompt(at: float, shared: Sequence[int], own_blocks: int, number: int, output_tokens: int = 50) -> TracedRequest:
    """Blocks that others have as well, then some of its own, then a few tokens that fill no block."""
    ids = [*shared, *(OWN_IDS + 1000 * number + block for block in range(own_blocks))]
    return TracedRequest(at, BLOCK_TOKENS * len(ids) + 100, output_tokens, tuple(map(block_key, ids)))


def send(world: World, requests: Iterable[TracedRequest]) -> None:
    """Let requests arrive at their moments."""
    for request in requests:
        world.at(request.arrival_s, partial(_submit, world, request))


def send_in_turn(world: World, requests: Iterable[TracedRequest], at_once: int, pause_s: float = 0.0) -> None:
    """A closed loop: so many are open at a time, and each one's end brings the next, after a pause."""
    coming = iter(requests)

    def follow(_: object) -> None:
        for request in islice(coming, 1):
            world.at(world.now + pause_s, partial(_submit, world, request))

    world.on_end = follow
    for request in islice(coming, at_once):
        world.at(0.0, partial(_submit, world, request))


def serve(plan: FleetPlan, requests: Iterable[TracedRequest], policy: str = "seconds", seed: int = 0) -> Outcome:
    """All requests, at their moments."""
    world = World(plan, policy, seed)
    send(world, requests)
    return world.run()


def shares(outcome: Outcome, of: Callable[[int], bool] = lambda number: True) -> list[float]:
    """Each engine's share of those requests whose number is `of` interest, the largest first."""
    chosen = [engine for number, engine in enumerate(outcome.engines) if of(number)]
    counts = Counter(chosen)
    return sorted((counts[engine] / len(chosen) for engine in range(len(outcome.busy_s))), reverse=True)


def ttfts(outcome: Outcome) -> list[float]:
    """Seconds to the first token, request by request."""
    return [job.ttft_s for job in outcome.jobs]


def _submit(world: World, request: TracedRequest) -> None:
    world.submit(request)
