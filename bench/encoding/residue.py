"""What encoding leaves behind: memory after millions of fresh tokens, and how long the event loop was held."""

import asyncio
import ctypes
import gc
import os
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from bench.encoding.fuzz import Tokenizer
from bench.encoding.workloads import Writer
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import CACHE_BYTES_MAX
from gateway.encoding.prompt_tokenizer import CachedPieces
from gateway.encoding.self_check import SelfCheck

TEXT_CHARS = 60_000
TICK_S = 0.001
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes gained by a cache of `budget_bytes` after `tokens` fresh tokens; the backend's own are apart."""

    tokenizer: str
    tokens: int
    budget_bytes: int
    cache_bytes: int
    gained_bytes: int


@dataclass(frozen=True, slots=True)
class Lag:
    """How late the event loop's timers of one millisecond were, in ms, with nothing to do and while prompts came."""

    tokenizer: str
    prompts: int
    prompt_tokens: int
    idle_p99_ms: float
    p50_ms: float
    p99_ms: float
    longest_ms: float


def measure_memory(tokenizer: Tokenizer, tokens: int) -> Memory:
    """Twice so many tokens pass: through the backend alone first, so that what it keeps itself isn't counted."""
    writer = _FreshWords(random.Random(2))
    passed = 0
    while passed < tokens:
        passed += len(tokenizer.rest.encode(writer.text(TEXT_CHARS))) // 4
    encoder = tokenizer.encoder(CACHE_BYTES_MAX)
    before, passed = _resident_bytes(), 0
    while passed < tokens:
        passed += len(encoder.encode(writer.text(TEXT_CHARS))) // 4
    gained = _resident_bytes() - before
    return Memory(tokenizer.name, passed, CACHE_BYTES_MAX, encoder.cache.bytes_used, gained)


async def measure_lag(tokenizer: Tokenizer, prompts: int, prompt_tokens: int) -> Lag:
    """Prompts that nobody has seen, two at a time, as requests bring them."""
    writer = Writer(random.Random(3))
    token_chars = 4
    texts = [writer.text(prompt_tokens * token_chars) for _ in range(prompts)]
    pool = EncodePool()
    prompt_tokenizer = CachedPieces(
        tokenizer.encoder(CACHE_BYTES_MAX), tokenizer.whole, tokenizer.rest, pool, SelfCheck(pool, lambda: None)
    )
    idle = await _lags_during(asyncio.sleep(1.0))
    lengths: list[int] = []

    async def client(own: list[str]) -> None:
        for text in own:
            lengths.append(len(await prompt_tokenizer.encode(text, False)) // 4)
            await asyncio.sleep(0.01)

    async def clients() -> None:
        await asyncio.gather(client(texts[::2]), client(texts[1::2]))

    lags = await _lags_during(clients())
    pool.close()
    tokens = sum(lengths) // len(lengths)
    return Lag(tokenizer.name, prompts, tokens, _share(idle, 0.99), _share(lags, 0.5), _share(lags, 0.99), lags[-1])


async def _lags_during(work: Coroutine[Any, Any, object]) -> list[float]:
    """Ascending, in ms."""
    task = asyncio.create_task(work)
    lags = []
    while not task.done():
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        lags.append(max(0.0, time.perf_counter() - due) * 1e3)
    task.result()
    return sorted(lags)


def _share(lags: list[float], share: float) -> float:
    return lags[int((len(lags) - 1) * share)]


@dataclass
class _FreshWords:
    """Words that were never there before: the worst that memory can meet."""

    choose: random.Random

    def text(self, characters: int) -> str:
        lines = []
        length = 0
        while length < characters:
            words = ["".join(self.choose.choices("etaoinshrdlu", k=self.choose.randrange(2, 9))) for _ in range(12)]
            lines.append(" ".join(words) + "\n" * self.choose.choice((1, 1, 2)))
            length += len(lines[-1])
        return "".join(lines)


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES
