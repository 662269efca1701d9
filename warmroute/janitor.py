"""Removes a local fleet's folder when its parent is gone, however it went: `python -m warmroute.janitor FOLDER`.

It waits for the end of its standard input, which the parent holds open and the kernel closes when the parent dies. The
parts end by themselves then; the folder goes when they no longer write into it.
"""

import shutil
import sys
import time
from pathlib import Path

PATIENCE_S = 60.0
PAUSE_S = 0.2
QUIET_ROUNDS = 10
"""The folder must stay away for this many pauses: a part may still write its last log line."""


def main() -> int:
    """Wait, then clean up."""
    folder = Path(sys.argv[1])
    sys.stdin.buffer.read()
    deadline, quiet = time.monotonic() + PATIENCE_S, 0
    while quiet < QUIET_ROUNDS and time.monotonic() < deadline:
        quiet = quiet + 1 if not folder.exists() else 0
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
