"""Routers head to head over HTTP: warmroute, sglang-router and vllm-router in front of eight simulated engines.

    python -m bench.fleet TRACES [--quick] [--only warmroute,kv_aware] [--traces conversation] [--json FILE]

TRACES is a folder with `conversation.jsonl` and `synthetic.jsonl` in Mooncake's format. Every router gets the same
requests at the same moments, fresh engines in each run, and its default options; runs of different routers alternate.
Engines are the replay's model in scaled time (`bench/fleet/scale.py`), with the `gpu` tier only. All figures are in
seconds of the trace. The peers are installed on the first run (`bench/peers.py`).
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import uvloop

from bench.fleet.prompts import TextRequest, slice_of, text_requests
from bench.fleet.report import Run, run_figures, table
from bench.fleet.run import ENGINES, FleetSize, StackFailed, run_stack
from bench.fleet.scale import Scale
from bench.fleet.stacks import STACKS, Stack
from bench.peers import PeerUnavailable
from warmroute.replay.trace import TraceError, read_trace

SPEEDS = {"conversation": 3.0, "synthetic": 2.6}
"""At which eight engines are busy for about 0.85 of the time with the best of the routers."""
SECONDS, QUICK_SECONDS = 125.0, 25.0
GPU_BLOCKS = 2000


def main() -> int:
    """Run it; 2 where something stands in the way."""
    options = _options()
    scale = Scale(real_s=options.real_s)
    stacks = [stack for stack in STACKS.values() if any(word in stack.name for word in options.only)]
    seconds = QUICK_SECONDS if options.quick else options.seconds
    size = FleetSize(scale, options.gpu_blocks)
    try:
        loads = {name: _load(options.folder, name, options.speed, seconds, scale) for name in options.traces}
        runs = uvloop.run(_all(stacks, size, loads, 1 if options.quick else options.repetitions, options.slo_ttft))
    except (PeerUnavailable, StackFailed, TraceError, OSError) as error:
        print(f"bench.fleet: {error}", file=sys.stderr)
        return 2
    print(
        f"\n{ENGINES} engines of {options.gpu_blocks} blocks of 512 tokens; {scale.trace_tokens} trace tokens a token, "
        f"{scale.real_s:g} s a second; {seconds:g} s of each trace; SLO {options.slo_ttft:g} s"
    )
    print(table(runs))
    if options.json is not None:
        options.json.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs))
    return 0


async def _all(
    stacks: Sequence[Stack],
    size: FleetSize,
    loads: Mapping[str, Sequence[TextRequest]],
    repetitions: int,
    slo_s: float,
) -> list[Run]:
    runs = []
    for repetition in range(repetitions):
        for trace, requests in loads.items():
            for stack in stacks if repetition % 2 == 0 else reversed(stacks):
                answers, watched = await run_stack(stack, size, requests)
                run = run_figures(trace, stack.name, answers, watched, size.scale, slo_s)
                runs.append(run)
                _show(run)
                await asyncio.sleep(0)
    return runs


def _show(run: Run) -> None:
    cores = ", ".join(f"{part} {cores:.2f}" for part, cores in run.cores.items())
    late = ", ".join(f"{who} {1000 * seconds:.1f} ms" for who, seconds in run.late_p99_s.items())
    print(
        f"{run.trace} {run.router}: {run.requests} requests, {run.errors} errors{_quoted(run.first_error)}; "
        f"ttft {run.ttft_mean:.3f} s, in slo {run.in_slo:.3f}, hit {run.hit_rate:.3f}, added {run.added_ms:.1f} ms; "
        f"cores: {cores}; late: {late}",
        flush=True,
    )


def _quoted(error: str) -> str:
    return f" ({error})" if error else ""


def _load(folder: Path, name: str, speed: float | None, seconds: float, scale: Scale) -> list[TextRequest]:
    with (folder / f"{name}.jsonl").open(encoding="utf-8") as lines:
        requests = read_trace(lines)
    return text_requests(slice_of(requests, speed or SPEEDS[name], seconds), scale)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path, metavar="TRACES", help="a folder with conversation.jsonl and synthetic.jsonl")
    add("--quick", action="store_true", help=f"one run of {QUICK_SECONDS:g} s each: to see that it works")
    add("--only", type=_words, default=[""], metavar="A,B", help=f"parts of names among: {', '.join(STACKS)}")
    add("--traces", type=_words, default=list(SPEEDS), metavar="A,B", help="which traces (default both)")
    add("--repetitions", type=int, default=2, metavar="N", help="runs of each (default 2)")
    add("--seconds", type=float, default=SECONDS, metavar="S", help=f"of each trace, sped up (default {SECONDS:g})")
    add("--speed", type=float, metavar="X", help=f"arrivals X times as fast (default {SPEEDS})")
    add("--real-s", type=float, default=0.2, metavar="S", help="real seconds a second of the trace (default 0.2)")
    add("--gpu-blocks", type=int, default=GPU_BLOCKS, metavar="N", help=f"of each engine (default {GPU_BLOCKS})")
    add("--slo-ttft", type=float, default=2.0, metavar="S", help="for goodput (default 2 s)")
    add("--json", type=Path, metavar="FILE", help="a JSON object a run")
    return parser.parse_args()


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
