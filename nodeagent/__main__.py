"""`python -m nodeagent`: run the agent of this host."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

from directory.errors import DirectoryError
from nodeagent.agent import run
from nodeagent.config import GIB, NVME_WRITES, AgentConfig
from nodeagent.errors import AgentError
from nodeagent.publisher import WALK_INTERVAL_S

USAGE_EXIT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments and run until a signal. Returns the exit code; what can't be set up is told in one sentence."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    try:
        config = AgentConfig(
            host=arguments.host,
            door=arguments.door,
            redis_url=arguments.redis,
            dram_bytes=int(arguments.dram_gb * GIB),
            nvme_path=arguments.nvme,
            nvme_bytes=int(arguments.nvme_gb * GIB) if arguments.nvme_gb is not None else None,
            nvme_write=arguments.nvme_write,
            bind=arguments.bind,
            port=arguments.port,
            agent_url=arguments.agent_url,
            walk_interval_s=arguments.walk_interval_s,
        )
        asyncio.run(run(config))
    except (ValueError, AgentError, DirectoryError) as error:
        print(f"warmroute agent: {error}", file=sys.stderr)
        return USAGE_EXIT
    except BaseExceptionGroup as group:
        known, rest = group.split((AgentError, DirectoryError))
        if known is None or rest is not None:
            raise
        print(f"warmroute agent: {known.exceptions[0]}", file=sys.stderr)
        return USAGE_EXIT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmroute agent", description="The node agent of one host.")
    parser.add_argument("--host", required=True, help="this machine's name in the directory")
    parser.add_argument("--door", required=True, metavar="PATH", help="the Unix socket for engines")
    parser.add_argument("--redis", required=True, metavar="URL", help="the fleet directory")
    parser.add_argument("--dram-gb", type=float, default=1.0, help="quota of the DRAM tier in GiB (default 1)")
    parser.add_argument("--nvme", metavar="PATH", help="a folder of its own for the NVMe tier (default: no such tier)")
    parser.add_argument("--nvme-gb", type=float, metavar="F", help="quota of the NVMe tier in GiB; goes with --nvme")
    parser.add_argument(
        "--nvme-write",
        choices=NVME_WRITES,
        default="hit",
        help="write to NVMe what was hit in DRAM, or every chunk (default hit)",
    )
    parser.add_argument("--bind", default="127.0.0.1", help="address of the agent's HTTP (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port of the agent's HTTP (default: a free one)")
    parser.add_argument("--agent-url", metavar="URL", help="where gateways reach the HTTP (default: bind and port)")
    parser.add_argument(
        "--walk-interval-s", type=float, default=WALK_INTERVAL_S, help="everything anew every S seconds"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
