"""One drive's life beside the others: used until it fails, withdrawn, left alone for a while, tried again.

    in use: its index is rebuilt; is watched for jobs that don't end
      | errors in a row, gone, or one job under way for `HANG_S` without a step
    in quarantine: found by nobody at once; its placements are withdrawn step by step
      | after `RETRY_FIRST_S`, doubling up to `RETRY_MAX_S`, once its threads are back
    opened anew, self-tested and listed: in use

A drive that fails soon after it came back waits twice as long again. A thread that never returns leaves its drive in
quarantine for good, and costs the others nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from nodeagent.errors import AgentError
from nodeagent.metrics import AgentMetrics
from nodeagent.registration import Clock, Sleep
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.restore import FILES_PER_S, restore

HANG_S = 30.0
WATCH_S = 1.0
RETRY_FIRST_S = 5.0
RETRY_MAX_S = 300.0
WITHDRAW_STEP_KEYS = 1_024

logger = logging.getLogger(__name__)

Withdraw = Callable[[Sequence[bytes]], None]
"""Reports keys that a drive has lost; returns at once."""


async def keep(
    drive: Drive,
    withdraw: Withdraw,
    metrics: AgentMetrics,
    *,
    sleep: Sleep = asyncio.sleep,
    clock: Clock = time.monotonic,
    files_per_s: float = FILES_PER_S,
) -> None:
    """Keep the drive in use, or in quarantine, until cancelled."""
    retry_s = RETRY_FIRST_S
    while True:
        came_up = clock()
        if drive.is_up:
            await _use(drive, metrics, sleep, files_per_s)
        if clock() - came_up > RETRY_MAX_S:
            retry_s = RETRY_FIRST_S
        lost = drive.take_lost()
        for first_row in range(0, lost.rows, WITHDRAW_STEP_KEYS):
            withdraw(lost.directory_keys(first_row, WITHDRAW_STEP_KEYS))
            await asyncio.sleep(0)
        while not drive.is_up:
            await sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)
            await _try_again(drive, metrics)


async def _use(drive: Drive, metrics: AgentMetrics, sleep: Sleep, files_per_s: float) -> None:
    """Rebuild the index, and watch, until the drive fails."""
    async with asyncio.TaskGroup() as group:
        restoring = group.create_task(_restore(drive, metrics, sleep, files_per_s))
        while drive.is_up:
            try:
                async with asyncio.timeout(WATCH_S):
                    await drive.failed.wait()
            except TimeoutError:
                if drive.oldest_job_s() > HANG_S:
                    drive.fail(f"it hangs: a job has been under way for {HANG_S:g} s")
        restoring.cancel()


async def _restore(drive: Drive, metrics: AgentMetrics, sleep: Sleep, files_per_s: float) -> None:
    try:
        await restore(drive, metrics, sleep, files_per_s)
    except (AgentError, OSError) as error:
        drive.fail(f"it can't be indexed: {error}")
    except Exception:  # the edge of a loop: a fault here must not end the agent
        logger.exception("indexing the drive %s met a fault", drive.name)
        drive.fail("its files can't be indexed")


async def _try_again(drive: Drive, metrics: AgentMetrics) -> None:
    if drive.has_jobs:
        metrics.degraded.labels("nvme_unavailable").inc()
        logger.warning("the drive %s still doesn't answer; it stays in quarantine", drive.name)
        return
    try:
        await drive.reopen()
    except (AgentError, OSError) as error:
        metrics.degraded.labels("nvme_unavailable").inc()
        logger.warning("the drive %s stays in quarantine: %s", drive.name, error)
    else:
        logger.info("the drive %s is back; its files are listed", drive.name)
