"""The score: the seconds until the answer's first token, and what this request costs everybody behind it.

    score = wait + price * (load + prefill)        lowest wins

`wait` is the work already booked on the engine. `load` and `prefill` come from `directory.costs` with the cheapest cut
of the hit. `price` is what one second of this engine's time costs all who want it: 1 for the request itself, 1 for each
prefill that queues there, and `USE_WEIGHT` for the share of its time that was given away lately, at most `PRICE_MAX`:
those who will come meanwhile. On an engine that nobody uses it is 1, and the score is the expected time to the first
token; so a crowd leaves the holder of its prefix for idle engines, and what has no prefix leaves a busy one.
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
UNKNOWN_DOUBT = 0.5
"""The share of an unknown chunk's recomputation that is charged: its partition didn't answer."""
NEUTRAL_FLOPS = 1e12
"""For a pool in which no engine has reported a rate: only the ratio of candidates counts then."""


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
    hit = _usable_hit(candidate, prompt_tokens)
    service = _service(candidate, rates, prompt_tokens, hit)
    if hit.unknown:  # where doubt costs more than it may save, what comes before it is counted alone
        certain = _Hit(hit.tiers[: hit.unknown[0]])
        service = min(service, _service(candidate, rates, prompt_tokens, certain), key=lambda each: each.total_s)
    second_s = price(candidate)
    cut, prefill = service.cut, service.cut.prefill_s + service.doubt_s
    tier_tokens = {
        tier: count * candidate.chunk_tokens for tier in TIERS if (count := service.hit.tiers[: cut.chunks].count(tier))
    }
    return Score(
        engine=candidate.engine,
        score_s=candidate.wait_s + second_s * (cut.load_s + prefill),
        wait_s=candidate.wait_s,
        load_s=cut.load_s,
        prefill_s=prefill,
        matched_tokens=cut.chunks * candidate.chunk_tokens,
        tier_tokens=tier_tokens,
        price=second_s,
        expected_tokens=max(0, cut.chunks + candidate.expected_chunks - candidate.match.chunks)
        * candidate.chunk_tokens,
    )


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
