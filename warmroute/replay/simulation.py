"""The replay itself: requests arrive, a policy routes them as a gateway would, engines serve them, in simulated time.

The routing code, the ledger, the overlay, the directory and the eviction policy are the real ones. What a gateway knows
is imperfect at stated values (`hardware.Imperfection`); what engines do is exact. Errors are drawn from the seed for
each engine and each request by its number, so every policy meets the same ones.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from directory.memory import MemoryDirectory
from directory.placements import NO_MATCH
from gateway.ledger import Booking, Ledger
from gateway.routing.overlay import LIFETIME_S, Overlay
from gateway.routing.policies import POLICIES
from gateway.routing.query import Candidate, RoutingDecision, RoutingQuery
from warmroute.replay.announcer import Announcer
from warmroute.replay.engine_model import EngineModel, Happened, Job
from warmroute.replay.hardware import FleetPlan
from warmroute.replay.node_tiers import TierChanges
from warmroute.replay.trace import BLOCK_TOKENS, TracedRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay saw. `spills`: requests that left the longest prefix; `busy_s`: engine seconds, by engine."""

    jobs: tuple[Job, ...]
    engines: tuple[int, ...]
    spills: int
    busy_s: tuple[float, ...]


@dataclass(slots=True)
class _Sent:
    """What the gateway remembers of an open request."""

    engine: int
    booking: Booking
    new_tokens: int


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def replay(requests: Sequence[TracedRequest], plan: FleetPlan, policy: str, seed: int = 0) -> Outcome:
    """Serve `requests`, which are in order of arrival, to the last token of the last one."""
    return _Replay(requests, plan, policy, seed).run()


class _Replay:
    def __init__(self, requests: Sequence[TracedRequest], plan: FleetPlan, policy: str, seed: int) -> None:
        drawn, flaws = random.Random(seed), plan.imperfection
        self._requests, self._plan, self._delay_s = requests, plan, flaws.announce_delay_s
        slowness = [math.exp(drawn.gauss(0, flaws.engine_spread)) for _ in range(plan.nodes)]
        self._errors = [math.exp(drawn.gauss(0, flaws.service_error)) for _ in requests]
        self._names = [f"engine-{number}" for number in range(plan.nodes)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._engines = [EngineModel(plan, each) for each in slowness]
        self._clock = _Clock()
        self._ledger, self._overlay, self._policy = Ledger(self._clock), Overlay(), POLICIES[policy]()
        self._announcer = Announcer(MemoryDirectory(self._clock), self._names)
        self._sent: dict[int, _Sent] = {}
        self._queued_tokens, self._active_tokens = [0] * plan.nodes, [0] * plan.nodes
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._versions = [0] * plan.nodes
        self._jobs: list[Job] = []
        self._chosen: list[int] = []
        self._spills = 0

    def run(self) -> Outcome:
        """Go from event to event until none is left."""
        arrivals = iter(self._requests)
        self._await_arrival(next(arrivals, None), arrivals.__next__)
        while self._events:
            self._clock.now, _, act = heapq.heappop(self._events)
            act()
        assert not self._sent, "every request ends"
        assert not self._ledger.engines(), "and leaves nothing booked"
        busy_s = tuple(each.busy_s for each in self._engines)
        return Outcome(tuple(self._jobs), tuple(self._chosen), self._spills, busy_s)

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), act))

    def _await_arrival(self, request: TracedRequest | None, following: Callable[[], TracedRequest]) -> None:
        if request is None:
            return

        def arrive() -> None:
            try:
                after = following()
            except StopIteration:
                after = None
            self._await_arrival(after, following)
            self._arrive(request)

        self._at(request.arrival_s, arrive)

    def _arrive(self, request: TracedRequest) -> None:
        number, now = len(self._jobs), self._clock.now
        job = Job(number, request)
        query = self._query(request)
        decision = self._policy.route(query)
        score = decision.ranked[0]
        engine = self._numbers[score.engine]
        self._jobs.append(job)
        self._chosen.append(engine)
        self._spills += _is_spill(decision)
        booking = self._ledger.book(score.engine, score.service_s * self._errors[number])
        self._overlay.expect(score.engine, request.keys, now + score.expected_ttft_s + LIFETIME_S)
        new_tokens = request.prompt_tokens - score.matched_tokens
        self._sent[number] = _Sent(engine, booking, new_tokens)
        self._queued_tokens[engine] += new_tokens
        self._active_tokens[engine] += request.prompt_tokens
        self._take(engine, self._engines[engine].submit(job, now))

    def _query(self, request: TracedRequest) -> RoutingQuery:
        now, keys = self._clock.now, request.keys
        matches = self._announcer.matches(keys)
        candidates = tuple(
            Candidate(
                engine=name,
                shape=self._plan.model.shape,
                rates=self._plan.model.rates,
                chunk_tokens=BLOCK_TOKENS,
                match=self._overlay.extend(name, matches.get(name, NO_MATCH), keys, now),
                wait_s=self._ledger.wait_s(name),
                prefills=self._ledger.prefills(name),
                running=self._ledger.running(name),
                queued_tokens=self._queued_tokens[number],
                active_tokens=self._active_tokens[number],
                kv_tokens_max=self._plan.blocks.gpu * BLOCK_TOKENS,
            )
            for number, name in enumerate(self._names)
        )
        return RoutingQuery(request.prompt_tokens, _affinity(request), candidates, keys=keys)

    def _take(self, engine: int, happened: Happened) -> None:
        """Tell the gateway and the directory what happened on an engine, and when to look at it again."""
        for job in happened.first_tokens:
            sent = self._sent[job.number]
            self._ledger.first_byte(sent.booking)
            self._queued_tokens[engine] -= sent.new_tokens
        for job in happened.ends:
            self._ledger.release(self._sent.pop(job.number).booking)
            self._active_tokens[engine] -= job.request.prompt_tokens
        for moment, changes in happened.changes:
            self._at(moment + self._delay_s, self._announcing(engine, changes))
        self._versions[engine] += 1
        due, version = self._engines[engine].next_at(), self._versions[engine]
        if due < math.inf:
            self._at(due, lambda: self._look_at(engine, version))

    def _announcing(self, engine: int, changes: TierChanges) -> Callable[[], None]:
        return lambda: self._announcer.announce(engine, changes, self._clock.now)

    def _look_at(self, engine: int, version: int) -> None:
        if version == self._versions[engine]:  # else something came between, and it will be looked at in its time
            self._take(engine, self._engines[engine].advance(self._clock.now))


def _affinity(request: TracedRequest) -> bytes:
    """What sticks together: the second block names the first as well, which in many traces is everybody's."""
    return request.keys[min(1, len(request.keys) - 1)] if request.keys else b""


def _is_spill(decision: RoutingDecision) -> bool:
    first, *others = decision.ranked
    return any(each.matched_tokens > first.matched_tokens for each in others)
