"""The folder of a running local fleet, for sockets and logs: private, locked, and removed however the fleet ends."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOCKET_PATH_BYTES_MAX = 107
LOCK_NAME = "warmroute-up.lock"
LOCK_CONTENT = b"the run folder of a local fleet of warmroute\n"
_FOLDER_PREFIX = "warmroute-"


class FolderUnavailable(Exception):
    """There is no place for the folder; the message is one sentence for the user."""


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A private folder, locked while we live. Raises `FolderUnavailable` where its path is too long for sockets."""
    base = Path(tempfile.gettempdir())
    sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    if len(os.fsencode(folder / "host-9999.sock")) > SOCKET_PATH_BYTES_MAX:
        folder.rmdir()
        raise FolderUnavailable(f"{base} is too long a path for sockets; set TMPDIR to a shorter one")
    with _janitor(folder), (folder / LOCK_NAME).open("wb") as lock:
        lock.write(LOCK_CONTENT)
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _janitor(folder: Path) -> Iterator[None]:
    """A process that removes the folder if this one is killed: see `warmroute.janitor`."""
    command = [sys.executable, "-m", "warmroute.janitor", str(folder)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
    ) as janitor:
        try:
            yield
        finally:
            janitor.kill()


def sweep(base: Path) -> None:
    """Remove the folders of fleets that are gone, and nobody else's."""
    for lock_path in base.glob(f"{_FOLDER_PREFIX}*/{LOCK_NAME}"):
        with contextlib.suppress(OSError), lock_path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its fleet lives
            # Another's folder may have such a name, and even such a file: ours says so.
            if lock.read(len(LOCK_CONTENT)) == LOCK_CONTENT and lock_path.stat().st_uid == os.geteuid():
                shutil.rmtree(lock_path.parent, ignore_errors=True)
