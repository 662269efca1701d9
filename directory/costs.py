"""Seconds to load KV and seconds to recompute it: the arithmetic behind every routing decision.

The break-even formulas are the published ones; `tests/vectors/break_even.json` holds golden values. For n tokens,
of which the first h are loaded, with P parameters, L layers, d the model's width:

    load    = hit bytes / bandwidth of the tier + a fixed cost per tier used
    prefill = (2 P (n - h) + 2 L d (n**2 - h**2)) / useful FLOP/s
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from directory.tiers import Tier

TOKENS_MAX = 2**24
"""No prompt is longer; where a break-even is looked for."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's arithmetic depends on. `kv_bytes_per_token` counts all layers, heads and ranks."""

    parameters: float
    layers: int
    d_model: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast an engine computes (useful FLOP/s) and its tiers deliver (bytes/s, and fixed seconds a load).

    A tier that isn't named costs nothing to load: chunks in an engine's own GPU memory are used in place.
    """

    flops: float
    bytes_per_s: Mapping[Tier, float] = field(default_factory=dict)
    fixed_s: Mapping[Tier, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HitCut:
    """How much of a hit is worth loading: the first `chunks` chunks, and what that costs."""

    chunks: int
    load_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        """Seconds of engine time: loading and computing."""
        return self.load_s + self.prefill_s


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of keys and values one token leaves behind."""
    return 2 * layers * kv_heads * head_dim * dtype_bytes


def prefill_s(shape: ModelShape, rates: Rates, prompt_tokens: int, hit_tokens: int = 0) -> float:
    """Seconds to compute the tokens of a prompt after its first `hit_tokens`."""
    return prefill_flop(shape, prompt_tokens, hit_tokens) / rates.flops


def prefill_flop(shape: ModelShape, prompt_tokens: int, hit_tokens: int = 0) -> float:
    """Floating-point operations to compute the tokens of a prompt after its first `hit_tokens`."""
    linear = 2 * shape.parameters * (prompt_tokens - hit_tokens)
    attention = 2 * shape.layers * shape.d_model * (prompt_tokens**2 - hit_tokens**2)
    return linear + attention


def tier_load_s(shape: ModelShape, rates: Rates, tier: Tier, tokens: int) -> float:
    """Seconds to load `tokens` tokens of KV from `tier`; none for no tokens."""
    if not tokens or tier not in rates.bytes_per_s:
        return 0.0
    return tokens * shape.kv_bytes_per_token / rates.bytes_per_s[tier] + rates.fixed_s.get(tier, 0.0)


def break_even_tokens(shape: ModelShape, rates: Rates, tier: Tier) -> int | None:
    """The fewest tokens, from a prompt's start, that are loaded from `tier` no later than they are computed.

    `None` where computing is quicker however many they are, up to `TOKENS_MAX`. Attention makes a token dearer the
    later it comes, so beyond this length loading stays the better choice.
    """

    def saved_s(tokens: int) -> float:
        return prefill_s(shape, rates, tokens) - tier_load_s(shape, rates, tier, tokens)

    if saved_s(TOKENS_MAX) < 0:
        return None
    low, high = 0, TOKENS_MAX
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if saved_s(middle) >= 0 else (middle, high)
    return high


def best_cut(shape: ModelShape, rates: Rates, prompt_tokens: int, chunk_tokens: int, tiers: Sequence[Tier]) -> HitCut:
    """How many of the leading hit chunks (the tier of each in `tiers`) to load so that the prompt is ready soonest.

    Where loading a part costs more than computing it (few tokens, a slow drive), the cheaper cut is taken. Cuts are
    weighed where the tier changes and at the end: between those points the saving per chunk only grows with its
    position, so no better cut lies inside a run of one tier.
    """
    best = HitCut(0, 0.0, prefill_s(shape, rates, prompt_tokens))
    loaded_tokens: dict[Tier, int] = {}
    chunks = 0
    for tier, run in groupby(tiers):
        length = len(list(run))
        chunks += length
        loaded_tokens[tier] = loaded_tokens.get(tier, 0) + length * chunk_tokens
        load = sum(tier_load_s(shape, rates, each, tokens) for each, tokens in loaded_tokens.items())
        cut = HitCut(chunks, load, prefill_s(shape, rates, prompt_tokens, chunks * chunk_tokens))
        if cut.total_s <= best.total_s:
            best = cut
    return best
