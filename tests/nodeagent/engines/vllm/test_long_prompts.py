"""Prompts longer than the host's DRAM, or than the engine's staging rows: as much is loaded as there is room for, and
every request is scheduled in the end."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engines.vllm.chunk_transfers import LOOKUP_WAIT_FRACTION, LOOKUP_WAIT_MIN_S, ChunkTransfers
from nodeagent.opened_chunk import NO_ANSWER
from tests.nodeagent.engines.vllm.fake_host import FakeHost
from tests.nodeagent.engines.vllm.staging import Staging
from tests.nodeagent.tiers_by_hand import ByHand

CHUNK = 16
STEPS_MAX = 200
SECONDS_PER_CHUNK = 0.1


class Rig:
    """An engine whose threads do their jobs when told to."""

    def __init__(self, host: FakeHost, rows: int) -> None:
        self.host = host
        self.area = bytearray(CHUNK * rows)
        self.now = 0.0
        self.transfers = ChunkTransfers(
            host, memoryview(self.area), CHUNK, CHUNK, lambda key: b"s" + key, SECONDS_PER_CHUNK, lambda: self.now
        )
        for pool in (self.transfers._lookups, self.transfers._loads, self.transfers._stores):
            pool.shutdown()
        self.lookups, self.loads = ByHand(), ByHand()
        self.transfers._lookups, self.transfers._loads = self.lookups, self.loads  # type: ignore[assignment]
        self.staging = Staging(self.transfers, rows)

    def step(self) -> None:
        self.staging.step()
        self.lookups.do_all()
        self.loads.do_all()
        self.check()

    def until_scheduled(self) -> None:
        for _ in range(STEPS_MAX):
            if not self.staging.waits:
                return
            self.step()
        raise AssertionError("a request is looked up for ever")

    def check(self) -> None:
        assert len(self.host.references) <= self.host.slots
        for key, cell in self.staging.cells.items():
            if cell.is_ready and b"s" + key in self.host.chunks:
                assert self.area[cell.row * CHUNK : (cell.row + 1) * CHUNK] == self.host.chunks[b"s" + key]

    def end(self) -> None:
        self.lookups.is_inline = self.loads.is_inline = True
        self.lookups.do_all()
        self.loads.do_all()
        self.transfers.close()
        assert self.host.references == set(), "nothing is held at the end"


@contextmanager
def rig(chunks: int, *, slots: int, rows: int) -> Iterator[Rig]:
    host = FakeHost()
    host.slots = slots
    host.chunks = {b"s" + key: bytes([number + 1]) * CHUNK for number, key in enumerate(prompt(chunks))}
    made = Rig(host, rows)
    yield made
    made.end()


def prompt(chunks: int) -> list[bytes]:
    return [b"%d" % number for number in range(chunks)]


def test_a_prompt_longer_than_the_hosts_dram_is_loaded_whole_piece_by_piece() -> None:
    with rig(10, slots=4, rows=12) as engine:
        engine.staging.add("r", [*prompt(10), b"unknown"])
        engine.until_scheduled()
        assert engine.staging.hits == {"r": 10}
        assert [len(keys) for keys in engine.host.asked] == [11, 7, 3]


def test_the_pieces_of_a_run_wait_together_for_a_part_of_what_computing_it_takes() -> None:
    with rig(10, slots=4, rows=12) as engine:
        engine.staging.add("r", prompt(10))
        engine.staging.step()
        patience_s = 10 * SECONDS_PER_CHUNK * LOOKUP_WAIT_FRACTION
        open_piece = engine.host.open_piece

        def slowly(keys: list[bytes], timeout_s: float) -> object:
            engine.now += 0.4
            return open_piece(keys, timeout_s)

        engine.host.open_piece = slowly  # type: ignore[method-assign]
        engine.until_scheduled()
        assert engine.host.timeouts == pytest.approx([patience_s, patience_s - 0.4, LOOKUP_WAIT_MIN_S])


def test_a_prompt_longer_than_the_rows_is_loaded_as_far_as_they_reach() -> None:
    with rig(10, slots=4, rows=6) as engine:
        engine.staging.add("r", prompt(10))
        engine.until_scheduled()
        assert engine.staging.hits == {"r": 6}
        assert engine.host.references == set()


def test_rows_that_others_use_bound_the_run_and_nothing_is_held_for_the_rest() -> None:
    with rig(10, slots=8, rows=6) as engine:
        for number in range(3):
            engine.staging.put(b"other%d" % number, is_pinned=True)
        engine.staging.add("r", prompt(10))
        engine.until_scheduled()
        assert engine.staging.hits == {"r": 3}
        assert engine.host.references == set(), "though the request goes on for long"


def test_what_came_into_the_rows_by_another_way_does_not_hold_the_next_piece_up() -> None:
    with rig(10, slots=4, rows=12) as engine:
        engine.staging.add("r", prompt(10))
        engine.staging.step()
        engine.lookups.do_all()
        engine.staging.put(b"2")
        engine.area[:CHUNK] = engine.host.chunks[b"s2"]
        engine.until_scheduled()
        assert engine.staging.hits == {"r": 10}


def test_a_piece_that_the_gpu_holds_meanwhile_is_given_back_for_the_next() -> None:
    with rig(10, slots=4, rows=12) as engine:
        engine.staging.add("r", prompt(10))
        engine.staging.step()
        engine.lookups.do_all()
        engine.staging._waiting[0].computed = 4
        engine.until_scheduled()
        assert engine.staging.hits == {"r": 6}


def test_damaged_bytes_end_the_run_where_they_lie() -> None:
    with rig(10, slots=4, rows=12) as engine:
        engine.host.damaged = {b"s5"}
        engine.staging.add("r", prompt(10))
        engine.until_scheduled()
        assert engine.staging.hits == {"r": 5}
        engine.host.damaged.clear()
        engine.staging.add("later", prompt(10))
        engine.until_scheduled()
        assert engine.staging.hits["later"] == 10


def test_an_agent_that_goes_between_two_pieces_ends_the_run() -> None:
    with rig(10, slots=4, rows=12) as engine:
        engine.staging.add("r", prompt(10))
        engine.step()
        engine.host.open_piece = lambda keys, timeout_s: NO_ANSWER  # type: ignore[method-assign]
        engine.until_scheduled()
        assert engine.staging.hits == {"r": 4}


PROMPTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4)
"""How many chunks of the shared document, how many of its own, how many the GPU holds."""


@settings(max_examples=150)
@given(PROMPTS, st.integers(1, 6), st.integers(1, 14), st.integers(0, 3), st.sets(st.integers(0, 12)), st.data())
def test_whatever_is_asked_at_once_and_however_slowly_all_are_scheduled_and_nothing_stays_held(
    prompts: list[tuple[int, int, int]], slots: int, rows: int, pinned: int, damaged: set[int], data: st.DataObject
) -> None:
    with rig(12, slots=slots, rows=rows) as engine:
        engine.host.damaged = {b"s%d" % number for number in damaged}
        for number in range(min(pinned, rows)):
            engine.staging.put(b"pinned%d" % number, is_pinned=True)
        for number, (shared, own, computed) in enumerate(prompts):
            keys = prompt(shared) + [b"own%d.%d" % (number, place) for place in range(own)]
            for place, key in enumerate(keys[shared:]):
                engine.host.chunks[b"s" + key] = bytes([100 + 10 * number + place]) * CHUNK
            engine.staging.add(f"r{number}", keys, min(computed, len(keys)))
        for _ in range(10):
            engine.staging.step()
            for jobs in (engine.lookups, engine.loads):
                for _ in range(data.draw(st.integers(0, 2))):
                    if jobs.jobs:
                        jobs.do(0)
            engine.check()
        engine.until_scheduled()
        engine.step()
        assert engine.host.references == set()
        for number, (shared, own, computed) in enumerate(prompts):
            assert 0 <= engine.staging.hits[f"r{number}"] <= max(0, shared + own - computed)
