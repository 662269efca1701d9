"""`WarmrouteConnector`: vLLM's own offloading connector, completed and described to the host's agent.

It is what the launch line names. It fills in the offloading specification (`offloading_spec.py`) and the secondary
tier (`secondary_tier.py`), refuses launch lines that can't be exact, and hands vLLM's configuration to the tier,
which vLLM itself doesn't. Written for vLLM 0.32; its interfaces are called experimental there.
"""

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from nodeagent.engines.vllm.description import check_launch
from nodeagent.engines.vllm.settings import EngineSettings, read_settings

PACKAGE = __name__.rpartition(".")[0]
os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")

ADAPTER_REQUESTS: set[str] = set()
"""Requests with a LoRA adapter, from their arrival until the tier is told of their end."""

_described: contextvars.ContextVar[tuple[Any, EngineSettings]] = contextvars.ContextVar("warmroute_described")


class WarmrouteConnector(OffloadingConnector):
    """See the module. Raises `SettingsRefused` at the engine's start."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        settings = complete(vllm_config)
        check_launch(vllm_config, settings)
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
