"""What was sent to an engine is believed to be there no longer than the engine's life."""

from dataclasses import replace

from directory.members import draw_incarnation
from directory.placements import NO_MATCH, Reach
from gateway.fleet import EngineView, FleetTable
from gateway.routing.assumed import AssumedPlacements
from gateway.routing.overlay import Overlay
from gateway.sent_prompts import SentPrompts
from tests.gateway.views import view

KEYS = [bytes([number]) * 16 for number in range(4)]
FIRST, SECOND = draw_incarnation(), draw_incarnation()


def alive(*lives: bytes) -> EngineView:
    return replace(view("a"), reach=Reach("a", frozenset(lives), frozenset()))


def believed(*tables: EngineView) -> int:
    """How many chunks of a prompt that was computed on the first of these, which follow each other."""
    sent = SentPrompts(Overlay(), AssumedPlacements(0.0), lambda: 1.0, on_its_way_s=600.0)
    sent.keep(FleetTable({"a": tables[0]}, {}))
    way = sent.send(tables[0], KEYS, sent.match(tables[0], NO_MATCH, KEYS), 0.1)
    way.first_byte(True)
    way.release()
    for each in tables[1:]:
        sent.keep(FleetTable({"a": each}, {}))
    return sent.match(tables[-1], NO_MATCH, KEYS).match.chunks


def test_as_long_as_the_engine_lives_what_it_computed_is_believed() -> None:
    assert believed(alive(FIRST), alive(FIRST)) == len(KEYS)


def test_a_life_that_is_not_believed_for_a_while_and_comes_back_is_the_same() -> None:
    assert believed(alive(FIRST), alive(), alive(FIRST)) == len(KEYS)


def test_an_engine_that_was_begun_anew_between_two_health_checks_has_nothing() -> None:
    assert believed(alive(FIRST), alive(SECOND)) == 0
    assert believed(alive(FIRST), alive(FIRST, SECOND), alive(SECOND)) == 0
    assert believed(alive(FIRST), alive(), alive(SECOND)) == 0


def test_an_engine_that_is_not_ready_has_nothing() -> None:
    assert believed(alive(FIRST), replace(alive(FIRST), state="starting"), alive(FIRST)) == 0
