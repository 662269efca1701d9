"""Among equal engines: which prompts go together, on whatever gateway, and which don't."""

import hashlib

import pytest

from gateway.routing.query import Candidate, RoutingQuery
from gateway.routing.router import route
from tests.gateway.samples import RATES, SHAPE

CHUNK = 256
ENGINES = [f"engine-{number}" for number in range(16)]


def keys(common: int, own: int, number: int) -> tuple[bytes, ...]:
    """A prompt's chunk keys, of which the first `common` are everybody's."""
    names = [f"common {each}" for each in range(common)] + [f"{number}: {each}" for each in range(own)]
    return tuple(hashlib.sha256(name.encode()).digest()[:16] for name in names)


def chosen(of: tuple[bytes, ...], affinity: bytes | None = None) -> str:
    """Where a gateway sends this prompt that knows of no load and of nobody who holds it."""
    idle = tuple(Candidate(engine, SHAPE, RATES, CHUNK) for engine in ENGINES)
    query = RoutingQuery(CHUNK * len(of) + 9, of[0] if affinity is None else affinity, idle, keys=of)
    return route(query).ranked[0].engine


def test_16_gateways_with_one_request_each_spread_though_all_begin_with_one_system_prompt() -> None:
    engines = [chosen(keys(4, 12, number)) for number in range(16)]
    assert len(set(engines)) >= 8
    assert max(map(engines.count, engines)) <= 4


@pytest.mark.parametrize("own", [1, 2, 5])
def test_prompts_with_most_in_common_go_together_on_every_gateway(own: int) -> None:
    assert len({chosen(keys(16, own, number)) for number in range(16)}) == 1


def test_a_session_that_has_a_name_stays_together_whatever_its_prompts() -> None:
    assert len({chosen(keys(1, 20, number), affinity=b"session") for number in range(16)}) == 1


def test_short_prompts_that_begin_alike_go_together() -> None:
    assert len({chosen(keys(1, own, 0)) for own in range(3)}) == 1
