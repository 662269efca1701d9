"""Traces: requests with their arrival, their lengths and the ids of their prompts' blocks; digests only, no text.

The format is Mooncake's (kvcache-ai/Mooncake, FAST25-release/traces): a JSON object a line with `timestamp` (ms since
the start), `input_length` and `output_length` (tokens) and `hash_ids`, the ids of the prompt's consecutive blocks of
512 tokens. Equal ids mean equal content *and* equal prefix, so an id is a chunk key.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from directory.chunks import DIRECTORY_KEY_BYTES

BLOCK_TOKENS = 512
ID_MAX = 2**64 - 1
TOKENS_MAX = 10**8


class TraceError(ValueError):
    """A line that isn't a request of a trace; the message names it."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request. `keys` are the directory keys of its full blocks."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...]


def read_trace(lines: Iterable[str]) -> list[TracedRequest]:
    """The requests of a trace, in the order of their arrival. Raises `TraceError`."""
    keys = _Keys()
    requests = [_read_line(number, line, keys) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise TraceError("the trace holds no request")
    return sorted(requests, key=lambda each: each.arrival_s)


def from_zero(requests: Sequence[TracedRequest], speed: float) -> list[TracedRequest]:
    """The same requests, the first at 0, `speed` times as fast."""
    start = requests[0].arrival_s
    return [replace(each, arrival_s=(each.arrival_s - start) / speed) for each in requests]


def spread_out(requests: Sequence[TracedRequest], tick_s: float, seed: int = 0) -> list[TracedRequest]:
    """The same requests, each up to `tick_s` later: for traces whose clock ticks coarsely.

    Those of Mooncake tick every 3 s, so ten requests seem to arrive in one instant; no gateway can hear of another's.
    """
    drawn = random.Random(seed)
    moved = [replace(each, arrival_s=each.arrival_s + drawn.uniform(0, tick_s)) for each in requests]
    return sorted(moved, key=lambda each: each.arrival_s)


def block_key(block_id: int) -> bytes:
    """The directory key of a block: a digest, as policies expect of keys.

    All lie in one partition: an announcement is a few batches, not sixteen.
    """
    digest = hashlib.blake2b(block_id.to_bytes(8, "big"), digest_size=DIRECTORY_KEY_BYTES - 1).digest()
    return b"\x00" + digest


class _Keys(dict[int, bytes]):
    """The key of each block, one object however many prompts have it: most of a long trace's memory."""

    def __missing__(self, block_id: int) -> bytes:
        key = self[block_id] = block_key(block_id)
        return key


def _read_line(number: int, line: str, keys: _Keys) -> TracedRequest:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"line {number} isn't JSON: {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"line {number} must be an object")
    prompt_tokens = _whole(number, row, "input_length", 1, TOKENS_MAX)
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= ID_MAX for each in ids):
        raise TraceError(f"line {number}: hash_ids must be a list of whole numbers from 0 to 2**64 - 1")
    full = prompt_tokens // BLOCK_TOKENS
    if len(ids) < full:
        raise TraceError(f"line {number}: {prompt_tokens} tokens have {full} full blocks, hash_ids names {len(ids)}")
    if len(set(ids[:full])) < full:
        raise TraceError(f"line {number}: hash_ids names a block twice; an id names all before it, too")
    return TracedRequest(
        arrival_s=_whole(number, row, "timestamp", 0, 10**13) / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=max(1, _whole(number, row, "output_length", 0, TOKENS_MAX)),
        keys=tuple(keys[each] for each in ids[:full]),
    )


def _whole(number: int, row: dict[str, Any], name: str, least: int, most: int) -> int:
    value = row.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise TraceError(f"line {number}: {name} must be a whole number from {least} to {most}, not {value!r}")
    return value
