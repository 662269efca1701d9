"""PrefillWatch: holds each request's first token against what was expected, and learns engines' rates from that."""

from dataclasses import dataclass

from directory.costs import Rates, prefill_flop
from gateway.audit import Usage
from gateway.fleet import EngineView, FleetTable
from gateway.metrics import GatewayMetrics
from gateway.preparation import Prepared
from gateway.rates import EngineLife, ObservedRates, PrefillWork, RateReport, Sending
from gateway.routing.query import Score

LENGTH_ERROR_MAX = 0.25
"""A prompt that was longer or shorter by a larger share than was counted says nothing of a rate."""


@dataclass(slots=True)
class WatchedPrefill:
    """One request's prefill on one engine; `release` has to be called however it ends."""

    rates: ObservedRates
    metrics: GatewayMetrics
    sending: Sending
    score: Score
    chunk_tokens: int
    prompt_tokens: int
    is_streamed: bool

    def first_byte(self, is_computed: bool = True) -> None:
        """Its first byte came. A refusal's says nothing, nor does a whole answer's, which is the last as well."""
        if is_computed and self.is_streamed:
            took = self.rates.first_token(self.sending)
            if took is not None:
                self.metrics.ttft_error.observe(took)

    def note_usage(self, usage: Usage | None) -> None:
        """What the engine reports: where it computed more or less than was expected, its time says nothing."""
        if usage is None:
            return
        is_other_length = abs(usage.prompt_tokens - self.prompt_tokens) > LENGTH_ERROR_MAX * self.prompt_tokens
        cached = self.score.matched_tokens if usage.cached_tokens is None else usage.cached_tokens
        if is_other_length or abs(cached - self.score.matched_tokens) > self.chunk_tokens:
            self.rates.mistaken(self.sending)

    def release(self) -> None:
        """It is over; repeating it changes nothing."""
        self.rates.ended(self.sending)


class PrefillWatch:
    """Tells `rates` what happens to requests, in its own terms."""

    def __init__(self, rates: ObservedRates, metrics: GatewayMetrics) -> None:
        self._rates, self._metrics = rates, metrics

    def see(self, table: FleetTable) -> None:
        """The fleet as it is now."""
        self._rates.see({view.engine: _life(view) for view in table.engines.values()})

    def rates_of(self, view: EngineView) -> Rates | None:
        """What to expect of an engine: what it registered, corrected by what was observed."""
        return self._rates.rates(view.engine, view.rates)

    def report(self, view: EngineView) -> RateReport:
        """What is known of an engine's rate."""
        return self._rates.report(view.engine, view.rates)

    def reports(self, table: FleetTable) -> list[tuple[str, RateReport]]:
        """The same of every engine, with its name."""
        return [(view.engine, self.report(view)) for view in table.engines.values()]

    def send(
        self, view: EngineView, prepared: Prepared, score: Score, is_streamed: bool, others_prefills: int = 0
    ) -> WatchedPrefill:
        """A request goes to `view`, on which other gateways have `others_prefills` outstanding."""
        tokens = prepared.prompt.tokens_of(view) or prepared.encoding.prompt_tokens
        work = PrefillWork(
            flop=prefill_flop(view.shape, tokens, score.matched_tokens),
            new_tokens=max(0, tokens - score.matched_tokens),
            load_s=score.load_s,
            expected_ttft_s=score.expected_ttft_s,
        )
        # A rough count is good enough where all counts are rough: it is off alike in what is learned and expected.
        is_counted = view.registration is None or (prepared.prompt.of(view) or prepared.encoding).is_whole
        sending = self._rates.sent(view.engine, work, is_streamed and is_counted, others_prefills)
        return WatchedPrefill(
            self._rates, self._metrics, sending, score, view.chunk_tokens, tokens, is_streamed and is_counted
        )


def _life(view: EngineView) -> EngineLife:
    """Of an engine without an agent, what it reaches are lives of gateways."""
    return EngineLife(view.url, frozenset() if view.registration is None else view.reach.own)
