"""The score: the seconds until the answer's first token, and what this request costs everybody behind it.

    score = wait + price * (load + prefill) + replies + evict        lowest wins

`wait` is the work already booked on the engine. `load` and `prefill` come from `directory.costs` with the cheapest cut
of the hit. `price` is what one second of this engine's time costs all who want it: 1 for the request itself, 1 for each
prefill that queues there, and `USE_WEIGHT` for the share of its time that was given away lately, at most `PRICE_MAX`:
those who will come meanwhile. On an engine that nobody uses it is 1, and the score is the expected time to the first
token; so a crowd leaves the holder of its prefix for idle engines, and what has no prefix leaves a busy one.

`replies` is `REPLY_SHARE` of the terms before it for every open request: replies share the engine's steps with
prefills, and what is queued will reply, too. `evict` is for an engine whose GPU can't hold this prompt beside those of
its open requests: the seconds to compute what doesn't fit once more. What of the prompt is there already is held.

What another host's agent can add to the hit counts as far as it will have come when the wait is over, as chunks in
`dram`: no engine waits for a peer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from directory.chunks import usable_chunks
from directory.costs import HitCut, Rates, best_cut, prefill_s
from directory.tiers import TIERS, Tier
from gateway.routing.query import Candidate, RoutingQuery, Score

PRICE_MAX = 16.0
USE_WEIGHT = 2.0
"""From replays of both traces: 1 is better than 0, 2 better than 1, 4 no better than 2."""
REPLY_SHARE = 0.01
"""By how much a running reply slows a prefill, about (`warmroute.replay.hardware`). What is queued will reply, too."""
UNKNOWN_DOUBT = 0.5
"""The share of an unknown chunk's recomputation that is charged: its partition didn't answer."""
NEUTRAL_FLOPS = 2e14
"""For a pool of which no rate is known: half of what an H100 computes. What is booked and what was given lately are
seconds, so a rate that is far too low would make every engine seem overrun, and prefixes be left for nothing."""


def price(candidate: Candidate) -> float:
    """What one second of this engine's time costs, in seconds of everybody's waiting."""
    return min(PRICE_MAX, 1.0 + candidate.prefills + USE_WEIGHT * candidate.use)


def score_all(query: RoutingQuery) -> list[Score]:
    """Every candidate's score, in the order given."""
    neutral = _neutral_rates(query.candidates)
    return [_score(each, each.prompt_tokens or query.prompt_tokens, neutral) for each in query.candidates]


@dataclass(frozen=True, slots=True)
class _Hit:
    tiers: tuple[Tier, ...]
    unknown: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Service:
    hit: _Hit
    cut: HitCut
    doubt_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.cut.total_s + self.doubt_s


def _score(candidate: Candidate, prompt_tokens: int, neutral: Rates) -> Score:
    rates = candidate.rates or neutral
    own = _usable_hit(candidate, prompt_tokens)
    hit = _with_peer(candidate, own, prompt_tokens)
    service = _service(candidate, rates, prompt_tokens, hit)
    if hit.unknown:  # where doubt costs more than it may save, what comes before it is counted alone
        certain = _Hit(hit.tiers[: hit.unknown[0]])
        service = min(service, _service(candidate, rates, prompt_tokens, certain), key=lambda each: each.total_s)
    second_s = price(candidate)
    cut, prefill = service.cut, service.cut.prefill_s + service.doubt_s
    seconds = candidate.wait_s + second_s * (cut.load_s + prefill)
    tier_tokens = {
        tier: count * candidate.chunk_tokens for tier in TIERS if (count := service.hit.tiers[: cut.chunks].count(tier))
    }
    to_hold = prompt_tokens - tier_tokens.get(Tier.GPU, 0)
    replies, evict = REPLY_SHARE * candidate.running * seconds, _evict_s(candidate, rates, to_hold)
    fetched = max(0, cut.chunks - len(own.tiers))
    return Score(
        engine=candidate.engine,
        score_s=seconds + replies + evict,
        wait_s=candidate.wait_s,
        load_s=cut.load_s,
        prefill_s=prefill,
        matched_tokens=cut.chunks * candidate.chunk_tokens,
        tier_tokens=tier_tokens,
        price=second_s,
        replies_s=replies,
        evict_s=evict,
        peer=candidate.peer.address if candidate.peer and fetched else "",
        peer_tokens=fetched * candidate.chunk_tokens,
        expected_tokens=max(0, min(cut.chunks - candidate.match.chunks, 0) + candidate.expected_chunks)
        * candidate.chunk_tokens,
    )


def _evict_s(candidate: Candidate, rates: Rates, to_hold: int) -> float:
    """Seconds to compute the tokens that won't fit beside `to_hold` more, each once, whatever comes before them."""
    if candidate.kv_tokens_max is None:
        return 0.0
    excess = max(0, candidate.active_tokens + to_hold - candidate.kv_tokens_max)
    return 2 * candidate.shape.parameters * excess / rates.flops


def _with_peer(candidate: Candidate, own: _Hit, prompt_tokens: int) -> _Hit:
    """The hit, lengthened by what will have come from the peer when the wait is over."""
    peer, usable = candidate.peer, usable_chunks(prompt_tokens, candidate.chunk_tokens)
    if peer is None or len(own.tiers) < min(candidate.match.chunks, usable):  # a run that ends in the unknown
        return own
    chunk_s = candidate.chunk_tokens * candidate.shape.kv_bytes_per_token / peer.bytes_per_s
    in_time = int(max(0.0, candidate.wait_s - peer.fixed_s) / chunk_s)
    more = min(in_time, min(peer.chunks, usable) - len(own.tiers))
    return _Hit(own.tiers + (Tier.DRAM,) * more, own.unknown)


def _usable_hit(candidate: Candidate, prompt_tokens: int) -> _Hit:
    """The tiers of the chunks that may be loaded; an unknown one counts as the next known one's tier.

    A chunk is never older than those after it, so it is rarely in a slower tier. What no known chunk follows isn't
    counted: the unknown doesn't lengthen a run.
    """
    run = candidate.match.tiers[: usable_chunks(prompt_tokens, candidate.chunk_tokens)]
    if None not in run:
        return _Hit(cast(tuple[Tier, ...], run))
    tiers: list[Tier] = []
    unknown: list[int] = []
    following: Tier | None = None
    for position in range(len(run) - 1, -1, -1):
        tier = run[position]
        following = tier or following
        if following is not None:
            tiers.append(following)
            if tier is None:
                unknown.append(position)
    return _Hit(tuple(reversed(tiers)), tuple(reversed(unknown)))


def _service(candidate: Candidate, rates: Rates, prompt_tokens: int, hit: _Hit) -> _Service:
    """The cheapest cut of a hit, and `UNKNOWN_DOUBT` of what its unknown chunks would cost, were they missing."""
    cut = best_cut(candidate.shape, rates, prompt_tokens, candidate.chunk_tokens, hit.tiers)
    doubted = sum(position < cut.chunks for position in hit.unknown) * candidate.chunk_tokens
    if not doubted:
        return _Service(hit, cut)
    loaded = cut.chunks * candidate.chunk_tokens
    missing_s = prefill_s(candidate.shape, rates, prompt_tokens, loaded - doubted) - cut.prefill_s
    return _Service(hit, cut, UNKNOWN_DOUBT * missing_s)


def _neutral_rates(candidates: Sequence[Candidate]) -> Rates:
    known = [each.rates.flops for each in candidates if each.rates is not None]
    return Rates(sum(known) / len(known) if known else NEUTRAL_FLOPS)
