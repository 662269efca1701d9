"""Notices that a living engine's weights change: its identity, which names the weights of its start, is wrong then.

vLLM 0.32 changes weights through its workers alone, and everything reaches a worker by the name of a method. So what
is not known to leave the weights alone counts as a change, before it begins; the methods that do change them are
watched by themselves as well, for callers within the process. Nothing here is vLLM's but names.

A change is noticed in the worker. The scheduler learns of it with the very message that says which transfers have
ended: whatever was stored with other weights isn't believed to be stored before it is known to be wrong.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from nodeagent.engines.vllm.settings import SettingsRefused

HARMLESS_CALLS = frozenset(
    {
        "initialize_from_config",
        "compile_or_warm_up_model",
        "determine_available_memory",
        "get_kv_cache_spec",
        "get_supported_kv_cache_layouts",
        "set_kv_cache_layout",
        "get_kv_connector_handshake_metadata",
        "update_max_model_len",
        "get_cache_block_size_bytes",
        "get_supported_tasks",
        "supports_draft_weight_updates",
        "shutdown",
        "execute_model",
        "sample_tokens",
        "execute_dummy_batch",
        "take_draft_token_ids",
        "synchronize_device",
        "annotate_profile",
        "add_lora",
        "remove_lora",
        "pin_lora",
        "list_loras",
        "reset_mm_cache",
        "reset_encoder_cache",
        "release_late_interaction_query_cache",
        "check_health",
        "profile",
        "get_model_inspection",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "compute_weight_checksums",
        "save_sharded_state",
        "save_tensorized_model",
        "wake_up",
    }
)
"""Of its workers: the start and end, steps, adapters (whose requests aren't stored), caches, and looking on."""
CHANGING_METHODS = (
    "load_model",
    "reload_weights",
    "update_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "finish_weight_update",
    "reset_weights",
    "apply_model",
    "update_config",
    "elastic_ep_execute",
    "sleep",
    "discard",
)
"""Of vLLM 0.32's worker; one that is missing means another vLLM, of which this isn't known."""
ENTRIES = ("vllm.v1.executor.uniproc_executor", "vllm.v1.executor.ray_utils")
"""Where calls reach a worker by `run_method(worker, method, arguments, named)`."""
PROCESS_ENTRY = "vllm.v1.executor.multiproc_executor"
"""And where by `WorkerProc._execute_worker_rpc((method, arguments, named, rank))`."""

logger = logging.getLogger("vllm.warmroute")


class WeightChanges:
    """Whether this process knows that its engine's weights aren't those of its start. Said in the log once."""

    def __init__(self) -> None:
        self.have_changed = False

    def note(self, why: str) -> None:
        """From now on nothing is loaded or stored."""
        if not self.have_changed:
            self.have_changed = True
            logger.error(
                "warmroute: the weights of this engine have changed or may have (%s): it works without its host's "
                "tiers until it is restarted",
                why,
            )

    def learn(self) -> None:
        """Another process of this engine has noticed, and said so."""
        self.have_changed = True

    def note_call(self, method: object, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """A worker is about to be called; `method` is a name, or code that could do anything."""
        if not isinstance(method, str):
            self.note("code was sent to the workers")
        elif method not in HARMLESS_CALLS and not leaves_weights(method, arguments, named):
            self.note(method)


def leaves_weights(method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether a sleep keeps the weights (level 1 moves them to the host and back), a discard leaves them out."""
    if method == "sleep":
        return bool((arguments[0] if arguments else named.get("level", 1)) == 1)
    if method == "discard":
        return "weights" not in (arguments[0] if arguments else named.get("tags", ("weights",)))
    return False


def watch_worker(worker: type[Any], model: str, changes: WeightChanges) -> None:
    """Watch a worker's class for good; doing it again changes nothing. Raises `SettingsRefused` for an unknown one."""
    for name in (*CHANGING_METHODS, "compile_or_warm_up_model"):
        method = getattr(worker, name, None)
        if not callable(method):
            raise SettingsRefused(
                f"vLLM's worker has no {name}: this connector knows how weights change in vLLM 0.32 alone"
            )
        if not hasattr(method, "warmroute_watched"):
            watched = _looking_on(method, model, changes) if name not in CHANGING_METHODS else _noted(method, changes)
            setattr(worker, name, watched)


def watch_entries(modules: Mapping[str, ModuleType], changes: WeightChanges) -> None:
    """Watch the ways on which calls reach the workers of this process. Raises `SettingsRefused` if one is missing."""
    for place in ENTRIES:
        if place in modules:
            _watch_entry(modules[place], "run_method", changes, lambda given: given[1:4])
    if PROCESS_ENTRY in modules:
        process = getattr(modules[PROCESS_ENTRY], "WorkerProc", None)
        _watch_entry(process, "_execute_worker_rpc", changes, lambda given: given[1][:3])


def _watch_entry(holder: Any, name: str, changes: WeightChanges, call: Callable[[Any], Any]) -> None:
    entry = getattr(holder, name, None)
    if not callable(entry):
        raise SettingsRefused(f"vLLM has no {name}: this connector knows how workers are called in vLLM 0.32 alone")
    if hasattr(entry, "warmroute_watched"):
        return

    @functools.wraps(entry)
    def watched(*given: Any) -> Any:
        method, arguments, named = call(given)
        changes.note_call(method, tuple(arguments), named or {})
        return entry(*given)

    watched.warmroute_watched = True  # type: ignore[attr-defined]
    setattr(holder, name, watched)


def _noted(method: Callable[..., Any], changes: WeightChanges) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(worker: Any, *arguments: Any, **named: Any) -> Any:
        if not leaves_weights(method.__name__, arguments, named):
            changes.note(method.__name__)
        return method(worker, *arguments, **named)

    noted.warmroute_watched = True  # type: ignore[attr-defined]
    return noted


def _looking_on(method: Callable[..., Any], model: str, changes: WeightChanges) -> Callable[..., Any]:
    """The first call after the weights were loaded: some models bring parts from other places than their folder."""

    @functools.wraps(method)
    def looking(worker: Any, *arguments: Any, **named: Any) -> Any:
        sources = getattr(worker.model_runner.get_model(), "secondary_weights", ())
        for source in sources:
            if source.model_or_path != model or source.subfolder is not None:
                changes.note(f"a part was loaded from {source.model_or_path}, which isn't hashed")
        return method(worker, *arguments, **named)

    looking.warmroute_watched = True  # type: ignore[attr-defined]
    return looking
