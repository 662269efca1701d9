"""What a vLLM engine is, read from its own configuration: identity, shape, files, and where its KV events are.

Runs in the engine's process. Nothing here is configured twice: vLLM knows its model, layout and block size, and this
module says them at the door. It imports nothing of vLLM; attributes are those of vLLM 0.32.
"""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from directory.costs import ModelShape
from directory.hardware import Hardware
from directory.identity import Identity
from nodeagent.engine_hello import EngineHello
from nodeagent.engines.vllm.content_digest import (
    WEIGHT_SUFFIXES,
    ContentUnknown,
    model_files,
    weights_digest,
)
from nodeagent.engines.vllm.loaded_files import LoadedFiles
from nodeagent.engines.vllm.settings import SOCKET_PATH_BYTES_MAX, EngineSettings, SettingsRefused
from nodeagent.engines.vllm.tokenizer_in_use import TokenizerInUse
from nodeagent.messages import KvEventSource

OWN_RENDERER_MODES = ("deepseek_v32", "deepseek_v4", "deepseek_v41")
"""Values of --tokenizer-mode under which vLLM's own code makes prompts of chats, and tokenizer.json encodes them."""
STABLE_HASHES = ("sha256", "sha256_cbor")
SAFETENSORS_HEADER_BYTES_MAX = 100 << 20
CPU_FLOPS, GPU_FLOPS = 5e10, 2e14
"""Useful FLOP/s believed of a device that isn't in the table of hardware, until the engine's own metrics tell."""
EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How `config.json` calls the number of experts of a layer, by model; `num_experts_per_tok` of them compute a token."""
PACKED_SUFFIX = "_blocks"
"""Of tensors in which a byte holds two values (MXFP4)."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How chunks lie in the staging rows. Bytes are of all ranks together."""

    chunk_bytes: int
    block_tokens: int
    kv_bytes_per_token: int
    name: str
    dtype: str
    staging_path: str | None = None


def check_launch(vllm_config: Any, settings: EngineSettings) -> None:
    """Refuse what can't be exact, naming the flag. Raises `SettingsRefused`."""
    transfer, events, cache = vllm_config.kv_transfer_config, vllm_config.kv_events_config, vllm_config.cache_config
    if transfer.kv_load_failure_policy != "recompute":
        raise SettingsRefused(
            'kv_load_failure_policy must be "recompute" in --kv-transfer-config: a miss must not fail a request'
        )
    if transfer.kv_role != "kv_both":
        raise SettingsRefused('kv_role must be "kv_both" in --kv-transfer-config')
    if not cache.enable_prefix_caching:
        raise SettingsRefused("prefix caching must be on: leave out --no-enable-prefix-caching")
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        raise SettingsRefused(
            '--kv-events-config must enable events by zmq, such as {"enable_kv_cache_events": true, "publisher": "zmq"}'
        )
    check_endpoint("endpoint", events.endpoint)
    if events.replay_endpoint is not None:
        check_endpoint("replay_endpoint", events.replay_endpoint)
    if os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0") != "0":
        raise SettingsRefused("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES must be 0: whole hashes name the chunks")
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in STABLE_HASHES and "PYTHONHASHSEED" not in os.environ:
        raise SettingsRefused(
            f"--prefix-caching-hash-algo {algorithm} draws a new seed at each start; use sha256, or set PYTHONHASHSEED"
        )
    if settings.chunk_tokens % cache.block_size:
        raise SettingsRefused(
            f"--block-size {cache.block_size} must divide the chunk of {settings.chunk_tokens} tokens (chunk_tokens)"
        )


def describe_engine(
    vllm_config: Any,
    settings: EngineSettings,
    layout: KvLayout,
    cache: Path,
    loaded: LoadedFiles,
    tokenizer: TokenizerInUse,
    is_stopped: Callable[[], bool] = lambda: False,
    device: str = "",
) -> EngineHello:
    """What the engine says at the door. Reads and hashes the model's files: minutes, for large weights.

    `device` is what the driver calls its devices.

    The tokenizer is part of the identity as it is in use, not as its folder has it: chunks are named by its ids.

    Raises `ContentUnknown` where they can't be read or aren't what was loaded, `HashingStopped` soon after
    `is_stopped`, `IdentityRefused` for a name that an identity can't hold.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    downloads = vllm_config.load_config.download_dir
    folder = model_folder(model.model, model.revision, downloads)
    weights_sha = loaded_weights_digest(folder, model.revision, cache, loaded, is_stopped)
    tokenizer_folder = model_folder(model.tokenizer, model.tokenizer_revision, downloads)
    try:
        files, tokenizer_sha = tokenizer.files(tokenizer_folder), tokenizer.digest(tokenizer_folder)
    except OSError as error:
        raise ContentUnknown(f"the tokenizer in {tokenizer_folder} can't be read: {error}") from error
    served = model.served_model_name
    models = (served,) if isinstance(served, str) else tuple(served)
    identity = Identity(
        model_id=models[0],
        weights_sha=weights_sha,
        tokenizer_sha=tokenizer_sha,
        kv_dtype=layout.dtype,
        layout=layout.name,
        tp_size=parallel.tensor_parallel_size,
    )
    text = model.hf_text_config
    parameters = count_parameters(folder, expert_share(text))
    return EngineHello(
        engine=settings.engine,
        url=settings.url.rstrip("/"),
        models=models,
        identity=identity,
        tp_rank=0,
        shape=ModelShape(parameters, text.num_hidden_layers, text.hidden_size, layout.kv_bytes_per_token),
        chunk_tokens=settings.chunk_tokens,
        chunk_bytes=layout.chunk_bytes,
        context_tokens=model.max_model_len,
        tokenizer_files=files,
        flops=settings.flops or believed_flops(vllm_config, device),
        renderer="vllm-unknown" if tokenizer.pipeline is None else renderer_of(model, tokenizer_folder),
        events=event_source(vllm_config, layout),
        kv_tokens=kv_cache_tokens(vllm_config.cache_config),
    )


def kv_cache_tokens(cache_config: Any) -> int | None:
    """How many tokens this rank's KV cache holds, as vLLM logs it; `None` for a model without one.

    vLLM counts them itself, once it knows its blocks: where layers differ, they aren't blocks times the block's size.
    """
    return getattr(cache_config, "kv_cache_size_tokens", None) or None


def renderer_of(model: Any, tokenizer_folder: Path) -> str:
    """Who makes prompts of chats: `vllm` the model's template, `vllm-own` code of vLLM's own for this model.

    `vllm-unknown`: another tokenizer than the one of tokenizer.json, such as Mistral's own, which vLLM takes for
    folders of Mistral's form (vllm/tokenizers/registry.py, vllm/renderers/online_renderer.py).
    """

    def has(*patterns: str) -> bool:
        return any(True for pattern in patterns for _ in tokenizer_folder.glob(pattern))

    mode = model.tokenizer_mode
    if mode == "auto" and has("consolidated*.safetensors") and has("tekken.json", "tokenizer.model.v*"):
        return "vllm-unknown"
    if mode in OWN_RENDERER_MODES or getattr(model.hf_config, "model_type", None) == "gpt_oss":
        return "vllm-own"
    return "vllm" if mode in ("auto", "hf") else "vllm-unknown"


def event_source(vllm_config: Any, layout: KvLayout) -> KvEventSource:
    """Where the agent, on the same host, hears this rank's KV events: a rank's port is the base's plus the rank."""
    events, rank = vllm_config.kv_events_config, vllm_config.parallel_config.data_parallel_index
    replay = events.replay_endpoint
    return KvEventSource(
        endpoint=reachable(events.endpoint, rank),
        replay_endpoint=reachable(replay, rank) if replay else None,
        topic=events.topic,
        block_tokens=layout.block_tokens,
        data_parallel_rank=rank,
        staging_path=layout.staging_path,
    )


def check_endpoint(field: str, endpoint: str) -> None:
    """Refuse an endpoint of the event configuration that the agent, a neighbour, couldn't hear.

    vLLM binds its publisher to ipc:// and to names with * or ::, and connects to any other; it always binds for
    replays (vllm/distributed/kv_events.py). Raises `SettingsRefused`.
    """
    if endpoint.startswith("ipc:///"):
        if len(endpoint.removeprefix("ipc://").encode("utf-8", "replace")) <= SOCKET_PATH_BYTES_MAX:
            return
        wrong = f"is a path of more than {SOCKET_PATH_BYTES_MAX} bytes"
    elif not endpoint.startswith("tcp://"):
        wrong = "can't be heard by the agent"
    elif not re.fullmatch(r"[1-9][0-9]{0,4}", endpoint.rpartition(":")[2]) or int(endpoint.rpartition(":")[2]) > 65535:
        wrong = "has no fixed port"
    elif field == "endpoint" and "*" not in endpoint and "::" not in endpoint:
        wrong = "is one that vLLM connects to, and nobody would hear it"
    else:
        return
    raise SettingsRefused(
        f"--kv-events-config: {field} {endpoint} {wrong}; it must be ipc:///FOLDER/NAME or tcp://*:PORT"
    )


def reachable(endpoint: str, rank: int) -> str:
    """A publisher's own endpoint as its neighbour connects to it."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    parts = urlsplit(endpoint)
    host, _, port = parts.netloc.rpartition(":")
    host = "127.0.0.1" if host in ("*", "0.0.0.0", "[::]", "::") else host
    return urlunsplit(parts._replace(netloc=f"{host}:{int(port) + rank}"))


def loaded_weights_digest(
    folder: Path, revision: str | None, cache: Path, loaded: LoadedFiles, is_stopped: Callable[[], bool]
) -> str:
    """The digest of what was loaded from a folder: nothing of it changed from before the start until it was hashed.

    Raises `ContentUnknown`, `HashingStopped`.
    """
    named = folder.parent.parent / "refs" / (revision or "main")

    def seen() -> object:
        files = model_files(folder)
        return loaded.seen(folder, [*files, named] if folder.parent.name == "snapshots" and named.exists() else files)

    before = seen()
    digest = weights_digest(folder, cache, is_stopped)
    if seen() != before:
        raise ContentUnknown(f"{folder} changed while it was hashed; restart the engine")
    return digest


def model_folder(name: str, revision: str | None, downloads: str | None = None) -> Path:
    """The folder of a model that vLLM has loaded: a path, or the hub's snapshot in the local cache."""
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, cache_dir=downloads, local_files_only=True))


def believed_flops(vllm_config: Any, device: str) -> float:
    """Useful FLOP/s of an engine whose first prompts are still to come, on `device`s as the driver calls them."""
    if getattr(vllm_config.device_config, "device_type", "") == "cpu":
        return CPU_FLOPS
    devices = vllm_config.parallel_config.tensor_parallel_size
    known = Hardware().device(device)
    if known is None:
        return float(GPU_FLOPS * devices)
    return known.useful_flops(devices, is_8_bit=vllm_config.model_config.quantization == "fp8")


def expert_share(text_config: Any) -> float:
    """The share of a layer's experts that compute a token; 1 for a model without."""
    experts = next((number for name in EXPERTS_FIELDS if (number := getattr(text_config, name, None))), 0)
    active = getattr(text_config, "num_experts_per_tok", None) or experts
    return min(1.0, active / experts) if experts else 1.0


def count_parameters(folder: Path, expert_share: float = 1.0) -> float:
    """The parameters that compute a token, `expert_share` of those of experts among them.

    From the headers of safetensors files, where experts' tensors are named so; else two bytes of weights for each.
    Format: a u64 (little-endian) length, then that much JSON (github.com/huggingface/safetensors).
    """
    counted = 0.0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > SAFETENSORS_HEADER_BYTES_MAX:
                return _parameters_by_size(folder)
            header = json.loads(file.read(length))
        counted += sum(
            math.prod(each["shape"])
            * (expert_share if ".experts." in name else 1.0)
            * (2 if name.endswith(PACKED_SUFFIX) else 1)
            for name, each in header.items()
            if name != "__metadata__"
        )
    return counted or _parameters_by_size(folder)


def _parameters_by_size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES) / 2


def seconds_per_chunk(hello: EngineHello) -> float:
    """About what computing one chunk takes."""
    return math.ceil(2 * hello.shape.parameters * hello.chunk_tokens) / hello.flops
