"""The score: the seconds until the answer's first token, and what this request costs everybody behind it.

    score = wait + price * (load + prefill)        lowest wins

`wait` is the work already booked on the engine. `load` and `prefill` come from `directory.costs` with the cheapest cut
of the hit. `price` is what one second of engine time costs all who queue: 1 + the mean number of prefills outstanding
per engine, at most `PRICE_MAX`; with nobody waiting it is 1 and the score is the expected time to the first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    return [_score(each, query.prompt_tokens, second_s, neutral) for each in query.candidates], second_s


@dataclass(frozen=True, slots=True)
class _Hit:
    tiers: tuple[Tier, ...]
    unknown: tuple[bool, ...]


def _score(candidate: Candidate, prompt_tokens: int, second_s: float, neutral: Rates) -> Score:
    rates = candidate.rates or neutral
    hit = _usable_hit(candidate, prompt_tokens)
    cut = best_cut(candidate.shape, rates, prompt_tokens, candidate.chunk_tokens, hit.tiers)
    doubt_s = _doubt_s(candidate, rates, prompt_tokens, hit, cut)
    tier_tokens = {
        tier: count * candidate.chunk_tokens for tier in TIERS if (count := hit.tiers[: cut.chunks].count(tier))
    }
    prefill = cut.prefill_s + doubt_s
    return Score(
        engine=candidate.engine,
        score_s=candidate.wait_s + second_s * (cut.load_s + prefill),
        wait_s=candidate.wait_s,
        load_s=cut.load_s,
        prefill_s=prefill,
        matched_tokens=cut.chunks * candidate.chunk_tokens,
        tier_tokens=tier_tokens,
    )


def _usable_hit(candidate: Candidate, prompt_tokens: int) -> _Hit:
    """The tiers of the chunks that may be loaded; an unknown one counts as its slowest neighbour's tier."""
    run = candidate.match.tiers[: usable_chunks(prompt_tokens, candidate.chunk_tokens)]
    known = [tier for tier in run if tier is not None]
    if not known:
        return _Hit((), ())
    slowest = max(known)
    return _Hit(tuple(slowest if tier is None else tier for tier in run), tuple(tier is None for tier in run))


def _doubt_s(candidate: Candidate, rates: Rates, prompt_tokens: int, hit: _Hit, cut: HitCut) -> float:
    """What unknown chunks inside the cut would cost, were they missing, times `UNKNOWN_DOUBT`."""
    doubted = sum(hit.unknown[: cut.chunks]) * candidate.chunk_tokens
    if not doubted:
        return 0.0
    loaded = cut.chunks * candidate.chunk_tokens
    missing_s = prefill_s(candidate.shape, rates, prompt_tokens, loaded - doubted) - cut.prefill_s
    return UNKNOWN_DOUBT * missing_s


def _neutral_rates(candidates: Sequence[Candidate]) -> Rates:
    known = [each.rates.flops for each in candidates if each.rates is not None]
    return Rates(sum(known) / len(known) if known else NEUTRAL_FLOPS)
