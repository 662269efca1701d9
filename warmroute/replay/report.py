"""Figures of a replay: what users wait for, what the tiers served, how even the engines were. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import pstdev

from directory.tiers import TIERS
from warmroute.replay.world import Outcome


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles, in seconds. A percentile is the smallest value that so many percent don't exceed."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One policy's figures.

    `tokens`: prompt tokens requested, by tier that served them, and missed; they add up. `hit_rate`: the shares of the
    requested. `balance`: the busiest engine's prefill seconds over the mean, and `balance_cov`: their standard
    deviation over it. `written`: blocks written to NVMe; `fetched`: blocks that hosts took from each other. `goodput`:
    requests whose first token came within `slo_ttft_s`, for each second from the first arrival to the last end;
    `goodput_share`: of all requests. Nothing is shed: what waits, waits.
    """

    policy: str
    requests: int
    ttft: Spread
    tpot: Spread
    tokens: Mapping[str, int]
    hit_rate: Mapping[str, float]
    balance: float
    balance_cov: float
    spills: int
    written: int
    fetched: int
    goodput: float
    goodput_share: float

    def as_json(self) -> dict[str, object]:
        """For `--json`; units are seconds, tokens and requests."""
        return asdict(self)


def report(policy: str, outcome: Outcome, slo_ttft_s: float) -> ReplayReport:
    """The figures of an outcome of at least one request."""
    jobs = outcome.jobs
    ttfts = [job.ttft_s for job in jobs]
    tpots = [
        (job.ended_at - job.first_token_at) / (job.request.output_tokens - 1)
        for job in jobs
        if job.request.output_tokens > 1
    ]
    requested = sum(job.request.prompt_tokens for job in jobs)
    tokens = {"requested": requested}
    tokens |= {tier.label: sum(job.tier_tokens[tier] for job in jobs) for tier in TIERS}
    tokens["missed"] = sum(job.missed_tokens for job in jobs)
    shares = {tier.label: tokens[tier.label] / requested for tier in TIERS}
    within = sum(ttft <= slo_ttft_s for ttft in ttfts)
    lasted_s = max(job.ended_at for job in jobs) - jobs[0].submitted_at
    mean_busy_s = sum(outcome.busy_s) / len(outcome.busy_s)
    return ReplayReport(
        policy=policy,
        requests=len(jobs),
        ttft=_spread(ttfts),
        tpot=_spread(tpots or [0.0]),
        tokens=tokens,
        hit_rate={"all": sum(shares.values())} | shares,
        balance=max(outcome.busy_s) / mean_busy_s,
        balance_cov=pstdev(outcome.busy_s) / mean_busy_s,
        spills=outcome.spills,
        written=sum(outcome.written),
        fetched=outcome.fetched,
        goodput=within / lasted_s,
        goodput_share=within / len(jobs),
    )


def table(reports: Sequence[ReplayReport]) -> str:
    """The reports as lines for people, one a policy."""
    head = (
        f"{'policy':12} {'ttft mean':>9} {'p50':>8} {'p90':>8} {'p99':>8} {'tpot':>7} {'hit':>6} {'gpu':>6} {'dram':>6}"
    )
    lines = [head + f" {'nvme':>6} {'balance':>7} {'spills':>6} {'goodput/s':>9} {'in slo':>6}"]
    for each in reports:
        ttft, hit = each.ttft, each.hit_rate
        lines.append(
            f"{each.policy:12} {ttft.mean:9.3f} {ttft.p50:8.3f} {ttft.p90:8.3f} {ttft.p99:8.3f} {each.tpot.mean:7.4f} "
            f"{hit['all']:6.3f} {hit['gpu']:6.3f} {hit['dram']:6.3f} {hit['nvme']:6.3f} {each.balance:7.2f} "
            f"{each.spills:6} {each.goodput:9.2f} {each.goodput_share:6.3f}"
        )
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)

    def at(percent: int) -> float:
        return ordered[-(-percent * len(ordered) // 100) - 1]

    return Spread(sum(ordered) / len(ordered), at(50), at(90), at(99))
