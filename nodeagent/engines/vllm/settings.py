"""What the launch line of a vLLM engine says to warmroute, in `kv_connector_extra_config`; all else is derived."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from directory.chunks import CHUNK_TOKENS_DEFAULT

STAGING_GB_DEFAULT = 4.0
GB = 1e9
STAGING_CHUNKS_MIN = 4
"""Below it hardly anything can be loaded: rows are shared by all that is under way."""
SOCKET_PATH_BYTES_MAX = 107
"""What Linux takes as the path of a Unix socket (unix(7): sun_path, with its zero)."""
_ENGINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
OWN_FIELDS = ("spec_name", "spec_module_path", "secondary_tiers", "cpu_bytes_to_use", "block_size", "blocks_per_chunk")


class SettingsRefused(ValueError):
    """The launch line can't be used; the message names the field and says what would be right."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`door`: the agent's Unix socket. `engine`: its name in the fleet. `url`: where gateways reach it, without /v1.

    `staging_gb`: vLLM's own host memory, a passage to the agent's tiers (GB, 10^9 bytes): what lies beyond it of
    the prompts that load at once is computed. `chunk_tokens`: the fleet's chunk. `offload_replies`: keep what was
    decoded as well; its KV differs from that of a prefill in the last bits. `flops`: useful FLOP/s until they were
    observed.
    """

    door: str
    engine: str
    url: str
    staging_gb: float = STAGING_GB_DEFAULT
    chunk_tokens: int = CHUNK_TOKENS_DEFAULT
    offload_replies: bool = False
    flops: float | None = None

    @property
    def staging_bytes(self) -> int:
        """The staging area in bytes."""
        return round(self.staging_gb * GB)


def read_settings(extra_config: Mapping[str, Any]) -> EngineSettings:
    """The settings in `kv_connector_extra_config`. Raises `SettingsRefused`."""
    names = {field.name: field for field in fields(EngineSettings)}
    for name in extra_config:
        if name not in names and name not in OWN_FIELDS:
            raise SettingsRefused(f"kv_connector_extra_config: {name} is not known; known are {', '.join(names)}")
    for name in ("door", "engine", "url"):
        if not isinstance(extra_config.get(name), str) or not extra_config[name]:
            raise SettingsRefused(f"kv_connector_extra_config: {name} must be a text")
    given = {name: extra_config[name] for name in names if name in extra_config}
    settings = EngineSettings(**given)
    if not _is_url(settings.url):
        raise SettingsRefused("kv_connector_extra_config: url must be http://host:port, without /v1")
    if not settings.door.startswith("/") or len(settings.door.encode("utf-8", "replace")) > SOCKET_PATH_BYTES_MAX:
        raise SettingsRefused(
            f"kv_connector_extra_config: door must be a path from / of at most {SOCKET_PATH_BYTES_MAX} bytes"
        )
    if not _ENGINE.fullmatch(settings.engine):
        raise SettingsRefused(
            "kv_connector_extra_config: engine must be a name of at most 128 letters, digits and . _ : @ -"
        )
    _check_number("staging_gb", settings.staging_gb)
    if settings.flops is not None:
        _check_number("flops", settings.flops)
    if type(settings.chunk_tokens) is not int or settings.chunk_tokens < 1:
        raise SettingsRefused("kv_connector_extra_config: chunk_tokens must be a whole number of tokens above 0")
    if not isinstance(settings.offload_replies, bool):
        raise SettingsRefused("kv_connector_extra_config: offload_replies must be true or false")
    return settings


def check_staging(rows: int, chunk_bytes: int) -> None:
    """Refuse a staging area of so few rows of a chunk each. Raises `SettingsRefused`."""
    if rows < STAGING_CHUNKS_MIN:
        least_gb = STAGING_CHUNKS_MIN * chunk_bytes / GB
        raise SettingsRefused(
            f"kv_connector_extra_config: staging_gb must hold at least {STAGING_CHUNKS_MIN} chunks of {chunk_bytes} "
            f"bytes, {least_gb:.2g} GB; it bounds how much of a prompt is loaded"
        )


def _is_url(text: str) -> bool:
    """Whether gateways can reach an engine by it: scheme, host, a valid port if any, and nothing else."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # brackets that don't match, or no such port
        return False
    host = parts.hostname or ""
    return (
        parts.scheme in ("http", "https")
        and bool(re.fullmatch(r"[0-9a-z._-]+|[0-9a-f:.]+", host))
        and all(len(label) <= 63 for label in host.split("."))
        and (":" in host or "" not in host.rstrip(".").split("."))
        and port != 0
        and parts.username is None
        and not parts.netloc.endswith(":")
        and parts.path in ("", "/")
        and not (parts.query or parts.fragment)
        and text.isprintable()
    )


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise SettingsRefused(f"kv_connector_extra_config: {name} must be a number above 0")
