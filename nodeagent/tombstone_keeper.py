"""Keeps the tombstones where they outlive the agent: on every drive, and in its state folder.

Each place has all of them, so that the loss of one loses none. A place that was away gets them when it is back.
"""

import asyncio
import logging
from collections.abc import Sequence

from nodeagent.errors import AgentError, TombstonesUnreadable
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.tombstone_file import NAME, StateFolder
from nodeagent.tiers.tombstones import Tombstones, load_tombstones

SAVE_WAIT_S = 10.0
"""How long a place may take to keep them; one that takes longer is told as one that hasn't."""
STATE = "state folder"

logger = logging.getLogger(__name__)


class TombstoneKeeper:
    """The places, and what was last kept in each. Everything belongs to the event loop."""

    def __init__(
        self, tombstones: Tombstones, state: StateFolder, drives: Sequence[Drive], metrics: AgentMetrics
    ) -> None:
        self._tombstones = tombstones
        self._state = state
        self._drives = drives
        self._metrics = metrics
        self._saved: dict[str, int] = {}
        self._saving = asyncio.Lock()

    async def read(self) -> None:
        """At the start, before anything is indexed: what all places say. One that can't be read is asked again.

        Raises `AgentError` where the state folder's can't be believed, or are more than can be remembered: what was
        forgotten would come back.
        """
        try:
            data = await asyncio.to_thread(self._state.read_tombstones)
            self._tombstones.merge(load_tombstones(data) if data is not None else ())
        except (TombstonesUnreadable, OSError) as error:
            if self._drives:
                raise TombstonesUnreadable(
                    f"what was forgotten can't be read from {NAME} in the state folder: {error}; remove that file to "
                    "start with what the drives say"
                ) from error
            logger.error("what was forgotten can't be read from the state folder: %s", error)
        for drive in self._drives:
            if drive.is_up:
                try:
                    async with asyncio.timeout(SAVE_WAIT_S):
                        await drive.read_tombstones()
                except (AgentError, OSError, TimeoutError) as error:
                    # Before it is indexed it is asked once more, and goes into quarantine if it doesn't say.
                    logger.warning("what was forgotten can't be read from %s: %s", drive.name, error)
        self._tombstones.is_grown = False

    @property
    def is_current(self) -> bool:
        """Whether every place that is there has all of them."""
        return not self._outdated()

    def is_safe(self, kept_in: Sequence[str]) -> bool:
        """Whether a next life knows in any case, before it indexes anything, what was kept in these places.

        It reads the state folder first; and where that hasn't it, each drive must tell of its own files.
        """
        drives = {drive.name for drive in self._drives}
        return STATE in kept_in or (bool(drives) and drives <= set(kept_in))

    async def save(self) -> tuple[list[str], list[str]]:
        """Have every place keep all; returns the names of those that have them now, and of those that haven't."""
        async with self._saving:
            self._tombstones.sweep()
            revision, data = self._tombstones.revision, self._tombstones.dump()
            outdated = self._outdated()
            results = await asyncio.gather(*(self._save_at(name, data) for name in outdated))
            for name, is_kept in zip(outdated, results, strict=True):
                if is_kept:
                    self._saved[name] = revision
            kept = [name for name in self._places() if self._saved.get(name) == revision]
            return kept, [name for name in self._places() if name not in kept]

    async def _save_at(self, name: str, data: bytes) -> bool:
        drive = next((each for each in self._drives if each.name == name), None)
        try:
            async with asyncio.timeout(SAVE_WAIT_S):
                if drive is None:
                    await asyncio.to_thread(self._state.write_tombstones, data)
                else:
                    await drive.listing.do(drive.store.write_tombstones, data)
        except (AgentError, OSError, TimeoutError) as error:
            self._metrics.degraded.labels("tombstones_unkept").inc()
            logger.error("what was forgotten can't be kept in %s: %s", name, error)
            return False
        return True

    def _outdated(self) -> list[str]:
        if not len(self._tombstones) and not self._saved:
            return []
        away = {drive.name for drive in self._drives if not drive.is_up}
        return [
            name for name in self._places() if name not in away and self._saved.get(name) != self._tombstones.revision
        ]

    def _places(self) -> list[str]:
        return [STATE, *(drive.name for drive in self._drives)]
