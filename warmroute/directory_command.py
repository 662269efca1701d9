"""`warmroute directory`: what the directory says, for people and, with `--json`, for programs."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.errors import DirectoryError, DirectoryUnavailable
from directory.function_library import load_functions
from directory.members import EngineRegistration, GatewayRegistration, Member, name_of, place_of
from directory.placements import unpack_holders
from directory.redis_directory import RedisDirectory
from directory.server_url import check_server_url
from directory.statistics import gather, state_of
from directory.tiers import tier_names
from gateway.config import DirectoryConfig, GatewayConfig, Section
from nodeagent.config import AgentConfig
from warmroute.configuration import ConfigurationError, effective, load
from warmroute.directory_tables import as_page, as_table, printable, terminal_chars

LOOKUP_DEADLINE_S = 2.0
KEYS_MAX = 4096
QUESTIONS = {
    "hosts": "who is in the fleet",
    "lookup": "who holds the chunks of these directory keys",
    "stats": "servers, records, holders and lives, from a bounded sample",
    "load": "load the directory's functions on every master; another release's are replaced with --force only",
    "forget": "end the lives of a host and its engines, or of an engine, by name; chunks stay (see warmroute forget)",
}


class DirectoryCommandConfig(Section):
    """Where the directory is."""

    directory: DirectoryConfig = Field(default=DirectoryConfig())


@dataclass(frozen=True, slots=True)
class Answer:
    """What is printed, for programs and for people; and the exit status."""

    data: Any
    text: str
    status: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = (
        "Ask the directory, load its functions, or make it forget. Exit status: 0 done, 1 refused, 2 trouble."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "questions:\n" + "\n".join(f"  {name:<8}{text}" for name, text in QUESTIONS.items())
    parser.add_argument("question", choices=tuple(QUESTIONS), nargs="?", default="hosts", help="see below; else hosts")
    parser.add_argument(
        "names", nargs="*", metavar="KEY|NAME", help="lookup: keys of 32 hex digits, else from stdin; forget: one name"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or TOML")
    parser.add_argument("--check", action="store_true", help="print the configuration in force, without secrets")
    parser.add_argument("--redis", metavar="URL", help="the directory's server, redis://host:port")
    parser.add_argument("--key-prefix", metavar="TEXT", help="begins every key of this fleet (default wr)")
    parser.add_argument("--force", action="store_true", help="forget: even what is live; load: over another release's")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run_command(options: argparse.Namespace) -> int:
    """Answer the question. Trouble is one sentence on stderr, and 2; what is refused is 1."""
    try:
        flags = {"directory.url": options.redis, "directory.key_prefix": options.key_prefix}
        config = load(DirectoryCommandConfig, options.config, os.environ, flags, others=(GatewayConfig, AgentConfig))
        if options.check:
            check_server_url(config.directory.url.get_secret_value())
            print(effective(config), end="")
            return 0
        answer = asyncio.run(_answered(config.directory, _question(options)))
    except (ConfigurationError, DirectoryError, ValueError) as error:
        print(f"warmroute directory: {error}", file=sys.stderr)
        return 2
    return _print(json.dumps(answer.data, indent=1) if options.json else answer.text, answer.status)


def _print(text: str, status: int) -> int:
    """Print, to a reader who may have read enough: `| head -1`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what the interpreter flushes at its end
    return status


_Question = Callable[[RedisDirectory], Awaitable[Answer]]


def _question(options: argparse.Namespace) -> _Question:
    """What is asked, checked before anything is connected. Raises `ValueError`."""
    names: list[str] = options.names
    if options.force and options.question not in ("forget", "load"):
        raise ValueError(f"--force is for forget and load, not for {options.question}")
    if options.question == "lookup":
        return partial(_lookup, _read_keys(names))
    if options.question == "forget":
        if len(names) != 1:
            raise ValueError("forget needs one name, of a host or an engine")
        return partial(_forget, names[0], options.force)
    if names:
        raise ValueError(f"keys are for lookup: {options.question} takes none, not {names[0]!r}")
    if options.question == "load":
        return partial(_load, options.force)
    return _stats if options.question == "stats" else _hosts


async def _answered(config: DirectoryConfig, question: _Question) -> Answer:
    directory = RedisDirectory.connect(
        config.url.get_secret_value(), key_prefix=config.key_prefix, clock=time.monotonic, loads_functions=False
    )
    try:
        return await question(directory)
    except DirectoryUnavailable as error:
        if "url" in config.model_fields_set:
            raise
        raise DirectoryUnavailable(f"{error} (this is the default: --redis URL says where it is)") from error
    finally:
        await directory.aclose()


async def _hosts(directory: RedisDirectory) -> Answer:
    rows = [_member_row(member) for member in sorted(await directory.members(), key=_order)]
    return Answer(rows, as_table(rows, "nothing is registered", terminal_chars()))


async def _lookup(keys: list[bytes], directory: RedisDirectory) -> Answer:
    members = {member.incarnation: member for member in await directory.members()}
    found = await directory.lookup(keys, LOOKUP_DEADLINE_S)
    rows = [_record_row(key, record, members) for key, record in zip(keys, found.records, strict=True)]
    return Answer(rows, as_table(rows, "", terminal_chars()))


async def _stats(directory: RedisDirectory) -> Answer:
    statistics = await gather(directory)
    data = asdict(statistics)
    for row, server in zip(data["servers"], statistics.servers, strict=True):
        row["warnings"] = list(server.warnings())
    return Answer(data, as_page(statistics, terminal_chars()), 2 if statistics.has_trouble else 0)


async def _load(is_forced: bool, directory: RedisDirectory) -> Answer:
    servers = await load_functions(await directory.nodes(), is_forced)
    lines = [f"{each.server}: {each.became}" + (f": {each.error}" if each.error else "") for each in servers]
    status = 2 if any(each.error for each in servers) else int(any(each.became == "kept" for each in servers))
    if any(each.became == "kept" for each in servers):
        lines.append("kept: another release's functions are loaded there; --force replaces them")
    return Answer([asdict(each) for each in servers], "\n".join(lines), status)


async def _forget(name: str, is_forced: bool, directory: RedisDirectory) -> Answer:
    """End every life of that name that hasn't ended. A live one is refused: its agent would only begin another."""
    lives = [member for member in sorted(await directory.members(), key=_order) if _is_of(member, name)]
    ending = [member for member in lives if not member.retired]
    live = [member for member in ending if member.is_live]
    if live and not is_forced:
        said = (
            f"{name} is live, nothing was forgotten: stop its agent, or use --force, after which it begins a new life"
        )
    else:
        for member in ending:
            await directory.retire(member.incarnation)
        said = f"{name}: {len(ending)} lives ended" if lives else f"nothing of the name {name} is registered"
        if live:
            said += "; an agent that still runs begins a new life and announces all again"
    is_done = bool(lives) and (is_forced or not live)
    said = printable(said)
    rows = [_forgotten_row(member, is_done) for member in lives]
    return Answer({"name": name, "done": is_done, "says": said, "lives": rows}, said, 0 if is_done else 1)


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


def _order(member: Member) -> tuple[bool, str, bool, str]:
    """By host, each before its engines; gateways are last."""
    registration = member.registration
    is_gateway, is_engine = (isinstance(registration, kind) for kind in (GatewayRegistration, EngineRegistration))
    return is_gateway, _host(member) or "", is_engine, name_of(registration)


def _host(member: Member) -> str | None:
    registration = member.registration
    return None if isinstance(registration, GatewayRegistration) else registration.host


def _member_row(member: Member) -> dict[str, Any]:
    registration, load = member.registration, member.load
    is_engine = isinstance(registration, EngineRegistration)
    row = {
        "host": _host(member),
        "engine": name_of(registration) if is_engine else None,
        "state": state_of(member),
        "url": place_of(registration),
        "models": list(registration.models) if isinstance(registration, EngineRegistration) else [],
        "incarnation": member.incarnation.hex(),
        "remaining_s": round(member.remaining_s, 2),
    }
    if isinstance(registration, GatewayRegistration):
        row["gateway"] = registration.gateway
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
                "holder": name_of(member.registration) if member else f"unknown {incarnation.hex()}",
                "tiers": list(tier_names(mask)),
                "state": state_of(member) if member else "gone",
            }
        )
    return {"key": key.hex(), "answered": record is not None, "holders": holders}


def _is_of(member: Member, name: str) -> bool:
    """Whether it is the host, engine or gateway of that name, or an engine of that host."""
    return name in (_host(member), name_of(member.registration))


def _forgotten_row(member: Member, is_done: bool) -> dict[str, Any]:
    was = state_of(member)
    return {
        "holder": name_of(member.registration),
        "incarnation": member.incarnation.hex(),
        "was": was,
        "state": "retired" if is_done else was,
    }
