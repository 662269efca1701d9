"""After a start: the files of a folder become the NVMe tier's index again, in the background, newest first.

(1) The folder is listed, which removes leftovers and counts every byte; until then nothing is written. (2) Headers
are read a batch at a time, at `FILES_PER_S`, and their chunks indexed and announced. (3) When all are read, they are
put in the order of use. A file that can't be one of ours any more (bad, of another version, or encrypted with a key
that isn't here) is removed: the quota counts it, and nobody could ever read it. Chunks of identities that no engine
has now are kept, until they are the oldest.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from nodeagent.errors import ChunkCorrupt, ChunkForeign
from nodeagent.metrics import AgentMetrics
from nodeagent.registration import Sleep
from nodeagent.tiers.chunk_file import FileHeader
from nodeagent.tiers.file_store import FoundFile, Listing, Store
from nodeagent.tiers.nvme import NVME, NvmeTier
from nodeagent.tiers.nvme_index import REORDER_STEP_KEYS, order_of_use

FILES_PER_S = 2_000.0
FILES_PER_BATCH = 200
LIST_RETRY_S = 10.0

logger = logging.getLogger(__name__)


async def restore(tier: NvmeTier, metrics: AgentMetrics, sleep: Sleep = asyncio.sleep) -> None:
    """Rebuild the tier's index, once. A folder that can't be listed is tried again; meanwhile nothing is written."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="warmroute-nvme-restore")
    try:
        listing = await _list(tier, metrics, threads, sleep)
        tier.index.list_files(listing.files)
        tier.note_listed()
        if listing.temporaries_removed or listing.strangers:
            logger.info(
                "the nvme folder held %d unfinished files, now removed, and %d that aren't ours, left alone",
                listing.temporaries_removed,
                listing.strangers,
            )
        for start in range(0, len(listing.files), FILES_PER_BATCH):
            batch = [found for found in listing.files[start:][:FILES_PER_BATCH] if tier.index.is_listed(found.name)]
            verdicts = await tier.in_thread(threads, _read_headers, tier.store, batch)
            for found, verdict in zip(batch, verdicts, strict=True):
                _take(tier, metrics, found, verdict)
            tier.account()
            await sleep(len(batch) / FILES_PER_S)
        ordered = await tier.in_thread(threads, order_of_use, *tier.index.account_of_use())
        for start in range(0, len(ordered), REORDER_STEP_KEYS):
            tier.index.put_in_order(ordered[start : start + REORDER_STEP_KEYS])
            await asyncio.sleep(0)
        tier.index.end_restoring()
        tier.is_restoring = False
        logger.info("the nvme tier holds %d chunks in %d bytes", len(tier.index), tier.used_bytes)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


async def _list(tier: NvmeTier, metrics: AgentMetrics, threads: ThreadPoolExecutor, sleep: Sleep) -> Listing:
    while True:
        try:
            return await tier.in_thread(threads, tier.store.listing)
        except OSError as error:
            metrics.degraded.labels("nvme_unlisted").inc()
            logger.error("the nvme folder can't be listed; nothing is written to it: %s", error)
            await sleep(LIST_RETRY_S)


def _read_headers(store: Store, batch: Sequence[FoundFile]) -> list[FileHeader | ChunkCorrupt | OSError]:
    verdicts: list[FileHeader | ChunkCorrupt | OSError] = []
    for found in batch:
        try:
            verdicts.append(store.header(found.name))
        except (ChunkCorrupt, OSError) as error:
            verdicts.append(error)
    return verdicts


def _take(
    tier: NvmeTier, metrics: AgentMetrics, found: FoundFile, verdict: FileHeader | ChunkCorrupt | OSError
) -> None:
    """Index a file's chunk, or have the file removed. One that was evicted or written anew meanwhile is passed by."""
    if not tier.index.is_listed(found.name):
        return
    if isinstance(verdict, FileHeader):
        tier.index.restore(verdict, found.modified_s)
        return
    if isinstance(verdict, ChunkForeign):
        reason = "foreign"
    elif isinstance(verdict, ChunkCorrupt):
        reason = "corrupt"
        metrics.checksum_failures.inc()
    else:
        reason = "vanished" if isinstance(verdict, FileNotFoundError) else "unreadable"
    metrics.evictions.labels(NVME, reason).inc()
    logger.warning("a file of the nvme folder is removed: %s", verdict)
    tier.doom_file(found.name, tier.index.unlist(found.name))
