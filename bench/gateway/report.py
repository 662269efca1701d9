"""Medians of pairs, ratios to the peers, and whether the targets are met."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from bench.gateway.site import PROXY, SGLANG, VLLM, WARMROUTE

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Target:
    """warmroute's CPU over a peer's is to be at most `ratio`; `stretch` where more is hoped for."""

    workload: str
    peer: str
    ratio: float
    stretch: float | None = None


TARGETS = (
    Target("32k", SGLANG, 1.5, 1.0),
    Target("32k", VLLM, 0.3),
    Target("8k", SGLANG, 2.0),
    Target("token", SGLANG, 1.0),
)


def table(costs_us: Mapping[Key, Sequence[float]], workloads: Sequence[str], routers: Sequence[str]) -> str:
    """Medians, with quartiles, of CPU microseconds a request (`token`: a streamed token), by workload and router."""
    rows = ["| CPU us | " + " | ".join(workloads) + " |", "|---" * (1 + len(workloads)) + "|"]
    for router in routers:
        cells = [_cell(costs_us.get((workload, router), ())) for workload in workloads]
        rows.append(f"| {router} | " + " | ".join(cells) + " |")
    for peer in (SGLANG, VLLM, PROXY):
        cells = [_ratio_cell(ratios(costs_us, workload, peer)) for workload in workloads]
        if peer in routers:
            rows.append(f"| warmroute / {peer} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def verdicts(costs_us: Mapping[Key, Sequence[float]]) -> list[str]:
    """A line for each target that was measured."""
    lines = []
    for target in TARGETS:
        found = ratios(costs_us, target.workload, target.peer)
        if not found:
            continue
        middle, low, high = median(found), *_quartiles(found)
        verdict = "met" if middle <= target.ratio else "missed"
        if low <= target.ratio < high or high == target.ratio:
            verdict += ", within the spread"
        stretch = f" (stretch {target.stretch:g})" if target.stretch is not None else ""
        bound = f"at most {target.ratio:g} x {target.peer}{stretch}"
        lines.append(f"{target.workload}: {middle:.2f} [{low:.2f}..{high:.2f}], {bound}: {verdict}")
    return lines


def ratios(costs_us: Mapping[Key, Sequence[float]], workload: str, peer: str) -> list[float]:
    """warmroute's over the peer's, pair by pair: what ran after one another, in the same noise."""
    own, theirs = costs_us.get((workload, WARMROUTE), ()), costs_us.get((workload, peer), ())
    return [each / other for each, other in zip(own, theirs, strict=False) if other > 0]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = _quartiles(values)
    return f"{median(values):,.0f} [{low:,.0f}..{high:,.0f}]"


def _ratio_cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = _quartiles(values)
    return f"{median(values):.2f} [{low:.2f}..{high:.2f}]"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third
