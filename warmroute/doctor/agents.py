"""An agent by its own account: reachable, guarded, its tiers and drives on, its engines attached."""

import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from warmroute.doctor.clocks import UNSURE_S, Reading
from warmroute.doctor.finding import Finding, counted, note, right, unknown, wrong
from warmroute.doctor.reader import LOOK_S, Reader, Reply, Unanswered

AGENTS = "agents"
NOBODY = "no-such-engine-asked-by-the-doctor"


async def look_at_agent(
    reader: Reader, host: str, url: str, is_fleet_elsewhere: bool
) -> tuple[list[Finding], Mapping[str, Any] | None]:
    """Findings, and its `/status`, where it answers. `is_fleet_elsewhere`: others aren't on this machine alone."""
    try:
        reply = await reader.get(f"{url}/status")
        status = reply.table()
    except Unanswered as error:
        mend = (
            "see that the agent runs and is reachable from here, that listen.bind isn't loopback where gateways are "
            "elsewhere, that listen.url is an address that they reach, and that no firewall stands between"
        )
        return [wrong(AGENTS, host, f"no agent answers, so none serves tokenizer files: {error}", mend)], None
    findings = [*check_place(host, url, is_fleet_elsewhere), *check_status(host, status)]
    findings += await _guard(reader, host, url)
    if not any(each.mend for each in findings):
        tiers = status.get("tiers") or {}
        words = [f"{name} {_part(tier)}" for name, tier in tiers.items() if isinstance(tier, Mapping)]
        engines = counted(len(status.get("engines") or ()), "engine")
        findings.insert(0, right(AGENTS, host, f"reachable; {', '.join(words)}; {engines}"))
    return findings, {**status, "reading": _clock(host, status, reply)}


def check_status(host: str, status: Mapping[str, Any]) -> list[Finding]:
    """What its `/status` says. Parts that it doesn't tell of are passed over."""
    findings = []
    if status.get("directory", "ok") != "ok":
        says = f"it can't announce: {status['directory']}"
        findings.append(wrong(AGENTS, host, says, "see directory.url in its configuration, and the server's rights"))
    tiers = status.get("tiers") or {}
    refusal = (tiers.get("dram") or {}).get("refusal")
    if refusal:
        findings.append(wrong(AGENTS, host, f"no DRAM tier: {refusal}", "give it less (dram.gb), or the machine more"))
    for drive in (tiers.get("nvme") or {}).get("drives") or ():
        findings += _drive(host, drive)
    for engine in status.get("engines") or ():
        findings += _engine(host, engine)
    return findings


def _drive(host: str, drive: Mapping[str, Any]) -> list[Finding]:
    name = drive.get("drive", "?")
    if not drive.get("is_up", True):
        says = f"the drive {name} is in quarantine: {drive.get('failure')}"
        mend = "look at the drive and its kernel log; it is tried again by itself once it answers"
        return [wrong(AGENTS, host, says, mend)]
    findings = []
    if drive.get("is_direct") is False:
        why = drive.get("direct_refusal") or "why isn't said"
        says = f"the drive {name} takes no O_DIRECT ({why}): the page cache keeps a second copy of each chunk"
        mend = "put nvme.path on a local ext4 or XFS; tmpfs, overlayfs and most network file systems refuse it"
        findings.append(note(AGENTS, host, says, mend))
    if drive.get("is_crowded"):
        says = f"the file system of {name} is nearly full by others: nothing is written there"
        findings.append(wrong(AGENTS, host, says, "free space, or give less nvme.gb; nvme.min_free_gb stays free"))
    elif drive.get("is_write_paused"):
        says = f"writing to {name} is paused: it fails or is full"
        findings.append(
            wrong(AGENTS, host, says, "see its log; the drive's quota must be below what its file system has")
        )
    return findings


def _engine(host: str, engine: Mapping[str, Any]) -> list[Finding]:
    name = engine.get("engine", "?")
    if engine.get("is_connected") is False:
        says = f"the engine {name} has left its door"
        return [wrong(AGENTS, host, says, "see whether the engine runs, and its log")]
    findings = []
    if engine.get("gpu_is_known") is False:
        says = f"what the GPU of {name} holds isn't known: its KV events don't arrive, or a gap couldn't be closed"
        mend = "see --kv-events-config (endpoint, replay_endpoint) in the engine's launch line; reset its prefix cache"
        findings.append(wrong(AGENTS, host, says, mend))
    if engine.get("directory", "ok") != "ok":
        says = f"{name} isn't announced: {engine['directory']}"
        findings.append(wrong(AGENTS, host, says, "see the agent's log, and the directory's findings above"))
    return findings


def check_place(host: str, url: str, is_fleet_elsewhere: bool) -> list[Finding]:
    """Whether others reach the agent where it says that it is."""
    if not is_fleet_elsewhere or not is_loopback(url):
        return []
    says = f"it registers {url}, which gateways on other machines can't reach"
    return [wrong(AGENTS, host, says, "set listen.bind and listen.url to an address of its machine")]


async def _guard(reader: Reader, host: str, url: str) -> list[Finding]:
    """Whether anybody may reset and forget: asked of an engine that isn't there."""
    if is_loopback(url):
        return []
    reply = await reader.post(f"{url}/engines/{NOBODY}/reset_prefix_cache", {}, LOOK_S)
    if reply.status == 401:
        return []
    if reply.status == 404:
        says = "without an admin token on an address that isn't loopback: whoever reaches it can make it forget"
        mend = "set listen.admin_token (16 characters or more), and give it to `warmroute forget`"
        return [wrong(AGENTS, host, says, mend)]
    return [unknown(AGENTS, host, f"whether it is guarded: it answered {reply.status}")]


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine alone."""
    name = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _part(tier: Mapping[str, Any]) -> str:
    used, limit = tier.get("bytes_used", 0), tier.get("bytes_limit", 0)
    return f"{used / 1e9:.1f} of {limit / 1e9:.1f} GB"


def _clock(host: str, status: Mapping[str, Any], reply: Reply) -> Reading | None:
    told = status.get("unix_time_s")
    return Reading(host, told - reply.at_s, UNSURE_S) if isinstance(told, int | float) else None
