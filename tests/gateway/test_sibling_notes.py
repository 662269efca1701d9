"""Processes of one gateway tell each other which engine made which response."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from itertools import count

import pytest

from gateway.response_homes import ResponseHomes
from gateway.sibling_notes import SiblingNotes, Siblings
from tests.gateway.assembly import eventually


@pytest.fixture
def two() -> Iterator[tuple[Siblings, Siblings]]:
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
        (tells_one, one), (tells_other, other) = pairs
        yield Siblings.of(one, [tells_other]), Siblings.of(other, [tells_one])


async def test_what_one_notes_or_forgets_the_other_hears(two: tuple[Siblings, Siblings]) -> None:
    one, other = ResponseHomes(lambda: 0.0), ResponseHomes(lambda: 0.0)
    notes = [SiblingNotes(homes, siblings) for homes, siblings in zip((one, other), two, strict=True)]
    hearing = [asyncio.create_task(each.run()) for each in notes]
    one.note("resp_1", "a")
    other.note("resp_2", "b")
    await eventually(lambda: (other.find("resp_1"), one.find("resp_2")) == ("a", "b"))
    other.forget("resp_1")
    await eventually(lambda: one.find("resp_1") is None)
    assert one.find("resp_2") == "b"
    for task in hearing:
        task.cancel()
    await asyncio.gather(*hearing, return_exceptions=True)


async def test_a_sibling_that_does_not_listen_costs_its_notes_alone(two: tuple[Siblings, Siblings]) -> None:
    homes, other = ResponseHomes(lambda: 0.0), ResponseHomes(lambda: 0.0)
    notes = SiblingNotes(homes, two[0])
    noted = 0
    for noted in count(1):
        homes.note(f"resp_{noted}", "a")
        if notes.lost:
            break
    assert homes.find(f"resp_{noted}") == "a"
    hearing = asyncio.create_task(SiblingNotes(other, two[1]).run())  # it listens again: what had room is there
    await eventually(lambda: len(other) == noted - 1)
    hearing.cancel()
    await asyncio.gather(hearing, return_exceptions=True)


async def test_a_note_that_is_not_one_is_passed_over(two: tuple[Siblings, Siblings]) -> None:
    homes = ResponseHomes(lambda: 0.0)
    hearing = asyncio.create_task(SiblingNotes(homes, two[1]).run())
    for note in (b"{", b'["resp_1","a"]'):
        two[0].outboxes[0].send(note)
    await eventually(lambda: homes.find("resp_1") == "a")
    hearing.cancel()
    await asyncio.gather(hearing, return_exceptions=True)
