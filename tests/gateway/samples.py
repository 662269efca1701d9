"""Engines, identities and tables that the gateway's tests share."""

from directory.costs import ModelShape, Rates
from directory.identity import Identity
from directory.members import EngineRegistration, HostRegistration, Load
from directory.tiers import Tier

IDENTITY = Identity("tiny", "a" * 64, "b" * 64, "float32", "test-v1")
SHAPE = ModelShape(parameters=1.35e8, layers=30, d_model=576, kv_bytes_per_token=46080)
RATES = Rates(flops=1e11, bytes_per_s={Tier.DRAM: 2e9, Tier.NVME: 5e8}, fixed_s={Tier.NVME: 0.002})
MODEL = "tiny"


def engine_registration(
    engine: str, url: str = "http://127.0.0.1:1", host: str = "h", **other: object
) -> EngineRegistration:
    fields: dict[str, object] = {
        "engine": engine,
        "host": host,
        "url": url,
        "models": (MODEL,),
        "identity": IDENTITY,
        "shape": SHAPE,
        "chunk_tokens": 4,
        "context_tokens": 8192,
    }
    return EngineRegistration(**{**fields, **other})  # type: ignore[arg-type]


def host_registration(host: str = "h", agent_url: str = "http://127.0.0.1:1") -> HostRegistration:
    return HostRegistration(host, agent_url)


ENGINE_LOAD = Load(rates=Rates(flops=1e11, bytes_per_s={Tier.DRAM: 2e9}))
HOST_LOAD = Load(tier_bytes_limit={Tier.DRAM: 10**9})
