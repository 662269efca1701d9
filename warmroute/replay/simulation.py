"""The replay of a trace: its requests arrive at their moments in a world of gateways and engines."""

from collections.abc import Iterator, Sequence
from functools import partial

from warmroute.replay.hardware import FleetPlan
from warmroute.replay.trace import TracedRequest
from warmroute.replay.world import Outcome, World


def replay(requests: Sequence[TracedRequest], plan: FleetPlan, policy: str, seed: int = 0) -> Outcome:
    """Serve `requests`, which are in order of arrival, to the last token of the last one."""
    world = World(plan, policy, seed)
    _await_next(world, iter(requests))
    return world.run()


def _await_next(world: World, coming: Iterator[TracedRequest]) -> None:
    """One arrival is awaited at a time: a trace may be long."""
    request = next(coming, None)
    if request is not None:
        world.at(request.arrival_s, partial(_arrive, world, request, coming))


def _arrive(world: World, request: TracedRequest, coming: Iterator[TracedRequest]) -> None:
    _await_next(world, coming)
    world.submit(request)
