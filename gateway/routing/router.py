"""Chooses the engine: scores every candidate, breaks near ties alike on every gateway, and says why."""

import hashlib
import math

from gateway.routing.query import Candidate, RoutingDecision, RoutingQuery, Score
from gateway.routing.seconds import score_all

NEAR_TIE_SHARE = 0.02
NEAR_TIE_S = 0.002
BOUND = 1.25
"""Without placements: an engine may carry this many times the mean of open requests before affinity leaves it."""


def route(query: RoutingQuery) -> RoutingDecision:
    """Rank the candidates of `query`, best first. Needs at least one."""
    assert query.candidates, "a query has candidates, or there is nothing to route"
    if query.without_placements:
        return route_by_affinity(query, query.without_placements)
    scores = score_all(query)
    best = min(score.score_s for score in scores)
    tie = best * (1 + NEAR_TIE_SHARE) + NEAR_TIE_S
    kin = _kin(query)
    ranked = sorted(
        scores,
        key=lambda score: (
            (0, -score.matched_tokens, rendezvous(kin, score.engine))
            if score.score_s <= tie
            else (1, score.score_s, rendezvous(kin, score.engine))
        ),
    )
    return RoutingDecision(tuple(ranked), _reason(ranked))


def _reason(ranked: list[Score]) -> str:
    """Why the first leads: `only-engine`, `prefix`, `spill` (a longer prefix is left elsewhere), or `load`."""
    if len(ranked) == 1:
        return "only-engine"
    longest = max(score.matched_tokens for score in ranked)
    if not longest:
        return "load"
    return "prefix" if ranked[0].matched_tokens == longest else "spill"


def _kin(query: RoutingQuery) -> bytes:
    """What prompts have in common that go together among equals.

    An affinity that is more than the first chunk's key stands. Many prompts begin alike, though, with a system prompt,
    and if the first chunk decided, all gateways would send all of them to one and the same idle engine before they hear
    of each other. So those go together that have about half of their chunks in common: the key at a power of two, so
    that one chunk more or less seldom makes another of it.
    """
    if not query.keys or query.affinity != query.keys[0]:
        return query.affinity
    half = max(1, len(query.keys) // 2)
    return query.keys[(1 << half.bit_length() - 1) - 1]


def route_by_affinity(query: RoutingQuery, reason: str) -> RoutingDecision:
    """Bounded-load rendezvous hashing: replicas agree without placements, and most affinity survives.

    The candidates are taken in rendezvous order; those that would carry more than `BOUND` times the mean, this request
    counted, come last. That is rounded up as published (consistent hashing with bounded loads; Mirrokni, Thorup,
    Zadimoghaddam, 2016), or a small fleet that is even would push its prefixes around.
    """
    scores = score_all(query)
    by_engine = {score.engine: score for score in scores}
    bound = math.ceil(BOUND * (1 + sum(each.running for each in query.candidates)) / len(query.candidates))

    def order(candidate: Candidate) -> tuple[bool, bytes]:
        return candidate.running + 1 > bound, rendezvous(query.affinity, candidate.engine)

    ranked = tuple(by_engine[each.engine] for each in sorted(query.candidates, key=order))
    return RoutingDecision(ranked, reason)


def rendezvous(affinity: bytes, engine: str) -> bytes:
    """Highest-random-weight hashing: the engine whose digest sorts first wins the key."""
    return hashlib.blake2b(affinity + engine.encode(), digest_size=8).digest()
