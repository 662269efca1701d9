"""What it costs a gateway that there are others: `python -m bench.shared_load [--gateways 16] [--engines 64]`.

CPU time of one core, medians: of a look at the other gateways' rows (decoding and joining them, every one changed), of
making a report, both at the interval that such a fleet has, and of a routing decision's share that asks for the load of
every engine, with so many requests open on each. What the call itself takes (about 0.2 ms) isn't in it.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from directory.members import (
    TERM_S,
    GatewayRegistration,
    Load,
    Member,
    decode_load,
    draw_incarnation,
    encode_load,
)
from gateway.ledger import Ledger
from gateway.shared_load import EngineLoads, published

REPEATS = 200
WARM_UP = 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The costs of gateways that share their load.")
    parser.add_argument("--gateways", type=int, default=16)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--open", type=int, default=200, help="requests on each engine, of each gateway")
    asked = parser.parse_args()
    engines = [f"engine-{number}.fleet.example:8000" for number in range(asked.engines)]
    ledger = _busy_ledger(engines, asked.open)
    report = Load(booked=published(ledger, time.monotonic()))
    data, others = encode_load(report), asked.gateways - 1
    loads = EngineLoads(ledger, time.monotonic)
    rows = [_row(report) for _ in range(others)]
    loads.take(rows)
    poll_s = _median_s(lambda: [decode_load(data) for _ in range(others)]) + _median_s(lambda: loads.take(rows))
    route_s = _median_s(lambda: [loads.of(engine) for engine in engines])
    report_s = _median_s(lambda: encode_load(Load(booked=published(ledger, time.monotonic()))))
    print(f"{asked.gateways} gateways, {asked.engines} engines, {asked.open} requests of each gateway on each engine")
    interval_s = loads.interval_s
    print(f"reports and looks are {interval_s * 1e3:.0f} ms apart")
    print(f"a report: {len(data):,} bytes, {report_s * 1e6:,.0f} us, {report_s / interval_s:.2%} of a core")
    share = poll_s / interval_s
    print(f"a look: {others * len(data):,} bytes of reports, {poll_s * 1e6:,.0f} us, {share:.2%} of a core")
    print(f"a decision: {route_s * 1e6:,.0f} us for the loads of {asked.engines} engines")


def _busy_ledger(engines: list[str], open_requests: int) -> Ledger:
    ledger = Ledger(time.monotonic)
    for engine in engines:
        for number in range(open_requests):
            ledger.book(engine, 0.5, is_streamed=number % 2 == 0, new_tokens=2000, held_tokens=8000)
    return ledger


def _row(report: Load) -> Member:
    registration = GatewayRegistration("gateway.example:8000", "http://gateway.example:8001")
    return Member(draw_incarnation(), registration, report, TERM_S - 0.2)


def _median_s(act: Callable[[], object]) -> float:
    spans = []
    for _ in range(WARM_UP + REPEATS):
        began = time.thread_time()
        act()
        spans.append(time.thread_time() - began)
    return statistics.median(spans[WARM_UP:])


if __name__ == "__main__":
    main()
