"""One engine's saved table on disk: written whole, never older over newer, and removed once it is known to be wrong."""

import logging
import threading
from pathlib import Path

logger = logging.getLogger(__name__)


class TableFile:
    """A file at `path`. What was there before is kept until something newer is written. Safe from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._revision = -1

    def read(self) -> bytes | None:
        """What was written last; None where there is nothing that can be read."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("the table of an engine's gpu can't be read; it begins empty: %s", error)
            return None

    def write(self, data: bytes | None, revision: int) -> None:
        """Replace the copy by `data`, the table's at that revision; None removes it: it is wrong by now.

        An older revision than that written last is passed over. A copy that can't be written costs a restart its
        knowledge.
        """
        with self._lock:
            if revision < self._revision:
                return
            self._revision = revision
            try:
                if data is None:
                    self._path.unlink(missing_ok=True)
                    return
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                temporary = self._path.with_suffix(".tmp")
                temporary.write_bytes(data)
                temporary.replace(self._path)
            except OSError as error:
                logger.warning("the table of an engine's gpu can't be saved: %s", error)
