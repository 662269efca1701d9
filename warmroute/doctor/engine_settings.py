"""How an engine was launched, as far as it shows from outside: vLLM's `/metrics` and `/server_info`, SGLang's own."""

import json
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from directory.chunks import CHUNK_TOKENS_DEFAULT
from nodeagent.engines.vllm.description import STABLE_HASHES
from warmroute.doctor.finding import Finding, note, right, unknown, wrong
from warmroute.doctor.patient import Patient, Served
from warmroute.doctor.reader import Reader
from warmroute.vllm.installation import VERSION as VLLM_VERSION

SETTINGS = "settings"
CACHE_CONFIG = "vllm:cache_config_info"
ACCEPTED_TEMPLATES = (None, "")


async def check_settings(reader: Reader, patient: Patient, served: Served) -> list[Finding]:
    """By the engine's kind. Raises `Unanswered`."""
    kind = (served.kind or "").partition("-")[0]
    if kind == "vllm":
        return await _vllm(reader, patient, served)
    if kind == "sglang":
        return await _sglang(reader, patient)
    if kind == "reference":
        return []
    return [unknown(SETTINGS, patient.name, "its kind isn't known; give --kind vllm, sglang or reference")]


def check_cache_config(subject: str, labels: Mapping[str, str], chunk_tokens: int) -> list[Finding]:
    """The labels of vLLM's `cache_config_info`: what its cache was started with."""
    findings = []
    if labels.get("enable_prefix_caching") == "False":
        mend = "start vLLM without --no-enable-prefix-caching"
        findings.append(wrong(SETTINGS, subject, "prefix caching is off: it keeps nothing between requests", mend))
    findings += _block_size(subject, labels.get("block_size"), chunk_tokens, "--block-size")
    algorithm = labels.get("prefix_caching_hash_algo")
    if algorithm is not None and algorithm not in STABLE_HASHES:
        says = f"block hashes are {algorithm}: seeded anew at each start, so no tier but its own survives one"
        mend = f"start vLLM with --prefix-caching-hash-algo {STABLE_HASHES[0]}"
        findings.append(wrong(SETTINGS, subject, says, mend))
    if not findings:
        says = f"prefix caching on, blocks of {labels.get('block_size', '?')} tokens, {algorithm or 'hashes unknown'}"
        findings.append(right(SETTINGS, subject, says))
    return findings


def check_server_info(subject: str, config: Mapping[str, Any]) -> list[Finding]:
    """vLLM's whole configuration, which it shows in development mode only."""
    findings = []
    transfer = config.get("kv_transfer_config") or {}
    policy = transfer.get("kv_load_failure_policy") if isinstance(transfer, Mapping) else None
    if transfer and policy != "recompute":
        says = f"a chunk that can't be loaded fails the request (kv_load_failure_policy {policy})"
        mend = 'put "kv_load_failure_policy": "recompute" into --kv-transfer-config'
        findings.append(wrong(SETTINGS, subject, says, mend))
    events = config.get("kv_events_config") or {}
    if not isinstance(events, Mapping) or not events.get("enable_kv_cache_events"):
        says = "it publishes no KV events: what its GPU holds isn't known"
        mend = "start it with --kv-events-config as in nodeagent/engines/VLLM.md"
        findings.append(wrong(SETTINGS, subject, says, mend))
    elif events.get("publisher") == "zmq" and not events.get("replay_endpoint"):
        says = "its KV events can't be repeated: after a gap its GPU's contents are unknown until they turn over"
        findings.append(note(SETTINGS, subject, says, 'put a "replay_endpoint" into --kv-events-config'))
    return findings


async def _vllm(reader: Reader, patient: Patient, served: Served) -> list[Finding]:
    chunk_tokens = patient.registration.chunk_tokens if patient.registration else CHUNK_TOKENS_DEFAULT
    findings = _version(patient.name, served.version)
    metrics = await reader.get(f"{patient.url}/metrics")
    labels = _labels(metrics.text) if metrics.is_ok else None
    if labels is None:
        why = "it shows no metrics of its cache; start it without --disable-log-stats"
        findings.append(unknown(SETTINGS, patient.name, why))
    else:
        findings += check_cache_config(patient.name, labels, chunk_tokens)
    info = await reader.get(f"{patient.url}/server_info?config_format=json")
    config = info.value.get("vllm_config") if info.is_ok and isinstance(info.value, dict) else None
    if isinstance(config, dict):
        findings += check_server_info(patient.name, config)
    else:
        why = "events, connector and failure policy (vLLM shows them with VLLM_SERVER_DEV_MODE=1 only)"
        findings.append(unknown(SETTINGS, patient.name, why))
    return findings


async def _sglang(reader: Reader, patient: Patient) -> list[Finding]:
    info = (await reader.get(f"{patient.url}/get_server_info")).table()
    chunk_tokens = patient.registration.chunk_tokens if patient.registration else CHUNK_TOKENS_DEFAULT
    findings = []
    if info.get("disable_radix_cache") is True:
        mend = "start SGLang without --disable-radix-cache"
        findings.append(wrong(SETTINGS, patient.name, "prefix caching is off: nothing stays between requests", mend))
    page = info.get("page_size")
    findings += _block_size(patient.name, None if page is None else str(page), chunk_tokens, "--page-size")
    template = info.get("chat_template")
    if template not in ACCEPTED_TEMPLATES:
        says = f"it was started with --chat-template {json.dumps(template)[:60]}, which no gateway knows"
        mend = "put that template beside the model as chat_template.jinja instead, and leave the flag out"
        findings.append(wrong(SETTINGS, patient.name, says, mend))
    return findings or [right(SETTINGS, patient.name, f"prefix caching on, pages of {page} tokens")]


def _block_size(subject: str, told: str | None, chunk_tokens: int, flag: str) -> list[Finding]:
    if told is None or not told.isdigit() or not int(told) or chunk_tokens % int(told) == 0:
        return []
    says = f"chunks of {chunk_tokens} tokens aren't a multiple of its blocks of {told}: no chunk is ever whole"
    fitting = max(size for size in range(1, int(told) + 1) if chunk_tokens % size == 0)
    mend = f"start it with {flag} {fitting}, or make chunk_tokens a multiple of {told} in the whole fleet"
    return [wrong(SETTINGS, subject, says, mend)]


def _version(subject: str, version: str | None) -> list[Finding]:
    pinned = ".".join(VLLM_VERSION.split(".")[:2])
    if version is None or version.startswith(f"{pinned}."):
        return []
    says = f"it is vLLM {version[:40]}; how prompts are rendered is known of {pinned} only"
    return [note(SETTINGS, subject, says, f"run vLLM {pinned}, or trust `ids` of this report")]


def _labels(text: str) -> Mapping[str, str] | None:
    lines = [line for line in text.split("\n") if line.startswith(CACHE_CONFIG)]
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                return dict(sample.labels)
    except (ValueError, TypeError, LookupError):
        return None
    return None
