"""The host's DRAM and NVMe tiers as a secondary tier of vLLM's offloading connector. Runs in the scheduler's process.

vLLM names a chunk by its own hash of the chunk's last block (32 bytes) and the KV group (4 bytes); under that key,
folded with the engine's identity, its bytes are stored. The directory key arrives at the agent with the KV events.
Until the identity is known (the weights are hashed in the background), whenever the agent is away, and for ever once
the engine's weights have changed, every lookup is a miss and every store fails at once.
"""

import logging
import os
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from directory.chunks import foreign_storage_key
from nodeagent.client import ChunkClient
from nodeagent.engines.vllm.chunk_transfers import ChunkRow, ChunkTransfers, FinishedJob
from nodeagent.engines.vllm.connector import ADAPTER_REQUESTS, WEIGHTS, description
from nodeagent.engines.vllm.content_digest import ContentUnknown, HashingStopped, digests_folder
from nodeagent.engines.vllm.description import KvLayout, describe_engine, seconds_per_chunk
from nodeagent.engines.vllm.launch_arguments import HARMLESS_VARIABLES, configuration_digest
from nodeagent.engines.vllm.loaded_files import LoadedFiles, process_started_at
from nodeagent.engines.vllm.promises import Verdict
from nodeagent.engines.vllm.settings import EngineSettings, SettingsRefused, check_staging
from nodeagent.engines.vllm.staging_file import staging_path
from nodeagent.engines.vllm.tokenizer_in_use import TokenizerInUse, tokenizer_in_use

KV_FORMAT = 1
"""Raised when the order of a row's bytes changes for a reason of ours."""
CLOSE_WAIT_S = 10.0
"""How long the end of the engine waits for the hashing of its weights, which asks after each block, to stop."""
RESULTS = {Verdict.HIT: LookupResult.HIT, Verdict.MISS: LookupResult.MISS, Verdict.RETRY: LookupResult.RETRY}

logger = logging.getLogger("vllm.warmroute")


class WarmrouteTier(SecondaryTierManager):
    """See the module. No method waits, but `drain_jobs` and `shutdown`."""

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        vllm_config, settings = description()
        self._layout = kv_layout(vllm_config, offloading_spec)
        self._chunk_tokens = settings.chunk_tokens
        self._area = primary_kv_view.cast("B")
        self._client: ChunkClient | None = None
        self._transfers: ChunkTransfers | None = None
        self._failed: list[JobResult] = []
        self._is_closing = threading.Event()
        self._introducing = threading.Thread(
            target=self._introduce, args=(vllm_config, settings), name="warmroute-introduce", daemon=True
        )
        self._introducing.start()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """HIT where the host holds the chunk, and will until it is loaded; RETRY while the agent is asked."""
        if self._transfers is None or WEIGHTS.have_changed or req_context.req_id in ADAPTER_REQUESTS:
            return LookupResult.MISS
        return RESULTS[self._transfers.look_up(bytes(key), req_context.req_id)]

    def submit_store(self, job_metadata: Any) -> None:
        """Store rows on the host. An adapter's are not: its name says nothing of its weights."""
        context = job_metadata.req_context
        if self._transfers is None or WEIGHTS.have_changed or context.req_id in ADAPTER_REQUESTS:
            self._failed.append(JobResult(job_metadata.job_id, success=False))
            return
        self._transfers.store(job_metadata.job_id, self._rows_of(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        """Fill rows from the host."""
        if self._transfers is None or WEIGHTS.have_changed:
            self._failed.append(JobResult(job_metadata.job_id, success=False))
            return
        self._transfers.load(job_metadata.job_id, self._rows_of(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call."""
        failed, self._failed = self._failed, []
        finished = self._transfers.take_finished() if self._transfers is not None else []
        return failed + [_as_result(each) for each in finished]

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping, so that rows are given back."""
        return bool(self._failed) or (self._transfers is not None and self._transfers.has_jobs)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Nothing is asked for before its keys are known."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Give back what was held for the request."""
        ADAPTER_REQUESTS.discard(req_context.req_id)
        if self._transfers is not None:
            self._transfers.forget(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Ask for what this step looked up. What was scheduled isn't looked up again, or from the beginning."""
        if self._transfers is not None:
            for request in (*context.new_req_ids, *context.preempted_req_ids):
                self._transfers.forget(request)
            self._transfers.flush()

    def drain_jobs(self) -> None:
        """Wait until no transfer touches a row."""
        if self._transfers is not None:
            self._transfers.drain()

    def shutdown(self) -> None:
        """End the transfers, say goodbye to the agent, and let the rows go."""
        self._is_closing.set()
        self._introducing.join(CLOSE_WAIT_S)
        if self._transfers is not None:
            self._transfers.close()
        if self._client is not None:
            self._client.stop()
        self._area.release()

    def _introduce(self, vllm_config: Any, settings: EngineSettings) -> None:
        """Hash the model's files, then connect to the agent; until then this tier is empty."""
        try:
            loaded = LoadedFiles(process_started_at())
            tokenizer = live_tokenizer(vllm_config)
            if tokenizer.pipeline is None:
                logger.warning("warmroute: prompts of text can't be routed by prefix: %s", tokenizer.reason)
            hello = describe_engine(
                vllm_config,
                settings,
                self._layout,
                digests_folder(),
                loaded,
                tokenizer,
                self._is_closing.is_set,
                device_name(),
            )
            if self._is_closing.is_set():
                return
            digest = hello.identity.fleet_digest()
            self._client = ChunkClient(settings.door, hello, list)
            self._transfers = ChunkTransfers(
                self._client,
                self._area,
                self.block_size_bytes,
                self._layout.chunk_bytes,
                lambda key: foreign_storage_key(digest, key),
                seconds_per_chunk(hello),
            )
            logger.info("warmroute: engine %s goes to the agent at %s", settings.engine, settings.door)
        except HashingStopped:
            logger.info("warmroute: the engine ends before its weights are hashed")
        except ContentUnknown as error:
            logger.error("warmroute: this engine works without its host's tiers: %s", error)
        except Exception:  # the edge of the thread: the engine serves on, without its host's tiers
            logger.exception("warmroute: this engine works without its host's tiers")

    def _rows_of(self, job_metadata: Any) -> list[ChunkRow]:
        context = job_metadata.req_context
        return [
            ChunkRow(bytes(key), int(row), self._position(context.get_offload_key_position(key)))
            for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)
        ]

    def _position(self, end_token: int | None) -> int:
        return 0 if end_token is None else max(0, end_token // self._chunk_tokens - 1)


def kv_layout(vllm_config: Any, spec: Any) -> KvLayout:
    """How this engine's chunks lie in a row. Raises `SettingsRefused` where a row isn't one chunk of the fleet."""
    config, settings = spec.config, description()[1]
    blocks = {group.tokens_per_block for group in config.groups}
    block_tokens = min(blocks)
    if len(blocks) != 1 or block_tokens * spec.blocks_per_chunk != settings.chunk_tokens:
        raise SettingsRefused(
            f"an offload block of {block_tokens * spec.blocks_per_chunk} tokens isn't the fleet's chunk of "
            f"{settings.chunk_tokens}; KV groups with blocks of {sorted(blocks)} tokens"
        )
    chunk_bytes = spec.cpu_page_size_per_worker * (1 if spec.replicated_layout else config.parallel.world_size)
    check_staging(spec.num_chunks, chunk_bytes)
    parallel, model = config.parallel, vllm_config.model_config
    if parallel.world_size != parallel.tp_size * parallel.pp_size * parallel.pcp_size:
        raise SettingsRefused(f"parallelism over {parallel.world_size} workers isn't known to this connector")
    import vllm

    parts = (
        f"vllm-{vllm.__version__}",
        f"row={KV_FORMAT}",
        f"{config.kv_cache_layout}",
        f"block={block_tokens}",
        f"kv={vllm_config.cache_config.cache_dtype}",
        f"groups={len(config.groups)}",
        f"pp={parallel.pp_size},pcp={parallel.pcp_size},dcp={parallel.dcp_size}",
        f"one_copy={spec.replicated_layout},canonical={config.canonical_layout}",
        f"quantization={model.quantization}",
        f"configuration={configuration_digest(vllm_config, shaping_variables())}",
        f"device={device_of(vllm_config, block_tokens)}",
    )
    return KvLayout(
        chunk_bytes=chunk_bytes,
        block_tokens=block_tokens,
        kv_bytes_per_token=max(1, chunk_bytes // settings.chunk_tokens),
        name=";".join(parts),
        dtype=str(config.model.dtype).removeprefix("torch."),
        staging_path=staging_path(config.engine_id),
    )


def live_tokenizer(vllm_config: Any) -> TokenizerInUse:
    """The tokenizer that the API server has as well: both ask vLLM's registry, which loads it once in each process."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = vllm_config.model_config
    if (getattr(model, "encoder_config", None) or {}).get("do_lower_case"):
        return TokenizerInUse(None, reason="vLLM lowers texts before this model's tokenizer sees them")
    return tokenizer_in_use(cached_tokenizer_from_config(model))


def shaping_variables() -> dict[str, object]:
    """vLLM's environment variables that are set here and that vLLM itself counts as part of what it computes."""
    from vllm import envs

    factors = envs.compile_factors()
    return {name: factors[name] for name in os.environ if name in factors and name not in HARMLESS_VARIABLES}


def device_of(vllm_config: Any, block_tokens: int) -> str:
    """The device's kind; of the CPU backend its instruction set as well, by which it orders KV bytes."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.device_name)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = vllm_config.model_config
    return f"cpu-{_get_attn_isa(model.dtype, block_tokens, model.get_head_size())}"


def device_name() -> str:
    """What the driver calls the engine's devices; nothing where vLLM's platform doesn't say."""
    from vllm.platforms import current_platform

    try:
        return str(current_platform.get_device_name())
    except NotImplementedError:
        return ""


def _as_result(finished: FinishedJob) -> JobResult:
    return JobResult(
        finished.job,
        success=finished.is_complete,
        successful_keys=None if finished.is_complete else finished.moved,
        transfer_time=finished.seconds,
        transfer_bytes=finished.moved_bytes,
    )
