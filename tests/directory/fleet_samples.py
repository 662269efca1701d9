"""Members, keys and batches that the directory's tests share."""

import hashlib

from directory.costs import ModelShape, Rates
from directory.identity import Identity
from directory.interface import LOST, Batch
from directory.members import BookedWork, EngineRegistration, GatewayRegistration, HostRegistration, Load
from directory.placements import partition_of, unpack_holders
from directory.tiers import Tier

HOST = HostRegistration("host-a", "http://10.0.0.1:9100")
IDENTITY = Identity("meta-llama/Llama-3.1-8B-Instruct", "a" * 64, "b" * 64, "bf16", "vllm-nhd-v1", 2)
ENGINE = EngineRegistration(
    engine="engine-a",
    host="host-a",
    url="http://10.0.0.1:8000",
    models=("llama", "llama-lora"),
    identity=IDENTITY,
    shape=ModelShape(8e9, 32, 4096, 131072),
    chunk_tokens=256,
    context_tokens=131072,
    key_scheme="sglang",
    page_tokens=64,
    tokenizer_files={"tokenizer.json": "c" * 64},
    kv_tokens=500_000,
)
GATEWAY = GatewayRegistration("gateway-a:8000", "http://10.0.0.9:8001")
BOOKED = Load(
    booked={
        "engine-a": BookedWork(1.25, 0.5, 0.125, 0.25, 3, 12, 5000, 80000, 7.5),
        "engine-b": BookedWork(running=1, free_age_s=3600.0),
        "engine-c": BookedWork(free_age_s=0.5, recent_s=2.25),
    }
)
LOAD = Load(
    rates=Rates(4e14, {Tier.DRAM: 2e10, Tier.NVME: 7e9}, {Tier.NVME: 0.002}),
    tier_bytes_used={Tier.GPU: 1, Tier.DRAM: 2},
    tier_bytes_limit={Tier.GPU: 10, Tier.DRAM: 20},
    running=3,
    waiting=1,
)
TTL_S = 3600.0


def key(number: int, partition: int = 0) -> bytes:
    """A directory key of that partition."""
    digest = hashlib.sha256(number.to_bytes(8, "big")).digest()[:16]
    return bytes([partition << 4 | digest[0] & 15]) + digest[1:]


def incarnation(number: int) -> bytes:
    return hashlib.sha256(b"incarnation" + number.to_bytes(8, "big")).digest()[:8]


def batch(
    writer: bytes,
    attempt: int,
    states: dict[bytes, int],
    replaces: bytes | None = None,
    ttl_s: float = TTL_S,
    acknowledged: int = LOST,
    partition: int = 0,
) -> Batch:
    """A batch for the partition of its keys (`partition` where it has none)."""
    partition = partition_of(next(iter(states))) if states else partition
    return Batch(writer, partition, attempt, tuple(states.items()), ttl_s, replaces, acknowledged)


def holders(record: bytes | None) -> dict[bytes, int]:
    """A record as {incarnation: mask}; fails where an incarnation stands in it twice."""
    assert record is not None
    pairs = unpack_holders(record)
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)
