"""The score: the seconds until the answer's first token, and what this request costs everybody behind it.

    score = wait + price * (load + prefill)        lowest wins

`wait` is the work already booked on the engine. `load` and `prefill` come from `directory.costs` with the cheapest cut
of the hit. `price` is what one second of engine time costs all who queue: 1 + the mean number of prefills outstanding
per engine, at most `PRICE_MAX`; with nobody waiting it is 1 and the score is the expected time to the first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from directory.chunks import usable_chunks
from directory.costs import HitCut, Rates, best_cut, prefill_s
from directory.tiers import TIERS, Tier
from gateway.routing.query import Candidate, RoutingQuery, Score

PRICE_MAX = 16.0
UNKNOWN_DOUBT = 0.5
"""The share of an unknown chunk's recomputation that is charged: its partition didn't answer."""
NEUTRAL_FLOPS = 1e12
"""For a pool in which no engine has reported a rate: only the ratio of candidates counts then."""


def price(candidates: Sequence[Candidate]) -> float:
    """What one second of engine time costs, in seconds of everybody's waiting."""
    if not candidates:
        return 1.0
    return min(PRICE_MAX, 1.0 + sum(each.prefills for each in candidates) / len(candidates))


def score_all(query: RoutingQuery) -> tuple[list[Score], float]:
    """Every candidate's score, in the order given, and the price they were counted with."""
    second_s = price(query.candidates)
    neutral = _neutral_rates(query.candidates)
    scores = [_score(each, each.prompt_tokens or query.prompt_tokens, second_s, neutral) for each in query.candidates]
    return scores, second_s


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


def _score(candidate: Candidate, prompt_tokens: int, second_s: float, neutral: Rates) -> Score:
    rates = candidate.rates or neutral
    hit = _usable_hit(candidate, prompt_tokens)
    service = _service(candidate, rates, prompt_tokens, hit)
    if hit.unknown:  # where doubt costs more than it may save, what comes before it is counted alone
        certain = _Hit(hit.tiers[: hit.unknown[0]])
        service = min(service, _service(candidate, rates, prompt_tokens, certain), key=lambda each: each.total_s)
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
