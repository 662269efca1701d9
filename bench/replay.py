"""Who routes best: the policies on whole fleets, light, busy and over capacity, in `warmroute replay`'s simulated time.

    python -m bench.replay TRACES [--quick] [--half first] [--policies P1,P2] [--seed N] [--prefill-chunk N] [--model M]

TRACES is a folder with `conversation.jsonl` and `synthetic.jsonl` in Mooncake's format (github.com/kvcache-ai/Mooncake,
FAST25-release/traces). Constants were tuned on the first halves; the second are reported. A half begins with
cold caches.

*Load*: 1 is the speed at which the engine seconds that a reference policy spends on the requests of the busiest third
of the run (loading, computing, and what replies slow these by) are just as many as that third has. The busiest,
because prompts that nobody has seen come early in a half: a fleet that can't keep up for a third of the run is over
capacity. The reference is `weighted`, which of the published forms hits most, so it recomputes least. The speed
is found by iteration (work per second is nearly proportional to speed) and is the same for every policy of a cell.

*Goodput* counts first tokens within `SLO_TTFT_S`: 30 s is the bound of the traces' publishers (Mooncake, FAST'25), 5 s
a stricter one.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.routing.policies import POLICIES
from warmroute.replay.hardware import MODELS, FleetPlan
from warmroute.replay.report import ReplayReport, report
from warmroute.replay.simulation import replay
from warmroute.replay.trace import TracedRequest, from_zero, read_trace, spread_out
from warmroute.replay.world import Outcome

TICKS_S = {"conversation": 3.0, "synthetic": 0.0}
"""Of each trace's clock: what arrives within a tick is spread over it."""
NODES = (4, 16)
LOADS = {"light": 0.5, "busy": 0.85, "over": 1.1}
COMPARED = ("seconds", "product", "blocks", "weighted", "sticky")
REFERENCE = "weighted"
THIRDS = 3
LOAD_TOLERANCE = 0.01
ITERATIONS_MAX = 6
SLO_TTFT_S = (5.0, 30.0)
BUSY_RATIO_MAX = {"weighted": 0.7, "sticky": 0.7, "product": 0.95, "blocks": 0.95}
"""What the default's mean TTFT may be of another policy's at busy load."""
MEAN_SHARE, P99_SHARE, GOODPUT_SHARE, HIT_POINTS = 1.02, 1.1, 0.98, 0.02
"""How near the best the default must be: mean TTFT, its p99 at busy load, goodput and token hit rate over capacity."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One fleet under one load, and each policy's figures: one report for each of `SLO_TTFT_S`."""

    trace: str
    nodes: int
    load: str
    speed: float
    figures: Mapping[str, tuple[ReplayReport, ...]]

    def lines(self) -> list[str]:
        """The cell as rows of a table."""
        head = f"{self.trace}, {self.nodes} nodes, {self.load} ({LOADS[self.load]}): speed {self.speed:.2f}"
        rows = []
        for policy, (strict, wide) in self.figures.items():
            mean, p99 = strict.ttft.mean, strict.ttft.p99
            rows.append(
                f"  {policy:12} ttft {mean:8.3f} p99 {p99:8.2f} tpot {strict.tpot.mean:6.4f} "
                f"hit {strict.hit_rate['all']:.3f} goodput {strict.goodput:6.2f} {wide.goodput:6.2f} "
                f"in slo {strict.goodput_share:.3f} {wide.goodput_share:.3f} balance {strict.balance:.2f} "
                f"ttft of seconds / its {self.figures['seconds'][0].ttft.mean / mean:.2f}"
            )
        return [head, *rows]

    def misses(self) -> list[str]:
        """What the default policy falls short of here, a sentence each."""
        found, own = [], self.figures["seconds"]

        def judge(is_met: bool, text: str) -> None:
            if not is_met:
                found.append(f"{self.trace}, {self.nodes} nodes, {self.load}: {text}")

        if self.load == "over":
            for number, slo in enumerate(SLO_TTFT_S):
                best = max(each[number].goodput for each in self.figures.values())
                text = f"goodput within {slo:g} s is {own[number].goodput:.2f}, the best {best:.2f}"
                judge(own[number].goodput >= best * GOODPUT_SHARE, text)
            most = max(each[0].hit_rate["all"] for each in self.figures.values())
            hit = own[0].hit_rate["all"]
            judge(hit >= most - HIT_POINTS, f"token hit rate {hit:.3f}, the best {most:.3f}")
            return found
        mean, p99 = own[0].ttft.mean, own[0].ttft.p99
        best = min(each[0].ttft.mean for each in self.figures.values())
        judge(mean <= best * MEAN_SHARE, f"mean TTFT {mean:.3f}, the best {best:.3f}")
        if self.load == "busy":
            for policy, limit in BUSY_RATIO_MAX.items():
                if policy in self.figures:
                    ratio = mean / self.figures[policy][0].ttft.mean
                    judge(ratio <= limit, f"mean TTFT is {ratio:.2f} of {policy}'s, not {limit}")
            best = min(each[0].ttft.p99 for each in self.figures.values())
            judge(p99 <= best * P99_SHARE, f"p99 of TTFT {p99:.2f}, the best {best:.2f}")
        return found


def offered_load(outcome: Outcome, nodes: int) -> float:
    """Engine seconds spent on the requests of the busiest third of a run, over the seconds that engines have then."""
    part_s = outcome.jobs[-1].request.arrival_s / THIRDS
    work_s = [0.0] * THIRDS
    for job in outcome.jobs:
        work_s[min(THIRDS - 1, int(job.request.arrival_s / part_s))] += job.first_token_at - job.started_at
    return max(work_s) / (nodes * part_s)


def capacity(requests: Sequence[TracedRequest], plan: FleetPlan, seed: int) -> float:
    """The speed at which the load is 1 (see the module)."""
    speed = plan.nodes / 2
    for _ in range(ITERATIONS_MAX):
        load = offered_load(replay(from_zero(requests, speed), plan, REFERENCE, seed), plan.nodes)
        speed /= load
        if abs(load - 1) <= LOAD_TOLERANCE:
            break
    return speed


def compare(
    requests: Sequence[TracedRequest], plan: FleetPlan, policies: Sequence[str], seed: int
) -> Mapping[str, tuple[ReplayReport, ...]]:
    """Every policy's figures on the same requests, which meet the same errors."""
    figures = {}
    for policy in policies:
        outcome = replay(requests, plan, policy, seed)
        figures[policy] = tuple(report(policy, outcome, slo) for slo in SLO_TTFT_S)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every cell as it is done, then what the default policy falls short of."""
    options = _options(arguments)
    policies = tuple(dict.fromkeys(("seconds", *options.policies.split(","))))
    misses: list[str] = []
    for trace, tick_s in TICKS_S.items():
        with (options.traces / f"{trace}.jsonl").open(encoding="utf-8") as lines:
            requests = read_trace(lines)
        middle = len(requests) // 2
        half = spread_out(requests[:middle] if options.half == "first" else requests[middle:], tick_s, options.seed)
        for nodes in NODES[:1] if options.quick else NODES:
            plan = FleetPlan(nodes, MODELS[options.model], prefill_chunk_tokens=options.prefill_chunk)
            full = capacity(half, plan, options.seed)
            for load, share in LOADS.items():
                speed = full * share
                figures = compare(from_zero(half, speed), plan, policies, options.seed)
                cell = Cell(trace, nodes, load, speed, figures)
                print("\n".join(cell.lines()), flush=True)
                misses += cell.misses()
    print("\n".join(["seconds falls short:", *misses] if misses else ["seconds falls short nowhere"]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("traces", type=Path, help="a folder with " + " and ".join(f"{name}.jsonl" for name in TICKS_S))
    parser.add_argument("--quick", action="store_true", help="fleets of 4 nodes only")
    parser.add_argument("--half", choices=("first", "second"), default="second")
    parser.add_argument("--policies", default=",".join(COMPARED), help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--model", choices=MODELS, default="8b")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
