"""`warmroute gateway`: one gateway, from a file, `WARMROUTE_*` variables and flags."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

import uvloop

from directory.errors import DirectoryError
from directory.server_url import check_server_url
from gateway.app import run
from gateway.config import GatewayConfig
from gateway.servers import PortTaken
from warmroute.configuration import ConfigurationError, effective, load, set_up_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options; each stands above the file and the variables."""
    parser.description = "Route requests to warm engines. CONFIGURATION.md documents the file and the variables."
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or TOML")
    parser.add_argument("--check", action="store_true", help="print the configuration in force, without secrets")
    parser.add_argument("--redis", metavar="URL", help="the directory's server, redis://host:port")
    parser.add_argument("--key-prefix", metavar="TEXT", help="begins every key of this fleet (default wr)")
    parser.add_argument("--port", type=int, help="the OpenAI-compatible port (default 8000)")
    parser.add_argument("--admin-port", type=int, help="/fleet, /metrics (default: one above --port)")
    parser.add_argument("--bind", help="the address to listen on (default 127.0.0.1)")
    parser.add_argument("--engine", action="append", metavar="URL", help="an engine without an agent; repeatable")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))


def run_command(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Trouble at the start is one sentence on stderr, and 2."""
    try:
        config = load(GatewayConfig, options.config, os.environ, _flags(options))
        if options.check:
            check_server_url(config.directory.url.get_secret_value())
            print(effective(config), end="")
            return 0
        set_up_logging(config.log_level)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(config))
    except (ConfigurationError, PortTaken, DirectoryError) as error:
        print(f"warmroute gateway: {error}", file=sys.stderr)
        return 2
    return 0


def _flags(options: argparse.Namespace) -> dict[str, object]:
    return {
        "directory.url": options.redis,
        "directory.key_prefix": options.key_prefix,
        "listen.port": options.port,
        "listen.admin_port": options.admin_port,
        "listen.bind": options.bind,
        "engines": [{"url": url} for url in options.engine] if options.engine else None,
        "log_level": options.log_level,
    }
