"""What watching answers costs a stream, and what encoding replies in advance saves the next turn. CPU time.

    python -m bench.parity [--families llama3_1 gemma3] [--reply-chars 4000] [--rounds 15]

A stream's events are taken as the relay does, read by read; the same reads through the relay's own work (cut at ends of
events, and the tail kept) are beside it. The next turn is one of a conversation of about 8k tokens.
The tokenizers are installed by `make test-encoding`.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable

import orjson

from bench.encoding.fuzz import Tokenizer, load
from bench.encoding.tokenizer_packages import FAMILIES, tokenizer_json
from bench.encoding.workloads import Writer, conversation, template_of
from gateway.audit import StreamTail
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import CACHE_BYTES_MAX, Encoder
from gateway.encoding.prompt_tokenizer import CachedPieces, Shared
from gateway.encoding.render import ReferenceRenderer
from gateway.encoding.self_check import SelfCheck
from gateway.encoding.warming import KeptEvents, Reply, Warmer, warm
from gateway.events import whole_events
from gateway.openai_schema import CHAT, InferenceRequest
from gateway.parity.stream_usage import UsageFilter

EVENTS = 900
TURNS, TURN_CHARS = 8, 4_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=["llama3_1", "mistral", "gemma3"])
    parser.add_argument("--reply-chars", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    relayed_us, watched_us = asyncio.run(_stream_costs(options.rounds))
    print(f"an event: cut and tail {relayed_us:.2f} us, and taking usage out and keeping it {watched_us:.2f} us more")
    for family in options.families:
        cold, warmed, spent = asyncio.run(
            _next_turn(load(family, tokenizer_json(family)), options.reply_chars, options.rounds)
        )
        row = f"{cold:.2f} ms, {warmed:.2f} ms where the reply was encoded in advance"
        print(f"{family}: the next turn {row}, which took {spent:.2f} ms", flush=True)
    return 0


async def _stream_costs(rounds: int) -> tuple[float, float]:
    """Median us an event: of the relay's own work, and of what watching adds."""
    events = [
        b"data: "
        + orjson.dumps({"id": "chatcmpl-1", "model": "m", "choices": [{"index": 0, "delta": {"content": f"w{n} "}}]})
        + b"\n\n"
        for n in range(EVENTS)
    ]
    relayed, watched = [], []
    for _ in range(rounds):
        relayed.append(await _relay(events, False))
        watched.append(await _relay(events, True))
    return statistics.median(relayed), statistics.median(watched) - statistics.median(relayed)


async def _relay(events: list[bytes], is_watched: bool) -> float:
    async def give() -> AsyncIterator[bytes]:
        for event in events:
            yield event

    tail, usage, kept = StreamTail(), UsageFilter(), KeptEvents(Warmer())
    started = time.process_time()
    async for piece in whole_events(give(), True):
        tail.add(piece)
        if is_watched:
            kept.add(piece)
            usage.take(piece)
    return (time.process_time() - started) / len(events) * 1e6


async def _next_turn(tokenizer: Tokenizer, reply_chars: int, rounds: int) -> tuple[float, float, float]:
    """Median ms of the turn after a reply: cold, and encoded in advance; and of doing that."""
    pool = EncodePool()
    renderer = ReferenceRenderer(template_of(tokenizer.name), {})
    times: dict[str, list[float]] = {"cold": [], "warmed": [], "spent": []}
    for number in range(rounds):
        writer = Writer(random.Random(number))
        *_, last = conversation(writer, TURNS, TURN_CHARS)
        for is_warmed in (False, True):
            said, question = writer.text(reply_chars), writer.text(200)
            encoder = _encoder(tokenizer, renderer, pool)
            request = _request(last)
            await encoder.encode(request, 10**6)
            if is_warmed:
                data = orjson.dumps({"choices": [{"message": {"content": said}}]})
                times["spent"].append(await _timed(warm(Reply(encoder, request, 10**6, data, False))))
            turn = [*last, {"role": "assistant", "content": said}, {"role": "user", "content": question}]
            times["warmed" if is_warmed else "cold"].append(await _timed(encoder.encode(_request(turn), 10**6)))
    pool.close()
    cold, warmed, spent = map(statistics.median, times.values())
    return cold, warmed, spent


async def _timed(step: Awaitable[object]) -> float:
    started = time.process_time()
    await step
    return (time.process_time() - started) * 1000


def _encoder(tokenizer: Tokenizer, renderer: ReferenceRenderer, pool: EncodePool) -> Encoder:
    check = SelfCheck(pool, lambda: None, draw=lambda: 1.0)
    texts = CachedPieces(tokenizer.encoder(CACHE_BYTES_MAX), tokenizer.whole, tokenizer.rest, Shared.of(pool, check))
    return Encoder(texts, renderer, 100)


def _request(messages: list[dict[str, str]]) -> InferenceRequest:
    return InferenceRequest(CHAT, b"", {"messages": messages}, "m", False, None)


if __name__ == "__main__":
    raise SystemExit(main())
