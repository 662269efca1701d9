"""Follows every Kubernetes service in the configuration, and tells the sources of engines what is found."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from gateway.config import KubernetesConfig
from gateway.discovery.endpoint_slices import Endpoint, SliceTable
from gateway.discovery.engine_sources import EngineSources
from gateway.discovery.kubernetes_api import Cluster, KubernetesApi
from gateway.discovery.slice_watch import SliceWatch

logger = logging.getLogger(__name__)


class Discovery:
    """One watch for each of `services`. `on_failure` is told whenever an API server couldn't be followed."""

    def __init__(
        self,
        services: Sequence[KubernetesConfig],
        sources: EngineSources,
        on_failure: Callable[[], None] = lambda: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._services, self._sources = services, sources
        self._tables = [SliceTable(each.port) for each in services]
        self._found: list[tuple[Endpoint, ...]] = [() for _ in services]
        self._watches = [
            SliceWatch(each.label_selector, table, partial(self._note, number), on_failure, sleep)
            for number, (each, table) in enumerate(zip(services, self._tables, strict=True))
        ]

    async def run(self) -> None:
        """Follow all of them until cancelled."""
        async with asyncio.TaskGroup() as watches:
            for watch, service in zip(self._watches, self._services, strict=True):
                watches.create_task(watch.run(partial(_open, service)))

    def rows(self) -> list[dict[str, Any]]:
        """Of each service how it is followed and what was found, for `/fleet`."""
        return [
            {
                "service": service.label_selector,
                "namespace": service.namespace or "the gateway's own",
                "state": watch.state,
                "engines": [each.name for each in found],
                "strange": table.strange,
            }
            for service, watch, table, found in zip(
                self._services, self._watches, self._tables, self._found, strict=True
            )
        ]

    def _note(self, number: int, endpoints: tuple[Endpoint, ...]) -> None:
        came = {each.name for each in endpoints} - {each.name for each in self._found[number]}
        went = {each.name for each in self._found[number]} - {each.name for each in endpoints}
        selector = self._services[number].label_selector
        logger.info("engines behind %s: %d; came: %s; went: %s", selector, len(endpoints), sorted(came), sorted(went))
        self._found[number] = endpoints
        self._sources.discovered(number, self._services[number], endpoints)


def _open(service: KubernetesConfig) -> tuple[KubernetesApi, str]:
    """The API server to ask, and the namespace. Raises `ApiFailed`."""
    if service.api_url is None:
        cluster = Cluster.own()
    else:
        cluster = Cluster(service.api_url.rstrip("/"), service.api_token_file, service.api_ca_file)
    return KubernetesApi(cluster), service.namespace or cluster.namespace
