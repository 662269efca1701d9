"""Dispatcher: chooses an engine for a prepared request, and keeps account of it from the choice to its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from directory.placements import NO_MATCH
from directory.tiers import Tier
from gateway.audit import Usage
from gateway.breaker import Breaker, Trial
from gateway.fleet import EngineView
from gateway.ledger import RECENT_S, Booking, Ledger
from gateway.metrics import GatewayMetrics
from gateway.prefetch import Hint, Prefetcher, Wish, hint_for
from gateway.prefill_watch import PrefillWatch, WatchedPrefill
from gateway.preparation import Prepared
from gateway.routing.policies import Policy
from gateway.routing.query import Candidate, PeerExtension, RoutingDecision, RoutingQuery
from gateway.sent_prompts import KnownMatch, SentPrompt, SentPrompts
from gateway.shared_load import EngineLoads

PEER_FIXED_S = 0.005
"""Seconds before another host's first chunk comes: a hint's way, and a round trip between two agents."""
PROBE_CHUNKS, PROBE_INTERVAL_S, PROBED_MAX = 2, 30.0, 4096
"""Hints at hosts that weren't measured yet: chunks, seconds between two for one pair of hosts, pairs remembered."""


@dataclass(slots=True)
class Dispatch:
    """One request on its way to one engine; `release` has to be called however it ends."""

    booking: Booking
    ledger: Ledger
    prompt: SentPrompt
    prefill: WatchedPrefill
    wish: Wish | None
    prefetcher: Prefetcher
    trial: Trial
    clock: Callable[[], float]

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self.trial.engine

    def first_byte(self, status: int = 200, retry_after_s: float = 0.0) -> None:
        """Its prefill is done, or else it was refused (another `status`, and when it may be tried again); repeating it
        changes nothing.
        """
        is_computed = status == 200
        self.trial.answered(status, retry_after_s, self.clock())
        self.ledger.first_byte(self.booking, is_computed)
        self.prompt.first_byte(is_computed)
        self.prefill.first_byte(is_computed)
        self._release_wish()

    def note_usage(self, usage: Usage | None) -> None:
        """What the engine reports at the end of a good answer."""
        self.prompt.note_usage(usage)
        self.prefill.note_usage(usage)

    def release(self) -> None:
        """It is over; repeating it changes nothing. What was asked for or expected and never came is taken back."""
        self.ledger.release(self.booking)
        self.prompt.release()
        self.prefill.release()
        self.trial.end()
        self._release_wish()

    def _release_wish(self) -> None:
        wish, self.wish = self.wish, None
        self.prefetcher.release(wish, is_used=self.prompt.is_computed)


class Dispatcher:
    """Builds the candidates from all that is known of engines and their load, and asks the policy."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        loads: EngineLoads,
        sent: SentPrompts,
        watch: PrefillWatch,
        prefetcher: Prefetcher,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._policy, self._ledger, self._loads, self._sent, self._watch = policy, ledger, loads, sent, watch
        self._prefetcher = prefetcher
        self._metrics, self._clock = metrics, clock
        self._probed: dict[tuple[str, str], float] = {}
        self._breaker = Breaker()

    def decide(self, prepared: Prepared, views: Sequence[EngineView]) -> RoutingDecision:
        """Rank `views`, of which there is at least one, for a request; those that failed lately only where all did.

        Nothing is booked.
        """
        now = self._clock()
        views = self._breaker.admitted(views, now)
        with self._metrics.stage("route", self._clock):
            return self._policy.route(
                RoutingQuery(
                    prompt_tokens=prepared.encoding.prompt_tokens,
                    affinity=prepared.affinity,
                    candidates=tuple(self._candidate(prepared, view) for view in views),
                    without_placements=prepared.without_placements,
                    keys=prepared.keys,
                )
            )

    def send_off(self, prepared: Prepared, decision: RoutingDecision, view: EngineView, is_streamed: bool) -> Dispatch:
        """Book the request on `view`, the first of the ranking, and tell its agent what will be needed."""
        score, keys, known = decision.ranked[0], prepared.holders.keys.get(view.engine, ()), self._known(prepared, view)
        hint = hint_for(view.agent_url, keys, known.match, score, view.chunk_tokens, _peer(prepared, view, known))
        wish = self._prefetcher.send(hint or self._probe(prepared, view, known))
        prompt = self._sent.send(view, keys, known, score.expected_ttft_s)
        self._metrics.decisions.labels(decision.reason).inc()
        prompt_tokens = prepared.prompt.tokens_of(view) or prepared.encoding.prompt_tokens
        others_prefills = self._loads.of_others(view.engine).prefills
        prefill = self._watch.send(view, prepared, score, is_streamed, others_prefills)
        booking = self._ledger.book(
            view.engine,
            score.service_s,
            is_streamed,
            new_tokens=max(0, prompt_tokens - score.matched_tokens),
            held_tokens=max(0, prompt_tokens - score.tier_tokens.get(Tier.GPU, 0)),
            ahead_s=self._loads.ahead_s(view.engine),
        )
        trial = self._breaker.send(view.engine, self._clock())
        return Dispatch(booking, self._ledger, prompt, prefill, wish, self._prefetcher, trial, self._clock)

    def _known(self, prepared: Prepared, view: EngineView) -> KnownMatch:
        holders = prepared.holders
        return self._sent.match(view, holders.matches.get(view.engine, NO_MATCH), holders.keys.get(view.engine, ()))

    def _candidate(self, prepared: Prepared, view: EngineView) -> Candidate:
        known, load = self._known(prepared, view), self._loads.of(view.engine)
        return Candidate(
            engine=view.engine,
            shape=view.shape,
            rates=self._watch.rates_of(view),
            chunk_tokens=view.chunk_tokens,
            match=known.match,
            wait_s=load.wait_s,
            prefills=load.prefills,
            running=load.running,
            prompt_tokens=prepared.prompt.tokens_of(view),
            queued_tokens=load.queued_tokens,
            active_tokens=load.active_tokens,
            kv_tokens_max=view.kv_tokens,
            use=load.recent_s / RECENT_S,
            peer=_peer(prepared, view, known),
            expected_chunks=known.expected_chunks,
        )

    def _probe(self, prepared: Prepared, view: EngineView, known: KnownMatch) -> Hint | None:
        """A hint at a few chunks of a host from which this one's never had any: how fast they come isn't known.

        Agents measure it, and gateways count on nothing that wasn't measured.
        """
        for address, chunks in prepared.holders.peers.get(view.engine, ()):
            if chunks <= known.match.chunks:
                break
            pair, now = (view.agent_url, address), self._clock()
            is_due = now >= self._probed.get(pair, now - PROBE_INTERVAL_S) + PROBE_INTERVAL_S
            if not view.agent_url or address in view.peer_bytes_per_s or not is_due:
                continue
            if len(self._probed) >= PROBED_MAX:
                self._probed.clear()
            self._probed[pair] = now
            keys = prepared.holders.keys[view.engine][known.match.chunks : chunks][:PROBE_CHUNKS]
            return Hint(view.agent_url, peers={address: keys})
        return None


def _peer(prepared: Prepared, view: EngineView, known: KnownMatch) -> PeerExtension | None:
    """The host, of those from which this engine's has measured how fast chunks come, that lengthens its match furthest;
    of several the fastest."""
    found: PeerExtension | None = None
    for address, chunks in prepared.holders.peers.get(view.engine, ()):  # the longest first
        if chunks <= known.match.chunks or (found is not None and chunks < found.chunks):
            break
        bytes_per_s = view.peer_bytes_per_s.get(address)
        if bytes_per_s is None:
            continue
        if found is None or bytes_per_s > found.bytes_per_s:
            found = PeerExtension(address, chunks, bytes_per_s, PEER_FIXED_S)
    return found
