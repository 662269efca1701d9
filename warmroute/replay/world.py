"""World: gateways, engines, the directory and the network between hosts, in simulated time.

The routing code, the ledger, the overlay, the directory, the eviction and write policies, and the rule by which chunks
are fetched from peers are the real ones. What a gateway knows is imperfect at stated values
(`hardware.Imperfection`); what engines do is exact. Errors are drawn from the seed for each engine and for each request
by its number, so every policy meets the same ones.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from directory.members import INCARNATION_BYTES
from directory.memory import MemoryDirectory
from gateway.routing.query import RoutingDecision, Score
from warmroute.replay.announcer import Announcer
from warmroute.replay.engine_model import EngineModel, Happened, Job
from warmroute.replay.gateway_model import GatewayModel, Report, Sent
from warmroute.replay.hardware import FleetPlan
from warmroute.replay.node_tiers import TierChanges
from warmroute.replay.peer_network import PeerNetwork
from warmroute.replay.trace import BLOCK_TOKENS, TracedRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay saw. `spills`: requests that left the longest prefix; by engine: who served each request, `busy_s`
    seconds of prefill and loading, and blocks `written` to NVMe; `fetched`: blocks that hosts took from each other.
    """

    jobs: tuple[Job, ...]
    engines: tuple[int, ...]
    spills: int
    busy_s: tuple[float, ...]
    written: tuple[int, ...] = ()
    fetched: int = 0


class World:
    """A fleet to send requests to. `now` is its time in seconds; `run` lets all happen that was begun.

    `on_end` is called with every request that is over, and may send others. Engines in `absent` join when `join` says.
    """

    def __init__(self, plan: FleetPlan, policy: str, seed: int = 0, absent: frozenset[int] = frozenset()) -> None:
        self._drawn, flaws = random.Random(seed), plan.imperfection
        self._plan, self._delay_s = plan, flaws.announce_delay_s
        slowness = [math.exp(self._drawn.gauss(0, flaws.engine_spread)) for _ in range(plan.nodes)]
        self._numbers = {f"engine-{number}": number for number in range(plan.nodes)}
        self._ready = [name for name, number in self._numbers.items() if number not in absent]
        self._engines = [EngineModel(plan, each) for each in slowness]
        lives = [number.to_bytes(INCARNATION_BYTES, "big") for number in range(plan.gateways)]
        self._gateways = [GatewayModel(plan, policy, self.clock, life) for life in lives]
        self._reports: dict[GatewayModel, Report] = {}
        self._reported_at: dict[GatewayModel, float] = {}
        self._due: set[tuple[str, GatewayModel]] = set()
        self._announcer = Announcer(MemoryDirectory(self.clock), list(self._numbers))
        self._peers = PeerNetwork(plan)
        self._sent: dict[int, tuple[GatewayModel, Sent]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._versions = [0] * plan.nodes
        self._jobs: list[Job] = []
        self._chosen: list[int] = []
        self._spills = self._fetched = 0
        self.now = 0.0
        self.on_end: Callable[[Job], None] = lambda job: None

    def clock(self) -> float:
        """Its time, for parts that take a clock."""
        return self.now

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Do something at a moment that isn't past."""
        heapq.heappush(self._events, (moment, next(self._order), act))

    def join(self, engine: int) -> None:
        """An engine that was absent may serve from now on."""
        self._ready.append(next(name for name, number in self._numbers.items() if number == engine))

    def submit(self, request: TracedRequest) -> int:
        """A request arrives now, at the gateway whose turn it is; the engine it is sent to."""
        number = len(self._jobs)
        gateway = self._gateways[number % len(self._gateways)]
        matches = self._announcer.matches(request.keys)
        hosts = self._announcer.host_matches(request.keys) if self._plan.peers else {}
        extensions = self._peers.extensions(self._ready, hosts)
        decision = gateway.decide(request, self._ready, matches, extensions)
        error = math.exp(self._drawn.gauss(0, self._plan.imperfection.service_error))
        sent = gateway.send_off(request, decision, error)
        engine, job = self._numbers[sent.engine], Job(number, request, self.now)
        self._jobs.append(job)
        self._chosen.append(engine)
        self._spills += _is_spill(decision)
        self._sent[number] = gateway, sent
        self._report_soon(gateway)
        self._fetch(engine, request, decision.ranked[0])
        self._take(engine, self._engines[engine].submit(job, self.now))
        return engine

    def run(self) -> Outcome:
        """Go from event to event until none is left."""
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        assert not self._sent, "every request ends"
        assert all(each.is_idle for each in self._gateways), "and leaves nothing booked"
        return Outcome(
            tuple(self._jobs),
            tuple(self._chosen),
            self._spills,
            tuple(each.busy_s for each in self._engines),
            tuple(each.tiers.written_blocks for each in self._engines),
            self._fetched,
        )

    def _fetch(self, engine: int, request: TracedRequest, score: Score) -> None:
        """Do as a hint says: take from another host what this one lacks of what the score counts on."""
        if not score.peer_tokens:
            return
        own, other = self._engines[engine].tiers, self._engines[self._numbers[score.peer]].tiers
        keys = request.keys[: score.matched_tokens // BLOCK_TOKENS]
        wanted = [number for number, key in enumerate(keys) if not own.match([key]) and other.host_holds(key)]
        for arrival in self._peers.fetch(engine, wanted, self.now):
            self.at(arrival.at, partial(self._receive, engine, keys, arrival.position))
            self._fetched += 1

    def _receive(self, engine: int, keys: Sequence[bytes], position: int) -> None:
        self._announce_later(engine, self._engines[engine].tiers.receive(keys, position), self.now)

    def _take(self, engine: int, happened: Happened) -> None:
        """Tell the gateways and the directory what happened on an engine, and when to look at it again."""
        for job in happened.first_tokens:
            gateway, sent = self._sent[job.number]
            gateway.first_byte(sent)
            self._report_soon(gateway)
        for job in happened.ends:
            gateway, sent = self._sent.pop(job.number)
            gateway.release(sent, job.tier_tokens.total())
            self._report_soon(gateway)
            self.at(self.now, partial(self.on_end, job))
        for moment, changes in happened.changes:
            self._announce_later(engine, changes, moment)
        self._versions[engine] += 1
        due, version = self._engines[engine].next_at(), self._versions[engine]
        if due < math.inf:
            self.at(due, partial(self._look_at, engine, version))

    def _announce_later(self, engine: int, changes: TierChanges, moment: float) -> None:
        self.at(moment + self._delay_s, lambda: self._announcer.announce(engine, changes, self.now))

    def _look_at(self, engine: int, version: int) -> None:
        if version == self._versions[engine]:  # else something came between, and it will be looked at in its time
            self._take(engine, self._engines[engine].advance(self.now))

    def _report_soon(self, gateway: GatewayModel) -> None:
        """Let a gateway that has news report it: now, or as long after its last report as must be."""
        if len(self._gateways) == 1 or ("report", gateway) in self._due:
            return
        self._due.add(("report", gateway))
        due = self._reported_at.get(gateway, -math.inf) + self._plan.imperfection.report_interval_s
        self.at(max(self.now, due), partial(self._report, gateway))

    def _report(self, gateway: GatewayModel) -> None:
        self._due.discard(("report", gateway))
        self._reported_at[gateway] = self.now
        self.at(self.now + self._plan.imperfection.report_s, partial(self._receive_report, gateway, gateway.report()))

    def _receive_report(self, gateway: GatewayModel, report: Report) -> None:
        self._reports[gateway] = report
        for other in self._gateways:
            self._await_poll(other)

    def _await_poll(self, gateway: GatewayModel) -> None:
        """Let a gateway read the reports at its next turn. Each has turns of its own; they end where all is told."""
        if ("poll", gateway) in self._due:
            return
        self._due.add(("poll", gateway))
        interval_s = self._plan.imperfection.poll_interval_s
        phase_s = interval_s * self._gateways.index(gateway) / len(self._gateways)
        turns = math.floor((self.now - phase_s) / interval_s) + 1
        turn_s = phase_s + turns * interval_s
        self.at(max(self.now, turn_s), partial(self._poll, gateway))

    def _poll(self, gateway: GatewayModel) -> None:
        self._due.discard(("poll", gateway))
        gateway.take(self._reports.values())


def _is_spill(decision: RoutingDecision) -> bool:
    first, *others = decision.ranked
    return any(each.matched_tokens > first.matched_tokens for each in others)
