"""A gateway by its own account: `/fleet` and its counters of what was served worse than it could be."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from warmroute.doctor.clocks import UNSURE_S, Reading
from warmroute.doctor.finding import Finding, counted, note, right, wrong
from warmroute.doctor.reader import Reader

GATEWAY = "gateway"
NAME = "gateway"
DEGRADED = "warmroute_degraded_total"
REASONS_SHOWN = 6


async def look_at_gateway(reader: Reader, admin_url: str) -> tuple[list[Finding], dict[str, Any], list[Reading]]:
    """Findings, the table, and its clock if it tells it. Raises `Unanswered`."""
    reply = await reader.get(f"{admin_url}/fleet")
    table = reply.table()
    findings = check_fleet(table)
    metrics = await reader.get(f"{admin_url}/metrics")
    findings += check_degraded(metrics.text) if metrics.is_ok else []
    told_s = table.get("unix_time_s")
    clock = [Reading(NAME, told_s - reply.at_s, UNSURE_S)] if isinstance(told_s, int | float) else []
    return findings, table, clock


def check_fleet(table: Mapping[str, Any]) -> list[Finding]:
    """What `/fleet` says of the directory, of lookups and of each engine."""
    findings = []
    directory = table.get("directory")
    if directory == "many lapsed":
        says = "more than half of the fleet's registrations lapsed at once: they are believed for some seconds more"
        mend = "see whether agents run and reach the directory's server, and whether that is slow or was restarted"
        findings.append(wrong(GATEWAY, NAME, says, mend))
    elif directory != "ok":
        says = f"the directory: {directory}"
        mend = "see directory.url and key_prefix in its configuration, and whether the server answers"
        findings.append(wrong(GATEWAY, NAME, says, mend))
    lookups = str(table.get("lookups"))
    if lookups not in ("ok", "none yet"):
        findings.append(wrong(GATEWAY, NAME, f"lookups: {lookups}", "see the directory's findings, and its latency"))
    engines = rows_of(table, "engines")
    if not engines:
        findings.append(
            wrong(GATEWAY, NAME, "it knows no engine", "start agents and engines, with its directory and prefix")
        )
    findings += [finding for row in engines for finding in check_engine(row)]
    findings += check_parity(table.get("parity"))
    if not findings:
        says = f"{counted(len(engines), 'engine')} ready, encoded exactly and believed; directory and lookups ok"
        findings.append(right(GATEWAY, NAME, says))
    return findings


def rows_of(table: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The rows of a part of `/fleet`; what isn't a row is passed over."""
    rows = table.get(name)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def check_engine(row: Mapping[str, Any]) -> list[Finding]:
    """One engine's row."""
    name, findings = str(row.get("engine")), []
    state, encoding = row.get("state"), str(row.get("encoding"))
    if state != "ready":
        mend = "see whether the engine serves /health and /v1/models at its registered URL, reachable from the gateway"
        findings.append(wrong(GATEWAY, name, f"{state} (at {row.get('url')}): it gets no requests", mend))
    if encoding == "no agent":
        says = "without an agent: routed by load and session, not by prefix"
        findings.append(note(GATEWAY, name, says, "run `warmroute agent` on its host, and attach it"))
    elif encoding == "loading":
        findings.append(note(GATEWAY, name, "its tokenizer is being loaded", "ask again in a moment"))
    elif encoding.startswith("token ids only"):
        mend = "prompts of token ids are exact; texts stay with their session: its log says what its tokenizer does"
        findings.append(note(GATEWAY, name, f"its prompts of text aren't encoded: {encoding}", mend))
    elif encoding.startswith("exact; "):
        mend = "mend the files in its `tokenizer` folder: those from before serve on, until the gateway starts anew"
        findings.append(wrong(GATEWAY, name, f"its files changed, and can't be used: {encoding}", mend))
    elif encoding != "exact":
        mend = "see that the agent is reachable from the gateway, and the model's tokenizer files; it is tried again"
        findings.append(wrong(GATEWAY, name, f"its prompts can't be encoded: {encoding}", mend))
    elif row.get("host") is None:
        says = "without an agent: routed by what its prompts begin with, not by what it holds"
        findings.append(note(GATEWAY, name, says, "run `warmroute agent` on its host, and attach it"))
    elif row.get("placements") != "believed":
        says = f"what it holds isn't believed ({row.get('placements')})"
        mend = "its agent's registration has lapsed, or the directory can't be read: see these findings"
        findings.append(wrong(GATEWAY, name, says, mend))
    tokenizer = str(row.get("tokenizer") or "")
    if "whole texts" in tokenizer or "check of encoded texts failed" in tokenizer:
        says = f"texts are encoded the dear way: {tokenizer}"
        findings.append(note(GATEWAY, name, says, "nothing is wrong with answers; report the tokenizer's family"))
    return findings


def check_parity(parity: Any) -> list[Finding]:
    """Kinds of request whose answers showed another number of tokens, or whose chunks their engine didn't announce."""
    findings = []
    for row in rows_of(parity if isinstance(parity, Mapping) else {}, "buckets"):
        if row.get("state") == "approximate":
            kind = "".join(f" {word}" for word in ("tools", "reasoning") if row.get(word))
            says = f"{row.get('endpoint')}{kind}: answers differ from what is encoded ({row.get('reason')})"
            mend = "see what `ids` finds of this engine: its template, tokenizer or flags aren't those of its files"
            findings.append(wrong(GATEWAY, str(row.get("engine")), says, mend))
    return findings


def check_degraded(text: str) -> list[Finding]:
    """What it has counted since its start."""
    lines = "\n".join(line for line in text.split("\n") if line.startswith(DEGRADED))
    counts: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(lines + "\n"):
            for sample in family.samples:
                reason = sample.labels.get("reason", "?")
                counts[reason] = counts.get(reason, 0.0) + sample.value
    except (ValueError, TypeError, LookupError):
        return []
    most = sorted(((count, reason) for reason, count in counts.items() if count), reverse=True)
    if not most:
        return []
    words = ", ".join(f"{reason} {count:,.0f}" for count, reason in most[:REASONS_SHOWN])
    mend = "gateway/encoding/README.md tells the reasons that begin with not_encoded; others name the part that failed"
    return [note(GATEWAY, NAME, f"served worse than it could be, since its start: {words}", mend)]
