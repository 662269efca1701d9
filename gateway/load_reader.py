"""LoadReader: hears what the other gateways report, between polls of the whole table.

The table says who they are; this asks for their rows alone, as often as `EngineLoads.interval_s` says, and for none
while there are no others. Where that can't be done, their reports are as old as the last poll of the table.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from directory.errors import DirectoryError
from directory.interface import DirectoryReader
from directory.members import RENEW_INTERVAL_S
from gateway.shared_load import EngineLoads

logger = logging.getLogger(__name__)


class LoadReader:
    """Reads until cancelled. `on_error(op)` hears of every call that failed."""

    def __init__(
        self,
        directory: DirectoryReader,
        loads: EngineLoads,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_error: Callable[[str], None] = lambda op: None,
    ) -> None:
        self._directory, self._loads, self._sleep, self._on_error = directory, loads, sleep, on_error
        self._is_failing = False

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self.read()
            except Exception:  # the edge of the loop: older reports are worth less, and no request
                logger.exception("reading the other gateways' reports met a fault")
                self._is_failing = True
            await self._sleep(RENEW_INTERVAL_S if self._is_failing else self._loads.interval_s)

    async def read(self) -> None:
        """Read now, if there are others to read of."""
        others = self._loads.gateways
        if not others:
            return
        try:
            rows = await self._directory.refreshed(others)
        except DirectoryError as error:
            self._on_error("refreshed")
            if not self._is_failing:
                logger.warning("the other gateways' reports are read with the whole table only: %s", error)
            self._is_failing = True
            return
        if self._is_failing:
            logger.info("the other gateways' reports can be read by themselves again")
        self._is_failing = False
        if self._loads.gateways is others:  # else the table has been read meanwhile, and may name others
            self._loads.take(rows)
