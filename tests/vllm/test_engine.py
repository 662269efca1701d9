"""A real vLLM as we launch it: what it tells, and that nothing of it stays behind."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from directory.chunks import pack_tokens
from nodeagent.engines.vllm.events import AllBlocksCleared, Batch, BlockStored, decode_batch
from nodeagent.engines.vllm.launch import BLOCK_TOKENS, SHARED_MEMORY, TOPIC
from nodeagent.engines.vllm.subscriber import REPLAY_END
from tests.vllm.engines import RunningEngine, running_engines
from tests.vllm.fleet import MODEL
from tests.warmroute.fleets import is_alive
from warmroute.process_group import members, remains

EVENT_BOUND_MS = 30_000
REQUEST_BOUND_S = 240.0
PROMPT = list(range(1_000, 1_000 + 5 * BLOCK_TOKENS + 7))
pytestmark = pytest.mark.timeout(600)


def complete(engine: RunningEngine) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=REQUEST_BOUND_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached_tokens(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def assert_nothing_is_left(engine: RunningEngine, pids: list[int], files: set[Path]) -> None:
    launch = engine.launch
    assert not [pid for pid in pids if is_alive(pid)]
    assert members(engine.process.pid) == []
    assert not [file for file in {*files, launch.staging_file} if file.exists()]
    assert not is_taken(launch.port)


@contextlib.contextmanager
def connected(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as link:
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.RCVTIMEO, EVENT_BOUND_MS)
        if kind == zmq.SUB:
            link.setsockopt(zmq.SUBSCRIBE, TOPIC.encode())
        link.connect(endpoint)
        yield link


def replayed(engine: RunningEngine) -> list[bytes]:
    """The payloads of all batches since the engine's start."""
    payloads = []
    with connected(zmq.DEALER, engine.launch.replay_endpoint) as link:
        link.send_multipart([b"", (0).to_bytes(8, "big")])
        while (frames := link.recv_multipart())[2] != REPLAY_END:
            assert int.from_bytes(frames[2], "big") == len(payloads)
            payloads.append(frames[3])
    return payloads


def stored_tokens(batches: list[Batch]) -> bytes:
    return b"".join(event.tokens for batch in batches for event in batch.events if isinstance(event, BlockStored))


def test_a_prompt_is_announced_once_and_cached_until_the_cache_is_reset(tmp_path: Path) -> None:
    whole_blocks = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    with running_engines(tmp_path, {"plain": None}) as engines:
        engine = engines["plain"]
        pids, files = members(engine.process.pid), set(remains(engine.process.pid).files)
        with connected(zmq.SUB, engine.launch.events_endpoint) as events:
            first, second = complete(engine), complete(engine)
            assert (cached_tokens(first), cached_tokens(second)) == (0, whole_blocks)
            assert first["choices"][0]["text"] == second["choices"][0]["text"]
            topic, _, heard = events.recv_multipart()
        assert topic == TOPIC.encode()
        assert heard in replayed(engine)
        batches = [decode_batch(payload) for payload in replayed(engine)]
        assert all(not batch.skipped for batch in batches)
        assert stored_tokens(batches) == pack_tokens(PROMPT[:whole_blocks])
        assert all(
            isinstance(block_hash, bytes) and len(block_hash) == 32
            for batch in batches
            for event in batch.events
            if isinstance(event, BlockStored)
            for block_hash in event.block_hashes
        )
        httpx.post(f"{engine.url}/reset_prefix_cache", timeout=REQUEST_BOUND_S, trust_env=False).raise_for_status()
        assert cached_tokens(complete(engine)) == 0
        assert AllBlocksCleared() in [event for each in replayed(engine) for event in decode_batch(each).events]
        assert len(pids) >= 3
        assert files
    assert_nothing_is_left(engine, pids, files)


def test_an_engine_whose_first_process_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """It serves without an agent behind its door as well, and has staging rows that nobody else would remove."""
    with running_engines(tmp_path, {"killed": tmp_path / "nobody.sock"}) as engines:
        engine = engines["killed"]
        launch = engine.launch
        pids, files = members(engine.process.pid), set(remains(engine.process.pid).files)
        assert cached_tokens(complete(engine)) == 0
        assert launch.staging_file in files
        assert launch.staging_file.exists()
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait()
        assert len(members(engine.process.pid)) >= 2, "the others live on"
    assert_nothing_is_left(engine, pids, files)
    assert SHARED_MEMORY in {file.parent for file in files}
