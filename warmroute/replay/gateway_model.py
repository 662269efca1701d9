"""GatewayModel: one gateway of a replayed fleet. Its policy, ledger and overlay are the real ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from directory.placements import NO_MATCH, PrefixMatch
from gateway.ledger import Booking, Ledger
from gateway.routing.overlay import LIFETIME_S, Overlay
from gateway.routing.policies import POLICIES
from gateway.routing.query import Candidate, PeerExtension, RoutingDecision, RoutingQuery
from warmroute.replay.hardware import FleetPlan
from warmroute.replay.shared_load import EngineLoad, OthersLoad
from warmroute.replay.trace import BLOCK_TOKENS, TracedRequest


@dataclass(eq=False, slots=True)
class Sent:
    """What a gateway remembers of an open request."""

    engine: str
    booking: Booking
    new_tokens: int
    prompt_tokens: int


class GatewayModel:
    """Routes requests among the engines it is told of, by what it knows: its own load, and what others published."""

    def __init__(self, plan: FleetPlan, policy: str, clock: Callable[[], float]) -> None:
        self._plan, self._clock = plan, clock
        self._ledger, self._overlay, self._policy = Ledger(clock), Overlay(), POLICIES[policy]()
        self._queued_tokens: dict[str, int] = {}
        self._active_tokens: dict[str, int] = {}
        self.others = OthersLoad()

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
        return self._policy.route(RoutingQuery(request.prompt_tokens, affinity(request), candidates, keys=keys))

    def send_off(self, request: TracedRequest, decision: RoutingDecision, service_error: float) -> Sent:
        """Book a request on the first of the ranking, whose service is misjudged by this factor."""
        score = decision.ranked[0]
        booking = self._ledger.book(score.engine, score.service_s * service_error)
        self._overlay.expect(score.engine, request.keys, self._clock() + score.expected_ttft_s + LIFETIME_S)
        sent = Sent(score.engine, booking, request.prompt_tokens - score.matched_tokens, request.prompt_tokens)
        self._count(self._queued_tokens, score.engine, sent.new_tokens)
        self._count(self._active_tokens, score.engine, sent.prompt_tokens)
        return sent

    def first_byte(self, sent: Sent) -> None:
        """The first token of a request has come."""
        self._ledger.first_byte(sent.booking)
        self._count(self._queued_tokens, sent.engine, -sent.new_tokens)

    def release(self, sent: Sent) -> None:
        """A request is over."""
        self._ledger.release(sent.booking)
        self._count(self._active_tokens, sent.engine, -sent.prompt_tokens)

    def load(self) -> dict[str, EngineLoad]:
        """What it has sent and is open, by engine: what it tells the others."""
        return {engine: self._own_load(engine) for engine in self._ledger.engines()}

    def _own_load(self, engine: str) -> EngineLoad:
        return EngineLoad(
            self._ledger.wait_s(engine),
            self._ledger.prefills(engine),
            self._ledger.running(engine),
            self._queued_tokens.get(engine, 0),
            self._active_tokens.get(engine, 0),
        )

    def _candidate(
        self, engine: str, keys: Sequence[bytes], match: PrefixMatch, peers: Mapping[str, PeerExtension]
    ) -> Candidate:
        load = self.others.add_to(self._own_load(engine), engine, self._clock())
        match = self._overlay.extend(engine, match, keys, self._clock())
        peer = peers.get(engine)
        candidate = Candidate(
            engine=engine,
            shape=self._plan.model.shape,
            rates=self._plan.model.rates,
            chunk_tokens=BLOCK_TOKENS,
            match=match,
            wait_s=load.wait_s,
            prefills=load.prefills,
            running=load.running,
            queued_tokens=load.queued_tokens,
            active_tokens=load.active_tokens,
            kv_tokens_max=self._plan.blocks.gpu * BLOCK_TOKENS,
        )
        return replace(candidate, peer=peer) if peer is not None and peer.chunks > match.chunks else candidate

    @staticmethod
    def _count(tokens: dict[str, int], engine: str, change: int) -> None:
        tokens[engine] = tokens.get(engine, 0) + change
        assert tokens[engine] >= 0, "no more is taken back than was added"


def affinity(request: TracedRequest) -> bytes:
    """What sticks together: the second block names the first as well, which in many traces is everybody's."""
    return request.keys[min(1, len(request.keys) - 1)] if request.keys else b""
