"""What a request costs in a router, and what it adds to the first token.

    python -m bench.gateway [--quick] [--only 100,8k,32k,token,first,streams] [--routers warmroute,sglang] [--pairs 20]

Routers run side by side over the same eight engines, which compute nothing, and are asked one after another in turns;
what counts is CPU time (all threads and children, as the scheduler counts it), in medians of pairs, for machines are
shared and the clock says more about the neighbours. Conversations of several turns share system prompts; each request
asks a new last question. warmroute does all that it does: exact token ids, a lookup in a real Valkey that holds the
conversations' chunks, the score, the ledger, metrics. `first` is the time that a router adds to a first token, and
`streams` are 2,000 streams at once. The peers are installed on the first run (`bench/peers.py`).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from bench.gateway.client import Load, run_load
from bench.gateway.crowd import CrowdSeen, crowd
from bench.gateway.engine import Behaviour
from bench.gateway.prompts import conversations
from bench.gateway.report import Key, table, verdicts
from bench.gateway.site import ROUTERS, Ground, Router, SiteFailed, standing
from bench.peers import PeerUnavailable

PAIRS, QUICK_PAIRS = 20, 2
FIRST_REQUESTS = 60


AT_ONCE = Behaviour(renders=True)
AS_TYPED = Behaviour(ttft_s=0.02, token_s=0.02, renders=True)


@dataclass(frozen=True, slots=True)
class Workload:
    """So many conversations of so many tokens, `requests` of them in a run over so many connections."""

    tokens: int
    conversations: int
    connections: int
    requests: int
    output_tokens: int = 16
    behaviour: Behaviour = AT_ONCE

    @property
    def is_streamed(self) -> bool:
        """Whether the cost is counted by token, and not by request."""
        return self.behaviour.token_s > 0


WORKLOADS = {
    "100": Workload(100, 64, 16, 500),
    "8k": Workload(8_000, 64, 8, 200),
    "32k": Workload(32_000, 32, 4, 100),
    "token": Workload(100, 64, 64, 128, 100, AS_TYPED),
}


def main() -> int:
    """Run it; 2 where something stands in the way."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="wr-bench-") as folder:
        try:
            uvloop.run(_all(options, Path(folder)))
        except (PeerUnavailable, SiteFailed, OSError) as error:
            print(f"bench.gateway: {error}", file=sys.stderr)
            return 2
    return 0


async def _all(options: argparse.Namespace, folder: Path) -> None:
    routers = [name for name in ROUTERS if any(word in name for word in options.routers)]
    costs_us: dict[Key, list[float]] = {}
    pairs = QUICK_PAIRS if options.quick else options.pairs
    names = [name for name in WORKLOADS if _is_wanted(name, options.only)]
    async with standing(routers, folder) as ground:
        for name in names:
            await _measure(ground, name, WORKLOADS[name], pairs, costs_us)
        if names:
            print(table(costs_us, names, routers))
            print("\n".join(verdicts(costs_us)), flush=True)
        if _is_wanted("first", options.only):
            await _show_first_tokens(ground, pairs)
        if _is_wanted("streams", options.only):
            for router in ground.routers:
                _show_crowd(router.name, await crowd(ground, router))
    if options.json is not None:
        options.json.write_text(json.dumps({f"{name} {router}": found for (name, router), found in costs_us.items()}))


async def _measure(ground: Ground, name: str, workload: Workload, pairs: int, costs_us: dict[Key, list[float]]) -> None:
    asked = conversations(workload.tokens, workload.conversations, workload.output_tokens, workload.is_streamed)
    await ground.announcer.hold(asked)
    await ground.behave(workload.behaviour)
    load = Load([each.body for each in asked], workload.connections, workload.requests)
    for router in ground.routers:
        await _run(router, load)
    for pair in range(pairs):
        for router in ground.routers if pair % 2 == 0 else reversed(ground.routers):
            before = router.cpu_s()
            tokens = await _run(router, load)
            spent_us = (router.cpu_s() - before) * 1e6
            costs_us.setdefault((name, router.name), []).append(
                spent_us / (tokens if workload.is_streamed else workload.requests)
            )


async def _run(router: Router, load: Load) -> int:
    """How many tokens were streamed. Raises `SiteFailed` where a request failed: its cost would say nothing."""
    outcome = await run_load(router.port, load)
    if outcome.good != load.requests:
        raise SiteFailed(f"{router.name}: {dict(outcome.statuses)} {dict(outcome.errors)} of {load.requests} requests")
    return outcome.tokens


async def _show_first_tokens(ground: Ground, pairs: int) -> None:
    """One request at a time: seconds until its first token, less those that an engine alone takes."""
    asked = conversations(32_000, 32, 1, True)
    await ground.announcer.hold(asked)
    await ground.behave(AT_ONCE)
    places = [("an engine alone", ground.engine_ports[0]), *((each.name, each.port) for each in ground.routers)]
    for keeps in (True, False):
        found: dict[str, list[float]] = {name: [] for name, _ in places}
        load = Load([each.body for each in asked], 1, FIRST_REQUESTS // 4, keeps=keeps)
        for _, port in places:
            await run_load(port, load)
        for _ in range(pairs):
            for name, port in places:
                found[name].append(median((await run_load(port, load)).first_token_s))
        alone = median(found["an engine alone"])
        said = ", ".join(f"{name} {1000 * (median(each) - alone):.2f}" for name, each in found.items())
        kept = "kept connections" if keeps else "a connection each"
        print(f"ms added to the first token, 32k tokens, warm, {kept}: {said}; alone {1000 * alone:.2f}", flush=True)


def _show_crowd(name: str, seen: CrowdSeen) -> None:
    print(
        f"{seen.streams} streams at once, {name}: {seen.good} good, errors {dict(seen.errors)}; first token "
        f"{seen.first_token_p50_s:.2f} s (p99 {seen.first_token_p99_s:.2f}); slowest probe {seen.probe_max_s:.3f} s; "
        f"RSS {seen.rss_bytes / 2**20:.0f} MiB; {seen.cores:.2f} cores",
        flush=True,
    )


def _is_wanted(name: str, only: Sequence[str]) -> bool:
    return not only or name in only


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs: to see that it works")
    add("--only", type=_words, default=[], metavar="A,B", help=f"of {', '.join(WORKLOADS)}, first, streams")
    add("--routers", type=_words, default=[""], metavar="A,B", help=f"parts of names among: {', '.join(ROUTERS)}")
    add("--pairs", type=int, default=PAIRS, metavar="N", help=f"runs of each (default {PAIRS})")
    add("--json", type=Path, metavar="FILE", help="all costs")
    return parser.parse_args()


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
