"""A publishing engine attached to a running agent: two chunks of it, and where the directory believes them to be."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from directory.chunks import chunk_keys, directory_key, foreign_storage_key, pack_tokens
from nodeagent.client import ChunkClient, ChunkLabel, EngineHello, PutResult
from nodeagent.engines.vllm.follower import offload_key
from tests.nodeagent.engines.vllm.publishing_engine import PublishingEngine
from tests.nodeagent.engines.vllm.recorded import stored
from tests.nodeagent.running import WAIT_S, RunningAgent, connected, make_hello, payload, running_agent

CHUNK_TOKENS = 16
BLOCKS = [bytes([number]) * 32 for number in range(1, 5)]
TOKENS = list(range(100, 100 + 2 * CHUNK_TOKENS))
TWO_CHUNKS = stored(list(BLOCKS), TOKENS)
"""Two chunks of two blocks each: the chunks' names are those of the second and the fourth block."""


def hello_of(engine: PublishingEngine, name: str = "engine-1", **changes: Any) -> EngineHello:
    return make_hello(name, events=replace(engine.source, block_tokens=CHUNK_TOKENS // 2), **changes)


DIGEST = make_hello().identity.fleet_digest()
KEYS = [directory_key(key) for key in chunk_keys(DIGEST, pack_tokens(TOKENS), CHUNK_TOKENS)]


def names(index: int) -> bytes:
    return foreign_storage_key(DIGEST, offload_key(BLOCKS[2 * index + 1]))


def put(client: ChunkClient, index: int, data: str | None = None) -> PutResult:
    return client.put(ChunkLabel(names(index), None, None, index), payload(data or f"chunk {index}"), WAIT_S)


async def soon(holds: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.02)


def tiers_of(agent: RunningAgent) -> list[int]:
    return [agent.believed(key) for key in KEYS]


@asynccontextmanager
async def followed(
    folder: Path, engine: PublishingEngine, **changes: Any
) -> AsyncIterator[tuple[RunningAgent, ChunkClient]]:
    with running_agent(folder, **changes) as agent:
        with connected(agent.config.door, hello_of(engine)) as client:
            yield agent, client
