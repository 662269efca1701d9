"""An engine's side of the host's tiers against a real agent: a prompt three times as long as its DRAM."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodeagent.client import ChunkClient
from nodeagent.engines.vllm.chunk_transfers import ChunkRow, ChunkTransfers
from nodeagent.tiers.chunk_file import file_bytes
from tests.nodeagent.engines.vllm.staging import Staging
from tests.nodeagent.running import (
    CHUNK_BYTES,
    SLOTS,
    RunningAgent,
    connected,
    eventually,
    make_hello,
    payload,
    running_agent,
    storage_key,
)

CHUNKS = 3 * SLOTS
NAMES = [f"v{number}" for number in range(CHUNKS)]
KEYS = [name.encode() for name in NAMES]
CHUNK_TOKENS = make_hello().chunk_tokens


@contextmanager
def attached(client: ChunkClient, area: bytearray) -> Iterator[ChunkTransfers]:
    transfers = ChunkTransfers(
        client, memoryview(area), CHUNK_BYTES, CHUNK_BYTES, lambda key: storage_key(key.decode()), 1.0
    )
    yield transfers
    transfers.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    """Its files hold the whole prompt; its DRAM can't."""
    nvme = {"nvme_path": str(tmp_path / "nvme"), "nvme_bytes": 1_000 * file_bytes(CHUNK_BYTES)}
    with running_agent(tmp_path, **nvme, nvme_write="through") as running, connected(running.config.door) as client:
        area = bytearray(b"".join(bytes(payload(name)) for name in NAMES))
        with attached(client, area) as transfers:
            for number, key in enumerate(KEYS):
                transfers.store(number, [ChunkRow(key, number, number)])
                eventually(lambda: running.status()["tiers"]["nvme"]["chunks"] > number, "the file")  # noqa: B023
        yield running


def chunks(agent: RunningAgent, counter: str, **labels: str) -> float:
    return agent.metric(f"warmroute_tier_{counter}_total", **labels) / CHUNK_TOKENS


def hit(agent: RunningAgent) -> float:
    return sum(chunks(agent, "hit_tokens", tier=tier, source="local") for tier in ("dram", "nvme"))


def test_a_prompt_longer_than_dram_is_loaded_whole_and_each_of_its_tokens_is_counted_once(agent: RunningAgent) -> None:
    area = bytearray(CHUNK_BYTES * CHUNKS)
    with connected(agent.config.door, make_hello("engine-2")) as client, attached(client, area) as transfers:
        staging = Staging(transfers, CHUNKS)
        staging.add("r", [*KEYS, b"unknown"])
        eventually(lambda: staging.step() or not staging.waits, "the request is scheduled")
        assert staging.hits == {"r": CHUNKS}
        for name, key in zip(NAMES, KEYS, strict=True):
            row = staging.cells[key].row
            assert area[row * CHUNK_BYTES : (row + 1) * CHUNK_BYTES] == payload(name)
        eventually(lambda: agent.tier()["references"] == 0, "everything is given back")
        eventually(lambda: hit(agent) == CHUNKS, "the hits")
        assert (chunks(agent, "missed_tokens"), chunks(agent, "tokens_requested")) == (1, CHUNKS + 1)


def test_an_agent_that_ends_while_a_prompt_is_loaded_costs_its_rest_only(agent: RunningAgent) -> None:
    area = bytearray(CHUNK_BYTES * CHUNKS)
    with connected(agent.config.door, make_hello("engine-2")) as client, attached(client, area) as transfers:
        staging = Staging(transfers, CHUNKS)
        staging.add("r", KEYS)
        eventually(lambda: staging.step() or len(staging.cells) >= 1, "the first piece is promised")
        agent.stop()
        eventually(lambda: staging.step() or not staging.waits, "the request is scheduled")
        assert staging.hits["r"] < CHUNKS
        for name, key in zip(NAMES[: staging.hits["r"]], KEYS, strict=False):
            row = staging.cells[key].row
            assert area[row * CHUNK_BYTES : (row + 1) * CHUNK_BYTES] == payload(name)
