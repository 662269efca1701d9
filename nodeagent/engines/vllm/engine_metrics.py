"""What a vLLM engine says of itself at `/metrics`, and what of it the fleet wants to know. Pure.

Names are those of vLLM 0.32; a name that isn't there is a value that isn't known.
"""

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USE = "vllm:kv_cache_usage_perc"
SLEEP = "vllm:engine_sleep_state"
PREFILL_SECONDS = "vllm:request_prefill_time_seconds_sum"
PREFILL_TOKENS = "vllm:request_prefill_kv_computed_tokens_sum"
METRICS_BYTES_MAX = 8 << 20
SERIES_MAX = 1_024
"""Of the series that are read: one for each rank and state."""
REQUESTS_MAX = 2**31 - 1
RATE_TOKENS_MIN = 256
"""A prefill rate is taken from at least so many tokens: shorter prompts tell of overhead."""


class MetricsUnreadable(Exception):
    """The text isn't Prometheus's, or a number in it can't be true."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One look. Counters since the engine's start: seconds spent in prefill, and tokens computed in it.

    `kv_use` is the part of the KV cache that running requests use, 0 to 1.
    """

    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    is_asleep: bool = False
    prefill_s: float = 0.0
    prefill_tokens: float = 0.0


def read_metrics(text: str) -> EngineMetrics:
    """The metrics in Prometheus's text, summed over an engine's series. Raises `MetricsUnreadable`, and nothing else.

    Only lines of the series that are read are parsed: an engine may have thousands of others.
    """
    lines = [line for line in text.split("\n") if line.startswith(_READ)]
    if len(lines) > SERIES_MAX:
        raise MetricsUnreadable(f"more than {SERIES_MAX} series of one kind")
    sums: dict[str, float] = {}
    awake: list[float] = []
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.name == SLEEP and sample.labels.get("sleep_state") == "awake":
                    awake.append(sample.value)
                elif sample.name in _SUMMED:
                    sums[sample.name] = sums.get(sample.name, 0.0) + float(sample.value)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise MetricsUnreadable(f"not Prometheus's text: {error}") from error
    for name, value in sums.items():
        if not (math.isfinite(value) and value >= 0):
            raise MetricsUnreadable(f"{name} is {value}")
    return EngineMetrics(
        running=_requests(sums, RUNNING),
        waiting=_requests(sums, WAITING),
        kv_use=sums.get(KV_USE, 0.0),
        is_asleep=bool(awake) and not any(awake),
        prefill_s=sums.get(PREFILL_SECONDS, 0.0),
        prefill_tokens=sums.get(PREFILL_TOKENS, 0.0),
    )


_SUMMED = (RUNNING, WAITING, KV_USE, PREFILL_SECONDS, PREFILL_TOKENS)
_READ = (*_SUMMED, SLEEP)


def _requests(sums: dict[str, float], name: str) -> int:
    requests = sums.get(name, 0.0)
    if requests > REQUESTS_MAX:
        raise MetricsUnreadable(f"{name} is {requests}")
    return int(requests)


class PrefillRate:
    """Tokens per second of prefill, from how two counters grow; a restart of the engine begins anew."""

    def __init__(self) -> None:
        self._before: EngineMetrics | None = None

    def note(self, seen: EngineMetrics) -> float | None:
        """The rate since the last one that was told; None where too little was computed meanwhile."""
        before = self._before
        if before is None or seen.prefill_tokens < before.prefill_tokens or seen.prefill_s < before.prefill_s:
            self._before = seen
            return None
        tokens, seconds = seen.prefill_tokens - before.prefill_tokens, seen.prefill_s - before.prefill_s
        if tokens < RATE_TOKENS_MIN or seconds <= 0:
            return None
        self._before = seen
        return tokens / seconds
