"""A name for one life of a process, which another process that takes its number later doesn't have."""

import hashlib
import os
from pathlib import Path


def process_life(pid: int) -> bytes:
    """32 bytes that name one life of a process: its number, when it began, and this boot of the host."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return os.urandom(32)
    return hashlib.sha256(b"%d %s %s" % (pid, fields[19], boot)).digest()
