"""After a start: the files of a folder become a drive's index again, in the background, newest first.

(1) What was forgotten is read, and meets every file that follows. (2) The folder is listed, which removes leftovers and
counts every byte; until then nothing is written. (3) Headers are read a batch at a time, at `FILES_PER_S`, and their
chunks indexed and announced. (4) When all are read, they are put in the order of use. A file that can't be one of ours
any more (bad, of another version, or encrypted with a key that isn't here) is removed: the quota counts it, and nobody
could ever read it. Chunks of identities that no engine has now are kept, until they are the oldest.
"""

import asyncio
import logging
from collections.abc import Sequence

from nodeagent.errors import ChunkCorrupt, ChunkForeign
from nodeagent.metrics import AgentMetrics
from nodeagent.registration import Sleep
from nodeagent.tiers.chunk_file import FileHeader
from nodeagent.tiers.drive import READ_ERRORS_MAX, Drive
from nodeagent.tiers.drive_faults import Fault, fault_of
from nodeagent.tiers.file_store import Listing, Store
from nodeagent.tiers.found_files import FoundFile
from nodeagent.tiers.nvme_index import REORDER_STEP_KEYS, NvmeIndex, order_of_use
from nodeagent.tiers.room import NVME

FILES_PER_S = 2_000.0
FILES_PER_BATCH = 64
LIST_RETRY_S = 10.0

logger = logging.getLogger(__name__)


async def restore(
    drive: Drive, metrics: AgentMetrics, sleep: Sleep = asyncio.sleep, files_per_s: float = FILES_PER_S
) -> None:
    """Rebuild the drive's index, once. A folder that can't be listed is tried again; meanwhile nothing is written."""
    index = drive.index
    await drive.read_tombstones()
    listing = await _list(drive, metrics, sleep)
    index.list_files(listing.files)
    drive.note_listed()
    if listing.temporaries_removed or listing.strangers:
        logger.info(
            "the nvme folder %s held %d unfinished files, now removed, and %d that aren't ours, left alone",
            drive.name,
            listing.temporaries_removed,
            listing.strangers,
        )
    for start in range(0, len(listing.files), FILES_PER_BATCH):
        batch = [found for found in listing.files.stretch(start, FILES_PER_BATCH) if index.is_listed(found.name)]
        while (error := _own_fault(verdicts := await drive.listing.do(_read_headers, drive.store, batch))) is not None:
            logger.error("files of %s can't be read now, and are tried again: %s", drive.name, error)
            await sleep(LIST_RETRY_S)
        for found, verdict in zip(batch, verdicts, strict=True):
            _take(drive, index, metrics, found, verdict)
        drive.account()
        await sleep(len(batch) / files_per_s)
    copying = index.account_of_use()
    account = next(copying)
    for _ in copying:
        # A million chunks copied at once would keep the event loop for too long.
        await asyncio.sleep(0)
    ordered = await drive.listing.do(order_of_use, account, drive.listing.note_step)
    for start in range(0, len(ordered.rows), REORDER_STEP_KEYS):
        index.put_in_order(ordered, start, REORDER_STEP_KEYS)
        await asyncio.sleep(0)
    index.end_restoring()
    drive.is_restoring = False
    logger.info("the nvme folder %s holds %d chunks in %d bytes", drive.name, len(index), drive.used_bytes)


async def _list(drive: Drive, metrics: AgentMetrics, sleep: Sleep) -> Listing:
    while True:
        try:
            return await drive.listing.do(drive.store.listing, drive.listing.note_step)
        except OSError as error:
            metrics.degraded.labels("nvme_unlisted").inc()
            logger.error("the nvme folder %s can't be listed; nothing is written to it: %s", drive.name, error)
            await sleep(LIST_RETRY_S)


def _read_headers(store: Store, batch: Sequence[FoundFile]) -> list[FileHeader | ChunkCorrupt | OSError]:
    verdicts: list[FileHeader | ChunkCorrupt | OSError] = []
    for found in batch:
        try:
            verdicts.append(store.header(found.name))
        except (ChunkCorrupt, OSError) as error:
            verdicts.append(error)
    return verdicts


def _own_fault(verdicts: Sequence[FileHeader | ChunkCorrupt | OSError]) -> OSError | None:
    """An error that says nothing of the file. Raises `OSError` where the drive fails file after file."""
    in_a_row = 0
    for verdict in verdicts:
        fault = fault_of(verdict) if isinstance(verdict, OSError) else None
        if isinstance(verdict, OSError) and fault is Fault.PROCESS:
            return verdict
        in_a_row = in_a_row + 1 if fault in (Fault.DRIVE, Fault.GONE) else 0
        if isinstance(verdict, OSError) and (in_a_row >= READ_ERRORS_MAX or fault is Fault.GONE):
            raise verdict
    return None


def _take(
    drive: Drive,
    index: NvmeIndex,
    metrics: AgentMetrics,
    found: FoundFile,
    verdict: FileHeader | ChunkCorrupt | OSError,
) -> None:
    """Index a file's chunk, or have the file removed. One that was evicted or written anew meanwhile is passed by."""
    if index is not drive.index or not index.is_listed(found.name):
        return
    if isinstance(verdict, FileHeader) and _is_forgotten(drive, verdict, found.modified_s):
        metrics.evictions.labels(NVME, "forgotten").inc()
        drive.doom_file(found.name, index.unlist(found.name))
        return
    if isinstance(verdict, FileHeader):
        index.restore(verdict, found.modified_s)
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
    drive.doom_file(found.name, index.unlist(found.name))


def _is_forgotten(drive: Drive, header: FileHeader, modified_s: float) -> bool:
    """Whether a file that was written then is of what was forgotten: its chunk is never indexed."""
    return drive.tombstones.meet(header.label, header.identity, header.written_at_s or modified_s)
