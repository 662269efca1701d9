"""vLLM's tiered offloading, with one thing added: a worker for the CPU backend, so that it runs without a GPU.

On a GPU nothing of vLLM's is replaced. The CPU backend's KV lies in ordinary memory, where a copy is a copy.
"""

import time
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class WarmrouteOffloadingSpec(TieringOffloadingSpec):
    """See the module."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker that moves blocks between the engine's KV and its staging rows."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class CpuCopyWorker(OffloadingWorker):
    """Copies at once, in the engine's worker: when a submit returns, its bytes are there."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._blocks = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in kv_caches.tensors]
        self._rows = [
            region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk) for each in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Blocks into rows."""
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Rows into blocks."""
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Copies have ended when their submit returns."""

    def shutdown(self) -> None:
        """Let the memory go."""
        self._blocks.clear()
        self._rows.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, blocks: Any, rows: Any, *, is_store: bool) -> bool:
        """`blocks` lists block ids group after group; a group's first block may lie inside its first row."""
        started = time.perf_counter()
        first_block = first_row = copied_bytes = 0
        for refs, size, start in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            if not size:
                continue
            skipped = start % self._blocks_per_chunk
            rows_used = -(-(size + skipped) // self._blocks_per_chunk)
            block_ids = blocks.block_ids[first_block : first_block + size]
            row_ids = rows.block_ids[first_row : first_row + rows_used]
            first_block += size
            first_row += rows_used
            for ref in refs:
                page_bytes = self._blocks[ref.tensor_idx].shape[1]
                for index, block_id in enumerate(block_ids):
                    row, place = divmod(skipped + index, self._blocks_per_chunk)
                    block = self._blocks[ref.tensor_idx][int(block_id), : ref.page_size_bytes]
                    offset = place * page_bytes
                    cell = self._rows[ref.tensor_idx][int(row_ids[row]), offset : offset + ref.page_size_bytes]
                    (cell if is_store else block).copy_(block if is_store else cell)
                    copied_bytes += ref.page_size_bytes
        self._finished.append(TransferResult(job_id, True, copied_bytes, time.perf_counter() - started))
        return True
