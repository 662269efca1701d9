"""Engines as the router sees them, for tests of lookups."""

from directory.members import draw_incarnation
from directory.placements import Reach
from gateway.fleet import EngineView
from tests.gateway.samples import RATES, engine_registration

LIFE = draw_incarnation()
"""The life of a host that every view reaches."""


def view(engine: str, **other: object) -> EngineView:
    reach = Reach(engine, frozenset(), frozenset({LIFE}))
    registration = engine_registration(engine, **other)
    return EngineView(engine, "http://e:1", registration.models, registration, "", reach, RATES, "ready")  # type: ignore[arg-type]
