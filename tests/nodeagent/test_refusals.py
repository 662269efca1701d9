"""What the directory refuses is said: once a partition and cause, with its end, and never as a flood."""

import logging

import pytest

from directory.errors import DirectoryError, DirectoryFull, DirectoryUnavailable, FunctionsMissing
from directory.placements import PARTITIONS
from nodeagent.metrics import AgentMetrics
from nodeagent.refusals import FULL_KNOWN_S, SAID_MAX, SAID_SPAN_S, Refusals
from tests.nodeagent.publishing import DRAM, keys_of, staged

FULL = DirectoryFull("the server is out of memory")
NOT_ALLOWED = DirectoryError("the server refused a call: NOPERM")


class Told:
    def __init__(self) -> None:
        self.now = 100.0
        self.refusals = Refusals("host-1", lambda: self.now, AgentMetrics())


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    caplog.set_level(logging.INFO, "nodeagent.refusals")
    return Told()


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == level and each.name == "nodeagent.refusals"]


def test_a_refusal_is_said_once_for_each_cause_and_so_is_its_end(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    for error in (NOT_ALLOWED, NOT_ALLOWED, DirectoryError("MISCONF"), DirectoryError("MISCONF")):
        told.refusals.note(3, error)
        told.now += 1
    assert told.refusals.trouble == "partition 3 refuses: MISCONF"
    said = lines(caplog, logging.WARNING)
    assert [("partition 3" in each, each.split()[-1]) for each in said] == [(True, "NOPERM"), (True, "MISCONF")]
    assert lines(caplog, logging.INFO) == []
    for _ in range(2):
        told.refusals.note_taken(3, is_removal=False)
    assert lines(caplog, logging.INFO) == ["host-1: partition 3 takes batches again"]
    assert told.refusals.trouble is None


def test_refusals_of_all_partitions_that_come_and_go_are_not_a_flood(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        for partition in range(PARTITIONS):
            told.refusals.note(partition, NOT_ALLOWED)
        for partition in range(PARTITIONS):
            told.refusals.note_taken(partition, is_removal=False)
        told.now += 1
    assert len(lines(caplog, logging.WARNING)) == SAID_MAX == len(lines(caplog, logging.INFO))
    told.now += SAID_SPAN_S
    told.refusals.note(0, NOT_ALLOWED)
    assert len(lines(caplog, logging.WARNING)) == SAID_MAX + 1


@pytest.mark.parametrize("error", [DirectoryUnavailable("no answer"), FunctionsMissing("run load")])
def test_what_others_say_is_not_said_here(told: Told, caplog: pytest.LogCaptureFixture, error: DirectoryError) -> None:
    told.refusals.note(3, error)
    assert caplog.records == []
    assert told.refusals.trouble is None


def test_a_directory_that_is_full_by_turns_is_said_within_the_bound(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        told.refusals.note(3, FULL)
        assert told.refusals.is_full
        told.refusals.note_taken(4, is_removal=True)
        assert told.refusals.is_full, "removals are taken by a full server as well"
        told.refusals.note_taken(3, is_removal=False)
        assert not told.refusals.is_full
    assert len(lines(caplog, logging.WARNING)) == SAID_MAX == len(lines(caplog, logging.INFO))


def test_a_directory_that_was_full_when_it_was_last_asked_is_not_full_for_ever(told: Told) -> None:
    told.refusals.note(3, FULL)
    told.now += FULL_KNOWN_S - 0.1
    assert told.refusals.trouble == "the directory is full: placements are refused"
    told.now += 1
    assert told.refusals.trouble is None


async def test_a_partition_that_refuses_is_named_until_it_takes_batches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nodeagent.refusals")
    async with staged() as stage:
        stage.directory.refusing = {5: "the server refused a call: NOPERM"}
        for each in keys_of(5, 100):
            stage.publisher.record(each, DRAM)
        await stage.time.advance(60)
        assert [each.split(":")[1] for each in lines(caplog, logging.WARNING)] == [
            " partition 5 refuses batches, trying again"
        ]
        assert stage.publisher.trouble == "partition 5 refuses: the server refused a call: NOPERM"
        stage.directory.refusing.clear()
        await stage.time.advance(10)
        assert lines(caplog, logging.INFO) == ["host-1: partition 5 takes batches again"]
        assert stage.publisher.trouble is None
        assert await stage.all_believed(keys_of(5, 100))


async def test_a_directory_is_full_for_a_publisher_until_it_takes_a_placement() -> None:
    async with staged() as stage:
        stage.directory.is_full = True
        stage.publisher.record(keys_of(5, 1)[0], DRAM)
        await stage.time.advance(20)
        assert stage.publisher.refusals.is_full
        stage.directory.is_full = False
        await stage.time.advance(2)
        assert not stage.publisher.refusals.is_full
