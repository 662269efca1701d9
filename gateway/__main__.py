"""`python -m gateway`: one gateway, told by flags where its directory is."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

import uvloop

from directory.errors import DirectoryError
from gateway.app import PortTaken, run
from gateway.config import GatewayConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; trouble at the start is one sentence, and 2."""
    parser = argparse.ArgumentParser(prog="warmroute gateway", description="Route requests to warm engines.")
    parser.add_argument("--redis", required=True, metavar="URL", help="the directory's server, redis://host:port")
    parser.add_argument("--port", type=int, default=8000, help="the OpenAI-compatible port (default 8000)")
    parser.add_argument("--admin-port", type=int, help="/fleet, /metrics, /docs (default: one above --port)")
    parser.add_argument("--bind", default="127.0.0.1", help="the address to listen on (default 127.0.0.1)")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = GatewayConfig(options.redis, options.port, options.admin_port or options.port + 1, options.bind)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(config))
    except (PortTaken, DirectoryError) as error:
        print(f"warmroute gateway: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
