"""What the simulated fleet is made of: models, accelerators, tiers, and how imperfect a gateway's knowledge is."""

from dataclasses import dataclass, field

from directory.costs import ModelShape, Rates, kv_bytes_per_token
from directory.hardware import Hardware
from directory.tiers import Tier
from gateway.shared_load import SHARE_INTERVAL_S

TIER_BYTES_PER_S = {Tier.DRAM: 25e9, Tier.NVME: 7e9}
TIER_FIXED_S = {Tier.NVME: 0.002}


@dataclass(frozen=True, slots=True)
class Model:
    """A model and the accelerators of one engine: useful FLOP/s, and seconds between two tokens of a lone reply."""

    shape: ModelShape
    flops: float
    step_s: float

    @property
    def rates(self) -> Rates:
        """What such an engine registers."""
        return Rates(self.flops, TIER_BYTES_PER_S, TIER_FIXED_S)


MODELS = {
    "8b": Model(ModelShape(8e9, 32, 4096, kv_bytes_per_token(32, 8, 128, 2)), flops=4e14, step_s=0.02),
    "70b": Model(ModelShape(70e9, 80, 8192, kv_bytes_per_token(80, 8, 128, 2)), flops=3.2e15, step_s=0.03),
}
"""Llama 3's shapes with 16-bit KV, on one accelerator and on eight, at 400 useful TFLOP/s each."""
STEP_OVER_WEIGHTS = 4.0
"""A step of the engine takes so many times what reading the active weights does: by it the 8B's is `MODELS`' 20 ms."""


def model_named(name: str, accelerator: str, devices: int) -> Model:
    """One of `MODELS`, or of the table of hardware in 16 bits. Raises `UnknownHardware`."""
    if name in MODELS:
        return MODELS[name]
    spec, device = Hardware().model(name), Hardware().accelerator(accelerator)
    weights_s = 2 * spec.active_parameters / (device.memory_bytes_per_s * devices)
    return Model(spec.shape(), device.useful_flops(devices), STEP_OVER_WEIGHTS * weights_s)


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """Blocks of 512 tokens in each tier of a node; 0 for none. An engine always has some `gpu`.

    Chunks reach NVMe through DRAM: without DRAM there is no NVMe either.
    """

    gpu: int = 800
    dram: int = 2000
    nvme: int = 30_000


@dataclass(frozen=True, slots=True)
class Imperfection:
    """How far a gateway's knowledge is from the truth.

    `service_error`: standard deviation of the logarithm of a booked service over the expected one; `engine_spread`: the
    same of an engine's real speed; `announce_delay_s`: until a change in a tier is in the directory. A gateway
    reports its load when it changes, `report_interval_s` after its last report or later, which the others can read
    `report_s` seconds later; they do so every `poll_interval_s`.
    """

    service_error: float = 0.25
    engine_spread: float = 0.1
    announce_delay_s: float = 0.3
    report_interval_s: float = SHARE_INTERVAL_S
    report_s: float = 0.002
    poll_interval_s: float = SHARE_INTERVAL_S


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet of equal nodes, one engine each.

    `interference`: by how much each running reply slows a prefill; `prefill_chunk_tokens`: the tokens of a prompt that
    one step of the engine takes, between which every running reply gets one token. 512 is a budget at which replies
    hardly wait for prefills (Sarathi-Serve, OSDI 2024); larger ones make replies longer and fill the GPU's KV.
    `write_policy`: which blocks are written to NVMe, by the agent's names. `gateways`: requests go to each in turn.
    `peers`: whether hosts fetch from each other, at `peer_bytes_per_s` a host after `peer_s` seconds; the default is
    what is left of 100 Gbit/s when both ends copy and check on one core. `corrects_rates`: whether gateways learn from
    first tokens how fast each engine is.
    """

    nodes: int
    model: Model = MODELS["8b"]
    blocks: TierBlocks = field(default_factory=TierBlocks)
    imperfection: Imperfection = field(default_factory=Imperfection)
    interference: float = 0.01
    prefill_chunk_tokens: int = 512
    write_policy: str = "reuse"
    gateways: int = 1
    peers: bool = False
    peer_bytes_per_s: float = 6e9
    peer_s: float = 0.002
    corrects_rates: bool = True
