"""`warmroute gateway`: one gateway, of one process or several, from a file, `WARMROUTE_*` variables and flags."""

import argparse
import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

import uvloop

from directory.errors import DirectoryError
from directory.server_url import check_server_url
from gateway.app import run
from gateway.config import GatewayConfig
from gateway.descriptors import raise_limit, shortfall
from gateway.logs import use_lines
from gateway.reload import Rejected
from gateway.servers import Listeners, PortTaken
from gateway.sibling_notes import Siblings
from warmroute.configuration import ConfigurationError, effective, load, set_up_logging
from warmroute.gateway_workers.workers import WorkerRefused, run_workers

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options; each stands above the file and the variables."""
    parser.description = "Route requests to warm engines. CONFIGURATION.md documents the file and the variables."
    parser.epilog = (
        "SIGHUP reads the configuration again: what is wrong changes nothing. SIGTERM lets running requests finish; "
        "a second one doesn't."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or TOML")
    parser.add_argument("--check", action="store_true", help="print the configuration in force, without secrets")
    parser.add_argument("--redis", metavar="URL", help="the directory's server, redis://host:port")
    parser.add_argument("--key-prefix", metavar="TEXT", help="begins every key of this fleet (default wr)")
    parser.add_argument("--port", type=int, help="the OpenAI-compatible port (default 8000)")
    parser.add_argument("--admin-port", type=int, help="/fleet, /metrics (default: one above --port)")
    parser.add_argument("--bind", help="the address to listen on (default 127.0.0.1)")
    parser.add_argument("--engine", action="append", metavar="URL", help="an engine without an agent; repeatable")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that serve the port together (default 1)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--worker", metavar="NUMBER:SOCKETS", help=argparse.SUPPRESS)


def run_command(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Trouble at the start is one sentence on stderr, and 2."""
    try:
        config = load(GatewayConfig, options.config, os.environ, _flags(options))
        if options.check:
            check_server_url(config.directory.url.get_secret_value())
            print(effective(config), end="")
            return 0
        set_up_logging(config.log_level)
        use_lines(config.logs.format)
        _provide_descriptors(config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if config.workers > 1 and options.worker is None:
                return runner.run(run_workers(config, _as_arguments(options), lambda: _reread(options)))
            listeners = None if options.worker is None else _inherited(options.worker)
            runner.run(run(config, listeners=listeners, reread=lambda: _reread(options)))
    except (ConfigurationError, PortTaken, DirectoryError, WorkerRefused) as error:
        print(f"warmroute gateway: {error}", file=sys.stderr)
        return 2
    return 0


def _reread(options: argparse.Namespace) -> GatewayConfig:
    try:
        return load(GatewayConfig, options.config, os.environ, _flags(options))
    except ConfigurationError as error:
        raise Rejected(str(error)) from None


def _provide_descriptors(config: GatewayConfig) -> None:
    waiting = (config.limits.queue_max + 1) // 2  # which have no engine's connection yet
    scarce = shortfall(raise_limit(), config.limits.requests_max + waiting)
    if scarce is not None:
        logger.warning("%s", scarce)


def _inherited(worker: str) -> Listeners:
    """The sockets that a worker was started with."""
    number, data, admin, inbox, *outboxes = map(int, worker.split(":"))
    siblings = Siblings.of(socket.socket(fileno=inbox), [socket.socket(fileno=each) for each in outboxes])
    return Listeners(socket.socket(fileno=data), socket.socket(fileno=admin), number, siblings)


def _as_arguments(options: argparse.Namespace) -> list[str]:
    """The options again as they are typed."""
    given = []
    for name, value in vars(options).items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None and each is not False:
                given += [f"--{name.replace('_', '-')}", str(each)]
    return given


def _flags(options: argparse.Namespace) -> dict[str, object]:
    return {
        "directory.url": options.redis,
        "directory.key_prefix": options.key_prefix,
        "listen.port": options.port,
        "listen.admin_port": options.admin_port,
        "listen.bind": options.bind,
        "engines": [{"url": url} for url in options.engine] if options.engine else None,
        "workers": options.workers,
        "log_level": options.log_level,
    }
