"""Keeps a list of a service's endpoints: lists, watches from there, and lists again when the thread is lost.

A watch may end, break, or be told that its past is forgotten (410). Whatever is missed meanwhile is in the next list:
what isn't in that is gone. While the API server can't be asked, the last list stands, as engines that are gone fail
their health checks.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from gateway.discovery.endpoint_slices import Endpoint, SliceTable
from gateway.discovery.kubernetes_api import ApiFailed, HistoryGone, KubernetesApi

logger = logging.getLogger(__name__)

BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
"""Between two tries: a random part of the first, then of twice as much each time, at most of the second."""
LASTING_S = 10.0
"""A watch that ends sooner, and told of no change, is as good as a failed one."""
FAILURES_SHOWN = 3
"""So many lists in a row whose past is forgotten at once are a failure."""
QUIET_TRIES = 5
"""Watches that may end in a row without an event before all is listed again."""


class SliceWatch:
    """The endpoints behind one selector. `on_change` is told when they are others than before."""

    def __init__(
        self,
        selector: str,
        table: SliceTable,
        on_change: Callable[[tuple[Endpoint, ...]], None],
        on_failure: Callable[[], None] = lambda: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._selector, self._table = selector, table
        self._on_change, self._on_failure, self._sleep = on_change, on_failure, sleep
        self._told: tuple[Endpoint, ...] | None = None
        self._has_worked = False
        self.state = "not listed yet"
        """In plain words, for `/fleet`."""

    async def run(self, open_api: Callable[[], tuple[KubernetesApi, str]]) -> None:
        """List and watch until cancelled. `open_api` gives the API server, and the namespace; may raise `ApiFailed`."""
        failures = 0
        while True:
            self._has_worked = False
            try:
                opened, namespace = open_api()
                async with opened as api:
                    await self._follow(api, namespace)
            except HistoryGone as gone:
                logger.info("the endpoints of %s are listed again: %s", self._selector, gone)
                if failures >= FAILURES_SHOWN:
                    self._note_failure(str(gone))
            except ApiFailed as error:
                self._note_failure(str(error))
            except Exception:  # the edge of the loop: a strange answer must not end discovery
                logger.exception("following the endpoints of %s met a fault", self._selector)
                self._note_failure("it met a fault of the gateway's own")
            failures = 0 if self._has_worked else min(failures + 1, 16)
            await self._pause(failures)

    async def _follow(self, api: KubernetesApi, namespace: str) -> None:
        """One list, and the watches that go on from it; returns to list again."""
        slices, version = await api.list_slices(namespace, self._selector)
        self._table.replace(slices)
        self._tell()
        loop, quiet, short = asyncio.get_running_loop(), 0, 0
        while quiet < QUIET_TRIES:
            quiet, began, is_news = quiet + 1, loop.time(), False
            async with aclosing(api.watch_slices(namespace, self._selector, version)) as events:
                async for event in events:
                    version = _version(event) or version
                    match event.get("type"):
                        case "OPENED":
                            self.state = "watching"
                            continue
                        case "ADDED" | "MODIFIED":
                            is_news = True
                            self._table.put(event.get("object"))
                        case "DELETED":
                            is_news = True
                            self._table.remove(event.get("object"))
                    quiet = 0
                    self._tell()
            is_lasting = is_news or loop.time() - began >= LASTING_S
            self._has_worked = self._has_worked or is_lasting
            short = 0 if is_lasting else short + 1
            await self._pause(short)
        self._has_worked = True

    async def _pause(self, failures: int) -> None:
        if failures:
            await self._sleep(random.uniform(0, min(BACKOFF_S_MAX, BACKOFF_S * 2 ** (failures - 1))))

    def _note_failure(self, why: str) -> None:
        if not self.state.startswith("failing"):
            logger.warning("the endpoints of %s can't be followed: %s", self._selector, why)
        self.state = f"failing, the last list stands: {why}"
        self._on_failure()

    def _tell(self) -> None:
        endpoints = self._table.endpoints()
        if endpoints != self._told:
            self._on_change(endpoints)
            self._told = endpoints


def _version(event: dict[str, object]) -> str | None:
    described = event.get("object")
    metadata = described.get("metadata") if isinstance(described, dict) else None
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return version if isinstance(version, str) and version else None
