"""What an engine says of its GPU is noted a step at a time, so that others have their turns."""

import pytest

from directory.tiers import Tier
from nodeagent import roster as roster_module
from nodeagent.roster import AttachedEngine
from tests.nodeagent.publishing import Stage

KEYS = [bytes([number]) * 16 for number in range(10)]
GPU = int(Tier.GPU)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(roster_module, "NOTE_STEP_KEYS", 3)
    engine = AttachedEngine("e", None, None, 1e9, b"")
    engine.publisher = Stage().publisher
    return engine


def held(engine):
    return {key: engine.publisher.inventory.mask(key) for key in engine.publisher.inventory}


async def test_a_snapshot_takes_as_many_steps_as_it_has_keys_for(engine):
    steps = engine.replacing_gpu(KEYS[:7])
    seen = [len(engine.publisher.inventory) for _ in steps]
    assert seen == [3, 6, 7]
    assert held(engine) == dict.fromkeys(KEYS[:7], GPU)


async def test_a_snapshot_that_was_given_up_half_way_is_replaced_by_the_next(engine):
    for _ in engine.replacing_gpu(KEYS[:7]):
        pass
    next(engine.replacing_gpu(KEYS[5:]))
    for _ in engine.replacing_gpu(KEYS[2:4]):
        pass
    assert held(engine) == dict.fromkeys(KEYS[2:4], GPU)


async def test_changes_are_the_newest_states(engine):
    engine.change_gpu(KEYS[:4], [])
    for _ in engine.changing_gpu(KEYS[4:6], KEYS[:3]):
        pass
    assert held(engine) == dict.fromkeys(KEYS[3:6], GPU)


async def test_nothing_that_a_faulty_engine_said_is_believed(engine):
    engine.change_gpu(KEYS, [])
    engine.doubt()
    assert held(engine) == {}
