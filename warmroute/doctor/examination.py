"""The examination: where the fleet's parts are, which checks are made of each, and that none takes for ever."""

import asyncio
import json
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from directory.errors import DirectoryError
from directory.members import (
    EngineRegistration,
    HostRegistration,
    Member,
    UnreadableMember,
    decode_registration,
)
from directory.redis_directory import RedisDirectory
from directory.statistics import gather
from gateway.encoding.files import TokenizerFiles
from warmroute.doctor.agents import AGENTS, is_loopback, look_at_agent
from warmroute.doctor.cache_use import CACHE, check_cache
from warmroute.doctor.clocks import HEADER_S, Reading, check_clocks
from warmroute.doctor.engine_ids import EngineIds
from warmroute.doctor.engine_settings import SETTINGS, check_settings
from warmroute.doctor.finding import CHECKS, NEEDS, Finding, failed, unknown, wrong
from warmroute.doctor.gateway_encoding import OwnEncodings
from warmroute.doctor.gateways import GATEWAY, NAME, look_at_gateway, rows_of
from warmroute.doctor.identities import check_engines, check_table, check_versions
from warmroute.doctor.patient import Patient, Served, look_at_served
from warmroute.doctor.reader import Reader, Reply, Unanswered
from warmroute.doctor.routed_keys import check_routed_keys
from warmroute.doctor.servers import DIRECTORY, check_statistics, look_at_nodes
from warmroute.doctor.token_ids import IDS, check_ids

CHECK_S = 300.0
"""What one check of one part may take: a slow engine computes three prompts in it."""
LOOK_S = 30.0
"""What a look at a gateway, an agent or the directory may take."""
PARTS_AT_ONCE_MAX = 8

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be examined. URLs without a path; `checks` are the names of those that are made.

    `tokenizer_folder` and `kind` are of the engines without an agent that a gateway's table has.
    """

    gateway_admin: str | None = None
    directory: str | None = None
    key_prefix: str = "wr"
    agents: Sequence[str] = ()
    engines: Sequence[Patient] = ()
    files_folder: Path = Path()
    tokenizer_folder: Path | None = None
    kind: str | None = None
    checks: frozenset[str] = frozenset(CHECKS)
    api_key: str | None = field(default=None, repr=False)


async def examine(asked: Asked) -> list[Finding]:
    """Look at everything. Raises nothing that others' answers could cause."""
    async with httpx.AsyncClient(trust_env=False) as http:
        encodings = OwnEncodings(TokenizerFiles(asked.files_folder, http))
        try:
            return await _Examination(asked, Reader(http), encodings).run()
        finally:
            encodings.close()


class _Examination:
    """One run: collects findings, clocks and versions as it goes along."""

    def __init__(self, asked: Asked, reader: Reader, encodings: OwnEncodings) -> None:
        self._asked, self._reader, self._encodings = asked, reader, encodings
        self._findings: list[Finding] = []
        self._clocks: list[Reading] = []
        self._versions: dict[str, str] = {}
        self._at_once = asyncio.Semaphore(PARTS_AT_ONCE_MAX)

    async def run(self) -> list[Finding]:
        table = await self._gateway()
        members = await self._directory()
        patients, agents = _parts(self._asked, table, members)
        if members is None:
            registered = [each.registration for each in patients if each.registration is not None]
            self._findings += check_engines(registered)
        await asyncio.gather(*(self._agent(host, url) for host, url in agents.items()))
        await asyncio.gather(*(self._engine(each, table) for each in patients))
        self._findings += check_versions(self._versions)
        self._findings += check_clocks(self._clocks)
        if not patients:
            self._findings.append(unknown(IDS, "engines", f"there is none to be examined; it needs {NEEDS[IDS]}"))
        return self._found()

    def _found(self) -> list[Finding]:
        """What was asked for, and where others are found from, if that failed: of what wasn't seen, what it needs."""
        wanted = self._asked.checks
        found = [
            each
            for each in self._findings
            if each.check in wanted or (each.has_failed and each.check in (GATEWAY, DIRECTORY))
        ]
        if wanted != CHECKS.keys():
            unseen = wanted - {each.check for each in found}
            found += [
                unknown(each, "the fleet", f"there is nothing to look at; it needs {NEEDS[each]}") for each in unseen
            ]
        return found

    async def _gateway(self) -> dict[str, Any] | None:
        url = self._asked.gateway_admin
        if url is None:
            return None
        mend = (
            "see that the gateway runs and that this is its admin port: one above the gateway's where it isn't given; "
            "else --admin URL"
        )
        looked = await self._within(LOOK_S, GATEWAY, url, look_at_gateway(self._reader, url), mend)
        if looked is None:
            return None
        findings, table, reading = looked
        self._findings += findings
        self._clocks += reading
        if isinstance(table.get("version"), str):
            self._versions[NAME] = table["version"]
        return table

    async def _directory(self) -> tuple[Member, ...] | None:
        """What the directory's servers say; the table, where it can be read."""
        url = self._asked.directory
        if url is None:
            return None
        try:
            directory = RedisDirectory.connect(
                url, key_prefix=self._asked.key_prefix, clock=time.monotonic, loads_functions=False
            )
        except DirectoryError as error:
            self._findings.append(failed(DIRECTORY, "directory", str(error)))
            return None
        try:
            mend = "see --directory, and whether the server runs and is to be reached from here"
            return await self._within(LOOK_S, DIRECTORY, "directory", self._look_at(directory), mend)
        finally:
            await directory.aclose()

    async def _look_at(self, directory: RedisDirectory) -> tuple[Member, ...] | None:
        if DIRECTORY in self._asked.checks:
            self._findings += check_statistics(await gather(directory))
            findings, clocks = await look_at_nodes(await directory.nodes(), directory.keys)
            self._findings += findings
            self._clocks += clocks
        members = await directory.members()
        self._findings += check_table(members, directory.unreadable)
        return members

    async def _agent(self, host: str, url: str) -> None:
        elsewhere = [self._asked.gateway_admin, self._asked.directory, *(each.url for each in self._asked.engines)]
        is_fleet_elsewhere = any(other is not None and not is_loopback(other) for other in elsewhere)
        async with self._at_once:
            looked = await self._within(
                LOOK_S, AGENTS, host, look_at_agent(self._reader, host, url, is_fleet_elsewhere)
            )
        if looked is None:
            return
        findings, status = looked
        self._findings += findings
        if status is not None:
            if isinstance(status.get("version"), str):
                self._versions[f"agent of {host}"] = status["version"]
            if status.get("reading") is not None:
                self._clocks.append(status["reading"])

    async def _engine(self, patient: Patient, table: Mapping[str, Any] | None) -> None:
        async with self._at_once:
            try:
                reader = Reader(self._reader.http, patient.headers)
                served = await look_at_served(reader, patient)
                self._clocks += _date_of(patient.name, await reader.get(f"{patient.url}/health"))
            except Unanswered as error:
                mend = "see whether it runs, and is to be reached from here"
                mend += " at the URL that it registers" if patient.registration is not None else ""
                has_key = "answered 401" not in str(error)
                is_due = patient.registration is not None and has_key
                check = next((each for each in (SETTINGS, IDS, CACHE) if each in self._asked.checks), SETTINGS)
                says = (check, patient.name, str(error), mend if has_key else "it asks for a key: --api-key-file")
                finding = wrong(*says) if is_due else failed(*says)
                self._findings.append(finding)
                return
            await self._checks(reader, patient, served, table)

    async def _checks(self, reader: Reader, patient: Patient, served: Served, table: Mapping[str, Any] | None) -> None:
        asked = EngineIds(reader, patient, served)
        name, wanted = patient.name, self._asked.checks
        if SETTINGS in wanted:
            await self._add(CHECK_S, SETTINGS, name, check_settings(reader, patient, served))
        if IDS in wanted:
            await self._add(CHECK_S, IDS, name, check_ids(self._encodings, asked, patient, served))
            admin = self._asked.gateway_admin
            if table is not None and admin is not None and patient.registration is not None:
                keys = check_routed_keys(self._reader, admin, patient.registration, asked, served)
                await self._add(CHECK_S, IDS, f"gateway, {name}", keys)
        if CACHE in wanted:
            await self._add(CHECK_S, CACHE, name, check_cache(reader, asked, patient, served))

    async def _add(self, limit_s: float, check: str, subject: str, work: Awaitable[list[Finding]]) -> None:
        self._findings += await self._within(limit_s, check, subject, work) or []

    async def _within(self, limit_s: float, check: str, subject: str, work: Awaitable[_T], mend: str = "") -> _T | None:
        """What `work` gives, or a finding that says why nothing. An edge: others' answers have any shape."""
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            self._findings.append(failed(check, subject, f"it took longer than {limit_s:g} s", mend))
        except (Unanswered, DirectoryError) as error:
            self._findings.append(failed(check, subject, str(error), mend))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError) as error:
            self._findings.append(failed(check, subject, f"it answered with something unexpected: {error!r}"))
        return None


def _parts(
    asked: Asked, table: Mapping[str, Any] | None, members: Sequence[Member] | None
) -> tuple[list[Patient], dict[str, str]]:
    """Engines to be examined, and agents' URLs by name: from the directory's table, a gateway's, and the command."""
    agents = {url: url for url in asked.agents}
    patients = {each.url: each for each in asked.engines}
    found = _of_members(members) if members is not None else _of_table(table or {})
    agents |= found[1]
    for registration, agent_url in found[0]:
        patients[registration.url] = Patient(
            registration.engine, registration.url, registration, agent_url, api_key=asked.api_key
        )
    for row in rows_of(table or {}, "engines"):
        url = row.get("url")
        if row.get("registration") is None and isinstance(url, str) and url not in patients:
            patients[url] = Patient(
                str(row.get("engine")),
                url,
                tokenizer_folder=asked.tokenizer_folder,
                kind=asked.kind,
                api_key=asked.api_key,
            )
    return list(patients.values()), agents


_Found = tuple[list[tuple[EngineRegistration, str | None]], dict[str, str]]


def _of_members(members: Sequence[Member]) -> _Found:
    live = [member.registration for member in members if member.is_live]
    agents = {each.host: each.agent_url for each in live if isinstance(each, HostRegistration)}
    engines = [each for each in live if isinstance(each, EngineRegistration)]
    return [(each, agents.get(each.host)) for each in engines], agents


def _of_table(table: Mapping[str, Any]) -> _Found:
    """The same of `/fleet`. Rows of another release that can't be read are engines without an agent."""
    live = [row for row in rows_of(table, "hosts") if row.get("state") == "live"]
    agents = {str(row.get("host")): str(row.get("agent_url")) for row in live}
    engines: list[tuple[EngineRegistration, str | None]] = []
    for row in rows_of(table, "engines"):
        try:
            registration = decode_registration(json.dumps(row.get("registration")).encode())
        except UnreadableMember:
            continue
        if isinstance(registration, EngineRegistration):
            engines.append((registration, agents.get(registration.host)))
    return engines, agents


def _date_of(part: str, reply: Reply) -> list[Reading]:
    """By a Date header, which tells whole seconds: half of one is added."""
    if reply.date_s is None:
        return []
    return [Reading(part, reply.date_s + HEADER_S / 2 - reply.at_s, HEADER_S / 2)]
