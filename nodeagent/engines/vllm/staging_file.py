"""vLLM's staging rows are a file in /dev/shm, which an engine that is killed leaves behind; the agent removes it.

Source of the name: vllm/v1/kv_offload/cpu/shared_offload_region.py of 0.32.
"""

import contextlib
import logging
import os
import stat
from pathlib import Path

FOLDER = Path("/dev/shm")
PREFIX = "vllm_offload_"

logger = logging.getLogger(__name__)


def staging_path(engine_id: str) -> str:
    """Where an engine of that id has its staging rows."""
    return str(FOLDER / f"{PREFIX}{engine_id}.mmap")


def remove_staging_file(path: str, folder: Path = FOLDER) -> bool:
    """Remove what a dead engine left; returns whether it was there. Another's file, or no such file, is left alone."""
    if own_file(path, folder) is None:
        return False
    with contextlib.suppress(OSError):
        os.unlink(path)
        logger.info("the staging file of an engine that is gone is removed: %s", Path(path).name)
        return True
    return False


def own_file(path: str, folder: Path) -> os.stat_result | None:
    """The file's status where it is a staging file of our own, and no link; else None."""
    file = Path(path)
    if file.parent != folder or not file.name.startswith(PREFIX) or file.suffix != ".mmap":
        return None
    try:
        status = file.lstat()
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return None
    return status if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else None
