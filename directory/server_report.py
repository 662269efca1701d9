"""One server's account of itself, read from INFO, DBSIZE and FUNCTION LIST, and what in it endangers the directory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from directory import redis_schema as schema

NEARLY_FULL = 0.9
"""The share of `maxmemory` from which on it is said."""


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What a server says; `None` where it didn't. `functions`: `current`, `missing`, or `other` (another release's)."""

    name: str
    version: str | None = None
    role: str | None = None
    replicas: int | None = None
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    eviction_policy: str | None = None
    evicted_keys: int | None = None
    append_only: bool | None = None
    last_save_ok: bool | None = None
    keys: int | None = None
    functions: str | None = None
    error: str | None = None
    """Why it said nothing at all."""

    def warnings(self) -> tuple[str, ...]:
        """What an operator should change, a sentence each."""
        found = []
        used, limit, policy = self.memory_used_bytes or 0, self.memory_limit_bytes or 0, self.eviction_policy or ""
        if limit and policy not in ("", "noeviction"):
            lost = "records and the fleet's table" if policy.startswith("allkeys") else "records"
            found.append(
                f"maxmemory-policy {policy} throws {lost} away when memory is full; noeviction refuses instead"
            )
        if limit and used >= NEARLY_FULL * limit and policy in ("", "noeviction"):
            found.append(f"{used / limit:.0%} of maxmemory is used: new placements are refused when it is full")
        if self.evicted_keys:
            found.append(f"{self.evicted_keys} keys were evicted since the server's start")
        if self.role not in (None, "master"):
            found.append(f"it is a {self.role}: it takes no writes")
        if self.last_save_ok is False:
            found.append("its last snapshot failed: by default a server then refuses writes (MISCONF)")
        if self.append_only:
            found.append("it keeps an append-only file, which the directory doesn't need: agents announce all again")
        if self.functions == "other":
            found.append(
                "another release's functions are loaded under this schema's name: `warmroute directory load --force` "
                "replaces them"
            )
        if self.functions == "missing":
            found.append("the directory's functions aren't loaded: `warmroute directory load` does it, as the operator")
        return tuple(found)


def read_report(name: str, info: Any, keys: Any, libraries: Any) -> ServerReport:
    """The report, from the replies as they came: INFO as text or already as a mapping; `None` for a refused one."""
    fields = _info_fields(info)
    version = None
    if "valkey_version" in fields:
        version = f"valkey {fields['valkey_version']}"
    elif "redis_version" in fields:
        version = f"redis {fields['redis_version']}"
    return ServerReport(
        name,
        version,
        fields.get("role"),
        _number(fields.get("connected_slaves")),
        _number(fields.get("used_memory")),
        _number(fields.get("maxmemory")),
        fields.get("maxmemory_policy"),
        _number(fields.get("evicted_keys")),
        fields["aof_enabled"] == "1" if "aof_enabled" in fields else None,
        fields["rdb_last_bgsave_status"] == "ok" if "rdb_last_bgsave_status" in fields else None,
        keys if isinstance(keys, int) else None,
        functions_state(libraries),
    )


def _info_fields(info: Any) -> dict[str, str]:
    if isinstance(info, Mapping):
        return {str(name): str(value) for name, value in info.items()}
    if isinstance(info, bytes):
        info = info.decode(errors="replace")
    if not isinstance(info, str):
        return {}
    lines = (line.partition(":") for line in info.splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in lines if colon}


def functions_state(libraries: Any) -> str | None:
    """`current`, `missing` or `other`, from FUNCTION LIST LIBRARYNAME ... WITHCODE as it came; `None` for no list."""
    if not isinstance(libraries, Sequence):
        return None
    if not libraries:
        return "missing"
    library = libraries[0]
    if isinstance(library, Mapping):
        fields = dict(library)
    else:
        fields = dict(zip(library[::2], library[1::2], strict=False))
    code = fields.get(b"library_code", fields.get("library_code", b""))
    text = code.decode(errors="replace") if isinstance(code, bytes) else str(code)
    return "current" if text.strip() == schema.functions_source().strip() else "other"


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and value.lstrip("-").isdigit() else None
