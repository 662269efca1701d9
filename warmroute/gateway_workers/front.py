"""The operators' door of a gateway of several processes: it answers for all of them.

It runs in the process that watches over them, which carries no requests: it answers at once however busy they are.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import httpx
import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from warmroute.gateway_workers.merged_fleet import merged_fleet
from warmroute.gateway_workers.merged_metrics import MergedMetrics
from warmroute.gateway_workers.worker import ASK_TIMEOUT_S, Worker

PASSED_TIMEOUT_S = 30.0
PASSED_HEADERS = frozenset({"content-type", "content-length", "retry-after"})
METRICS_INTERVAL_S = 2.0
"""How often workers' counters are read: what one counted after that is lost when it dies."""
NOBODY = b'{"status":"no worker is up"}'
NO_FLEET: Mapping[str, Any] = {"status": "no worker is up", "hosts": [], "engines": []}


class WorkerGauges(Collector):
    """Which workers are up, and how often they had to be started again."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client`."""
        up = GaugeMetricFamily("warmroute_worker_up", "Whether a worker process is up.", labels=["worker"])
        restarts = CounterMetricFamily(
            "warmroute_worker_restarts_total", "Times that a worker process was started again.", labels=["worker"]
        )
        for worker in self._workers:
            up.add_metric([str(worker.number)], float(worker.is_up))
            restarts.add_metric([str(worker.number)], worker.restarts)
        return up, restarts


class Front:
    """Asks the workers that are up, all at once, each for at most `ASK_TIMEOUT_S`."""

    def __init__(
        self,
        workers: Sequence[Worker],
        client: httpx.AsyncClient,
        metrics: MergedMetrics,
        own_names: frozenset[str],
        is_draining: Callable[[], bool],
    ) -> None:
        self._workers, self._client, self._metrics, self._own_names = workers, client, metrics, own_names
        self._is_draining, self._turns = is_draining, itertools.count()

    def application(self) -> FastAPI:
        """What is served at the admin port; its description is the workers'."""
        api = FastAPI(openapi_url=None)
        api.get("/healthz")(self.healthz)
        api.get("/readyz")(self.readyz)
        api.get("/metrics")(self.metrics)
        api.get("/fleet")(self.fleet)
        api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])(self.passed_on)
        return api

    async def run(self) -> None:
        """Read the workers' counters now and then, until cancelled."""
        while True:
            await self._read_metrics()
            await asyncio.sleep(METRICS_INTERVAL_S)

    async def healthz(self) -> dict[str, str]:
        """Alive."""
        return {"status": "ok"}

    async def readyz(self) -> Response:
        """May get traffic: a worker says so of itself, and they aren't going."""
        if self._is_draining():
            return Response(b'{"status":"draining"}', 503, media_type="application/json")
        answers = await self._ask_all("/readyz")
        ready = [answer for answer in answers.values() if answer.status_code == 200]
        for answer in ready or answers.values():
            return Response(answer.content, answer.status_code, media_type="application/json")
        return Response(NOBODY, 503, media_type="application/json")

    async def metrics(self) -> Response:
        """Prometheus metrics over all workers."""
        await self._read_metrics()
        return Response(self._metrics.text([WorkerGauges(self._workers)]), media_type=CONTENT_TYPE_LATEST)

    async def fleet(self) -> Response:
        """The fleet, with what all workers together have booked."""
        answers = await self._ask_all("/fleet")
        said = [orjson.loads(answer.content) for answer in answers.values() if answer.status_code == 200]
        merged: dict[str, Any] = merged_fleet(said, self._own_names) if said else dict(NO_FLEET)
        merged["workers"] = [
            {"worker": each.number, "pid": each.pid, "is_up": each.is_up, "restarts": each.restarts}
            for each in self._workers
        ]
        return Response(orjson.dumps(merged), 200 if said else 503, media_type="application/json")

    async def passed_on(self, path: str, request: Request) -> Response:
        """Anything else is asked of the workers in turn."""
        up = [worker for worker in self._workers if worker.is_up]
        if not up:
            return Response(NOBODY, 503, media_type="application/json")
        url = f"{up[next(self._turns) % len(up)].url}/{path}"
        try:
            answer = await self._client.request(
                request.method,
                url,
                params=request.query_params,
                headers=[(name, value) for name, value in request.headers.items() if name != "host"],
                content=request.stream(),
                timeout=PASSED_TIMEOUT_S,
            )
        except httpx.HTTPError as error:
            said = orjson.dumps({"status": f"a worker didn't answer: {type(error).__name__}"})
            return Response(said, 502, media_type="application/json")
        headers = {name: value for name, value in answer.headers.items() if name in PASSED_HEADERS}
        return Response(answer.content, answer.status_code, headers)

    async def _read_metrics(self) -> None:
        lives = {worker.number: worker.pid for worker in self._workers}
        answers = await self._ask_all("/metrics")
        for worker in self._workers:
            answer = answers.get(worker.number)
            # One that died meanwhile is buried already, with what was read before.
            if answer is not None and answer.status_code == 200 and worker.pid == lives[worker.number]:
                self._metrics.take(worker.number, answer.text)

    async def _ask_all(self, path: str) -> dict[int, httpx.Response]:
        async def ask(worker: Worker) -> tuple[int, httpx.Response] | None:
            try:
                return worker.number, await self._client.get(worker.url + path, timeout=ASK_TIMEOUT_S)
            except httpx.HTTPError:
                return None

        found: list[Any] = await asyncio.gather(*(ask(worker) for worker in self._workers if worker.is_up))
        return dict(each for each in found if each is not None)
