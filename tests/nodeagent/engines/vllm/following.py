"""A subscriber beside a publishing engine, and what it claims; prompts of one chunk, by number."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from directory.chunks import chunk_keys, directory_key, pack_tokens
from nodeagent.engines.vllm.block_tree import Label
from nodeagent.engines.vllm.events import BlockRemoved, BlockStored
from nodeagent.engines.vllm.gpu_table import GpuChanges, GpuTable
from nodeagent.engines.vllm.saved_table import SavedTable
from nodeagent.engines.vllm.subscriber import GpuUnknown, KvEventSubscriber, SubscriberLimits
from tests.nodeagent.engines.vllm.publishing_engine import PublishingEngine, until
from tests.nodeagent.engines.vllm.recorded import removed, stored

FLEET = b"\x01" * 32
BRIEF = SubscriberLimits(replay_timeout_s=0.05, probe_interval_s=0.05)
QUICK = SubscriberLimits(replay_timeout_s=1.0, probe_interval_s=30.0)


def chunk(number: int) -> BlockStored:
    """A prompt of one chunk: two blocks of two tokens."""
    return stored([b"%d a" % number, b"%d b" % number], [number, 0, 0, 0])


def gone(number: int) -> BlockRemoved:
    return removed(b"%d b" % number)


def key(number: int) -> bytes:
    return directory_key(chunk_keys(FLEET, pack_tokens([number, 0, 0, 0]), 4)[0])


def held(*numbers: int) -> set[bytes]:
    return {key(number) for number in numbers}


def fresh(entries_max: int = 100_000) -> SavedTable:
    return SavedTable(GpuTable(FLEET, 4, {}.get, entries_max), 0, b"")


class Listener:
    """What an agent would announce."""

    def __init__(self) -> None:
        self.claimed: set[bytes] = set()
        self.labels: list[Label] = []
        self.unknown_because: list[str] = []
        self.calls = 0
        self.fault: Exception | None = None

    def changed(self, changes: GpuChanges) -> None:
        self.calls += 1
        assert set(changes.removed) <= self.claimed
        assert not set(changes.stored) & self.claimed
        self.claimed |= set(changes.stored)
        self.claimed -= set(changes.removed)
        self.labels.extend(changes.labels)
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def unknown(self, unknown: GpuUnknown) -> None:
        self.unknown_because.append(unknown.reason)


@asynccontextmanager
async def following(
    engine: PublishingEngine,
    start: SavedTable | None = None,
    limits: SubscriberLimits = QUICK,
    listener: Any = None,
    **source: Any,
) -> AsyncIterator[tuple[KvEventSubscriber, Listener]]:
    listener = listener or Listener()
    subscriber = KvEventSubscriber(
        replace(engine.source, **source), start or fresh(), listener, engine.context, limits=limits
    )
    task = asyncio.create_task(subscriber.run())
    try:
        yield subscriber, listener
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def in_step(engine: PublishingEngine, subscriber: KvEventSubscriber) -> None:
    """Listening, and sure of all that was published."""
    await engine.listened_to()
    await until(lambda: subscriber.is_known and subscriber.next_sequence == engine.next)
