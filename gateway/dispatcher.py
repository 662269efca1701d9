"""Dispatcher: chooses an engine for a prepared request, and keeps account of it from the choice to its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from directory.placements import NO_MATCH
from gateway.audit import Usage
from gateway.fleet import EngineView
from gateway.ledger import RECENT_S, Booking, Ledger
from gateway.metrics import GatewayMetrics
from gateway.prefetch import Prefetcher, hint_for
from gateway.prefill_watch import PrefillWatch, WatchedPrefill
from gateway.preparation import Prepared
from gateway.routing.policies import Policy
from gateway.routing.query import Candidate, RoutingDecision, RoutingQuery
from gateway.shared_load import EngineLoads


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One request on its way to one engine; `release` has to be called however it ends."""

    booking: Booking
    ledger: Ledger
    prefill: WatchedPrefill

    def first_byte(self, is_computed: bool = True) -> None:
        """Its prefill is done, or else it was refused (not `is_computed`); repeating it changes nothing."""
        self.ledger.first_byte(self.booking)
        self.prefill.first_byte(is_computed)

    def note_usage(self, usage: Usage | None) -> None:
        """What the engine reports at the end of a good answer."""
        self.prefill.note_usage(usage)

    def release(self) -> None:
        """It is over; repeating it changes nothing."""
        self.ledger.release(self.booking)
        self.prefill.release()


class Dispatcher:
    """Builds the candidates from all that is known of engines and their load, and asks the policy."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        loads: EngineLoads,
        watch: PrefillWatch,
        prefetcher: Prefetcher,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._policy, self._ledger, self._loads, self._watch = policy, ledger, loads, watch
        self._prefetcher = prefetcher
        self._metrics, self._clock = metrics, clock

    def decide(self, prepared: Prepared, views: Sequence[EngineView]) -> RoutingDecision:
        """Rank `views`, of which there is at least one, for a request. Nothing is booked."""
        with self._metrics.stage("route", self._clock):
            decision = self._policy.route(
                RoutingQuery(
                    prompt_tokens=prepared.encoding.prompt_tokens,
                    affinity=prepared.affinity,
                    candidates=tuple(self._candidate(prepared, view) for view in views),
                    without_placements=prepared.without_placements,
                    keys=prepared.keys,
                )
            )
        self._metrics.decisions.labels(decision.reason).inc()
        return decision

    def send_off(self, prepared: Prepared, decision: RoutingDecision, view: EngineView, is_streamed: bool) -> Dispatch:
        """Book the request on `view`, the first of the ranking, and tell its agent what will be needed."""
        score = decision.ranked[0]
        hint = hint_for(view.agent_url, prepared.holders, score, view.chunk_tokens)
        prompt_tokens = prepared.prompt.tokens_of(view) or prepared.encoding.prompt_tokens
        others_prefills = self._loads.of_others(view.engine).prefills
        prefill = self._watch.send(view, prepared, score, is_streamed, others_prefills)
        booking = self._ledger.book(
            view.engine,
            score.service_s,
            is_streamed,
            new_tokens=max(0, prompt_tokens - score.matched_tokens),
            prompt_tokens=prompt_tokens,
            ahead_s=self._loads.ahead_s(view.engine),
        )
        self._prefetcher.send(hint)
        return Dispatch(booking, self._ledger, prefill)

    def _candidate(self, prepared: Prepared, view: EngineView) -> Candidate:
        load = self._loads.of(view.engine)
        return Candidate(
            engine=view.engine,
            shape=view.shape,
            rates=self._watch.rates_of(view),
            chunk_tokens=view.chunk_tokens,
            match=prepared.holders.matches.get(view.engine, NO_MATCH),
            wait_s=load.wait_s,
            prefills=load.prefills,
            running=load.running,
            prompt_tokens=prepared.prompt.tokens_of(view),
            queued_tokens=load.queued_tokens,
            active_tokens=load.active_tokens,
            use=load.recent_s / RECENT_S,
        )
