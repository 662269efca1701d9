"""vLLM's KV events: msgpack bytes in, frozen events out. Nothing a peer sends raises; what can't be read is counted.

A batch is `[ts, [event, ...], data_parallel_rank]`, or a map of these. An event is a map with its type under "type"
(vLLM 0.24 and later), or an array with its type in front (before), in which fields that came later are missing at the
end. Source: vllm/distributed/kv_events.py of 0.32; the order of the array's fields is that of the map's declaration.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from directory.chunks import pack_tokens
from nodeagent.engines.vllm.payload_bound import is_bounded

PAYLOAD_BYTES_MAX = 16 * 2**20
EVENTS_MAX = 200_000
BLOCK_TOKENS_MAX = 2**16
HASH_BYTES_MAX = 64
NUMBER_MAX = 2**31 - 1
"""Of groups, ranks, windows and adapters."""
GPU = "GPU"

BlockHash: TypeAlias = int | bytes
"""vLLM's name for a block and all before it: 32 bytes, or the lowest 64 bits of them."""
ExtraKey: TypeAlias = "str | bytes | int | tuple[ExtraKey, ...]"
"""An adapter's name, a salt, a digest of embeddings (bytes), or a pair (medium, offset). What is none is ()."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow one another are reusable from now on.

    `tokens` are little-endian u32. They cover all blocks from `parent_block_hash` on; a group with a window may skip
    blocks, so that there are more tokens than `block_hashes`. `extra_keys` has an entry for each hash; None: an
    engine that doesn't tell.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    tokens: bytes
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of each of these blocks is gone."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The GPU's prefix cache was reset. Other tiers keep what they hold, whatever the name says."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Batch:
    """One message. `ts` is the engine's wall clock, seconds. `skipped` counts by reason what couldn't be read.

    `is_complete` is false where a removal may be among that: what is known of the engine then isn't any more.
    """

    ts: float = 0.0
    events: tuple[Event, ...] = ()
    data_parallel_rank: int | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    is_complete: bool = True


class _Malformed(Exception):
    """A value that isn't what its field holds."""


def decode_batch(payload: bytes) -> Batch:
    """The batch in `payload`. Never raises.

    Bounds: `PAYLOAD_BYTES_MAX`, `EVENTS_MAX`, `BLOCK_TOKENS_MAX`, `NUMBER_MAX`, and `is_bounded`'s.
    """
    if len(payload) > PAYLOAD_BYTES_MAX or not is_bounded(payload):
        return _unreadable("payload_too_large")
    try:
        ts, events, rank = _envelope(_DECODER.decode(payload))
    except (msgspec.DecodeError, RecursionError, _Malformed):
        return _unreadable("undecodable")
    if len(events) > EVENTS_MAX:
        return _unreadable("too_many_events")
    skipped: Counter[str] = Counter()
    decoded: list[Event] = []
    is_complete = True
    for raw in events:
        kind = _type_of(raw)
        try:
            read = _TYPES.get(kind) if isinstance(kind, str) else None
            if read is not None:
                decoded.append(read(raw, skipped))
            elif isinstance(kind, str):
                skipped["unknown_event"] += 1
            else:
                raise _Malformed
        except _Malformed:
            skipped["malformed_event"] += 1
            is_complete = is_complete and kind == "BlockStored"
    return Batch(ts, tuple(decoded), rank, dict(skipped), is_complete)


_DECODER = msgspec.msgpack.Decoder()
_STORED_FIELDS = tuple(item.name for item in BlockStored.__dataclass_fields__.values())
_ON_THE_WIRE = {"tokens": "token_ids"}
_STORED_NAMES = tuple(_ON_THE_WIRE.get(name, name) for name in _STORED_FIELDS)
_REMOVED_NAMES = tuple(BlockRemoved.__dataclass_fields__)


def _unreadable(reason: str) -> Batch:
    return Batch(skipped={reason: 1}, is_complete=False)


def _envelope(raw: Any) -> tuple[float, list[Any], int | None]:
    if isinstance(raw, dict):
        ts, events, rank = raw.get("ts"), raw.get("events"), raw.get("data_parallel_rank")
    elif isinstance(raw, list) and len(raw) >= 2:
        ts, events, rank = raw[0], raw[1], raw[2] if len(raw) > 2 else None
    else:
        raise _Malformed
    if isinstance(ts, bool) or not isinstance(ts, int | float) or not isinstance(events, list):
        raise _Malformed
    return float(ts), events, _whole_or_none(rank)


def _type_of(raw: Any) -> Any:
    if isinstance(raw, dict):
        return raw.get("type")
    return raw[0] if isinstance(raw, list) and raw else None


def _fields(raw: Any, names: tuple[str, ...], skipped: Counter[str]) -> dict[str, Any]:
    """The event's fields by name, whichever way it came."""
    if isinstance(raw, list):
        skipped.update({"unknown_field": len(raw) - 1 - len(names)} if len(raw) - 1 > len(names) else {})
        return dict(zip(names, raw[1:], strict=False))
    unknown = sum(key not in names for key in raw) - 1  # less the type
    skipped.update({"unknown_field": unknown} if unknown else {})
    return {name: raw[name] for name in names if name in raw}


def _stored(raw: Any, skipped: Counter[str]) -> BlockStored:
    given = _fields(raw, _STORED_NAMES, skipped)
    if "parent_block_hash" not in given:
        raise _Malformed  # a block of which nobody says that it is the first
    parent, block_size = given["parent_block_hash"], _whole_or_none(given.get("block_size"))
    # Of its offload tiers vLLM tells without tokens, with a block of 0 (unless it is told to describe them).
    smallest = 1 if given.get("medium") in (None, GPU) else 0
    if block_size is None or not smallest <= block_size <= BLOCK_TOKENS_MAX:
        raise _Malformed
    return BlockStored(
        block_hashes=_hashes(given.get("block_hashes")),
        parent_block_hash=None if parent is None else _hash(parent),
        tokens=_tokens(given.get("token_ids")),
        block_size=block_size,
        lora_id=_whole_or_none(given.get("lora_id")),
        medium=_text_or_none(given.get("medium")),
        lora_name=_text_or_none(given.get("lora_name")),
        extra_keys=_extra_keys(given.get("extra_keys")),
        group_idx=_whole_or_none(given.get("group_idx")),
        kv_cache_spec_kind=_text_or_none(given.get("kv_cache_spec_kind")),
        kv_cache_spec_sliding_window=_whole_or_none(given.get("kv_cache_spec_sliding_window")),
        locality=_text_or_none(given.get("locality")),
        ownership=_text_or_none(given.get("ownership")),
        session_id=_text_or_none(given.get("session_id")),
    )


def _removed(raw: Any, skipped: Counter[str]) -> BlockRemoved:
    given = _fields(raw, _REMOVED_NAMES, skipped)
    return BlockRemoved(
        block_hashes=_hashes(given.get("block_hashes")),
        medium=_text_or_none(given.get("medium")),
        group_idx=_whole_or_none(given.get("group_idx")),
        locality=_text_or_none(given.get("locality")),
        ownership=_text_or_none(given.get("ownership")),
    )


def _cleared(raw: Any, skipped: Counter[str]) -> AllBlocksCleared:
    _fields(raw, (), skipped)
    return AllBlocksCleared()


_TYPES: dict[str, Callable[[Any, Counter[str]], Event]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole_or_none(value: Any) -> int | None:
    if value is None or (_is_whole(value) and 0 <= value <= NUMBER_MAX):
        return value  # type: ignore[no-any-return]
    raise _Malformed


def _text_or_none(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise _Malformed


def _hash(value: Any) -> BlockHash:
    if (_is_whole(value) and value >= 0) or (isinstance(value, bytes) and 0 < len(value) <= HASH_BYTES_MAX):
        return value  # type: ignore[no-any-return]
    raise _Malformed


def _hashes(value: Any) -> tuple[BlockHash, ...]:
    if not isinstance(value, list):
        raise _Malformed
    return tuple(map(_hash, value))


def _tokens(value: Any) -> bytes:
    if not isinstance(value, list):
        raise _Malformed
    try:
        return pack_tokens(value)
    except ValueError:
        raise _Malformed from None


def _extra_keys(value: Any) -> tuple[tuple[ExtraKey, ...] | None, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise _Malformed
    return tuple(None if keys is None else _as_tuple(keys) for keys in value)


def _as_tuple(keys: Any) -> tuple[ExtraKey, ...]:
    return tuple(map(_extra_key, keys)) if isinstance(keys, list) else ((),)


def _extra_key(value: Any) -> ExtraKey:
    if isinstance(value, list):
        return tuple(map(_plain_key, value))
    return _plain_key(value)


def _plain_key(value: Any) -> ExtraKey:
    return value if isinstance(value, str | bytes) or _is_whole(value) else ()
