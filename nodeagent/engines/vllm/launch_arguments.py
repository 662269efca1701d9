"""What becomes of each argument of vLLM 0.32: it is in the engine's identity, refused, or has a reason not to matter.

`HASHED` names where an argument's *effective* value stands in vLLM's configuration after its overrides and defaults:
what vLLM runs with, not what was typed. `tests/vllm` compares the three tables with vLLM's own arguments, so none
can be overlooked. Reads vLLM's configuration and imports nothing of it.
"""

import enum
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

from nodeagent.engines.vllm.content_digest import ContentUnknown
from nodeagent.engines.vllm.settings import SettingsRefused

HASHED: Mapping[str, tuple[str, ...]] = {
    "hf_config_path": ("model_config.hf_config", "model_config.hf_text_config"),
    "hf_overrides": ("model_config.hf_config", "model_config.hf_text_config"),
    "config_format": ("model_config.hf_config", "model_config.hf_text_config"),
    "trust_remote_code": ("model_config.trust_remote_code",),
    "runner": ("model_config.runner",),
    "convert": ("model_config.convert",),
    "dtype": ("model_config.dtype",),
    # LongRoPE and others choose their factors by it; -1 has chosen before the length was fitted.
    "max_model_len": ("model_config.max_model_len", "model_config.original_max_model_len"),
    "quantization": ("model_config.quantization",),
    "quantization_config": ("model_config.quantization_config",),
    "disable_sliding_window": ("model_config.disable_sliding_window",),
    "model_impl": ("model_config.model_impl",),
    "load_format": ("load_config.load_format",),
    "ignore_patterns": ("load_config.ignore_patterns",),
    "block_size": ("cache_config.block_size",),
    "kv_cache_dtype": ("cache_config.cache_dtype",),
    "kv_cache_dtype_skip_layers": ("cache_config.kv_cache_dtype_skip_layers",),
    "mamba_cache_dtype": ("cache_config.mamba_cache_dtype",),
    "mamba_ssm_cache_dtype": ("cache_config.mamba_ssm_cache_dtype",),
    "mamba_block_size": ("cache_config.mamba_block_size",),
    "mamba_cache_mode": ("cache_config.mamba_cache_mode",),
    "enable_mamba_shared_prefix_checkpoint": ("cache_config.enable_mamba_shared_prefix_checkpoint",),
    "replayssm_buffer_len": ("cache_config.replayssm_buffer_len",),
    "use_replayssm": ("cache_config.use_replayssm",),
    "kv_sharing_fast_prefill": ("cache_config.kv_sharing_fast_prefill",),
    "swa_bounded_replay": ("cache_config.swa_bounded_replay",),
    "disable_hybrid_kv_cache_manager": ("scheduler_config.disable_hybrid_kv_cache_manager",),
    "pipeline_parallel_size": ("parallel_config.pipeline_parallel_size",),
    "tensor_parallel_size": ("parallel_config.tensor_parallel_size",),
    "prefill_context_parallel_size": ("parallel_config.prefill_context_parallel_size",),
    "decode_context_parallel_size": ("parallel_config.decode_context_parallel_size",),
    "dcp_comm_backend": ("parallel_config.dcp_comm_backend",),
    "dcp_q_replicate": ("parallel_config.dcp_q_replicate",),
    "dcp_kv_cache_interleave_size": ("parallel_config.dcp_kv_cache_interleave_size",),
    "cp_kv_cache_interleave_size": ("parallel_config.cp_kv_cache_interleave_size",),
    "enable_expert_parallel": ("parallel_config.enable_expert_parallel",),
    "enable_hc_sp": ("parallel_config.enable_hc_sp",),
    "all2all_backend": ("parallel_config.all2all_backend",),
    "moe_backend": ("kernel_config.moe_backend",),
    "linear_backend": ("kernel_config.linear_backend",),
    "sparse_indexer_topk_backend": ("kernel_config.sparse_indexer_topk_backend",),
    "ir_op_priority": ("kernel_config.ir_op_priority",),
    "kernel_config": ("kernel_config.linear_backend_per_quant",),
    "attention_config": ("attention_config",),
    "attention_backend": ("attention_config",),
    "mamba_config": ("mamba_config",),
    "mamba_backend": ("mamba_config",),
    "mamba_ssu_algorithm": ("mamba_config",),
    "enable_mamba_cache_stochastic_rounding": ("mamba_config",),
    "mamba_cache_philox_rounds": ("mamba_config",),
    "engram_config": ("engram_config",),
    "additional_config": ("additional_config",),
    "gdn_prefill_backend": ("additional_config",),
    "kda_prefill_backend": ("additional_config",),
    "kda_decode_backend": ("additional_config",),
    "enforce_eager": ("compilation_config.mode",),
    "optimization_level": ("compilation_config.mode", "compilation_config.pass_config"),
    "performance_mode": ("performance_mode",),
    "compilation_config": (
        "compilation_config.mode",
        "compilation_config.backend",
        "compilation_config.custom_ops",
        "compilation_config.pass_config",
        "compilation_config.inductor_passes",
    ),
    "language_model_only": ("model_config.multimodal_config.language_model_only",),
    "media_io_kwargs": ("model_config.multimodal_config.media_io_kwargs",),
    "mm_processor_kwargs": ("model_config.multimodal_config.mm_processor_kwargs",),
    "mm_hasher_algorithm": ("model_config.multimodal_config.mm_hasher_algorithm",),
    "mm_encoder_only": ("model_config.multimodal_config.mm_encoder_only",),
    "mm_encoder_attn_backend": ("model_config.multimodal_config.mm_encoder_attn_backend",),
    "mm_encoder_attn_dtype": ("model_config.multimodal_config.mm_encoder_attn_dtype",),
    "mm_device_do_normalize": ("model_config.multimodal_config.mm_device_do_normalize",),
    "mm_processor_device": ("model_config.multimodal_config.mm_processor_kwargs",),
    "video_pruning_rate": ("model_config.multimodal_config.video_pruning_rate",),
    "video_pruning_method": ("model_config.multimodal_config.video_pruning_method",),
    "speculative_config": ("speculative_config.method", "speculative_config.num_speculative_tokens"),
    "spec_method": ("speculative_config.method",),
    "spec_tokens": ("speculative_config.num_speculative_tokens",),
}
"""By argument: the dotted paths of what it decides, in vLLM's configuration."""

LOAD_FORMATS = ("auto", "hf", "safetensors", "pt", "mistral", "fastsafetensors", "instanttensor")
"""Those that load the files of the model's folder, all of which are hashed, and nothing else."""
LOADER_OPTIONS = {"enable_multithread_load", "num_threads", "enable_weights_track"}
EXECUTORS = ("uni", "mp", "ray", "external_launcher")


def _speculates_elsewhere(config: Any) -> bool:
    draft = getattr(config.speculative_config, "draft_model_config", None)
    return draft is not None and draft.model != config.model_config.model


def _code_elsewhere(config: Any) -> bool:
    places = dict(getattr(config.model_config.hf_config, "auto_map", None) or {}).values()
    return any("--" in str(place) for place in places)


REFUSED: Mapping[str, tuple[Callable[[Any], object], str]] = {
    "load_format": (
        lambda config: config.load_config.load_format not in LOAD_FORMATS,
        f"loads other weights than the files that name them; use one of {', '.join(LOAD_FORMATS)}",
    ),
    "model_loader_extra_config": (
        lambda config: set(config.load_config.model_loader_extra_config) - LOADER_OPTIONS,
        f"may hold {', '.join(sorted(LOADER_OPTIONS))} only",
    ),
    "model_weights": (lambda config: config.model_config.model_weights, "weights must lie in the model's own folder"),
    "model_class_overrides": (
        lambda config: config.model_config.model_class_overrides,
        "the code that computes KV must be vLLM's or the model's own",
    ),
    "code_revision": (
        lambda config: config.model_config.code_revision not in (None, config.model_config.revision),
        "the model's code must be of the model's own revision",
    ),
    "trust_remote_code": (
        lambda config: config.model_config.trust_remote_code and _code_elsewhere(config),
        "the model's code must lie in its own folder; its auto_map names another repository",
    ),
    "worker_cls": (
        lambda config: not str(config.parallel_config.worker_cls).startswith("vllm."),
        "the worker must be one of vLLM's own",
    ),
    "worker_extension_cls": (
        lambda config: config.parallel_config.worker_extension_cls,
        "an extension of the worker can change weights unseen; leave it out",
    ),
    "distributed_executor_backend": (
        lambda config: config.parallel_config.distributed_executor_backend not in (None, *EXECUTORS),
        f"must be one of {', '.join(EXECUTORS)}",
    ),
    "scheduler_cls": (
        lambda config: (
            config.scheduler_config.scheduler_cls is not None
            and not str(getattr(config.scheduler_config.scheduler_cls, "__module__", "")).startswith("vllm.")
            and not str(config.scheduler_config.scheduler_cls).startswith("vllm.")
        ),
        "the scheduler must be one of vLLM's own",
    ),
    "enable_elastic_ep": (
        lambda config: config.parallel_config.enable_elastic_ep,
        "weights move between living engines; leave it out",
    ),
    "weight_transfer_config": (
        lambda config: config.weight_transfer_config is not None,
        "weights that a trainer sends have no name; such an engine works without warmroute's connector",
    ),
    "diffusion_config": (lambda config: config.diffusion_config is not None, "KV of such models isn't a prefix's"),
    "ec_transfer_config": (
        lambda config: config.ec_transfer_config is not None,
        "what other engines have encoded can't be named",
    ),
    "mm_encoder_fp8_scale_path": (
        lambda config: getattr(config.model_config.multimodal_config, "mm_encoder_fp8_scale_path", None),
        "scales must lie in the model's own folder",
    ),
    "spec_model": (
        _speculates_elsewhere,
        "(speculative_config.model): a draft model's KV lies in the same chunks, and its weights aren't hashed; "
        "methods without one of its own, such as ngram and mtp, can be used",
    ),
}
"""By argument: whether a configuration is refused, and what would be right."""

HARMLESS: Mapping[str, str] = {
    "the files are hashed wherever they come from": "model revision hf_token download_dir",
    "how the same files are read": "safetensors_load_strategy safetensors_prefetch_num_threads "
    "safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location max_parallel_loading_workers "
    "enable_ep_weight_filter allow_deprecated_quantization",
    "part of the identity by itself": "served_model_name tokenizer tokenizer_revision",
    "chunks are named by token ids, whatever made them": "tokenizer_mode skip_tokenizer_init tokens_only "
    "interleave_mm_strings renderer_num_workers io_processor_plugin reasoning_parser reasoning_parser_plugin "
    "reasoning_config",
    "prompts of embeddings, images and the like are named by vLLM's hash of their content": "enable_prompt_embeds "
    "enable_mm_embeds limit_mm_per_prompt mm_processor_cache_gb mm_processor_cache_type "
    "mm_shm_cache_max_object_size_mb mm_tensor_ipc mm_ipc_gpu_memory_gb skip_mm_profiling "
    "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin disable_chunked_mm_input ec_manager_config "
    "allowed_local_media_path allowed_media_domains enable_mm_processor_stats",
    "what is chosen from the logits, after KV was made": "seed max_logprobs logprobs_mode use_fp64_gumbel "
    "return_sampling_mask generation_config override_generation_config logits_processors structured_outputs_config "
    "watermark_config pooler_config enable_batch_sharded_sampling",
    "which requests run together: the same function of the same tokens": "max_num_batched_tokens "
    "max_num_scheduled_tokens long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_seqs "
    "max_num_active_seqs max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill scheduler_reserve_full_isl "
    "prefill_schedule_interval watermark scheduling_policy async_scheduling stream_interval disable_cascade_attn "
    "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold dp_sync_interval",
    "how much memory, and where": "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override "
    "kv_offloading_size kv_offloading_backend offload_backend cpu_offload_gb cpu_offload_params offload_group_size "
    "offload_num_in_group offload_prefetch_step offload_params enable_cumem_allocator enable_shm_tensor_arena",
    "vLLM's own prefix cache, by content": "enable_prefix_caching prefix_caching_hash_algo prefix_match_unit "
    "prefix_cache_retention_interval",
    "graphs of the same kernels": "cudagraph_capture_sizes max_cudagraph_capture_size enable_flashinfer_autotune "
    "jit_monitor_mode jit_monitor_verbose",
    "where processes run and how they talk": "master_addr master_port nnodes node_rank distributed_timeout_seconds "
    "cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids data_parallel_size "
    "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port "
    "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
    "disable_nccl_for_dp_synchronization disable_custom_all_reduce ray_workers_use_nsight _api_process_count "
    "_api_process_rank enable_fault_tolerance fault_tolerance_config elastic_ep_max_dp_size shutdown_timeout "
    "mm_encoder_tp_mode",
    "which device computes an expert, not what": "eplb_config enable_eplb expert_placement_strategy",
    "requests with an adapter are neither stored nor announced": "enable_lora max_loras max_lora_rank default_mm_loras "
    "fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules enable_tower_connector_lora "
    "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
    "a living engine's weights are watched (weight_changes.py)": "enable_sleep_mode sleep_mode_offload_cudagraph "
    "sleep_preserve_parameter_names enable_nccl_comm_suspend",
    "checked by itself (description.py, settings.py)": "kv_transfer_config kv_events_config",
    "what is told, logged and measured": "enable_return_routed_experts enable_trace_replay disable_log_stats "
    "aggregate_engine_logging aux_output_config show_hidden_metrics_for_version otlp_traces_endpoint "
    "collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample "
    "custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics "
    "enable_logging_iteration_details profiler_config logging_config log_level log_config_file "
    "fail_on_environ_validation enable_log_requests",
}
"""By the reason for which they don't matter: arguments."""

HARMLESS_VARIABLES = frozenset(
    {
        "VLLM_ALLOW_INSECURE_SERIALIZATION",
        "VLLM_USE_MODELSCOPE",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_PLUGINS",
        "VLLM_HOST_IP",
        "VLLM_LOOPBACK_IP",
    }
)
"""Refused where they matter, or of places, memory and processes alone."""
UNNAMED = ("_name_or_path", "_commit_hash", "transformers_version")
"""What a model's configuration says of where it comes from, not of what it is."""


def check_arguments(vllm_config: Any, environment: Mapping[str, str]) -> None:
    """Refuse what would give KV another model's name, by its flag. Raises `SettingsRefused`."""
    for argument, (is_refused, right) in REFUSED.items():
        if is_refused(vllm_config):
            raise SettingsRefused(f"--{argument.replace('_', '-')} can't be used with this connector: {right}")
    if environment.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0") != "0":
        raise SettingsRefused("VLLM_ALLOW_INSECURE_SERIALIZATION must be 0: any code could change the weights unseen")
    if environment.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise SettingsRefused("VLLM_USE_MODELSCOPE must be unset: give the model's folder instead")


def configuration_digest(vllm_config: Any, variables: Mapping[str, object]) -> str:
    """Hex sha256 of all that vLLM runs with and that can change KV: `HASHED`, and vLLM's environment variables.

    Raises `ContentUnknown` where something can't be put into words that are the same on every host.
    """
    paths = sorted({path for several in HASHED.values() for path in several})
    said: dict[str, object] = {path: canonical(_at(vllm_config, path), path) for path in paths}
    said["variables"] = {name: canonical(variables[name], name) for name in sorted(variables)}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def canonical(value: Any, name: str) -> Any:
    """A value as JSON of one form. Raises `ContentUnknown` for what has none, such as a function."""
    if value is None or isinstance(value, bool | int | float | str):
        return canonical(value.value, name) if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return canonical(value.value, name)
    if isinstance(value, Mapping):
        return {str(key): canonical(value[key], name) for key in sorted(value, key=str) if key not in UNNAMED}
    if isinstance(value, list | tuple):
        return [canonical(each, name) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((canonical(each, name) for each in value), key=str)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):
        return [type(value).__name__, canonical(value.to_dict(), name)]
    if is_dataclass(value):
        return {field.name: canonical(getattr(value, field.name), name) for field in fields(value)}
    if isinstance(value, PurePath) or type(value).__name__ == "dtype":
        return str(value)
    raise ContentUnknown(f"{name} holds a {type(value).__name__}, which can't be part of an engine's identity")


def _at(config: Any, path: str) -> Any:
    """What stands at a path; None below what isn't there."""
    value = config
    for part in path.split("."):
        if value is None:
            return None
        try:
            value = getattr(value, part)
        except AttributeError:
            raise ContentUnknown(f"this vLLM has no {path}: the connector is written for vLLM 0.32") from None
    return value
