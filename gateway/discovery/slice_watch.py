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
        self.state = "not listed yet"
        """In plain words, for `/fleet`."""

    async def run(self, open_api: Callable[[], tuple[KubernetesApi, str]]) -> None:
        """List and watch until cancelled. `open_api` gives the API server, and the namespace; may raise `ApiFailed`."""
        failures = 0
        while True:
            try:
                opened, namespace = open_api()
                async with opened as api:
                    await self._follow(api, namespace)
            except HistoryGone as gone:
                logger.info("the endpoints of %s are listed again: %s", self._selector, gone)
                failures = 0
            except ApiFailed as error:
                if not self.state.startswith("failing"):
                    logger.warning(
                        "the endpoints of %s can't be followed, the last list stands: %s", self._selector, error
                    )
                failures = 0 if self.state == "watching" else failures
                self.state = f"failing, the last list stands: {error}"
                self._on_failure()
            except Exception:  # the edge of the loop: a strange answer must not end discovery
                logger.exception("following the endpoints of %s met a fault", self._selector)
                self.state = "failing, the last list stands: it met a fault of the gateway's own"
                self._on_failure()
            await self._sleep(random.uniform(0, min(BACKOFF_S_MAX, BACKOFF_S * 2**failures)))
            failures = min(failures + 1, 16)

    async def _follow(self, api: KubernetesApi, namespace: str) -> None:
        """One list, and the watches that go on from it; returns to list again."""
        slices, version = await api.list_slices(namespace, self._selector)
        self._table.replace(slices)
        self._tell()
        self.state = "watching"
        quiet = 0
        while quiet < QUIET_TRIES:
            quiet += 1
            async with aclosing(api.watch_slices(namespace, self._selector, version)) as events:
                async for event in events:
                    quiet = 0
                    version = _version(event) or version
                    match event.get("type"):
                        case "ADDED" | "MODIFIED":
                            self._table.put(event.get("object"))
                        case "DELETED":
                            self._table.remove(event.get("object"))
                    self._tell()

    def _tell(self) -> None:
        endpoints = self._table.endpoints()
        if endpoints != self._told:
            self._told = endpoints
            self._on_change(endpoints)


def _version(event: dict[str, object]) -> str | None:
    described = event.get("object")
    metadata = described.get("metadata") if isinstance(described, dict) else None
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return version if isinstance(version, str) and version else None
