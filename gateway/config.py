"""What a gateway is told at its start; everything about engines with an agent comes from the directory.

Strict: an unknown key is an error. Every field says its unit; relations between fields are checked here. Where a value
comes from (file, `WARMROUTE_*` variables, flags) is none of this module's business.
"""

import os
import re
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from directory.hardware import ACCELERATORS, MODELS, Accelerator, Hardware, ModelSpec
from directory.redis_schema import KEY_PREFIX, KEY_PREFIX_PATTERN
from directory.server_url import URL_FORMS


def cache_folder() -> Path:
    """Where files fetched by digest are kept: `$XDG_CACHE_HOME/warmroute/files`, or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "warmroute" / "files"


_PATH = re.compile(r"(/[A-Za-z0-9_.~-]+)+")


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
    requests_max: int = Field(2048, ge=1, description="Requests that one process serves at once; more wait.")
    engine_requests_max: int | None = Field(
        None, ge=1, description="Requests that one process has on one engine at once; as many as come if left out."
    )
    queue_max: int = Field(1024, ge=0, description="Requests that may wait for a place; more are refused with 429.")
    queue_s: float = Field(30.0, gt=0, description="Seconds that a request may wait for a place; then 429.")
    drain_s: float = Field(30.0, ge=0, le=86_400, description="Seconds that running requests have after SIGTERM.")


class TimeoutsConfig(Section):
    """How long an engine may take."""

    connect_s: float = Field(2.0, gt=0, description="Seconds to accept a connection.")
    first_byte_s: float = Field(600.0, gt=0, description="Seconds until the first byte of an answer.")
    idle_s: float = Field(120.0, gt=0, description="Seconds between two pieces of an answer.")
    probe_s: float = Field(
        3.0,
        ge=0,
        description="Seconds that an engine has for one token, where requests wait far longer than expected, before it "
        "counts as hung; longer where it was slow lately or has much to do; 0 asks none.",
    )

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
TARGETS_MAX = 64
"""Models that one alias leads to."""


class AliasTarget(Section):
    """A model that an alias stands for."""

    model: str = Field(min_length=1)
    weight: float = Field(1.0, ge=0, le=1e6)


class ModelsConfig(Section):
    """What clients may ask for beside the models that engines serve."""

    aliases: dict[str, tuple[AliasTarget, ...]] = Field(
        {},
        description="Names for models: `name: [{model: x, weight: 9}, {model: y, weight: 1}]`. Conversations are split "
        "by the weights (1 if left out), each stays with its model; one of weight 0 has them while no other is served.",
    )
    pass_through: tuple[str, ...] = Field(
        (), description="Further paths that are passed on to an engine of the model in their JSON or form: /v1/x."
    )

    @field_validator("aliases")
    @classmethod
    def _lead_to_models(cls, aliases: dict[str, tuple[AliasTarget, ...]]) -> dict[str, tuple[AliasTarget, ...]]:
        for name, targets in aliases.items():
            models = [each.model for each in targets]
            if any(not each.isprintable() or not 0 < len(each) <= NAME_CHARS_MAX for each in (name, *models)):
                raise ValueError(f"aliases and their models must have 1 to {NAME_CHARS_MAX} printable characters")
            if not 0 < len(models) <= TARGETS_MAX or len(set(models)) < len(models):
                raise ValueError(f"{name} must lead to 1 to {TARGETS_MAX} models, each named once")
        return aliases

    @field_validator("pass_through")
    @classmethod
    def _are_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not _PATH.fullmatch(path):
                raise ValueError(f"{path!r} is no path such as /v1/x")
        return paths


KV_TOKENS_DEFAULT = 131_072
"""Assumed of an engine without an agent: 16 GiB for a model of 8 billion parameters."""


class EngineTraits(Section):
    """What engines without an agent may have in common."""

    models: tuple[str, ...] = Field((), description="Model ids it serves; asked for at /v1/models if left out.")
    shape: str | None = Field(
        None,
        description="Its model's name in the table of hardware, such as llama-3.1-8b, or in `hardware.models`; found "
        "by the models it serves if left out.",
    )
    accelerator: str | None = Field(
        None,
        description="Its accelerators' name in the table of hardware, such as h100, or in `hardware.accelerators`; if "
        "left out, its speed is learned from its first tokens alone.",
    )
    devices: int = Field(1, ge=1, le=4096, description="How many accelerators it has.")
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

    kv_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens whose keys and values its GPU memory holds (vLLM logs it as `GPU KV cache size`): no more "
        f"are assumed to be cached there, and prompts that won't fit beside others count as dearer. If left out, "
        f"{KV_TOKENS_DEFAULT} are assumed for the former, and nothing for the latter; used with `tokenizer`.",
    )

    @field_validator("api_key")
    @classmethod
    def _is_a_token(cls, api_key: SecretStr | None) -> SecretStr | None:
        said = "" if api_key is None else api_key.get_secret_value()
        if not said.isascii() or not said.isprintable():
            raise ValueError("must be printable ASCII characters, without line ends")
        return api_key


class EngineConfig(EngineTraits):
    """An OpenAI-compatible engine without an agent: health-checked, routed by load and session affinity.

    With its tokenizer it is routed by what its prompts begin with.
    """

    url: str = Field(description="Base URL without /v1, such as http://10.0.0.5:8000.")
    name: str | None = Field(None, description="Its name in metrics and headers; its host and port if left out.")

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


class TraceConfig(Section):
    """A record of requests for `warmroute replay`: times, lengths and which prompts began alike, without any text."""

    file: Path | None = Field(
        None,
        description="Where to record; one that is there is kept as `<name>.1`. Nothing if left out. With "
        "`workers` each has a file of its own, such as trace.2.jsonl.",
    )
    mb: int = Field(256, ge=1, le=65_536, description="Megabytes (MiB) at which the record ends.")


class LogsConfig(Section):
    """What is logged, to stderr, beside `log_level`. No line holds a prompt, an answer or a key."""

    format: Literal["text", "json"] = Field("text", description="text, or json: an object a line.")
    access: bool = Field(
        False, description="Whether there is a line for each request: id, model, engine, status, tokens, times."
    )
    access_every: int = Field(
        1, ge=1, le=10**6, description="Of so many requests one has its line; all with a status from 500 on."
    )


class ModelConfig(Section):
    """A model that isn't in the table of hardware; all of this is in its `config.json`, but for the counts."""

    name: str = Field(min_length=1, description="What `engines.shape` names, or what the served model ids begin with.")
    parameters: float = Field(gt=0, le=1e15, description="Its parameters, such as 8.03e9.")
    active_parameters: float | None = Field(
        None, gt=0, le=1e15, description="Of a mixture of experts, those that compute a token; all if left out."
    )
    layers: int = Field(ge=1, le=10_000, description="num_hidden_layers.")
    d_model: int = Field(ge=1, le=10**6, description="hidden_size.")
    kv_heads: int = Field(ge=1, le=10_000, description="num_key_value_heads.")
    head_dim: int = Field(ge=1, le=100_000, description="head_dim, or hidden_size by num_attention_heads.")

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        active, values = self.active_parameters or self.parameters, 2 * self.kv_heads * self.head_dim
        return ModelSpec(self.parameters, active, self.layers, self.d_model, values)


class AcceleratorConfig(Section):
    """An accelerator that isn't in the table of hardware."""

    name: str = Field(min_length=1, description="What `engines.accelerator` names.")
    tflops: float = Field(
        gt=0, le=1e6, description="10^12 FLOP/s of dense 16-bit matrices, as published; prefills get 0.4 of it."
    )

    @property
    def device(self) -> Accelerator:
        """The accelerator."""
        return Accelerator(self.tflops * 1e12, self.tflops * 1e12)


class HardwareConfig(Section):
    """What is added to the table of hardware (`directory/hardware.py`)."""

    models: tuple[ModelConfig, ...] = Field(
        (), description=f"Models that aren't in the table, which holds {', '.join(MODELS)}."
    )
    accelerators: tuple[AcceleratorConfig, ...] = Field(
        (), description=f"Accelerators that aren't in the table, which holds {', '.join(ACCELERATORS)}."
    )

    def tables(self) -> Hardware:
        """The table with what is added."""
        return Hardware(
            {model.name: model.spec for model in self.models}, {each.name: each.device for each in self.accelerators}
        )


class KubernetesConfig(EngineTraits):
    """Engines behind a Kubernetes service, found by its EndpointSlices; a pod's name is its engine's.

    The gateway's service account must get, list and watch `endpointslices` of `discovery.k8s.io` in that namespace.
    """

    service: str | None = Field(None, min_length=1, description="The service's name; or `selector`.")
    selector: str | None = Field(
        None, min_length=1, description="A label selector for EndpointSlices, such as app.kubernetes.io/name=vllm."
    )
    namespace: str | None = Field(None, min_length=1, description="Its namespace; the gateway's own if left out.")
    port: int | str | None = Field(None, description="The port's name or number in the slices; the first if left out.")
    scheme: Literal["http", "https"] = Field("http", description="How engines are spoken to: http or https.")
    api_url: str | None = Field(
        None, description="The API server; the one of the cluster that the gateway runs in if left out."
    )
    api_token_file: Path | None = Field(None, description="The file with the token for `api_url`, read for each use.")
    api_ca_file: Path | None = Field(None, description="The file with the authority that `api_url` is known by.")

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if (self.service is None) == (self.selector is None):
            raise ValueError("give either service or selector")
        return self

    @property
    def label_selector(self) -> str:
        """What its slices are found by."""
        return self.selector or f"kubernetes.io/service-name={self.service}"

    def engine_at(self, name: str, place: str) -> EngineConfig:
        """One of its engines: a pod's name, and its host and port."""
        traits = {each: getattr(self, each) for each in EngineTraits.model_fields}
        return EngineConfig(url=f"{self.scheme}://{place}", name=name, **traits)


class GatewayConfig(Section):
    """One gateway."""

    listen: ListenConfig = ListenConfig()
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that serve `port` together; each has all of its tokenizers and caches in memory.",
    )
    directory: DirectoryConfig = DirectoryConfig()
    limits: LimitsConfig = LimitsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    encoding: EncodingConfig = EncodingConfig()
    routing: RoutingConfig = RoutingConfig()
    models: ModelsConfig = ModelsConfig()
    trace: TraceConfig = TraceConfig()
    engines: tuple[EngineConfig, ...] = Field((), description="Engines without an agent.")
    kubernetes: tuple[KubernetesConfig, ...] = Field((), description="Kubernetes services of engines without an agent.")
    hardware: HardwareConfig = HardwareConfig()
    files_folder: Path = Field(
        default_factory=cache_folder, description="Folder for tokenizer files fetched from agents."
    )
    logs: LogsConfig = LogsConfig()
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug to error.")

    @field_validator("engines")
    @classmethod
    def _names_differ(cls, engines: tuple[EngineConfig, ...]) -> tuple[EngineConfig, ...]:
        names = [engine.engine for engine in engines]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two engines are named {name!r}; give each a name of its own")
        return engines

    @model_validator(mode="after")
    def _hardware_is_known(self) -> Self:
        tables = self.hardware.tables()
        for engine in self.engines:
            if engine.shape is not None:
                tables.model(engine.shape)
            if engine.accelerator is not None:
                tables.accelerator(engine.accelerator)
        return self
