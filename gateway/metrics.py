"""The gateway's metrics. Labels are bounded: a model that isn't served counts as `other`."""

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.rates import RateReport
from gateway.shared_load import EngineLoad

_TTFT_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100)
_ERROR_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4, 10)
_STAGE_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
FILE_STATES = ("loading", "exact", "ids", "failed")
_TOKEN_BUCKETS = (0, 1, 16, 64, 256, 512, 1024, 4096, 16384)


class GatewayMetrics:
    """Every counter of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "warmroute_requests_total",
            "Requests answered, by model, endpoint and status (499: the client went away).",
            ["model", "endpoint", "status"],
            registry=registry,
        )
        self.ttft = Histogram(
            "warmroute_ttft_seconds",
            "Seconds from a streamed request's arrival to its first byte, by what was expected of the cache.",
            ["model", "cache"],
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.ttft_error = Histogram(
            "warmroute_ttft_estimate_error_ratio",
            "Seconds from sending a streamed request to its first token, over what was expected: 1 is exact.",
            buckets=_ERROR_BUCKETS,
            registry=registry,
        )
        self.routing = Histogram(
            "warmroute_routing_seconds",
            "Seconds the gateway spent on a request before sending it on, by stage.",
            ["stage"],
            buckets=_STAGE_BUCKETS,
            registry=registry,
        )
        self._stages: dict[str, Histogram] = {}
        self.decisions = Counter(
            "warmroute_decisions_total", "Routing decisions, by reason.", ["reason"], registry=registry
        )
        self.prompt_tokens = Counter(
            "warmroute_prompt_tokens_total", "Prompt tokens of encoded requests.", ["model"], registry=registry
        )
        self.cached_tokens = Counter(
            "warmroute_cached_tokens_total",
            "Prompt tokens served from a cache: predicted by tier, and as engines report them (tier `any`).",
            ["model", "tier", "source"],
            registry=registry,
        )
        self.prediction_error = Histogram(
            "warmroute_prediction_error_tokens",
            "Absolute difference between predicted and reported cached tokens of a request.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.degraded = Counter(
            "warmroute_degraded_total",
            "Requests routed with less than full knowledge, by what was missing.",
            ["reason"],
            registry=registry,
        )
        self._count_admission(registry)
        self._count_encoding(registry)
        self._count_directory(registry)
        self._count_parity(registry)
        self._count_process(registry)

    def count_encoded(self, hit_chars: int, miss_chars: int) -> None:
        """Count a prompt's characters by whether their ids were known."""
        self.tokenizer_hits.inc(hit_chars)
        self.tokenizer_misses.inc(miss_chars)

    def count_reload(self, result: str) -> None:
        """Count an attempt to reload the configuration."""
        self.reloads.labels(result).inc()

    def _count_process(self, registry: CollectorRegistry) -> None:
        self.reloads = Counter(
            "warmroute_config_reloads_total",
            "Attempts to reload the configuration (SIGHUP), by result: ok, rejected.",
            ["result"],
            registry=registry,
        )
        for result in ("ok", "rejected"):
            self.reloads.labels(result)
        tasks = Gauge(
            "warmroute_tasks", "Tasks that are under way in the process, its loops included.", registry=registry
        )
        tasks.set_function(_tasks)
        ProcessCollector(registry=registry)

    def _count_admission(self, registry: CollectorRegistry) -> None:
        self.retries = Counter(
            "warmroute_retries_total", "Requests sent to another engine before the first byte.", registry=registry
        )
        self.admission_refused = Counter(
            "warmroute_admission_refused_total",
            "Requests refused with 429, as all places were taken, by why they couldn't wait.",
            ["reason"],
            registry=registry,
        )
        self.discovery_failures = Counter(
            "warmroute_discovery_failures_total",
            "Times that a Kubernetes API server couldn't be listed or watched; the last list stands.",
            registry=registry,
        )
        self.requests_waiting = Gauge(
            "warmroute_requests_waiting", "Requests that wait for a place, here or on an engine.", registry=registry
        )

    def _count_encoding(self, registry: CollectorRegistry) -> None:
        self.tokenizer_hits = Counter(
            "warmroute_tokenizer_cache_hit_chars_total",
            "Characters of prompts whose token ids were known from earlier prompts.",
            registry=registry,
        )
        self.tokenizer_misses = Counter(
            "warmroute_tokenizer_cache_miss_chars_total",
            "Characters of prompts that had to be tokenized.",
            registry=registry,
        )
        self.tokenizer_cache_bytes = Gauge(
            "warmroute_tokenizer_cache_bytes", "Memory that known token ids take, about.", registry=registry
        )

    def _count_directory(self, registry: CollectorRegistry) -> None:
        self.lookup = Histogram(
            "warmroute_directory_lookup_seconds",
            "Seconds a directory lookup took.",
            buckets=_STAGE_BUCKETS,
            registry=registry,
        )
        self.directory_errors = Counter(
            "warmroute_directory_errors_total", "Directory calls that failed.", ["op"], registry=registry
        )
        self.lookup_pauses = Counter(
            "warmroute_directory_lookup_pauses_total",
            "Times that lookups were paused because the directory kept giving no answer.",
            registry=registry,
        )

    def _count_parity(self, registry: CollectorRegistry) -> None:
        self.parity = Counter(
            "warmroute_parity_total",
            "Comparisons of the gateway's token ids with the engines': counts in answers (`usage`), chunks that "
            "engines announce (`ids`), and, within the gateway, pieces with whole texts (`self_check`); by result.",
            ["kind", "result"],
            registry=registry,
        )
        for kind, last in (("usage", "unreported"), ("ids", "unknown"), ("self_check", "")):
            for result in ("match", "mismatch", last):
                if result:
                    self.parity.labels(kind, result)
        self.token_count_mismatches = Counter(
            "warmroute_token_count_mismatch_total",
            "Answers whose prompt had another number of tokens than the gateway counted.",
            registry=registry,
        )
        self.approximate_buckets = Gauge(
            "warmroute_approximate_buckets",
            "Kinds of requests, by engine, whose prompts aren't known exactly although they should be: see /fleet.",
            registry=registry,
        )
        self.degraded.labels("approximate")
        self.replies_warmed = Counter(
            "warmroute_replies_warmed_total",
            "Replies considered for encoding in advance of their conversations' next turns, by result.",
            ["result"],
            registry=registry,
        )
        for result in ("warmed", "skipped", "dropped"):
            self.replies_warmed.labels(result)

    def stage(self, stage: str, clock: Callable[[], float]) -> "Stage":
        """Observe the seconds of a stage of routing, however it ends: a context manager."""
        observed = self._stages.get(stage)
        if observed is None:
            observed = self._stages[stage] = self.routing.labels(stage)
        return Stage(observed, clock)


def _tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no event loop runs: nobody serves
        return 0


class Stage:
    """Observes how long its block takes. A class, for a generator costs twice as much, several times a request."""

    __slots__ = ("_clock", "_observed", "_started_at")

    def __init__(self, observed: Histogram, clock: Callable[[], float]) -> None:
        self._observed, self._clock = observed, clock

    def __enter__(self) -> None:
        self._started_at = self._clock()

    def __exit__(self, *_: object) -> None:
        self._observed.observe(self._clock() - self._started_at)


class EngineGauges(Collector):
    """Per-engine gauges read at scrape time; an engine's series go when it goes.

    `read` gives for each engine what this gateway has booked on it, and what the others say that they have.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[str, EngineLoad, EngineLoad]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """See `prometheus_client`."""
        own, others = "by this gateway's account", "by the other gateways' reports"
        inflight = _engine_gauge("inflight_requests", f"Open requests on an engine, {own}.")
        booked = _engine_gauge("booked_seconds", f"Seconds of work booked ahead on an engine, {own}.")
        others_inflight = _engine_gauge("others_inflight_requests", f"Open requests on an engine, {others}.")
        others_booked = _engine_gauge("others_booked_seconds", f"Seconds of work booked ahead on an engine, {others}.")
        for engine, load, others_load in self._read():
            inflight.add_metric([engine], load.running)
            booked.add_metric([engine], load.wait_s)
            others_inflight.add_metric([engine], others_load.running)
            others_booked.add_metric([engine], others_load.wait_s)
        return inflight, booked, others_inflight, others_booked


def _engine_gauge(name: str, says: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"warmroute_{name}", says, labels=["engine"])


class RateGauges(Collector):
    """What is known of engines' rates, read at scrape time; an engine's series go when it goes."""

    def __init__(self, read: Callable[[], Iterable[tuple[str, RateReport]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """See `prometheus_client`."""
        flops = GaugeMetricFamily(
            "warmroute_engine_flops", "Useful FLOP/s of prefill that an engine is expected to have.", labels=["engine"]
        )
        correction = GaugeMetricFamily(
            "warmroute_engine_rate_correction",
            "How many times the registered rate an engine's first tokens show; 1 where too few were seen.",
            labels=["engine"],
        )
        error = GaugeMetricFamily(
            "warmroute_engine_ttft_error_factor",
            "The factor by which half of the last expectations of an engine's time to first token were off, at most.",
            labels=["engine"],
        )
        for engine, report in self._read():
            correction.add_metric([engine], report.correction)
            if report.flops is not None:
                flops.add_metric([engine], report.flops)
            if report.error_factor is not None:
                error.add_metric([engine], report.error_factor)
        yield flops
        yield correction
        yield error


class ModelFilesGauge(Collector):
    """How many sets of model files are in each state, read at scrape time."""

    def __init__(self, read: Callable[[], Iterable[str]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """See `prometheus_client`."""
        counts = dict.fromkeys(FILE_STATES, 0)
        for state in self._read():
            counts[state] += 1
        gauge = GaugeMetricFamily(
            "warmroute_model_files",
            "Sets of tokenizer and template files in the fleet, by state: loading, in use (exact, or ids alone) or "
            "failed.",
            labels=["state"],
        )
        for state, count in counts.items():
            gauge.add_metric([state], count)
        yield gauge
