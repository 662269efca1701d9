"""Events that vLLM 0.32 sent, and the two ways in which events are written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

from directory.chunks import pack_tokens
from nodeagent.engines.vllm.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

RECORDED = Path(__file__).parents[3] / "vectors" / "vllm_kv_events.json"
SERVERS = ("server_1", "server_2", "server_4")


def recorded(server: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))[server]["messages"]
    return messages


def payloads(server: str) -> list[bytes]:
    return [bytes.fromhex(message["payload_hex"]) for message in recorded(server)]


def as_map(event: Event) -> dict[str, Any]:
    """As vLLM writes it since 0.24: the type among the fields, later fields left out where they are None."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    always = {"block_hashes", "parent_block_hash", "block_size", "lora_id", "medium", "lora_name"}
    kept = {name: value for name, value in fields.items() if value is not None or name in always}
    return {"type": type(event).__name__} | {_wire_name(name): _wire(name, value) for name, value in kept.items()}


def as_array(event: Event, length: int | None = None) -> list[Any]:
    """As vLLM wrote it before: the type in front, then the first `length` fields."""
    values = [_wire(field.name, getattr(event, field.name)) for field in dataclasses.fields(event)]
    return [type(event).__name__, *values[:length]]


def payload(*events: Any, ts: float = 1.0, rank: int | None = 0) -> bytes:
    encoded = [as_map(e) if isinstance(e, BlockStored | BlockRemoved | AllBlocksCleared) else e for e in events]
    return msgspec.msgpack.encode([ts, encoded, rank])


def stored(
    hashes: list[int | bytes], tokens: list[int], parent: int | bytes | None = None, **fields: Any
) -> BlockStored:
    """Blocks as vLLM tells of them; without extra keys unless they are given."""
    fields = {"block_size": len(tokens) // max(1, len(hashes)), "medium": "GPU", "group_idx": 0} | fields
    fields.setdefault("kv_cache_spec_kind", "full_attention")
    fields.setdefault("extra_keys", (None,) * len(hashes))
    return BlockStored(tuple(hashes), parent, pack_tokens(tokens), **fields)


def removed(*hashes: int | bytes, group: int = 0) -> BlockRemoved:
    return BlockRemoved(tuple(hashes), "GPU", group)


def _wire_name(name: str) -> str:
    return "token_ids" if name == "tokens" else name


def _wire(name: str, value: Any) -> Any:
    return memoryview(value).cast("I").tolist() if name == "tokens" else value
