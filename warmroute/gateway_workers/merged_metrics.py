"""Several processes' metrics as one: counters and histograms are added, and never go back when a process dies.

What a process had counted stays in the sums when it is gone: all of it as far as it was last read. Gauges are those of
the processes that are there: amounts are added, what all see alike is taken once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

SUMS = frozenset({"counter", "histogram", "summary"})
ADDED_GAUGES = frozenset(
    {
        "warmroute_inflight_requests",
        "warmroute_booked_seconds",
        "warmroute_tokenizer_cache_bytes",
        "warmroute_requests_waiting",
    }
)
"""Gauges of which each process has a part. Of others, which all see alike, the largest stands for all."""
OTHERS = {
    "warmroute_others_inflight_requests": "warmroute_inflight_requests",
    "warmroute_others_booked_seconds": "warmroute_booked_seconds",
}
"""What each process says of all others, of which its siblings are no others: with what it says of itself."""

Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class _Family:
    """Samples of one metric, by name and labels, in the order in which they were first seen."""

    kind: str
    documentation: str
    samples: dict[Series, float] = field(default_factory=dict)


class MergedMetrics(Collector):
    """Takes each worker's metrics as text, whenever they were read; forgets the gauges of one that died."""

    def __init__(self) -> None:
        self._last: dict[int, str] = {}
        self._buried: dict[str, _Family] = {}

    def take(self, worker: int, text: str) -> None:
        """What a worker says now."""
        self._last[worker] = text

    def bury(self, worker: int) -> None:
        """It has died: what it had counted stays, what it had under way doesn't."""
        families = _parse(self._last.pop(worker, ""))
        sums = {name: family for name, family in families.items() if family.kind in SUMS}
        self._buried = _merged([self._buried, sums])

    def text(self, more: Iterable[Collector] = ()) -> bytes:
        """All of it, in Prometheus's text format, with what `more` collect."""
        registry = CollectorRegistry()
        registry.register(self)
        for each in more:
            registry.register(each)
        return generate_latest(registry)

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client`."""
        for name, family in _merged([self._buried, *map(_parse, self._last.values())]).items():
            metric = Metric(name, family.documentation, family.kind)
            for (sample, labels), value in family.samples.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric


def _parse(text: str) -> dict[str, _Family]:
    families = {}
    for metric in text_string_to_metric_families(text):
        family = families[metric.name] = _Family(metric.type, metric.documentation)
        for sample in metric.samples:
            family.samples[sample.name, tuple(sample.labels.items())] = sample.value
    return families


def _merged(parts: Iterable[dict[str, _Family]]) -> dict[str, _Family]:
    merged: dict[str, _Family] = {}
    for families in parts:
        for name, family in families.items():
            into = merged.setdefault(name, _Family(family.kind, family.documentation))
            is_added = family.kind in SUMS or name in ADDED_GAUGES
            own = families.get(OTHERS.get(name, ""))
            for series, value in family.samples.items():
                seen = value + (own.samples.get((OTHERS[name], series[1]), 0.0) if own is not None else 0.0)
                before = into.samples.get(series)
                into.samples[series] = seen if before is None else before + seen if is_added else max(before, seen)
    for others, own_name in OTHERS.items():
        for series in merged[others].samples if others in merged else ():
            own_s = merged[own_name].samples.get((own_name, series[1]), 0.0)
            merged[others].samples[series] = max(0.0, merged[others].samples[series] - own_s)
    return merged
