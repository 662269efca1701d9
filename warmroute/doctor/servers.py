"""The directory's servers: settings that lose records, functions, rights, memory, and the time of a lookup."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from directory import redis_schema as schema
from directory.errors import DirectoryError
from directory.placements import PARTITIONS
from directory.redis_errors import ONE_OF_A_CLUSTER
from directory.server_report import NEARLY_FULL, ServerReport
from directory.statistics import DirectoryStatistics, ServerNode
from warmroute.doctor.clocks import Reading
from warmroute.doctor.finding import Finding, failed, note, right, unknown, wrong

DIRECTORY = "directory"
LOOKUP_SLOW_S, LOOKUP_LATE_S = 0.005, 0.05
"""The shortest deadline of a gateway's lookup, and the longest: what takes longer than that is never used."""
CONFIGURED = (
    "save", "appendonly", "timeout", "protected-mode", "requirepass", "cluster-enabled", "cluster-require-full-coverage"
)  # fmt: skip


def check_statistics(statistics: DirectoryStatistics) -> list[Finding]:
    """What every server says of itself, and how long lookups take."""
    findings = [finding for server in statistics.servers for finding in check_server(server)]
    median_s = statistics.lookup_median_s
    if median_s is None:
        findings.append(failed(DIRECTORY, "lookups", f"can't be made: {'; '.join(statistics.refused)}"))
    elif median_s > LOOKUP_SLOW_S:
        took = f"{statistics.lookup_keys} keys take {median_s * 1000:.1f} ms"
        says = f"{took}; gateways wait 5 ms for them where prompts are short, 50 where they are long"
        mend = "put the directory nearer to the gateways, give its server a core of its own, or look at its SLOWLOG"
        findings.append((wrong if median_s > LOOKUP_LATE_S else note)(DIRECTORY, "lookups", says, mend))
    else:
        says = f"{statistics.lookup_keys} keys in {median_s * 1000:.2f} ms (from here)"
        findings.append(right(DIRECTORY, "lookups", says))
    return findings


def check_server(server: ServerReport) -> list[Finding]:
    """One server's report."""
    name, findings = server.name, []
    if server.error is not None:
        return [wrong(DIRECTORY, name, f"doesn't answer: {server.error}", "start it, or see who may reach it")]
    policy, limit, used = server.eviction_policy or "", server.memory_limit_bytes or 0, server.memory_used_bytes or 0
    if limit and policy not in ("", "noeviction"):
        lost = "records and the fleet's table" if policy.startswith("allkeys") else "records"
        says = f"maxmemory-policy {policy} throws {lost} away when memory ({limit / 1e6:,.0f} MB) is full"
        findings.append(wrong(DIRECTORY, name, says, "CONFIG SET maxmemory-policy noeviction, and in its file"))
    elif limit and used >= NEARLY_FULL * limit:
        says = f"{used / limit:.0%} of maxmemory is used: new placements are refused when it is full"
        findings.append(
            wrong(DIRECTORY, name, says, "CONFIG SET maxmemory to twice that; 165 bytes a chunk are needed")
        )
    elif server.memory_limit_bytes == 0:
        says = "without maxmemory: a fleet that grows takes what the machine has"
        findings.append(note(DIRECTORY, name, says, "CONFIG SET maxmemory below the machine's, with noeviction"))
    if server.functions == "missing":
        mend = "`warmroute directory load --redis URL`, as the operator; agents with the right to load do it themselves"
        findings.append(wrong(DIRECTORY, name, "the directory's functions aren't loaded: nothing can be written", mend))
    if server.functions == "other":
        mend = "`warmroute directory load --force`, once every part runs this release"
        findings.append(wrong(DIRECTORY, name, "another release's functions are loaded under this schema's name", mend))
    if server.role not in (None, "master"):
        findings.append(
            wrong(DIRECTORY, name, f"it is a {server.role}: it takes no writes", "name its master in the URL")
        )
    if server.last_save_ok is False:
        mend = "free its disk, or switch snapshots off: CONFIG SET save ''"
        findings.append(wrong(DIRECTORY, name, "its last snapshot failed: it may refuse all writes (MISCONF)", mend))
    if not findings:
        findings.append(right(DIRECTORY, name, f"{server.version or 'version unknown'}, functions current, {policy}"))
    return findings


async def look_at_nodes(nodes: Sequence[ServerNode], keys: schema.Keyspace) -> tuple[list[Finding], list[Reading]]:
    """What only a question of its own tells: settings, whether this login may write, and the clock."""
    findings: list[Finding] = []
    readings: list[Reading] = []
    for node in nodes:
        findings += await _settings(node)
        findings += await _rights(node, keys)
        sent_s = time.time()
        answer = await _asked(node.execute, "TIME")
        if isinstance(answer, list | tuple) and len(answer) == 2:
            took_s = time.time() - sent_s
            told_s = int(answer[0]) + int(answer[1]) / 1e6
            readings.append(Reading(node.name, told_s - sent_s - took_s / 2, took_s / 2))
    return findings, readings


async def _settings(node: ServerNode) -> list[Finding]:
    settings: dict[str, str] = {}
    for name in CONFIGURED:
        answer = await _asked(node.execute, "CONFIG GET", name)
        if answer is None:
            return [unknown(DIRECTORY, node.name, "this login may not read its settings (CONFIG GET)")]
        settings |= _pairs(answer)
    findings = []
    if settings.get("save", "").strip():
        says = "it saves snapshots: each forks it, and doubles its memory while writes go on; nothing needs them"
        findings.append(note(DIRECTORY, node.name, says, "CONFIG SET save ''"))
    if settings.get("appendonly") == "yes":
        says = "it keeps an append-only file, which the directory doesn't need: agents announce all again"
        findings.append(note(DIRECTORY, node.name, says, "CONFIG SET appendonly no"))
    if settings.get("timeout", "0") != "0":
        says = f"it closes connections that rest for {settings['timeout']} s: lookups after a pause must connect first"
        findings.append(note(DIRECTORY, node.name, says, "CONFIG SET timeout 0"))
    if settings.get("protected-mode") == "no" and not settings.get("requirepass"):
        says = "it has no password, and protected-mode is off: whoever reaches it may read and write"
        mend = "give it a password or ACL users (directory/README.md), or keep it behind a firewall"
        findings.append(note(DIRECTORY, node.name, says, mend))
    is_cluster = settings.get("cluster-enabled") == "yes"
    if is_cluster and settings.get("cluster-require-full-coverage") == "yes":
        says = "when one shard is lost, all the others refuse to answer"
        findings.append(wrong(DIRECTORY, node.name, says, "CONFIG SET cluster-require-full-coverage no"))
    return findings


async def _rights(node: ServerNode, keys: schema.Keyspace) -> list[Finding]:
    """A call with too few arguments: checked before anything is done, it changes nothing."""
    for partition in range(PARTITIONS):
        try:
            await node.execute("FCALL", schema.PLACE, 1, keys.attempts(partition))
        except DirectoryError as error:
            said = str(error)
        else:
            said = "a senseless call wasn't refused"
        if said == ONE_OF_A_CLUSTER:  # another shard's partition
            continue
        if "warmroute: " in said:
            return [right(DIRECTORY, node.name, "this login may read and write")]
        if "NOPERM" in said or "no permissions" in said.lower():
            mend = f"where agents use it, grant it FCALL with the functions of {schema.LIBRARY} (directory/README.md)"
            return [note(DIRECTORY, node.name, "this login may not write", mend)]
        if "not found" in said.lower():
            return []  # the functions are missing, which is said of the server already
        return [unknown(DIRECTORY, node.name, f"whether this login may write: {said}")]
    return []


async def _asked(execute: Callable[..., Awaitable[Any]], *command: Any) -> Any:
    try:
        return await execute(*command)
    except DirectoryError:
        return None


def _pairs(answer: Any) -> dict[str, str]:
    """CONFIG GET's answer, flat or as a mapping."""
    if isinstance(answer, dict):
        items = list(answer.items())
    else:
        items = list(zip(answer[::2], answer[1::2], strict=False))
    return {_text(name): _text(value) for name, value in items}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
