"""What a routing decision is made from, and what it says. Neither knows HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from directory.costs import ModelShape, Rates
from directory.placements import NO_MATCH, PrefixMatch
from directory.tiers import Tier


@dataclass(frozen=True, slots=True)
class PeerExtension:
    """What another host's agent can add to a candidate's own match: the chunks after it, up to `chunks` from the start.

    `address` is that agent's (`host:port`); the chunks come at `bytes_per_s`, after `fixed_s` seconds.
    """

    address: str
    chunks: int
    bytes_per_s: float
    fixed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that may serve the request.

    `rates` is `None` for an engine that has reported none. `wait_s` is the work booked ahead of this request,
    `prefills` how many requests on it haven't shown their first byte, `running` how many are open. `prompt_tokens` is
    the prompt's length in tokens of its own, where they aren't the query's. `queued_tokens` are still to be prefilled
    there, the prompts of its open requests hold `active_tokens` of its KV cache, which holds `kv_tokens_max` at most.
    `peer` is the other host that can lengthen its match furthest. `use` is the share of its time that was given to it
    lately, done or not. The last `expected_chunks` of `match` aren't there yet: they are on their way
    (`gateway.routing.overlay`).
    """

    engine: str
    shape: ModelShape
    rates: Rates | None
    chunk_tokens: int
    match: PrefixMatch = NO_MATCH
    wait_s: float = 0.0
    prefills: int = 0
    running: int = 0
    prompt_tokens: int | None = None
    queued_tokens: int = 0
    active_tokens: int = 0
    kv_tokens_max: int | None = None
    peer: PeerExtension | None = None
    use: float = 0.0
    expected_chunks: int = 0


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """One request and its candidates. `affinity` decides near ties, alike on every gateway (the first chunk key).

    `without_placements` says why nothing is known of who holds the prompt, where nothing is: affinity then decides
    within a bound on load, and the reason is this text. `keys` are the prompt's chunk keys, for policies that remember
    what they sent where.
    """

    prompt_tokens: int
    affinity: bytes
    candidates: tuple[Candidate, ...]
    without_placements: str = ""
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """A candidate with each term of its score, in seconds; the lowest `score_s` is served first.

    `price` is what a second of its time was counted as, `replies_s` what open requests' replies add, and `evict_s` what
    its GPU can't hold. Of `matched_tokens`, the last `peer_tokens` come from the agent at `peer` and count as `dram`;
    the last `expected_tokens` before those aren't there yet.
    """

    engine: str
    score_s: float
    wait_s: float
    load_s: float
    prefill_s: float
    matched_tokens: int
    tier_tokens: Mapping[Tier, int] = field(default_factory=dict)
    price: float = 1.0
    replies_s: float = 0.0
    evict_s: float = 0.0
    peer: str = ""
    peer_tokens: int = 0
    expected_tokens: int = 0

    @property
    def service_s(self) -> float:
        """Engine seconds the request is expected to take before its first token."""
        return self.load_s + self.prefill_s

    @property
    def expected_ttft_s(self) -> float:
        """Seconds from now to the first token."""
        return self.wait_s + self.service_s


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """The candidates, best first, and why the first one leads. The ranking is final."""

    ranked: tuple[Score, ...]
    reason: str

    @property
    def price(self) -> float:
        """What a second of the first one's time was counted as."""
        return self.ranked[0].price
