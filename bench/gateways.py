"""What several gateways cost: replays traces through 1, 2, 4 and 8 of them that share their load.

    python -m bench.gateways TRACE:NODES:SPEED... [--json] [--report S] [--poll S]

A trace is one in Mooncake's format, such as `conversation.jsonl:16:5`; its second half is replayed. `apart` is the
widest difference of the token hit rates, in points. `--report` and `--poll` are the seconds between a gateway's reports
and between its looks at the others'.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

from warmroute.replay.hardware import FleetPlan, Imperfection
from warmroute.replay.report import ReplayReport, report
from warmroute.replay.simulation import replay
from warmroute.replay.trace import from_zero, read_trace, spread_out

GATEWAYS = (1, 2, 4, 8)
TICK_S = 3.0
"""Of Mooncake's clock: what arrives within a tick is spread over it."""


def replayed(trace: Path, nodes: int, speed: float, gateways: int, known: Imperfection, seed: int = 0) -> ReplayReport:
    with trace.open(encoding="utf-8") as lines:
        requests = read_trace(lines)
    requests = from_zero(spread_out(requests[len(requests) // 2 :], TICK_S), speed)
    plan = FleetPlan(nodes, imperfection=known, gateways=gateways)
    return report("seconds", replay(requests, plan, "seconds", seed), slo_ttft_s=2.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cells", nargs="+", metavar="TRACE:NODES:SPEED")
    parser.add_argument("--json", action="store_true", help="an object a line")
    parser.add_argument("--report", type=float, default=Imperfection().report_interval_s, metavar="S")
    parser.add_argument("--poll", type=float, default=Imperfection().poll_interval_s, metavar="S")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="means of so many replays")
    options = parser.parse_args()
    known = Imperfection(report_interval_s=options.report, poll_interval_s=options.poll)
    for cell in options.cells:
        trace, nodes, speed = cell.rsplit(":", 2)
        rates = []
        for gateways in GATEWAYS:
            figures = [
                replayed(Path(trace), int(nodes), float(speed), gateways, known, seed) for seed in range(options.seeds)
            ]
            rates.append(fmean(each.hit_rate["all"] for each in figures))
            row: dict[str, object] = {"cell": Path(cell).name, "gateways": gateways, "hit": rates[-1]}
            row["ttft_mean_s"] = fmean(each.ttft.mean for each in figures)
            row["ttft_p99_s"] = fmean(each.ttft.p99 for each in figures)
            row["goodput_per_s"] = fmean(each.goodput for each in figures)
            told = json.dumps(row) if options.json else "  ".join(f"{key} {_told(each)}" for key, each in row.items())
            print(told, flush=True)
        print(f"apart {100 * (max(rates) - min(rates)):.1f}", file=sys.stderr)
    return 0


def _told(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
