"""`warmroute replay`: how a policy and a choice of tiers would serve a trace, in simulated time."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from directory.hardware import UnknownHardware
from gateway.routing.policies import POLICIES
from nodeagent.tiers.write_policy import WRITE_POLICIES
from warmroute.replay.hardware import MODELS, FleetPlan, Imperfection, Model, TierBlocks, model_named
from warmroute.replay.plot import Curve, PlotError, check_plot, draw
from warmroute.replay.report import report, table
from warmroute.replay.simulation import replay
from warmroute.replay.trace import TracedRequest, TraceError, from_zero, read_trace, spread_out

NODES_MAX = 4096
GATEWAYS_MAX = 256
DEVICES_MAX = 4096
BLOCKS_MAX = 10**8
TIER_NOTES = {
    "gpu": "; a block of 8b is 67 MB",
    "nvme": "; chunks come there through dram, so without that there is none",
}
SPEED_MIN, DEVIATION_MAX = 1e-3, 3.0
TIERS_DEFAULT, FLAWS_DEFAULT, PLAN_DEFAULT = TierBlocks(), Imperfection(), FleetPlan(nodes=4)

EPILOG = (
    "A line of a trace is a JSON object: timestamp (ms), input_length and output_length (tokens), and hash_ids, "
    "the ids of the prompt's blocks of 512 tokens; equal ids mean equal prompts up to there. Public traces: "
    "github.com/kvcache-ai/Mooncake, FAST25-release/traces. A gateway records its own: trace.file in its "
    "configuration."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = "Replay a trace in Mooncake's format (digests only) through the real routing code."
    parser.epilog = EPILOG
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="a file of JSON lines; - for stdin")
    add("--policy", choices=POLICIES, default="seconds", help="how requests are routed (default seconds)")
    add("--compare", metavar="P1,P2", help="several policies instead, a line each")
    add("--nodes", type=_whole("nodes", 1, NODES_MAX), default=4, metavar="N", help="one engine each (default 4)")
    speed = _number("speed", SPEED_MIN)
    add("--speed", type=speed, default=1.0, metavar="X", help="arrivals X times as fast (default 1)")
    text = "spread arrivals over S seconds of the trace, where its clock ticks coarsely (Mooncake's: 3; default 0)"
    add("--tick", type=_number("the tick"), default=0.0, metavar="S", help=text)
    text = "half of the requests, with cold caches: tune on the first, report on the second"
    add("--half", choices=("all", "first", "second"), default="all", help=text)
    text = "8b or 70b (Llama 3's, on one or eight H100), or a name of the hardware table (default 8b)"
    add("--model", default="8b", metavar="NAME", help=text)
    text = "of a model from the table: its accelerators (default h100)"
    add("--accelerator", metavar="NAME", help=text)
    devices = _whole("devices", 1, DEVICES_MAX)
    add("--devices", type=devices, metavar="N", help="of a model from the table: how many (default 1)")
    for tier, least in (("gpu", 1), ("dram", 0), ("nvme", 0)):
        blocks = getattr(TIERS_DEFAULT, tier)
        check = _whole(f"{tier} blocks", least, BLOCKS_MAX)
        text = f"a node's {tier} tier in blocks of 512 tokens (default {blocks}){TIER_NOTES.get(tier, '')}"
        add(f"--{tier}-blocks", type=check, default=blocks, metavar="N", help=text)
    text = "what is written to NVMe: reuse (as agents do by default), hit, through or demote"
    add("--write-policy", choices=WRITE_POLICIES, default="reuse", help=text)
    for flag, name, most, text in (
        ("--announce-delay", "announce_delay_s", 1e6, "seconds until a change in a tier is in the directory"),
        (
            "--service-error",
            "service_error",
            DEVIATION_MAX,
            "deviation of the logarithm of booked over expected service",
        ),
        ("--engine-spread", "engine_spread", DEVIATION_MAX, "deviation of the logarithm of engines' speeds"),
    ):
        value = getattr(FLAWS_DEFAULT, name)
        check = _number(flag, most=most)
        add(flag, type=check, default=value, metavar="X", dest=name, help=f"{text} (default {value})")
    text = "requests go to N gateways in turn, each with an account of its own (default 1)"
    add("--gateways", type=_whole("gateways", 1, GATEWAYS_MAX), default=1, metavar="N", help=text)
    add("--peers", action="store_true", help="hosts fetch blocks from each other's DRAM and NVMe")
    rate = PLAN_DEFAULT.peer_bytes_per_s / 1e9
    text = f"GB/s that a host takes from its peers (default {rate:g})"
    add("--peer-rate", type=_number("the peers' rate", 1e-3), default=rate, metavar="X", help=text)
    text = "engines' registered rates are believed, whatever their first tokens show"
    add("--uncorrected", action="store_true", help=text)
    add(
        "--prefill-chunk",
        type=_whole("the chunk", 16, BLOCKS_MAX),
        default=512,
        metavar="N",
        help="prompt tokens of one engine step, with which every running reply gets a token (default 512)",
    )
    add("--slo-ttft", type=_number("the SLO", 1e-6), default=2.0, metavar="S", help="for goodput (default 2 s)")
    add("--seed", type=int, default=0, help="of all errors; every policy meets the same ones")
    add("--plot", type=Path, metavar="FILE", help="draw TTFT and hit rates: .png, .svg or .pdf (needs warmroute[plot])")
    add("--json", action="store_true", help="a JSON object a policy, in seconds, tokens and requests")


def run_command(options: argparse.Namespace) -> int:
    """Print the figures; trouble is one sentence on stderr, and 2."""
    try:
        return _run(options)
    except BrokenPipeError:  # who reads has read enough: `| head -1`
        _leave_stdout()
        return 0
    except (TraceError, PlotError, UnknownHardware) as error:
        print(f"warmroute replay: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        _leave_stdout()
        print(f"warmroute replay: the figures can't be written: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _leave_stdout() -> None:
    """Nothing more goes there, not even what the interpreter flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    requests = _requests(options)
    policies = _policies(options)
    model = _model(options)
    if options.plot is not None:
        check_plot(options.plot)
    plan = FleetPlan(
        nodes=options.nodes,
        model=model,
        blocks=TierBlocks(options.gpu_blocks, options.dram_blocks, options.nvme_blocks),
        imperfection=replace(
            FLAWS_DEFAULT,
            announce_delay_s=options.announce_delay_s,
            service_error=options.service_error,
            engine_spread=options.engine_spread,
        ),
        prefill_chunk_tokens=options.prefill_chunk,
        write_policy=options.write_policy,
        gateways=options.gateways,
        peers=options.peers,
        corrects_rates=not options.uncorrected,
        peer_bytes_per_s=options.peer_rate * 1e9,
    )
    curves = []
    for policy in policies:
        outcome = replay(requests, plan, policy, options.seed)
        figures = report(policy, outcome, options.slo_ttft)
        curves.append(Curve(figures, [job.submitted_at for job in outcome.jobs], [job.ttft_s for job in outcome.jobs]))
        if options.json:
            print(json.dumps(figures.as_json()), flush=True)
    if not options.json:
        print(table([curve.report for curve in curves]), flush=True)
    if options.plot is not None:
        draw(curves, options.plot)
    return 0


def _model(options: argparse.Namespace) -> Model:
    """Raises `UnknownHardware`."""
    if options.model in MODELS and (options.accelerator or options.devices):
        text = "is on H100s; --accelerator and --devices go with a model of the hardware table, such as llama-3.1-8b"
        raise UnknownHardware(f"{options.model} {text}")
    return model_named(options.model, options.accelerator or "h100", options.devices or 1)


def _requests(options: argparse.Namespace) -> Sequence[TracedRequest]:
    requests = _read(options.trace)
    middle = len(requests) // 2
    part = {"all": requests, "first": requests[:middle], "second": requests[middle:]}[options.half]
    if not part:
        raise TraceError(f"the {options.half} half of the trace holds no request")
    return from_zero(spread_out(part, options.tick, options.seed) if options.tick else part, options.speed)


def _read(path: Path) -> list[TracedRequest]:
    name = "stdin" if str(path) == "-" else str(path)
    try:
        if str(path) != "-":
            with path.open(encoding="utf-8-sig") as lines:
                return read_trace(lines)
        return read_trace(sys.stdin or ())
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{name} isn't text in UTF-8; a compressed trace must be unpacked first") from None
    except OSError as error:
        raise TraceError(f"{name} can't be read: {error.strerror}") from None


def _policies(options: argparse.Namespace) -> list[str]:
    if not options.compare:
        return [options.policy]
    names = [name.strip() for name in options.compare.split(",") if name.strip()]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        known = ", ".join(POLICIES)
        raise TraceError(f"--compare names policies among {known}; not {', '.join(unknown) or 'nothing'}")
    return names


class _Bounded:
    """An option's type with bounds; argparse prints the sentence."""

    def __init__(self, kind: type[int] | type[float], name: str, least: float, most: float) -> None:
        self._kind, self._name, self._least, self._most = kind, name, least, most

    def __call__(self, text: str) -> int | float:
        what = "whole number" if self._kind is int else "number"
        try:
            value = self._kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{self._name} must be a {what}, not {text!r}") from None
        if not self._least <= value <= self._most:
            bounds = f"from {self._least:.15g} to {self._most:.15g}"
            raise argparse.ArgumentTypeError(f"{self._name} must be a {what} {bounds}, not {text}")
        return value


def _whole(name: str, least: int, most: int) -> _Bounded:
    return _Bounded(int, name, least, most)


def _number(name: str, least: float = 0.0, most: float = 1e6) -> _Bounded:
    return _Bounded(float, name, least, most)
