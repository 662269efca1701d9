"""Figures of runs, in the trace's seconds: what clients waited for, what engines' caches served, what it cost here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.fleet.load import Answer
from bench.fleet.scale import Scale

LATE_P99_S_MAX = 0.02
"""Real seconds: a run counts where the engines and the client were later than this less often than once in 100."""

CLIENT, ENGINES, OTHERS = "client", "engines", "others"
"""Rows of `cores` that aren't the router's; `OTHERS` is what else ran on the machine."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run. TTFT in seconds of the trace; `goodput`: requests a second (of the trace) with a first token in the SLO.

    `added_ms`: real milliseconds of the mean TTFT that weren't an engine's queue or prefill: the router, and how late
    everybody was told. `hit_rate`: cached tokens that engines reported, of all prompt tokens. `busiest`: prompt tokens
    that the busiest engine computed over the mean. `late_p99_s`: of engines and client, real seconds. `cores`: CPU
    seconds a real second, by process.
    """

    trace: str
    router: str
    requests: int
    errors: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    goodput: float
    in_slo: float
    added_ms: float
    hit_rate: float
    busiest: float
    late_p99_s: Mapping[str, float]
    cores: Mapping[str, float]
    first_error: str = ""

    @property
    def is_late(self) -> bool:
        """Whether the machine was too slow for its figures to count."""
        return max(self.late_p99_s.values()) > LATE_P99_S_MAX


@dataclass(frozen=True, slots=True)
class Watched:
    """What was measured beside the answers."""

    engines_late_s: Sequence[float]
    computed_tokens: Sequence[int]
    cores: Mapping[str, float]
    engines_ttft_s: float


def run_figures(
    trace: str, router: str, answers: Sequence[Answer], watched: Watched, scale: Scale, slo_s: float
) -> Run:
    """The figures of one run. A request that failed has no first token and counts against the goodput."""
    good = [each for each in answers if not each.error]
    ttfts = sorted(each.first_token_s / scale.real_s for each in good if each.first_token_s is not None)
    within = sum(each <= slo_s for each in ttfts)
    lasted_s = max(each.at_s + (each.ended_s or 0.0) for each in answers) / scale.real_s
    prompt = sum(each.prompt_tokens for each in good)
    errors = [each.error for each in answers if each.error]
    return Run(
        trace=trace,
        router=router,
        requests=len(answers),
        errors=len(errors),
        ttft_mean=fmean(ttfts) if ttfts else float("nan"),
        ttft_p50=percentile(ttfts, 50),
        ttft_p99=percentile(ttfts, 99),
        goodput=within / lasted_s,
        in_slo=within / len(answers),
        added_ms=1000 * (fmean(ttfts) * scale.real_s - watched.engines_ttft_s) if ttfts else float("nan"),
        hit_rate=sum(each.cached_tokens for each in good) / prompt if prompt else 0.0,
        busiest=max(watched.computed_tokens) / max(1.0, fmean(watched.computed_tokens)),
        late_p99_s={
            "engines": percentile(sorted(watched.engines_late_s), 99),
            "client": percentile(sorted(each.late_s for each in answers), 99),
        },
        cores=watched.cores,
        first_error=errors[0] if errors else "",
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent don't exceed; not a number of nothing."""
    return ordered[-(-percent * len(ordered) // 100) - 1] if ordered else float("nan")


def table(runs: Sequence[Run]) -> str:
    """A line for each trace and router: means of the runs that count, and their mean TTFTs one by one."""
    lines = [
        f"{'trace':13} {'router':26} {'ttft mean':>9} {'p50':>7} {'p99':>7} {'goodput/s':>9} {'in slo':>6} {'hit':>6} "
        f"{'busiest':>7} {'added ms':>8} {'errors':>6} {'router cores':>12}  mean ttft of each run"
    ]
    for trace, router in dict.fromkeys((run.trace, run.router) for run in runs):
        all_of_it = [run for run in runs if (run.trace, run.router) == (trace, router)]
        # Where the machine was late in all of them they are shown all the same, and marked.
        counted = [run for run in all_of_it if not run.is_late] or all_of_it
        each = " ".join(f"{run.ttft_mean:.2f}{'(late)' if run.is_late else ''}" for run in all_of_it)
        lines.append(
            f"{trace:13} {router:26} {_mean(counted, 'ttft_mean'):9.2f} {_mean(counted, 'ttft_p50'):7.2f} "
            f"{_mean(counted, 'ttft_p99'):7.2f} {_mean(counted, 'goodput'):9.2f} {_mean(counted, 'in_slo'):6.3f} "
            f"{_mean(counted, 'hit_rate'):6.3f} {_mean(counted, 'busiest'):7.2f} {_mean(counted, 'added_ms'):8.1f} "
            f"{sum(run.errors for run in all_of_it):6} {fmean(_router_cores(run) for run in counted):12.2f}  {each}"
        )
    return "\n".join(lines)


def _mean(runs: Sequence[Run], name: str) -> float:
    return fmean(getattr(run, name) for run in runs)


def _router_cores(run: Run) -> float:
    return sum(cores for part, cores in run.cores.items() if part not in (CLIENT, ENGINES, OTHERS))
