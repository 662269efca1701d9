"""The `warmroute` command: subcommands only; each hands over at once, so that none pays for another's imports."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from warmroute import keys


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["gateway"]:
        from warmroute import gateway_command

        parser = argparse.ArgumentParser(prog="warmroute gateway")
        gateway_command.add_arguments(parser)
        return gateway_command.run_command(parser.parse_args(given[1:]))
    if given[:1] == ["directory"]:
        from warmroute import directory_command

        parser = argparse.ArgumentParser(prog="warmroute directory")
        directory_command.add_arguments(parser)
        return directory_command.run_command(parser.parse_intermixed_args(given[1:]))
    if given[:1] == ["forget"]:
        from warmroute import forget_command

        parser = argparse.ArgumentParser(prog="warmroute forget")
        forget_command.add_arguments(parser)
        return forget_command.run_command(parser.parse_args(given[1:]))
    if given[:1] == ["doctor"]:
        from warmroute import doctor_command

        parser = argparse.ArgumentParser(prog="warmroute doctor")
        doctor_command.add_arguments(parser)
        return doctor_command.run_command(parser.parse_args(given[1:]))
    if given[:1] == ["agent"]:
        from warmroute import agent_command

        parser = argparse.ArgumentParser(prog="warmroute agent")
        agent_command.add_arguments(parser)
        return agent_command.run_command(parser.parse_args(given[1:]))
    if given[:1] == ["replay"]:
        from warmroute import replay_command

        parser = argparse.ArgumentParser(prog="warmroute replay")
        replay_command.add_arguments(parser)
        return replay_command.run_command(parser.parse_args(given[1:]))
    parser = argparse.ArgumentParser(
        prog="warmroute", description="Routes each LLM request to the engine where its prefix is already warm."
    )
    parser.add_argument("--version", action="version", version=f"warmroute {version('warmroute')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands.add_parser("up", help="a whole fleet on this machine, with a real small model"))
    commands.add_parser("gateway", help="one gateway (see warmroute gateway --help)")
    commands.add_parser("agent", help="one node agent (see warmroute agent --help)")
    commands.add_parser("directory", help="who is in the fleet, who holds a chunk")
    commands.add_parser("forget", help="remove chunks from every host's tiers (see warmroute forget --help)")
    commands.add_parser("doctor", help="what is wrong with a fleet, and how to mend it (see warmroute doctor --help)")
    commands.add_parser(
        "replay", help="a trace through the routing code, in simulated time (see warmroute replay --help)"
    )
    keys.add_arguments(commands.add_parser("keys", help="the chunk keys of a prompt"))
    options = parser.parse_args(given)
    if options.command == "keys":
        return keys.run(options)
    from warmroute.up import run

    return run(options)


def _add_up(parser: argparse.ArgumentParser) -> None:
    parser.description = "Start a directory server, hosts with an agent and an engine each, and a gateway."
    parser.add_argument("--engines", type=int, default=2, metavar="N", help="hosts with an engine each (default 2)")
    parser.add_argument(
        "--engine-kind",
        choices=("reference", "vllm"),
        default="reference",
        help="the small engine that is always there, or vLLM on the CPU, which is installed once (3.4 GB)",
    )
    parser.add_argument(
        "--engine",
        action="append",
        metavar="URL",
        help="an OpenAI-compatible engine of your own, instead of engines started here; repeatable",
    )
    parser.add_argument("--port", type=int, default=8000, help="the gateway's port; its admin port is one above")
    parser.add_argument("--redis", metavar="URL", help="an existing Redis or Valkey instead of the bundled one")
    parser.add_argument("--key-prefix", metavar="TEXT", help="begins every key of this fleet (default wr)")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file instead of the model package's")
    parser.add_argument("--dram-gb", type=float, default=0.6, metavar="GB", help="each host's DRAM tier (default 0.6)")
    parser.add_argument("--nvme", type=Path, metavar="FOLDER", help="NVMe tiers here, one per host (default: none)")
    parser.add_argument("--nvme-gb", type=float, metavar="GB", help="each host's NVMe tier (default 4); needs --nvme")
    parser.add_argument(
        "--nvme-write",
        choices=("reuse", "hit", "through", "demote"),
        default="reuse",
        help="when a chunk is written to NVMe (default: once it was hit in DRAM, or stored again)",
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the parts' logs here")
    parser.add_argument("--no-cache", action="store_true", help="engines reuse nothing: for comparison")
    parser.add_argument("--demo", action="store_true", help="play a short scripted conversation and show its hits")
    parser.add_argument("--exit", action="store_true", help="end after the demo")
    parser.add_argument("--json", action="store_true", help="the demo's results as JSON on stdout")


if __name__ == "__main__":
    sys.exit(main())
