"""The recorded trace: what stands in it, what doesn't, and how it ends."""

import asyncio
import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.audit import Usage
from gateway.openai_schema import COMPLETIONS
from gateway.trace_recorder import BLOCK_TOKENS, ROWS_WAITING_MAX, Row, TraceRecorder, block_ids
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL
from warmroute.replay.trace import read_trace

SALT = b"s" * 32


def keys(count: int, first: int = 0) -> list[bytes]:
    return [(first + number).to_bytes(16, "big") for number in range(count)]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_requests_that_begin_alike_have_numbers_in_common_and_no_text(tmp_path: Path) -> None:
    trace, alike = tmp_path / "trace.jsonl", "secret words " * 50
    prompts = [alike + "a" * 500, alike + "b" * 500, "c" * 300]
    async with MockEngine("a") as engine, httpx.AsyncClient(trust_env=False) as client:
        async with gateway_for([engine], trace_file=trace) as gateway:
            for prompt in prompts:
                answer = await client.post(gateway.url + COMPLETIONS, json={"model": MODEL, "prompt": prompt})
                assert answer.status_code == 200
    first, second, short = rows_of(trace)
    assert [each["input_length"] for each in (first, second, short)] == [1150, 1150, 300]
    assert [each["output_length"] for each in (first, second, short)] == [1, 1, 1]
    assert first["timestamp"] <= second["timestamp"] <= short["timestamp"]
    assert first["hash_ids"][0] == second["hash_ids"][0]
    assert first["hash_ids"][1] != second["hash_ids"][1]
    assert len(short["hash_ids"]) == 1, "a number of its own for what fills no block"
    assert "secret" not in trace.read_text(encoding="utf-8")
    assert len(read_trace(trace.read_text(encoding="utf-8").splitlines())) == 3
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600


@pytest.mark.parametrize("chunk_tokens", [16, 256, 512, 1024, 384])
def test_a_block_is_named_by_all_before_its_end(chunk_tokens: int) -> None:
    chunks = 4096 // chunk_tokens
    row = Row(0.0, 4096, 1, keys(chunks + 1), chunk_tokens)
    ids = block_ids(row, SALT)
    assert len(set(ids)) == len(ids) == 8
    changed = keys(chunks + 1)
    changed[-2:] = keys(2, first=10**6)
    other = block_ids(Row(0.0, 4096, 1, changed, chunk_tokens), SALT)
    assert other[0] == ids[0]
    assert other[-1] != ids[-1]
    assert set(block_ids(row, b"t" * 32)).isdisjoint(ids), "another file's numbers"


@given(st.integers(1, 5000), st.integers(0, 30), st.sampled_from([16, 256, 384, 1024]))
def test_every_block_has_a_number_of_its_own_that_json_keeps(tokens: int, known: int, chunk_tokens: int) -> None:
    ids = block_ids(Row(0.0, tokens, 1, keys(known), chunk_tokens), SALT)
    assert len(set(ids)) == len(ids) == math.ceil(tokens / BLOCK_TOKENS), "as in Mooncake's traces"
    assert all(0 <= each < 2**53 for each in ids)


def test_blocks_that_are_not_known_are_like_no_others() -> None:
    row = Row(0.0, 2048, 1, keys(1), 512)
    first, again = block_ids(row, SALT), block_ids(row, SALT)
    assert first[0] == again[0]
    assert set(first[1:]).isdisjoint(again[1:])


class _Known:
    """A prepared prompt and an engine's view, as far as the recorder looks at them."""

    engine, chunk_tokens = "a", 256

    def __init__(self, tokens: int | None = 1000, named: Sequence[bytes] = ()) -> None:
        self._tokens = tokens
        self.prompt = self.holders = self.best = self
        self.is_whole = False
        self.keys = {"a": tuple(named)}

    def tokens_of(self, view: object) -> int | None:
        return self._tokens


async def recorded(recorder: TraceRecorder, *usages: Usage | None) -> None:
    running = asyncio.create_task(recorder.run())
    await asyncio.sleep(0)
    for usage in usages:
        recorder.note(0.0, _Known(), _Known(), usage)  # type: ignore[arg-type]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_stream_that_does_not_tell_its_tokens_is_recorded_by_its_events(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    async with MockEngine("a") as engine, httpx.AsyncClient(trust_env=False) as client:
        async with gateway_for([engine], trace_file=trace) as gateway:
            asked = {"model": MODEL, "prompt": "p" * 600, "stream": True}
            answer = await client.post(gateway.url + COMPLETIONS, json=asked)
    (row,) = rows_of(trace)
    assert "usage" not in answer.text
    assert row["input_length"] == 600
    assert row["output_length"] == answer.text.count("data:") > 1


async def test_a_full_trace_ends_and_holds_whole_lines(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    await recorded(TraceRecorder(trace, 300, lambda: 0.0), *[Usage(9, None, 5)] * 20)
    assert 0 < trace.stat().st_size <= 300
    assert all(row["output_length"] == 5 for row in rows_of(trace))


async def test_a_trace_that_is_there_is_kept_beside(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("old", encoding="utf-8")
    await recorded(TraceRecorder(trace, 10**6, lambda: 0.0), Usage(9, None, 5))
    assert (tmp_path / "trace.jsonl.1").read_text(encoding="utf-8") == "old"
    assert len(rows_of(trace)) == 1


async def test_a_folder_or_a_pipe_in_its_place_is_left_alone(tmp_path: Path) -> None:
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    for path in (folder, pipe):
        await recorded(TraceRecorder(path, 10**6, lambda: 0.0), Usage(9, None, 5))
    assert sorted(tmp_path.iterdir()) == [folder, pipe]


async def test_a_trace_that_cannot_be_written_costs_no_request(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "none" / "trace.jsonl", 10**6, lambda: 0.0)
    await recorded(recorder, Usage(9, None, 5), Usage(9, None, 5))
    recorder.note(0.0, _Known(), _Known(), Usage(9, None, 5))  # type: ignore[arg-type]


async def test_what_is_not_known_to_the_end_or_waits_too_long_is_left_out_and_counted(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(trace, 10**8, lambda: 0.0)
    await recorded(recorder, None, Usage(9, None), *[Usage(9, None, 5)] * (ROWS_WAITING_MAX + 3))
    assert recorder.left_out == 2 + 3
    assert len(rows_of(trace)) == ROWS_WAITING_MAX
