"""GatewayModel: one gateway of a replayed fleet. Its policy, ledger and overlay are the real ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from directory.costs import prefill_flop
from directory.members import TERM_S, BookedWork, GatewayRegistration, Load, Member
from directory.placements import NO_MATCH, PrefixMatch
from gateway.ledger import RECENT_S, Booking, Ledger
from gateway.rates import ObservedRates, PrefillWork, Sending
from gateway.routing.overlay import LIFETIME_S, Expectation, Overlay
from gateway.routing.policies import POLICIES
from gateway.routing.query import Candidate, PeerExtension, RoutingDecision, RoutingQuery
from gateway.shared_load import EngineLoads, published
from warmroute.replay.hardware import FleetPlan
from warmroute.replay.trace import BLOCK_TOKENS, TracedRequest


@dataclass(frozen=True, slots=True)
class Report:
    """A gateway's row in the table of members, as of `at`."""

    incarnation: bytes
    at: float
    booked: Mapping[str, BookedWork]

    def as_member(self, now: float) -> Member:
        """The row as it is read now."""
        registration, load = GatewayRegistration(self.incarnation.hex(), ""), Load(booked=self.booked)
        return Member(self.incarnation, registration, load, TERM_S - (now - self.at))


@dataclass(frozen=True, slots=True)
class Sent:
    """What a gateway remembers of an open request."""

    engine: str
    booking: Booking
    expectation: Expectation
    sending: Sending
    matched_tokens: int


class GatewayModel:
    """Routes requests among the engines it is told of, by its own load and what other gateways report of theirs."""

    def __init__(self, plan: FleetPlan, policy: str, clock: Callable[[], float], incarnation: bytes) -> None:
        self._plan, self._clock, self._incarnation = plan, clock, incarnation
        self._affinity = beginning if policy == "seconds" else session
        self._ledger, self._overlay, self._policy = Ledger(clock), Overlay(), POLICIES[policy]()
        self._loads = EngineLoads(self._ledger, clock)
        self._loads.disregard(incarnation)
        self._rates = ObservedRates(clock)

    def decide(
        self,
        request: TracedRequest,
        engines: Sequence[str],
        matches: Mapping[str, PrefixMatch],
        peers: Mapping[str, PeerExtension],
    ) -> RoutingDecision:
        """Rank `engines` for a request. `matches` are what the directory says, `peers` what lengthens those."""
        keys = request.keys
        candidates = tuple(self._candidate(engine, keys, matches.get(engine, NO_MATCH), peers) for engine in engines)
        return self._policy.route(RoutingQuery(request.prompt_tokens, self._affinity(request), candidates, keys=keys))

    def send_off(self, request: TracedRequest, decision: RoutingDecision, service_error: float) -> Sent:
        """Book a request on the first of the ranking, whose service is misjudged by this factor."""
        score, now = decision.ranked[0], self._clock()
        until = now + score.expected_ttft_s + LIFETIME_S
        expectation = self._overlay.expect(score.engine, request.keys, until, now)
        sending = self._rates.sent(
            score.engine,
            PrefillWork(
                flop=prefill_flop(self._plan.model.shape, request.prompt_tokens, score.matched_tokens),
                new_tokens=request.prompt_tokens - score.matched_tokens,
                load_s=score.load_s,
                expected_ttft_s=score.expected_ttft_s,
            ),
            is_streamed=True,
            others_prefills=self._loads.of_others(score.engine).prefills,
        )
        booking = self._ledger.book(
            score.engine,
            score.service_s * service_error,
            new_tokens=request.prompt_tokens - score.matched_tokens,
            held_tokens=request.prompt_tokens,
            ahead_s=self._loads.ahead_s(score.engine),
        )
        return Sent(score.engine, booking, expectation, sending, score.matched_tokens)

    def first_byte(self, sent: Sent) -> None:
        """The first token of a request has come."""
        self._ledger.first_byte(sent.booking)
        self._overlay.settle(sent.expectation, self._clock() + LIFETIME_S)
        self._rates.first_token(sent.sending)

    def release(self, sent: Sent, cached_tokens: int) -> None:
        """A request is over, of whose prompt so many tokens were cached."""
        self._ledger.release(sent.booking)
        if cached_tokens != sent.matched_tokens:
            self._rates.mistaken(sent.sending)
        self._rates.ended(sent.sending)

    @property
    def is_idle(self) -> bool:
        """Whether all that it sent is over."""
        return not self._ledger.engines()

    def report(self) -> Report:
        """What it tells the other gateways now."""
        return Report(self._incarnation, self._clock(), published(self._ledger, self._clock()))

    def take(self, reports: Iterable[Report]) -> None:
        """The table of gateways, as read now."""
        self._loads.take([each.as_member(self._clock()) for each in reports])

    def _candidate(
        self, engine: str, keys: Sequence[bytes], match: PrefixMatch, peers: Mapping[str, PeerExtension]
    ) -> Candidate:
        load = self._loads.of(engine)
        announced, match = match, self._overlay.extend(engine, match, keys, self._clock())
        peer, registered = peers.get(engine), self._plan.model.rates
        candidate = Candidate(
            engine=engine,
            shape=self._plan.model.shape,
            rates=self._rates.rates(engine, registered) if self._plan.corrects_rates else registered,
            chunk_tokens=BLOCK_TOKENS,
            match=match,
            wait_s=load.wait_s,
            prefills=load.prefills,
            running=load.running,
            queued_tokens=load.queued_tokens,
            active_tokens=load.active_tokens,
            kv_tokens_max=self._plan.blocks.gpu * BLOCK_TOKENS,
            use=load.recent_s / RECENT_S,
            expected_chunks=match.chunks - announced.chunks,
        )
        return replace(candidate, peer=peer) if peer is not None and peer.chunks > match.chunks else candidate


def beginning(request: TracedRequest) -> bytes:
    """What the gateway asks by where clients name no session: the first key. The router looks further itself.

    Prompts that fill no block are taken to be different.
    """
    return request.keys[0] if request.keys else repr(request).encode()


def session(request: TracedRequest) -> bytes:
    """What the other policies stick to, and break ties by: the second block, as if clients named their sessions.

    It names the first as well, which in many traces is everybody's. By that, all ties would go to one engine; the
    published forms break them at random.
    """
    return request.keys[min(1, len(request.keys) - 1)] if request.keys else beginning(request)
