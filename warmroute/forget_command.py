"""`warmroute forget`: has every host's agent remove chunks, in all its tiers, and shows the receipts."""

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field, SecretStr

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.errors import DirectoryError, DirectoryUnavailable
from directory.members import EngineRegistration, HostRegistration, Member
from directory.redis_directory import RedisDirectory
from gateway.config import DirectoryConfig, GatewayConfig, Section
from nodeagent.config import AgentConfig
from warmroute.configuration import ConfigurationError, load
from warmroute.directory_tables import as_table, printable, terminal_chars

HOSTS_AT_ONCE_MAX = 32
CONNECT_WAIT_S = 5.0
ANSWER_WAIT_S = 900.0
"""How long an agent may take: it removes a file a chunk."""
QUIET_S = 5.0
"""After which it is said who hasn't answered yet."""
ANSWER_BYTES_MAX = 4 << 20
INPUT_BYTES_MAX = 64 << 20


class AdminConfig(Section):
    """What agents ask for."""

    admin_token: SecretStr | None = Field(None, description="The agents' admin token, if they have one.")


class ForgetCommandConfig(Section):
    """Where the directory is, and what its agents ask for."""

    directory: DirectoryConfig = Field(default=DirectoryConfig())
    listen: AdminConfig = Field(default=AdminConfig())


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """One host's: its receipt, or why there is none."""

    host: str
    receipt: Mapping[str, Any] | None
    trouble: str | None = None
    is_refused: bool = False
    """The request doesn't say what to forget, or says it wrongly: asking again doesn't help."""

    @property
    def is_confirmed(self) -> bool:
        """Whether nothing of it will be served there again."""
        return self.receipt is not None and self.receipt.get("is_confirmed") is True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = (
        "Remove chunks, and all that follow them, from the DRAM and NVMe tiers of every host, and keep them from "
        "coming back. (`warmroute directory forget` removes none: it ends lives of hosts or engines in the directory.)"
    )
    parser.epilog = (
        "Exit status: 0 every host confirmed; 1 a host didn't, or there is none; 2 trouble, or the request makes no "
        "sense, and nothing was done. A host that isn't in the "
        "directory's table isn't asked: have it forget before it serves again. FORGET.md of the agent says the rest."
    )
    parser.add_argument(
        "--identity", metavar="HEX|JSON", help="an identity's digest, or its fields: all its chunks, or see below"
    )
    parser.add_argument("--keys", nargs="+", metavar="KEY", help="directory keys of 32 hex digits")
    parser.add_argument(
        "--salt-stdin",
        action="store_true",
        help="a salt, read from stdin, as the engine sees it; of --identity if given",
    )
    parser.add_argument("--token-ids", metavar="FILE", help="a JSON list of token ids, - for stdin; needs --identity")
    parser.add_argument("--salt-file", type=Path, metavar="FILE", help="with --token-ids: holds the salt")
    parser.add_argument("--kept-tokens", type=int, metavar="N", help="with --token-ids: leading tokens to leave alone")
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="with --token-ids: if no engine there tells")
    parser.add_argument("--lora", metavar="HEX", help="with --token-ids: the adapter's content digest")
    parser.add_argument("--reset-engines", action="store_true", help="engines empty their own prefix caches as well")
    parser.add_argument("--host", action="append", metavar="NAME", help="this host only; repeatable")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or TOML, such as an agent's")
    parser.add_argument("--redis", metavar="URL", help="the directory's server, redis://host:port")
    parser.add_argument("--key-prefix", metavar="TEXT", help="begins every key of this fleet (default wr)")
    parser.add_argument("--json", action="store_true", help="the receipts as JSON instead of a table")


def run_command(options: argparse.Namespace) -> int:
    """Ask the hosts. Trouble is one sentence on stderr, and 2; what isn't confirmed is 1."""
    try:
        flags = {"directory.url": options.redis, "directory.key_prefix": options.key_prefix}
        config = load(ForgetCommandConfig, options.config, os.environ, flags, others=(GatewayConfig, AgentConfig))
        answers = asyncio.run(_ask_all(config, _asked(options), options.host))
    except (ConfigurationError, DirectoryError, ValueError, OSError) as error:
        return _complain(2, str(error))
    except KeyboardInterrupt:
        return _complain(130, "broken off: hosts that were asked may go on, and nothing is confirmed; ask again")
    is_senseless = bool(answers) and all(each.is_refused for each in answers)
    if options.json:
        rows = [{"host": each.host, "receipt": each.receipt, "trouble": each.trouble} for each in answers]
        print(json.dumps(rows, indent=1))
    elif answers and not is_senseless:
        print(as_table([_row(each) for each in answers], "", terminal_chars()))
    if is_senseless:
        return _complain(2, f"{'; '.join(sorted({str(each.trouble) for each in answers}))}: nothing was done")
    if not answers:
        prefix = config.directory.key_prefix
        return _complain(1, f"no host is registered under the key prefix {prefix}: nobody was asked")
    lacking = [each.host for each in answers if not each.is_confirmed]
    if lacking:
        said = "what was meant may be served there, or come back; ask again"
        return _complain(1, f"not confirmed by {', '.join(lacking)}: {said}")
    return 0


def _complain(status: int, text: str) -> int:
    print(f"warmroute forget: {printable(text)}", file=sys.stderr)
    return status


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """The body of the request. Raises `ValueError`; the agents check the rest."""
    asked: dict[str, Any] = {}
    if options.salt_file is not None and (options.token_ids is None or options.salt_stdin):
        raise ValueError("--salt-file says of which salt --token-ids are; to forget a whole salt: --salt-stdin")
    if options.identity is not None:
        asked["identity"] = _identity(options.identity)
    if options.keys is not None:
        asked["keys"] = [_key(text) for text in options.keys]
    if options.salt_stdin:
        asked["salt"] = sys.stdin.read(INPUT_BYTES_MAX).rstrip("\r\n")
    if options.salt_file is not None:
        asked["salt"] = _read(options.salt_file).rstrip("\r\n")
    if options.token_ids is not None:
        asked["token_ids"] = _tokens(options.token_ids)
    for name in ("kept_tokens", "chunk_tokens", "lora"):
        if getattr(options, name) is not None:
            asked[name] = getattr(options, name)
    if not asked:
        raise ValueError("say what to forget: --identity, --keys, --salt-stdin or --token-ids")
    return asked | ({"reset_engines": True} if options.reset_engines else {})


def _key(text: str) -> str:
    if not re.fullmatch(f"[0-9a-fA-F]{{{2 * DIRECTORY_KEY_BYTES}}}", text):
        raise ValueError(f"a directory key is {2 * DIRECTORY_KEY_BYTES} hex digits, not {text!r}")
    return text


def _identity(text: str) -> Any:
    if re.fullmatch("[0-9a-fA-F]{64}", text):
        return text
    try:
        fields = json.loads(text)
        if isinstance(fields, dict):
            return fields
    except (ValueError, RecursionError):
        pass
    raise ValueError("--identity must be 64 hex digits, or a JSON object with the identity's fields")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error


def _tokens(name: str) -> Any:
    text = sys.stdin.read(INPUT_BYTES_MAX) if name == "-" else _read(Path(name))
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("--token-ids must hold a JSON list of whole numbers") from None


async def _ask_all(
    config: ForgetCommandConfig, asked: Mapping[str, Any], names: Sequence[str] | None
) -> list[HostAnswer]:
    members = await _members(config.directory)
    hosts, body = _hosts(members), json.dumps(_with_fields(asked, members)).encode()
    unknown = sorted(set(names or ()) - set(hosts))
    if unknown:
        raise ValueError(f"no host of the name {printable(unknown[0])} is registered; see `warmroute directory hosts`")
    token = config.listen.admin_token
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if token is not None:
        headers["authorization"] = f"Bearer {token.get_secret_value()}"
    at_once = asyncio.Semaphore(HOSTS_AT_ONCE_MAX)
    wait = httpx.Timeout(ANSWER_WAIT_S, connect=CONNECT_WAIT_S)
    async with httpx.AsyncClient(timeout=wait, trust_env=False, headers=httpx.Headers(headers, "utf-8")) as http:

        async def ask(host: str, url: str) -> HostAnswer:
            async with at_once:
                return await _ask(http, host, url, body)

        async with asyncio.TaskGroup() as group:
            chosen = [(host, url) for host, url in sorted(hosts.items()) if names is None or host in names]
            asking = {group.create_task(ask(host, url)): host for host, url in chosen}
            waiting = (await asyncio.wait(asking, timeout=QUIET_S))[1] if asking else ()
            if waiting:
                silent = sorted(asking[each] for each in waiting)
                _complain(0, f"waiting for {', '.join(silent)}, for up to {ANSWER_WAIT_S:g} s")
        return [each.result() for each in asking]


async def _members(config: DirectoryConfig) -> Sequence[Member]:
    directory = RedisDirectory.connect(
        config.url.get_secret_value(), key_prefix=config.key_prefix, clock=time.monotonic, loads_functions=False
    )
    try:
        return await directory.members()
    except DirectoryUnavailable as error:
        if "url" in config.model_fields_set:
            raise
        raise DirectoryUnavailable(f"{error} (this is the default: --redis URL says where it is)") from error
    finally:
        await directory.aclose()


def _hosts(members: Sequence[Member]) -> dict[str, str]:
    """Every host of the table, and where its agent is. One that lapsed is asked as well: it may still serve."""
    lives = [member for member in members if isinstance(member.registration, HostRegistration) and not member.retired]
    # The live ones last: where a host has several lives, they are believed.
    return {
        member.registration.host: member.registration.agent_url
        for member in sorted(lives, key=lambda each: (each.is_live, each.remaining_s))
        if isinstance(member.registration, HostRegistration)
    }


def _with_fields(asked: Mapping[str, Any], members: Sequence[Member]) -> dict[str, Any]:
    """An identity that is given by digest, by its fields where an engine of the table has it: every host knows those.

    A host without that engine couldn't tell from a digest which shards are meant.
    """
    digest = asked.get("identity")
    identities = {
        member.registration.identity for member in members if isinstance(member.registration, EngineRegistration)
    }
    for identity in identities:
        digests = [identity.fleet_digest(), *map(identity.shard_digest, range(identity.tp_size))]
        if isinstance(digest, str) and bytes.fromhex(digest) in digests:
            return {**asked, "identity": asdict(identity)}
    return dict(asked)


async def _ask(http: httpx.AsyncClient, host: str, url: str, body: bytes) -> HostAnswer:
    try:
        async with asyncio.timeout(ANSWER_WAIT_S), http.stream("POST", f"{url}/forget", content=body) as answer:
            data = bytearray()
            async for part in answer.aiter_raw():
                data += part
                if len(data) > ANSWER_BYTES_MAX:
                    return HostAnswer(host, None, "its answer is too long")
            said = json.loads(data)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        return HostAnswer(host, None, f"its agent at {url} doesn't answer: {error or type(error).__name__}")
    except (ValueError, RecursionError):
        return HostAnswer(host, None, f"its agent at {url} didn't answer as an agent does")
    if not isinstance(said, dict) or "is_confirmed" not in said:
        detail = said.get("detail") if isinstance(said, dict) else None
        trouble = f"refused ({answer.status_code}): {detail or 'no reason was given'}"
        return HostAnswer(host, None, trouble, is_refused=answer.status_code == 400)
    return HostAnswer(host, said, _trouble(said))


def _trouble(receipt: Mapping[str, Any]) -> str | None:
    """Why a receipt doesn't confirm."""
    if receipt["is_confirmed"] is True:
        return None
    if (receipt.get("remains") or {}).get("identity_unknown"):
        return "no engine tells whose digest this is: give the identity's fields, as JSON"
    return "it couldn't be kept that this is forgotten"


def _row(answer: HostAnswer) -> dict[str, Any]:
    receipt: Mapping[str, Any] = answer.receipt or {}
    forgotten, remains = receipt.get("forgotten") or {}, receipt.get("remains") or {}
    under_way = sum(forgotten.get(name, 0) for name in ("puts", "loads", "writes"))
    return {
        "host": answer.host,
        "confirmed": "yes" if answer.is_confirmed else "NO",
        "dram": _amount(forgotten.get("dram")),
        "nvme": _amount(forgotten.get("nvme")),
        "files removed": forgotten.get("files_removed"),
        "under way": under_way if receipt else None,
        "placements": forgotten.get("placements"),
        "remains": answer.trouble or _remains(remains),
        "receipt": receipt.get("number"),
    }


def _amount(amount: Mapping[str, Any] | None) -> str | None:
    return None if amount is None else f"{amount['chunks']} ({amount['bytes'] / 1e6:,.1f} MB)"


def _remains(remains: Mapping[str, Any]) -> str:
    """What is left, in a few words; nothing is left where there is none."""
    reading = remains.get("open_references") or {}
    parts = [
        (reading.get("chunks"), "being read"),
        (remains.get("files_unremoved"), "files not removed"),
        (remains.get("files_unread"), "files unread"),
        (len(remains.get("drives_away") or ()), "drives away"),
        (remains.get("salt_unknown"), "of unknown salt"),
        (remains.get("placements_pending"), "placements pending"),
    ]
    words = [f"{count} {what}" for count, what in parts if count]
    words += [
        f"{each.get('gpu_chunks')} in {each.get('engine')}'s gpu" + (f" ({each['reset']})" if each.get("reset") else "")
        for each in remains.get("engines") or ()
    ]
    return "; ".join(words) or "nothing"
