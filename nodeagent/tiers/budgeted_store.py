"""A place for chunks that is written within its drive's daily budget; everything else passes through.

The budget's state lies in the drive's own folder, because the wear is the drive's: whoever moves it moves the state.
It is replaced atomically, and is on the drive before the bytes that it lets through.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nodeagent.errors import BudgetSpent, ChunkConflict
from nodeagent.labels import ChunkLabel
from nodeagent.tiers.chunk_file import HEADER_BYTES, FileHeader, file_bytes
from nodeagent.tiers.endurance import STATE_BYTES_MAX, DailyBudget, Instant
from nodeagent.tiers.file_store import Listing, Space, Store
from nodeagent.tiers.found_files import no_step
from nodeagent.tiers.self_test import TEST_BYTES, SelfTest

STATE_NAME = "warmroute.budget"
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
_TEMPORARY_NAME = STATE_NAME + ".tmp"
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

logger = logging.getLogger(__name__)


class HostTime:
    """This host's two clocks."""

    def __init__(self, boot_id_path: str = BOOT_ID_PATH) -> None:
        try:
            self._boot_id = Path(boot_id_path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            self._boot_id = secrets.token_hex(16)  # as a boot of its own: nothing is believed but the time since it

    def __call__(self) -> Instant:
        """Now."""
        return Instant(self._boot_id, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


class BudgetedStore:
    """The store of one drive, at `path`. `drive` is its name in logs; `now` is the host's time.

    Writers may be several threads; `may_write` and the two figures never wait.
    """

    def __init__(
        self, store: Store, path: str, drive: str, day_bytes: int, now: Callable[[], Instant] | None = None
    ) -> None:
        self.drive = drive
        self.day_bytes = day_bytes
        self._store = store
        self._path = path
        self._now = now or HostTime()
        self._budget = DailyBudget(day_bytes, self._now())
        self._root_fd = -1
        self._writing = threading.Lock()
        self._is_spent = False

    @property
    def available_bytes(self) -> int:
        """What may be written now."""
        return self._budget.available_bytes(self._now())

    @property
    def written_today_bytes(self) -> int:
        """What was written since midnight (UTC), headers and padding included."""
        return self._budget.written_today_bytes(self._now())

    def open(self) -> SelfTest:
        """See `Store`. A state that can't be read is none: the bucket begins empty. The self-test's writes count."""
        tested = self._store.open()
        try:
            self._root_fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            self._store.close()
            raise
        self._budget = DailyBudget(self.day_bytes, self._now(), self._read())
        with contextlib.suppress(BudgetSpent, OSError):
            self._spend(TEST_BYTES)
        logger.info(
            "%s may be written %d bytes in any 24 hours, %d of them now%s",
            self.drive,
            self.day_bytes,
            self.available_bytes,
            "" if self._budget.has_past else "; what was written to it before isn't known, so its budget begins empty",
        )
        return tested

    def is_there(self) -> bool:
        """See `Store`."""
        return self._store.is_there()

    def space(self) -> Space:
        """See `Store`."""
        return self._store.space()

    def close(self) -> None:
        """See `Store`. What was drawn and not spent is given back."""
        if self._root_fd >= 0:
            self._budget.put_back()
            try:
                self._save()
            except OSError as error:
                logger.warning("the write budget of %s can't be saved; a little of it is lost: %s", self.drive, error)
            os.close(self._root_fd)
            self._root_fd = -1
        self._store.close()

    def may_write(self, size_bytes: int) -> bool:
        """See `Store`."""
        now = self._now()
        if self._budget.allows(size_bytes, now):
            # A spent bucket lets a draw through every minute or two: that isn't told each time.
            if self._is_spent and self._budget.available_bytes(now) >= self._budget.burst_bytes / 2:
                self._is_spent = False
                logger.info("%s has half a burst of its write budget again", self.drive)
            return True
        if not self._is_spent:
            self._is_spent = True
            self._tell_spent(size_bytes)
        return False

    def put(self, header: FileHeader, payload: memoryview) -> bool:
        """See `Store`. Raises `BudgetSpent`. A write that fails midway is counted in full: its bytes may be there."""
        size = file_bytes(header.length)
        self._spend(size)
        try:
            is_new = self._store.put(header, payload)
        except ChunkConflict:
            self._give_back(size)
            raise
        if not is_new:
            self._give_back(size)
        return is_new

    def update_label(self, label: ChunkLabel) -> None:
        """See `Store`. Raises `BudgetSpent`."""
        self._spend(HEADER_BYTES)
        self._store.update_label(label)

    def read_into(self, storage_key: bytes, target: memoryview) -> FileHeader:
        """See `Store`."""
        return self._store.read_into(storage_key, target)

    def remove(self, name: bytes) -> None:
        """See `Store`."""
        self._store.remove(name)

    def listing(self, on_step: Callable[[], None] = no_step) -> Listing:
        """See `Store`."""
        return self._store.listing(on_step)

    def header(self, name: bytes) -> FileHeader:
        """See `Store`."""
        return self._store.header(name)

    def read_tombstones(self) -> bytes | None:
        """See `Store`."""
        return self._store.read_tombstones()

    def write_tombstones(self, data: bytes) -> None:
        """See `Store`. What is forgotten is kept whatever it costs the drive."""
        self._store.write_tombstones(data)

    def _tell_spent(self, size_bytes: int) -> None:
        budget, needed = self._budget, self._budget.needed_bytes(size_bytes)
        if needed > budget.burst_bytes:
            logger.error(
                "%s is never written: a chunk takes %d bytes, and its endurance budget of %d bytes a day lets at most "
                "%d be written at once; look at its capacity_gb and dwpd",
                self.drive,
                size_bytes,
                self.day_bytes,
                budget.burst_bytes,
            )
            return
        logger.warning(
            "%s is read only until %d bytes of its endurance budget have come together, then written a little at a "
            "time: it has %d, and gets %d a second (%d a day)",
            self.drive,
            needed,
            self.available_bytes,
            budget.flow_bytes_per_s,
            self.day_bytes,
        )

    def _spend(self, size_bytes: int) -> None:
        with self._writing:
            now = self._now()
            if self._budget.spend(size_bytes, now):
                return
            if not self._budget.draw(size_bytes, now):
                raise BudgetSpent(f"the endurance budget of {self.drive} is spent")
            try:
                self._save()
            except OSError:
                self._budget.put_back()
                raise
            self._budget.spend(size_bytes, now)

    def _give_back(self, size_bytes: int) -> None:
        with self._writing:
            self._budget.give_back(size_bytes)

    def _save(self) -> None:
        """Replace the state, and see that it has arrived. Raises `OSError`."""
        data = self._budget.state(self._now())
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_TEMPORARY_NAME, dir_fd=self._root_fd)
        fd = os.open(_TEMPORARY_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self._root_fd)
        try:
            os.write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(_TEMPORARY_NAME, STATE_NAME, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
        os.fsync(self._root_fd)

    def _read(self) -> bytes | None:
        try:
            fd = os.open(STATE_NAME, os.O_RDONLY | _FILE, dir_fd=self._root_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("the write budget of %s can't be read; it begins empty: %s", self.drive, error)
            return None
        try:
            return os.read(fd, STATE_BYTES_MAX + 1)
        except OSError as error:
            logger.warning("the write budget of %s can't be read; it begins empty: %s", self.drive, error)
            return None
        finally:
            os.close(fd)
