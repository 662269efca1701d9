"""A folder of files under the names of their digests, which several gateways may share and anybody may have written.

It is a cache: what is wrong with it (read-only, full, strange entries, one gateway removing what another reads) costs a
fetch and nothing else. Who reads checks the content; this module only sees to it that reading is bounded and harmless.
"""

import contextlib
import errno
import os
import re
import stat
import tempfile
import time
from pathlib import Path

FOLDER_BYTES_MAX = 2**30
"""What the folder's files take together; the longest unused go first."""
ENTRIES_MAX = 10_000
"""Names looked at when room is made: more of them aren't ours."""
LEFTOVER_S = 3600.0
"""A file that is being written isn't older."""
_TEMPORARY = ".new-"
_OURS = re.compile(r"[0-9a-f]{64}(\.verdict)?")


class FileCache:
    """Files by name. Nothing here raises `OSError`."""

    def __init__(self, folder: Path, bytes_max: int = FOLDER_BYTES_MAX) -> None:
        self._folder, self._bytes_max = folder, bytes_max

    def read(self, name: str, bytes_max: int) -> bytes | None:
        """The content, as it lies there; `None` where there is none. A use is noted: the longest unused go first.

        What isn't a plain file, or is larger than `bytes_max`, is empty content, which is never right.
        """
        try:
            # A link could lead anywhere, and a pipe wouldn't end.
            file = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return b"" if error.errno in (errno.ELOOP, errno.ENXIO) else None
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size > bytes_max:
                return b""
            with contextlib.suppress(OSError):
                os.utime(file)
            with open(file, "rb", closefd=False) as opened:
                return opened.read(bytes_max)
        except OSError:
            return None
        finally:
            os.close(file)

    def write(self, name: str, content: bytes) -> None:
        """Put a file there, in place of what was, whole or not at all; then make room."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write_whole(name, content)
            self._make_room()

    def _write_whole(self, name: str, content: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=_TEMPORARY, delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.replace(file.name, self._folder / name)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise

    def _make_room(self) -> None:
        found: list[tuple[float, int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry, _ in zip(entries, range(ENTRIES_MAX), strict=False):
                is_leftover = entry.name.startswith(_TEMPORARY)
                if not is_leftover and not _OURS.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        continue
                    if is_leftover and status.st_mtime < time.time() - LEFTOVER_S:
                        os.unlink(entry.path)
                    elif not is_leftover:
                        found.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._bytes_max:
                return
            with contextlib.suppress(OSError):  # another gateway was quicker
                os.unlink(path)
            total -= size
