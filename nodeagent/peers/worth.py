"""Whether fetching chunks from a peer beats computing them. Pure: no clock, no I/O; moments are arguments.

A hint is followed where

    round trip + bytes of these chunks and of those queued before them / the peer's bandwidth + the load from DRAM
        < what the attached engine that computes fastest needs for as many tokens

A hint says nothing of its chunks' places, so computing is priced as at the start of a prompt, where it costs least:
that errs towards computing. Bandwidth is measured (`peer_rate.py`). Of a peer that isn't measured yet, or whose
rate was too low and may have risen, a probe of a few chunks is fetched now and then: all else is expected to pay.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass

from directory.costs import ModelShape, Rates, prefill_s, tier_load_s
from directory.tiers import Tier

PROBE_CHUNKS = 2
PROBE_INTERVAL_S = 30.0


class Refusal(enum.Enum):
    """Why chunks that a hint names aren't fetched: a metric's label."""

    SLOWER = "slower"
    UNMEASURED = "unmeasured"


@dataclass(frozen=True, slots=True)
class Computing:
    """How fast one attached engine computes, and loads what is in DRAM."""

    shape: ModelShape
    rates: Rates
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class PeerEstimate:
    """What is known of a peer: bytes/s, `None` until measured; seconds to the first byte; when it was last probed."""

    bytes_per_s: float | None
    first_byte_s: float
    probed_at_s: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many of a hint's chunks are fetched, and why the others aren't."""

    chunks: int
    refusal: Refusal | None = None
    is_probe: bool = False


def judge(
    chunks: int, queued: int, chunk_bytes: int, peer: PeerEstimate, engines: Collection[Computing], now_s: float
) -> Verdict:
    """What becomes of a hint to `chunks` chunks of at most `chunk_bytes`, behind `queued` others of this peer."""
    if not chunks:
        return Verdict(0)
    refusal = Refusal.UNMEASURED
    if peer.bytes_per_s is not None:
        fetch_s = peer.first_byte_s + (chunks + queued) * chunk_bytes / peer.bytes_per_s
        if engines and all(fetch_s < saved_s(chunks, each) for each in engines):
            return Verdict(chunks)
        refusal = Refusal.SLOWER
    if queued or (peer.probed_at_s is not None and now_s - peer.probed_at_s < PROBE_INTERVAL_S):
        return Verdict(0, refusal)
    probed = min(chunks, PROBE_CHUNKS)
    return Verdict(probed, refusal if probed < chunks else None, is_probe=True)


def saved_s(chunks: int, engine: Computing) -> float:
    """Seconds that an engine saves by loading this many chunks from DRAM instead of computing them, at least."""
    tokens = chunks * engine.chunk_tokens
    return prefill_s(engine.shape, engine.rates, tokens) - tier_load_s(engine.shape, engine.rates, Tier.DRAM, tokens)
