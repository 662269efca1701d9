"""`WarmrouteConnector`: vLLM's own offloading connector, completed and described to the host's agent.

It is what the launch line names. It fills in the offloading specification (`offloading_spec.py`) and the secondary
tier (`secondary_tier.py`), refuses launch lines that can't be exact, and hands vLLM's configuration to the tier,
which vLLM itself doesn't. Written for vLLM 0.32; its interfaces are called experimental there.
"""

import contextlib
import contextvars
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from nodeagent.engines.vllm.description import check_launch
from nodeagent.engines.vllm.launch_arguments import check_arguments
from nodeagent.engines.vllm.settings import EngineSettings, read_settings
from nodeagent.engines.vllm.weight_changes import WeightChanges, watch_entries, watch_worker

PACKAGE = __name__.rpartition(".")[0]
os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")

ADAPTER_REQUESTS: set[str] = set()
"""Requests with a LoRA adapter, from their arrival until the tier is told of their end."""

WEIGHTS = WeightChanges()
"""Of the engine in this process: noticed in its workers, told to its scheduler."""

_described: contextvars.ContextVar[tuple[Any, EngineSettings]] = contextvars.ContextVar("warmroute_described")


@dataclass
class WorkerMessage(OffloadingWorkerMetadata):
    """What workers tell the scheduler: the transfers that ended, and whether weights had changed by then."""

    weights_have_changed: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of several workers: changed where one has."""
        whole = super().aggregate(other)
        assert isinstance(whole, OffloadingWorkerMetadata)
        changed = self.weights_have_changed or getattr(other, "weights_have_changed", False)
        return WorkerMessage(whole.completed_jobs, whole.transfer_stats, changed)


class WarmrouteConnector(OffloadingConnector):
    """See the module. Raises `SettingsRefused` at the engine's start."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        settings = complete(vllm_config)
        check_launch(vllm_config, settings)
        check_arguments(vllm_config, os.environ)
        if role == KVConnectorRole.WORKER:
            watch_weights(vllm_config)
        with described(vllm_config, settings):
            super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
        """In the API server's process: the metrics of the completed configuration."""
        complete(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments, **named)

    def on_new_request(self, request: Any) -> None:
        """Note requests with an adapter: vLLM names an adapter by its path, which says nothing of its weights."""
        if request.lora_request is not None:
            ADAPTER_REQUESTS.add(request.request_id)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Of the scheduler: nothing matches once weights have changed, in vLLM's own staging rows as well."""
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (0, False) if tokens and WEIGHTS.have_changed else (tokens, is_async)

    def update_connector_output(self, connector_output: Any) -> None:
        """Of the scheduler: a change of weights is known before a transfer that it spoils is believed."""
        if getattr(connector_output.kv_connector_worker_meta, "weights_have_changed", False):
            WEIGHTS.learn()
        super().update_connector_output(connector_output)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Of a worker: loads that end once weights have changed have failed; their requests are computed."""
        results = super().get_transfer_results(finished_req_ids)
        if WEIGHTS.have_changed:
            results.failed_recving |= results.finished_recving
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Of a worker: the transfers that ended, with the state of the weights after them."""
        ended = super().build_connector_worker_meta()
        if ended is None and not WEIGHTS.have_changed:
            return None
        ended = ended or OffloadingWorkerMetadata()
        return WorkerMessage(ended.completed_jobs, ended.transfer_stats, WEIGHTS.have_changed)


def watch_weights(vllm_config: Any) -> None:
    """In a worker's process, before it serves: notice whatever changes its weights. Raises `SettingsRefused`."""
    place, _, name = vllm_config.parallel_config.worker_cls.rpartition(".")
    watch_worker(getattr(importlib.import_module(place), name), vllm_config.model_config.model, WEIGHTS)
    watch_entries(sys.modules, WEIGHTS)


def complete(vllm_config: Any) -> EngineSettings:
    """Read our settings and put vLLM's own beside them; doing it again changes nothing."""
    transfer = vllm_config.kv_transfer_config
    settings = read_settings(transfer.kv_connector_extra_config)
    transfer.kv_connector_extra_config.update(
        spec_name="WarmrouteOffloadingSpec",
        spec_module_path=f"{PACKAGE}.offloading_spec",
        cpu_bytes_to_use=settings.staging_bytes,
        block_size=settings.chunk_tokens,
        offload_prompt_only=not settings.offload_replies,
        secondary_tiers=[{"type": "WarmrouteTier", "module_path": f"{PACKAGE}.secondary_tier"}],
    )
    return settings


@contextlib.contextmanager
def described(vllm_config: Any, settings: EngineSettings) -> Iterator[None]:
    """While the connector is built, the tier finds the configuration here."""
    token = _described.set((vllm_config, settings))
    try:
        yield
    finally:
        _described.reset(token)


def description() -> tuple[Any, EngineSettings]:
    """The configuration of the connector that is being built."""
    return _described.get()
