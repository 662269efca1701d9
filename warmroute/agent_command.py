"""`warmroute agent`: the node agent of one host, from a file, `WARMROUTE_*` variables and flags."""

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from directory.errors import DirectoryError
from directory.server_url import check_server_url
from nodeagent.agent import run
from nodeagent.config import AgentConfig
from nodeagent.errors import AgentError
from nodeagent.shortfalls import shortfalls, shortfalls_of_memory
from warmroute.configuration import ConfigurationError, effective, load, set_up_logging

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options; each stands above the file and the variables."""
    parser.description = "Run this host's DRAM and NVMe tiers beside its engines. CONFIGURATION.md documents the file."
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or TOML")
    parser.add_argument(
        "--check",
        action="store_true",
        help="print the configuration in force, without secrets, and on stderr what this machine lacks for it",
    )
    parser.add_argument("--host", help="this machine's name in the directory (default: its host name)")
    parser.add_argument("--door", metavar="PATH", help="the Unix socket for engines")
    parser.add_argument("--redis", metavar="URL", help="the directory's server, redis://host:port")
    parser.add_argument("--key-prefix", metavar="TEXT", help="begins every key of this fleet (default wr)")
    parser.add_argument("--dram-gb", type=float, metavar="GB", help="quota of the DRAM tier (default 1)")
    parser.add_argument(
        "--nvme", metavar="FOLDER", help="a folder of its own for the NVMe tier (default: no such tier)"
    )
    parser.add_argument("--nvme-gb", type=float, metavar="GB", help="quota of the NVMe tier; goes with --nvme")
    parser.add_argument("--nvme-write", metavar="reuse|hit|through|demote", help="when a chunk is written")
    parser.add_argument("--bind", help="address of the agent's HTTP (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port of the agent's HTTP (default: a free one)")
    parser.add_argument("--agent-url", metavar="URL", help="where gateways reach the HTTP (default: bind and port)")
    parser.add_argument("--walk-interval-s", type=float, metavar="S", help="announce everything anew every S seconds")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))


def run_command(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Trouble at the start is one sentence on stderr, and 2."""
    try:
        config = load(AgentConfig, options.config, os.environ, _flags(options))
        if options.check:
            check_server_url(config.directory.url.get_secret_value())
            print(effective(config), end="", flush=True)
            for each in shortfalls(config):
                print(f"warmroute agent: on this machine: {each.text}", file=sys.stderr)
            return 0
        set_up_logging(config.log_level)
        # What others hold now is waited for when an engine comes: on an upgrade, the agent before this one has it.
        for each in shortfalls_of_memory(config):
            if not each.is_passing:
                logger.warning("engines will work without the dram tier: %s", each.text)
        if not asyncio.run(run(config)):
            _end_despite_hanging_threads()
    except (ConfigurationError, AgentError, DirectoryError) as error:
        return _refuse(error)
    except BaseExceptionGroup as group:
        known, rest = group.split((AgentError, DirectoryError))
        if known is None or rest is not None:
            raise
        return _refuse(known.exceptions[0])
    return 0


def _end_despite_hanging_threads() -> NoReturn:
    """Everything is closed; an interpreter that ends in good order would wait for threads that a drive holds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _refuse(error: BaseException) -> int:
    print(f"warmroute agent: {error}", file=sys.stderr)
    return 2


def _flags(options: argparse.Namespace) -> dict[str, object]:
    return {
        "host": options.host,
        "door": options.door,
        "directory.url": options.redis,
        "directory.key_prefix": options.key_prefix,
        "directory.walk_interval_s": options.walk_interval_s,
        "dram.gb": options.dram_gb,
        "nvme.path": options.nvme,
        "nvme.gb": options.nvme_gb,
        "nvme.write": options.nvme_write,
        "listen.bind": options.bind,
        "listen.port": options.port,
        "listen.url": options.agent_url,
        "log_level": options.log_level,
    }
