"""`warmroute doctor`: what is right about an engine or a fleet, and how to mend what isn't."""

import argparse
import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

from pydantic import Field, ValidationError

from directory.errors import DirectoryError
from directory.server_url import check_server_url
from gateway.config import DirectoryConfig, EngineConfig, GatewayConfig, Section, cache_folder
from nodeagent.config import AgentConfig
from warmroute.configuration import ConfigurationError, load, set_up_logging
from warmroute.doctor.examination import Asked, examine
from warmroute.doctor.finding import CHECKS, exit_status
from warmroute.doctor.page import as_page, as_rows, summary
from warmroute.doctor.patient import Patient

KEY_BYTES_MAX = 4096
WIDTH_DEFAULT = 100


class DoctorCommandConfig(Section):
    """Where the directory is, if it is to be looked at, and where files from agents are kept."""

    directory: DirectoryConfig = Field(default=DirectoryConfig())
    files_folder: Path = Field(
        default_factory=cache_folder, description="Folder for tokenizer files fetched from agents."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = (
        "Look at an engine or a whole fleet from outside. Exit status: 0 all right, 1 something is wrong, 2 it "
        "couldn't look. Engines are asked some dozens of short requests, and one long prompt three times."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "checks:\n" + "\n".join(f"  {name:<11}{text}" for name, text in CHECKS.items())
    parser.add_argument("--gateway", metavar="URL", help="a gateway, and the engines and agents that it knows")
    parser.add_argument("--admin", metavar="URL", help="its admin port; one above the gateway's if left out")
    parser.add_argument("--directory", metavar="URL", help="the directory's server, redis://host:port, and its fleet")
    parser.add_argument("--key-prefix", metavar="TEXT", help="begins every key of this fleet (default wr)")
    parser.add_argument("--agent", metavar="URL", action="append", default=[], help="an agent; repeatable")
    parser.add_argument("--engine", metavar="URL", action="append", default=[], help="an engine; repeatable")
    parser.add_argument(
        "--tokenizer", metavar="DIR", type=Path, help="the model's folder, for engines without an agent"
    )
    parser.add_argument(
        "--kind", choices=("vllm", "sglang", "reference"), help="of engines without an agent; found out if left out"
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", type=Path, help="holds what engines ask for as a bearer token"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or TOML, such as a gateway's: its directory")
    parser.add_argument("--only", choices=tuple(CHECKS), action="append", help="this check; repeatable")
    parser.add_argument("--strict", action="store_true", help="notes count as wrong")
    parser.add_argument("--json", action="store_true", help="JSON instead of a page")


def run_command(options: argparse.Namespace) -> int:
    """Examine and print. Trouble with what was asked is one sentence on stderr, and 2."""
    set_up_logging("error")  # what is warned of is found
    try:
        asked = _asked(options)
        findings = asyncio.run(examine(asked))
    except (ConfigurationError, DirectoryError, ValueError, OSError) as error:
        print(f"warmroute doctor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    status = exit_status(findings, options.strict)
    if options.json:
        text = json.dumps({"status": status, "summary": summary(findings), "findings": as_rows(findings)}, indent=1)
    else:
        text = as_page(findings, shutil.get_terminal_size((WIDTH_DEFAULT, 24)).columns)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what the interpreter flushes at its end
    return status


def _asked(options: argparse.Namespace) -> Asked:
    """What is to be examined. Raises `ConfigurationError`, `DirectoryError`, `ValueError` or `OSError`."""
    flags = {"directory.url": options.directory, "directory.key_prefix": options.key_prefix}
    config = load(DoctorCommandConfig, options.config, os.environ, flags, others=(GatewayConfig, AgentConfig))
    is_directory_given = "url" in config.directory.model_fields_set
    if options.tokenizer is not None and not options.tokenizer.is_dir():
        raise ValueError(f"--tokenizer {options.tokenizer} is no folder")
    if options.admin is not None and options.gateway is None:
        options.gateway = options.admin
    api_key = _read_key(options.api_key_file)
    engines = [
        Patient(url.partition("://")[2], url, tokenizer_folder=options.tokenizer, kind=options.kind, api_key=api_key)
        for url in (_base_url("--engine", each) for each in options.engine)
    ]
    if options.tokenizer is not None and not (options.gateway or engines):
        raise ValueError("--tokenizer goes with --engine URL, or with --gateway URL of a gateway that has such engines")
    if not (options.gateway or is_directory_given or options.agent or engines):
        raise ValueError("say what to look at: --gateway URL, --directory URL, --engine URL or --agent URL")
    directory = config.directory.url.get_secret_value() if is_directory_given else None
    if directory is not None:
        check_server_url(directory)
    return Asked(
        gateway_admin=_admin_url(options),
        directory=directory,
        key_prefix=config.directory.key_prefix,
        agents=tuple(_base_url("--agent", each) for each in options.agent),
        engines=engines,
        files_folder=config.files_folder,
        tokenizer_folder=options.tokenizer,
        kind=options.kind,
        checks=frozenset(options.only or CHECKS),
        api_key=api_key,
    )


def _admin_url(options: argparse.Namespace) -> str | None:
    """Where a gateway's `/fleet` is: one port above, unless it is said."""
    if options.admin is not None:
        return _base_url("--admin", options.admin)
    if options.gateway is None:
        return None
    url = _base_url("--gateway", options.gateway)
    scheme, _, place = url.partition("://")
    name, colon, port = place.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"--gateway {url} has no port: say where its admin port is, with --admin")
    return f"{scheme}://{name}:{int(port) + 1}"


def _base_url(flag: str, url: str) -> str:
    try:
        return EngineConfig(url=url).url
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"{flag} {url}: {reason}") from None


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        with path.open(encoding="utf-8") as file:
            key = file.read(KEY_BYTES_MAX).strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't UTF-8"
        raise ValueError(f"--api-key-file {path} can't be read: {reason}") from error
    if not key.isascii() or not key.isprintable() or not key:
        raise ValueError(f"--api-key-file {path} holds no key: one line of ASCII")
    return key
