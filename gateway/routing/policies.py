"""The routing policies behind one protocol, chosen by name: the default, simple ones, and others' published forms.

Every policy ranks all candidates and loses none; equal costs go by rendezvous hash of the query's affinity, so alike on
every gateway and in whatever order the candidates come. The published forms are here to be compared with
(`warmroute replay`); each says where its formula comes from.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from gateway.routing.approx_tree import ApproxTree
from gateway.routing.query import Candidate, RoutingDecision, RoutingQuery
from gateway.routing.router import rendezvous, route, route_by_affinity
from gateway.routing.seconds import score_all

PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0
OVERLAP_WEIGHT = 1.0
TURNS_MAX = 4096
"""Engines whose last turn is remembered."""

Cost = tuple[float, ...]
Costs = Callable[[RoutingQuery], Sequence[Cost]]


class Policy(Protocol):
    """Ranks candidates. An object may remember what it decided: one for each gateway."""

    def route(self, query: RoutingQuery) -> RoutingDecision:
        """The candidates of `query`, best first; it has at least one."""
        ...


class Seconds:
    """The default: the engine whose answer comes soonest, at the price of its time (`gateway.routing.seconds`)."""

    def route(self, query: RoutingQuery) -> RoutingDecision:
        """See `Policy`."""
        return route(query)


class Sticky:
    """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016), by rendezvous on the affinity."""

    def route(self, query: RoutingQuery) -> RoutingDecision:
        """See `Policy`."""
        return route_by_affinity(query, "sticky")


class ByCost:
    """The lowest cost first. `costs` gives one for each candidate, in their order."""

    def __init__(self, name: str, costs: Costs) -> None:
        self._name, self._costs = name, costs

    def route(self, query: RoutingQuery) -> RoutingDecision:
        """See `Policy`."""
        return ranked_by(query, self._costs(query), self._name)


class RoundRobin:
    """Each in turn: whose last turn is longest ago leads, whoever else could serve then; at first by their names.

    One turn for all would be a turn for nobody: with two models in turn, each would see every other number.
    """

    def __init__(self) -> None:
        self._turns = count()
        self._last: dict[str, int] = {}

    def route(self, query: RoutingQuery) -> RoutingDecision:
        """See `Policy`."""
        place = {name: number for number, name in enumerate(sorted(each.engine for each in query.candidates))}
        costs = [(self._last.get(each.engine, -1), place[each.engine]) for each in query.candidates]
        decision = ranked_by(query, costs, "round-robin")
        self._last.pop(decision.ranked[0].engine, None)
        self._last[decision.ranked[0].engine] = next(self._turns)
        if len(self._last) > TURNS_MAX:
            del self._last[next(iter(self._last))]
        return decision


class RememberedPrefix:
    """SGLang's `cache_aware`: prefixes from a tree of what was sent where, and least load where engines are uneven.

    From the documentation of its router's options, with their present defaults. Uneven: the most open requests exceed
    the fewest by more than `balance_abs_threshold` and by more than `balance_rel_threshold` times; then the fewest
    lead. Else, where the longest remembered prefix is more than `cache_threshold` of the prompt, its engine leads; else
    the smallest tree does. The tree there is of characters; here it is of chunk keys.
    """

    CACHE_THRESHOLD, BALANCE_ABS_THRESHOLD, BALANCE_REL_THRESHOLD = 0.3, 64, 1.5

    def __init__(self) -> None:
        self._tree = ApproxTree()

    def route(self, query: RoutingQuery) -> RoutingDecision:
        """See `Policy`. Remembers that the prompt goes to the first."""
        decision = ranked_by(query, self._costs(query), "approx-tree")
        self._tree.insert(decision.ranked[0].engine, query.keys)
        return decision

    def _costs(self, query: RoutingQuery) -> list[Cost]:
        loads = [each.running for each in query.candidates]
        most, fewest = max(loads), min(loads)
        if most - fewest > self.BALANCE_ABS_THRESHOLD and most > fewest * self.BALANCE_REL_THRESHOLD:
            return [(load,) for load in loads]
        matched = [self._tree.match(each.engine, query.keys) for each in query.candidates]
        chunk_tokens = query.candidates[0].chunk_tokens
        if max(matched) * chunk_tokens > self.CACHE_THRESHOLD * query.prompt_tokens:
            return [(-chunks,) for chunks in matched]
        return [(self._tree.size(each.engine),) for each in query.candidates]


def ranked_by(query: RoutingQuery, costs: Sequence[Cost], reason: str) -> RoutingDecision:
    """The candidates by cost, the lowest first, equal ones by rendezvous hash."""
    assert query.candidates, "a query has candidates, or there is nothing to route"
    scores = score_all(query)
    order = sorted(
        zip(costs, scores, strict=True),
        key=lambda each: (each[0], rendezvous(query.affinity, each[1].engine), each[1].engine),
    )
    return RoutingDecision(tuple(score for _, score in order), reason)


def least_load(query: RoutingQuery) -> list[Cost]:
    """The shortest wait, then the fewest open requests; blind to prefixes."""
    return [(each.wait_s, each.running) for each in query.candidates]


def longest_prefix(query: RoutingQuery) -> list[Cost]:
    """The longest prefix, whatever waits there; the shortest wait among equals."""
    return [(-_hit_tokens(query, each), each.wait_s) for each in query.candidates]


def weighted_sum(query: RoutingQuery) -> list[Cost]:
    """llm-d's default profile: 3 x prefix + 2 x queue + 2 x free KV, each from 0 to 1; the highest sum leads.

    From the published configurations of its endpoint picker (`prefix-cache-scorer` 3, `queue-scorer` 2,
    `kv-cache-utilization-scorer` 2): the matched share of the prompt; how far the queue is below the pool's longest, as
    a share of longest less shortest (1 where all are equal); the share of the KV cache that isn't used.
    """
    queues = [each.prefills for each in query.candidates]
    longest, spread = max(queues), max(queues) - min(queues)
    costs: list[Cost] = []
    for each in query.candidates:
        prefix = _hit_tokens(query, each) / max(1, query.prompt_tokens)
        queue = (longest - each.prefills) / spread if spread else 1.0
        free = 1.0 - min(1.0, each.active_tokens / each.kv_tokens_max) if each.kv_tokens_max else 1.0
        costs.append((-(PREFIX_WEIGHT * prefix + QUEUE_WEIGHT * queue + KV_WEIGHT * free),))
    return costs


def blocks_of_work(query: RoutingQuery) -> list[Cost]:
    """Dynamo's cost: overlap weight x prefill blocks + decode blocks, as if the request were there; the lowest leads.

    From its "Router Design" page (weight 1 by default): prefill blocks are the tokens still to be prefilled, this
    request's uncached ones included; decode blocks those of open requests, this one's prompt included. Dynamo
    doesn't count what of this prompt open requests hold already; here all of it counts, which differs where requests
    with one prefix meet.
    """
    costs: list[Cost] = []
    for each in query.candidates:
        prefill = each.queued_tokens + query.prompt_tokens - _hit_tokens(query, each)
        decode = each.active_tokens + query.prompt_tokens
        costs.append(((OVERLAP_WEIGHT * prefill + decode) / each.chunk_tokens,))
    return costs


def product(query: RoutingQuery) -> list[Cost]:
    """LMetric: new prefill tokens, the queued ones included, times the batch size (Zhang et al., arXiv 2603.15202).

    The request counts in its batch, or all idle engines would tie at nothing.
    """
    return [
        ((each.queued_tokens + query.prompt_tokens - _hit_tokens(query, each)) * (each.running + 1.0),)
        for each in query.candidates
    ]


def _hit_tokens(query: RoutingQuery, candidate: Candidate) -> int:
    """What the placements promise, whether or not all of it is worth loading; one token is always computed."""
    return min(candidate.match.chunks * candidate.chunk_tokens, query.prompt_tokens - 1)


POLICIES: dict[str, Callable[[], Policy]] = {
    "seconds": Seconds,
    "least-load": lambda: ByCost("least-load", least_load),
    "round-robin": RoundRobin,
    "sticky": Sticky,
    "prefix": lambda: ByCost("prefix", longest_prefix),
    "weighted": lambda: ByCost("weighted", weighted_sum),
    "blocks": lambda: ByCost("blocks", blocks_of_work),
    "product": lambda: ByCost("product", product),
    "approx-tree": RememberedPrefix,
}
