"""`warmroute directory`: what the directory says, for people and, with `--json`, for programs."""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.errors import DirectoryError
from directory.members import HostRegistration, Member
from directory.placements import unpack_holders
from directory.redis_directory import RedisDirectory
from directory.tiers import tier_names
from gateway.config import DirectoryConfig, Section
from warmroute.configuration import ConfigurationError, effective, load

LOOKUP_DEADLINE_S = 2.0
KEYS_MAX = 4096
QUESTIONS = ("hosts", "lookup")


class DirectoryCommandConfig(Section):
    """Where the directory is."""

    directory: DirectoryConfig = Field(default=DirectoryConfig())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = "Ask the directory who is in the fleet, or who holds chunks."
    parser.add_argument(
        "question", choices=QUESTIONS, nargs="?", default="hosts", help="hosts: who is in the fleet; lookup: who holds"
    )
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="directory keys for lookup, 32 hex digits each; else on stdin"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or TOML")
    parser.add_argument("--check", action="store_true", help="print the configuration in force, without secrets")
    parser.add_argument("--redis", metavar="URL", help="the directory's server, redis://host:port")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run_command(options: argparse.Namespace) -> int:
    """Answer the question. Trouble is one sentence on stderr, and 2."""
    try:
        config = load(DirectoryCommandConfig, options.config, os.environ, {"directory.url": options.redis})
        if options.check:
            print(effective(config), end="")
            return 0
        if options.keys and options.question != "lookup":
            raise ValueError(f"keys are for lookup: {options.question} takes none, not {options.keys[0]!r}")
        keys = _read_keys(options.keys) if options.question == "lookup" else []
        rows = asyncio.run(_ask(config.directory.url.get_secret_value(), keys, options.question))
    except (ConfigurationError, DirectoryError, ValueError) as error:
        print(f"warmroute directory: {error}", file=sys.stderr)
        return 2
    print(json.dumps(rows, indent=1) if options.json else _as_table(rows))
    return 0


def _read_keys(given: list[str]) -> list[bytes]:
    texts = given or sys.stdin.read().split()
    if len(texts) > KEYS_MAX:
        raise ValueError(f"at most {KEYS_MAX} keys can be asked for at once, not {len(texts)}")
    if not texts:
        raise ValueError(f"lookup needs directory keys, {2 * DIRECTORY_KEY_BYTES} hex digits each")
    keys = []
    for text in texts:
        try:
            key = bytes.fromhex(text)
        except ValueError:
            raise ValueError(f"a directory key is {2 * DIRECTORY_KEY_BYTES} hex digits, not {text!r}") from None
        if len(key) != DIRECTORY_KEY_BYTES:
            raise ValueError(f"a directory key is {2 * DIRECTORY_KEY_BYTES} hex digits, not {text!r}")
        keys.append(key)
    return keys


async def _ask(url: str, keys: list[bytes], question: str) -> list[dict[str, Any]]:
    directory = RedisDirectory.connect(url, clock=time.monotonic)
    try:
        members = await directory.members()
        if question == "hosts":
            return [_member_row(member) for member in sorted(members, key=_order)]
        found = await directory.lookup(keys, LOOKUP_DEADLINE_S)
    finally:
        await directory.aclose()
    names = {member.incarnation: member for member in members}
    return [_record_row(key, record, names) for key, record in zip(keys, found.records, strict=True)]


def _order(member: Member) -> tuple[str, bool, str]:
    registration = member.registration
    is_engine = not isinstance(registration, HostRegistration)
    return registration.host, is_engine, "" if isinstance(registration, HostRegistration) else registration.engine


def _member_row(member: Member) -> dict[str, Any]:
    registration, load = member.registration, member.load
    row = {
        "host": registration.host,
        "engine": None if isinstance(registration, HostRegistration) else registration.engine,
        "state": _state(member),
        "url": registration.agent_url if isinstance(registration, HostRegistration) else registration.url,
        "models": [] if isinstance(registration, HostRegistration) else list(registration.models),
        "incarnation": member.incarnation.hex(),
        "remaining_s": round(member.remaining_s, 2),
    }
    for tier, limit in load.tier_bytes_limit.items():
        row[f"{tier.label}_bytes_used"] = load.tier_bytes_used.get(tier, 0)
        row[f"{tier.label}_bytes_limit"] = limit
    return row


def _record_row(key: bytes, record: bytes | None, members: dict[bytes, Member]) -> dict[str, Any]:
    holders = []
    for incarnation, mask in unpack_holders(record or b""):
        member = members.get(incarnation)
        holders.append(
            {
                "holder": _name(member) if member else f"unknown {incarnation.hex()}",
                "tiers": list(tier_names(mask)),
                "state": _state(member) if member else "gone",
            }
        )
    return {"key": key.hex(), "answered": record is not None, "holders": holders}


def _name(member: Member) -> str:
    registration = member.registration
    return registration.host if isinstance(registration, HostRegistration) else registration.engine


def _state(member: Member) -> str:
    return "retired" if member.retired else "live" if member.is_live else "lapsed"


def _as_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "nothing is registered"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "-"
    if isinstance(value, dict):
        return f"{value['holder']} ({value['state']}): {'+'.join(value['tiers'])}"
    return "-" if value is None else str(value)
