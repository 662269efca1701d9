"""Engines as the chunk door's client sees them, and chunks to store: light, since processes start with it."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from directory.costs import ModelShape
from directory.identity import Identity
from nodeagent.client import ChunkClient, ChunkLabel, EngineHello

WAIT_S = 15.0
CHUNK_BYTES = 8_192


def make_hello(name: str = "engine-1", /, **changes: Any) -> EngineHello:
    fields: dict[str, Any] = {
        "engine": name,
        "url": "http://127.0.0.1:9",
        "models": ("tiny",),
        "identity": Identity("tiny", "w" * 8, "t" * 8, "float32", "test-1", 1),
        "tp_rank": 0,
        "shape": ModelShape(1e6, 2, 8, 32),
        "chunk_tokens": 16,
        "chunk_bytes": CHUNK_BYTES,
        "context_tokens": 128,
        "tokenizer_files": {"tokenizer.json": b"{}"},
        "flops": 1e9,
    }
    return EngineHello(**(fields | changes))


def storage_key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def label(name: str, parent: str | None = None, position: int = 0) -> ChunkLabel:
    key = storage_key(name)
    return ChunkLabel(key, key[:16], storage_key(parent) if parent is not None else None, position)


def payload(name: str, length: int = CHUNK_BYTES) -> memoryview:
    digest = hashlib.sha256(name.encode()).digest()
    return memoryview((digest * (length // len(digest) + 1))[:length])


@contextmanager
def connected(
    agent_door: str, hello: EngineHello | None = None, gpu: list[bytes] | None = None
) -> Iterator[ChunkClient]:
    inventory = gpu if gpu is not None else []
    client = ChunkClient(agent_door, hello or make_hello(), lambda: list(inventory))
    try:
        assert client.wait_connected(WAIT_S)
        yield client
    finally:
        client.stop()
