"""What a gateway is told at its start; everything about engines with an agent comes from the directory.

Strict: an unknown key is an error. Every field says its unit; relations between fields are checked here. Where a value
comes from (file, `WARMROUTE_*` variables, flags) is none of this module's business.
"""

import os
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from directory.redis_schema import KEY_PREFIX, KEY_PREFIX_PATTERN
from directory.server_url import URL_FORMS


def cache_folder() -> Path:
    """Where files fetched by digest are kept: `$XDG_CACHE_HOME/warmroute/files`, or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "warmroute" / "files"


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def in_force(self) -> dict[str, Any]:
        """Fields whose value in force follows from others, where they were left out."""
        return {}


class ListenConfig(Section):
    """Where clients and operators reach the gateway."""

    bind: str = Field("127.0.0.1", description="Address to listen on; only this machine reaches the default.")
    port: int = Field(8000, ge=1, le=65535, description="The OpenAI-compatible port.")
    admin_port: int | None = Field(
        None, ge=1, le=65535, description="Port of /fleet, /route/explain and /metrics; one above `port`."
    )

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.admin == self.port:
            raise ValueError(f"admin_port must differ from port ({self.port})")
        if self.admin > 65535:
            raise ValueError("admin_port must be given where port is 65535")
        return self

    @property
    def admin(self) -> int:
        """The admin port in force."""
        return self.port + 1 if self.admin_port is None else self.admin_port

    def in_force(self) -> dict[str, Any]:
        """See `Section`."""
        return {"admin_port": self.admin}


class DirectoryConfig(Section):
    """The fleet's directory."""

    url: SecretStr = Field(SecretStr("redis://127.0.0.1:6379"), description=URL_FORMS)
    key_prefix: str = Field(
        KEY_PREFIX,
        pattern=KEY_PREFIX_PATTERN,
        description="Begins every key of this fleet: letters, digits, -, _ and .; the same for all parts of a fleet.",
    )


class LimitsConfig(Section):
    """Bounds on what a client may take."""

    body_bytes_max: int = Field(64 * 2**20, ge=1024, description="Largest request body, in bytes.")
    body_timeout_s: float = Field(60.0, gt=0, description="Seconds in which a request body must have arrived.")
    drain_s: float = Field(30.0, ge=0, le=86_400, description="Seconds that running requests have after SIGTERM.")


class TimeoutsConfig(Section):
    """How long an engine may take."""

    connect_s: float = Field(2.0, gt=0, description="Seconds to accept a connection.")
    first_byte_s: float = Field(600.0, gt=0, description="Seconds until the first byte of an answer.")
    idle_s: float = Field(120.0, gt=0, description="Seconds between two pieces of an answer.")

    @model_validator(mode="after")
    def _first_byte_after_connect(self) -> Self:
        if self.first_byte_s < self.connect_s:
            raise ValueError(f"first_byte_s ({self.first_byte_s:g}) must not be below connect_s ({self.connect_s:g})")
        return self


class EncodingConfig(Section):
    """How prompts become token ids."""

    cache_mb: int = Field(
        64, ge=1, le=65_536, description="Megabytes (MiB) for the token ids of text seen before, for each tokenizer."
    )
    send_ids: bool = Field(
        False, description="Whether engines that are found to take token ids are sent them beside or instead of text."
    )


class RoutingConfig(Section):
    """How an engine is chosen for a request."""

    policy: Literal["seconds", "least-load", "round-robin", "sticky"] = Field(
        "seconds",
        description="seconds: the engine whose answer comes soonest, by its queue and what it has cached; least-load: "
        "the shortest queue; round-robin: each in turn; sticky: by session or first chunk, within a bound on load.",
    )
    on_its_way_s: float = Field(
        5.0,
        ge=0,
        le=600,
        description="Seconds after its first byte that a prompt counts as cached where it was sent, until it must have "
        "been announced: requests that share its beginning follow it.",
    )
    assumed_s: float = Field(
        600.0,
        ge=0,
        le=86_400,
        description="Seconds since its last use that a prompt is assumed to be cached by an engine without an agent "
        "whose `tokenizer` is configured; 0 assumes nothing, such prompts then go by their first chunk.",
    )


NAME_CHARS_MAX = 200
KV_TOKENS_DEFAULT = 131_072
"""16 GiB for a model of 8 billion parameters."""


class EngineConfig(Section):
    """An OpenAI-compatible engine without an agent: health-checked, routed by load and session affinity.

    With its tokenizer it is routed by what its prompts begin with.
    """

    url: str = Field(description="Base URL without /v1, such as http://10.0.0.5:8000.")
    name: str | None = Field(None, description="Its name in metrics and headers; its host and port if left out.")
    models: tuple[str, ...] = Field((), description="Model ids it serves; asked for at /v1/models if left out.")
    api_key: SecretStr | None = Field(None, description="Sent to it as a bearer token, instead of the client's.")
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="Its model's folder, or a hub id (`org/name`, `org/name@revision`) that is in this machine's hub "
        "cache: prompts are then tokenized as it does. Nothing is downloaded; files that change are read again.",
    )
    kind: Literal["vllm", "sglang", "reference"] = Field(
        "vllm", description="vllm, sglang or reference: whose way of making prompts is followed; used with `tokenizer`."
    )

    kv_tokens: int = Field(
        KV_TOKENS_DEFAULT,
        ge=1,
        description="Tokens whose keys and values its GPU memory holds (vLLM logs it as `GPU KV cache size`): no more "
        "are assumed to be cached there; used with `tokenizer`.",
    )

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, url: str) -> str:
        scheme, _, rest = url.rstrip("/").partition("://")
        if (
            scheme not in ("http", "https")
            or not rest
            or "/v1" in rest
            or "?" in rest
            or "@" in rest
            or not _is_url(url)
        ):
            raise ValueError("must be http://host:port or https://host:port, without /v1")
        return url.rstrip("/")

    @property
    def engine(self) -> str:
        """Its name."""
        return self.name or self.url.partition("://")[2]

    @field_validator("name")
    @classmethod
    def _stands_in_a_header(cls, name: str | None) -> str | None:
        if name is not None and (not name.isprintable() or not 0 < len(name) <= NAME_CHARS_MAX):
            raise ValueError(f"must be 1 to {NAME_CHARS_MAX} printable characters")
        return name

    @field_validator("api_key")
    @classmethod
    def _is_a_token(cls, api_key: SecretStr | None) -> SecretStr | None:
        said = "" if api_key is None else api_key.get_secret_value()
        if not said.isascii() or not said.isprintable():
            raise ValueError("must be printable ASCII characters, without line ends")
        return api_key

    def in_force(self) -> dict[str, Any]:
        """See `Section`."""
        return {"name": self.engine}


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return bool(parts.hostname) and port != 0 and not any(character.isspace() for character in url)


class GatewayConfig(Section):
    """One gateway."""

    listen: ListenConfig = ListenConfig()
    directory: DirectoryConfig = DirectoryConfig()
    limits: LimitsConfig = LimitsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    encoding: EncodingConfig = EncodingConfig()
    routing: RoutingConfig = RoutingConfig()
    engines: tuple[EngineConfig, ...] = Field((), description="Engines without an agent.")
    files_folder: Path = Field(
        default_factory=cache_folder, description="Folder for tokenizer files fetched from agents."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug to error.")

    @field_validator("engines")
    @classmethod
    def _names_differ(cls, engines: tuple[EngineConfig, ...]) -> tuple[EngineConfig, ...]:
        names = [engine.engine for engine in engines]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two engines are named {name!r}; give each a name of its own")
        return engines
