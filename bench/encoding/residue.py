"""What encoding leaves behind: memory after millions of fresh tokens, and how long the event loop was held."""

import asyncio
import ctypes
import gc
import os
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import orjson

from bench.encoding.fuzz import Tokenizer
from bench.encoding.workloads import Writer, template_of
from directory.chunks import chunk_keys
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import CACHE_BYTES_MAX, Encoder
from gateway.encoding.prompt_tokenizer import CachedPieces, Shared
from gateway.encoding.render import ReferenceRenderer
from gateway.openai_schema import CHAT, parse_request

TEXT_CHARS = 60_000
TICK_S = 0.001
TOKEN_CHARS, TOKEN_CHARS_MAX, CONTEXT_TOKENS = 4, 128, 2**20
SHORT_CHARS, SHORT_TEXTS = 4_000, 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes gained by a cache of `budget_bytes` after `tokens` fresh tokens; the backend's own are apart."""

    tokenizer: str
    backend: str
    tokens: int
    budget_bytes: int
    cache_bytes: int
    gained_bytes: int
    backend_gained_bytes: int


@dataclass(frozen=True, slots=True)
class Lag:
    """How late the event loop's timers of one millisecond were, in ms: with nothing to do, and while long prompts that
    nobody has seen came beside short ones. `held_…` is what the loop's own thread computed between two timers, which no
    other process's load adds to; `short_p99_ms` is what a short prompt took.
    """

    tokenizer: str
    backend: str
    prompts: int
    prompt_tokens: int
    short_prompts: int
    short_p99_ms: float
    idle_p99_ms: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    held_p99_ms: float
    held_longest_ms: float


def measure_memory(tokenizer: Tokenizer, tokens: int) -> Memory:
    """Twice so many tokens pass: through the backend alone first, so that what it keeps itself is told apart."""
    writer = _FreshWords(random.Random(2))
    at_first, passed = _resident_bytes(), 0
    while passed < tokens:
        passed += len(tokenizer.rest.encode(writer.text(TEXT_CHARS))) // 4
    encoder = tokenizer.encoder(CACHE_BYTES_MAX)
    before, passed = _resident_bytes(), 0
    while passed < tokens:
        text = writer.text(TEXT_CHARS)
        if encoder.looks_new(text):
            new = encoder.encode_at_once(text)
            passed += len(new.ids) // 4
            encoder.keep(new, encoder.take_apart(new) or [])
        else:
            passed += len(encoder.encode(text)) // 4
    after = _resident_bytes()
    return Memory(
        tokenizer.name,
        tokenizer.rest.name,
        passed,
        CACHE_BYTES_MAX,
        encoder.cache.bytes_used,
        after - before,
        before - at_first,
    )


async def measure_lag(tokenizer: Tokenizer, prompts: int, prompt_tokens: int) -> Lag:
    """Chats that nobody has seen, two at a time, as bodies come: parsed, rendered, encoded, keyed. Beside them short
    ones, one after another.
    """
    writer = Writer(random.Random(3))
    bodies = [_chat(writer, prompt_tokens * TOKEN_CHARS) for _ in range(prompts)]
    shorts = [_chat(writer, SHORT_CHARS) for _ in range(SHORT_TEXTS)]
    pool = EncodePool()
    shared = Shared.of(pool)
    prompt_tokenizer = CachedPieces(tokenizer.encoder(CACHE_BYTES_MAX), tokenizer.whole, tokenizer.rest, shared)
    encoder = Encoder(prompt_tokenizer, ReferenceRenderer(template_of(tokenizer.name), {}), TOKEN_CHARS_MAX, pool)
    loops = [asyncio.create_task(each.run()) for each in (shared.check, shared.learner)]
    gc.collect()
    gc.freeze()  # as the gateway does
    idle, _ = await _lags_during(asyncio.sleep(1.0))
    lengths: list[int] = []
    took_ms: list[float] = []

    async def serve(body: bytes) -> int:
        encoding = await encoder.encode(parse_request(CHAT, body), CONTEXT_TOKENS)
        assert encoding.tokens is not None, encoding.reason
        chunk_keys(bytes(32), encoding.tokens)
        return encoding.prompt_tokens

    async def client(own: list[bytes]) -> None:
        for body in own:
            lengths.append(await serve(body))
            await asyncio.sleep(0.01)

    async def hasty_client(busy: asyncio.Future[Any]) -> None:
        for body in cycle(shorts):
            if busy.done():
                break
            started = time.perf_counter()
            await serve(body)
            took_ms.append((time.perf_counter() - started) * 1e3)
            await asyncio.sleep(0.005)

    async def clients() -> None:
        await hasty_client(asyncio.gather(client(bodies[::2]), client(bodies[1::2])))

    lags, held = await _lags_during(clients())
    for task in loops:
        task.cancel()
    await asyncio.wait(loops)
    pool.close()
    return Lag(
        tokenizer.name,
        tokenizer.rest.name,
        prompts,
        sum(lengths) // len(lengths),
        len(took_ms),
        _share(sorted(took_ms), 0.99),
        _share(idle, 0.99),
        _share(lags, 0.5),
        _share(lags, 0.99),
        lags[-1],
        _share(held, 0.99),
        held[-1],
    )


def _chat(writer: Writer, characters: int) -> bytes:
    half = characters // 2
    messages = [{"role": role, "content": writer.text(half)} for role in ("system", "user")]
    return orjson.dumps({"model": "m", "messages": messages})


async def _lags_during(work: Coroutine[Any, Any, object]) -> tuple[list[float], list[float]]:
    """How late timers were, and what this thread computed from one to the next: each ascending, in ms."""
    task = asyncio.create_task(work)
    lags, held = [], []
    while not task.done():
        due, started = time.perf_counter() + TICK_S, time.thread_time()
        await asyncio.sleep(TICK_S)
        lags.append(max(0.0, time.perf_counter() - due) * 1e3)
        held.append((time.thread_time() - started) * 1e3)
    task.result()
    return sorted(lags), sorted(held)


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
