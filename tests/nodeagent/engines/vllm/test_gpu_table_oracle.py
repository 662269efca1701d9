"""The table against vLLM's block pool in miniature: after every batch both hold the same chunks."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engines.vllm.events import Batch, decode_batch
from nodeagent.engines.vllm.gpu_table import GpuTable
from nodeagent.engines.vllm.saved_table import SavedTable, dump_table, load_table
from tests.nodeagent.engines.vllm.block_pool import ADAPTERS, BlockPool, Request, Running
from tests.nodeagent.engines.vllm.recorded import payload

FLEET = b"\x01" * 32
BLOCK, CHUNK = 2, 6
PROMPTS = st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, CHUNK - 1)).map(
    lambda prompt: tuple(token for token in prompt[0] for _ in range(CHUNK)) + (9,) * prompt[1]
)
REQUESTS = st.builds(
    Request,
    PROMPTS,
    st.sampled_from([None, None, None, "s"]),
    st.sampled_from([None, None, None, None, "good", "twin", "bad"]),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["run", "run", "start"]), REQUESTS)
    | st.tuples(st.sampled_from(["again", "finish"]), st.integers(0, 9))
    | st.tuples(st.just("compute"), st.integers(0, 9), st.integers(1, 26))
    | st.tuples(st.sampled_from(["batch", "batch", "reset"])),
    min_size=20,
    max_size=60,
)
SEGMENTS = st.sampled_from([None, CHUNK // BLOCK])
Step = tuple[Any, ...]
Windows = tuple[int | None, ...]
WINDOWS = st.sampled_from([(None,), (None, None), (None, 4), (7, None), (None, 1, 12)])


class Engine:
    """Requests that come, run and end, as a scheduler would have it."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.running: list[tuple[Running, int]] = []
        self.past: list[Request] = []

    def step(self, step: Step) -> None:
        match step:
            case ("start", request):
                self.start(request)
            case ("run", request):
                if self.start(request):
                    self.finish(-1)
            case ("again", which) if self.past:
                self.start(self.past[which % len(self.past)])
            case ("compute", which, tokens) if self.running:
                self.compute(which % len(self.running), tokens)
            case ("finish", which) if self.running:
                self.finish(which % len(self.running))
            case ("reset",) if not self.running:
                self.pool.reset()

    def start(self, request: Request) -> bool:
        running = self.pool.start(request)
        if running is None:
            return False
        self.running.append((running, running.cached[0] * self.pool.block_size))
        self.past.append(request)
        return True

    def compute(self, which: int, tokens: int) -> None:
        running, done = self.running[which]
        done = min(len(running.request.tokens), done + tokens)
        self.pool.compute(running, done)
        self.running[which] = (running, done)

    def finish(self, which: int) -> None:
        self.compute(which, 99)
        self.pool.finish(self.running.pop(which)[0])


def follow(pool: BlockPool, steps: list[Step], each: Callable[[Batch], None]) -> None:
    engine = Engine(pool)
    for step in [*steps, ("batch",)]:
        if step == ("batch",):
            each(decode_batch(payload(*pool.take_events())))
        else:
            engine.step(step)


@settings(max_examples=120)
@given(steps=STEPS, blocks=st.integers(14, 50), windows=WINDOWS, ints=st.booleans(), segment=SEGMENTS)
def test_the_table_holds_what_the_pool_holds(
    steps: list[Step], blocks: int, windows: Windows, ints: bool, segment: int | None
) -> None:
    pool = BlockPool(blocks, BLOCK, windows, ints=ints, segment_blocks=segment)
    table, reported = GpuTable(FLEET, CHUNK, ADAPTERS.get), set[bytes]()

    def check(batch: Batch) -> None:
        changes = table.apply(batch)
        assert not set(changes.stored) & reported
        assert set(changes.removed) <= reported
        reported.update(changes.stored)
        reported.difference_update(changes.removed)
        assert table.held == reported == pool.held(FLEET, CHUNK)
        assert table.entries <= (1 + len(windows)) * blocks * len(windows)

    follow(pool, steps, check)
    assert not set(table.skipped) - {"adapter_unknown"}


@settings(max_examples=60)
@given(steps=STEPS, blocks=st.integers(14, 50), windows=WINDOWS, cut=st.integers(0, 20))
def test_a_table_saved_and_warmed_goes_on_as_if_never_saved(
    steps: list[Step], blocks: int, windows: Windows, cut: int
) -> None:
    pool, past = BlockPool(blocks, BLOCK, windows), list[Batch]()
    tables = [GpuTable(FLEET, CHUNK, ADAPTERS.get)]

    def check(batch: Batch) -> None:
        tables[0].apply(batch)
        past.append(batch)
        if len(past) == cut + 1:
            data = dump_table(SavedTable(tables[0], len(past), b"8" * 8), b"life")
            loaded = load_table(data, life=b"life", fleet_digest=FLEET, chunk_tokens=CHUNK, adapters=ADAPTERS.get)
            assert loaded is not None
            assert loaded.table.held == tables[0].held
            assert loaded.table.entries == tables[0].entries
            for old in past:
                assert not loaded.table.warm(old)
            tables[0] = loaded.table
        assert tables[0].held == pool.held(FLEET, CHUNK)

    follow(pool, steps, check)


@settings(max_examples=60)
@given(steps=STEPS, blocks=st.integers(14, 50), windows=WINDOWS, lost=st.integers(0, 6), segment=SEGMENTS)
def test_after_a_gap_nothing_is_claimed_that_is_not_held(
    steps: list[Step], blocks: int, windows: Windows, lost: int, segment: int | None
) -> None:
    pool = BlockPool(blocks, BLOCK, windows, segment_blocks=segment)
    table, seen = GpuTable(FLEET, CHUNK, ADAPTERS.get), list[Batch]()

    def check(batch: Batch) -> None:
        seen.append(batch)
        if len(seen) <= lost:
            table.clear(is_complete=False)
        else:
            table.apply(batch)
        assert table.held <= pool.held(FLEET, CHUNK)

    follow(pool, steps, check)


@pytest.mark.parametrize("ints", [False, True], ids=["bytes", "ints"])
def test_a_conversation_grows_and_is_eaten_from_its_end(ints: bool) -> None:
    pool, table = BlockPool(9, BLOCK, ints=ints), GpuTable(FLEET, CHUNK, ADAPTERS.get)
    engine = Engine(pool)
    for tokens in ((1,) * 6, (1,) * 12, (2,) * 8):
        engine.start(Request(tokens))
        engine.finish(0)
        table.apply(Batch(events=pool.take_events()))
        assert table.held == pool.held(FLEET, CHUNK)
    assert len(table.held) == 2  # the first chunk of each
