"""Health checks: which engines may serve. An engine joins when it is well *and* lists the model it registered."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import httpx

from directory.members import EngineRegistration

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
CHECK_TIMEOUT_S = 2.0
CHECKS_AT_ONCE_MAX = 32
FAILURES_MAX = 2
"""Checks that must fail in a row before a ready engine is left: one slow answer isn't an outage."""


class HealthCheck:
    """Asks engines how they are, at most `CHECKS_AT_ONCE_MAX` at a time."""

    interval_s = CHECK_INTERVAL_S

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(CHECKS_AT_ONCE_MAX)
        self._listed: dict[str, str] = {}
        self._failures: dict[str, int] = {}

    async def check(self, engines: Sequence[EngineRegistration]) -> dict[str, str]:
        """The state of each engine: `ready`, or why it isn't, in plain words."""
        known = {registration.engine for registration in engines}
        for table in (self._listed, self._failures):
            for gone in table.keys() - known:
                del table[gone]
        states = await asyncio.gather(*(self._check_one(registration) for registration in engines))
        return {registration.engine: state for registration, state in zip(engines, states, strict=True)}

    def distrust(self, engine: str) -> None:
        """Forget that this engine was well: its next failed check counts at once."""
        self._failures[engine] = FAILURES_MAX

    async def _check_one(self, registration: EngineRegistration) -> str:
        async with self._slots:
            problem = await self._problem(registration)
        engine = registration.engine
        if problem is None:
            self._failures[engine] = 0
            return "ready"
        was_ready = self._listed.get(engine) == registration.url
        self._failures[engine] = self._failures.get(engine, 0) + 1
        if was_ready and self._failures[engine] < FAILURES_MAX:
            return "ready"
        self._listed.pop(engine, None)
        return problem

    async def _problem(self, registration: EngineRegistration) -> str | None:
        try:
            answer = await self._client.get(f"{registration.url}/health", timeout=CHECK_TIMEOUT_S)
            if answer.status_code != 200:
                return f"unhealthy: status {answer.status_code}"
            if self._listed.get(registration.engine) == registration.url:
                return None
            models = await self._client.get(f"{registration.url}/v1/models", timeout=CHECK_TIMEOUT_S)
            if not set(_model_ids(models)) & set(registration.models):
                return f"doesn't list its model {registration.models[0]}"
        except (httpx.HTTPError, ValueError) as error:
            return f"unreachable: {type(error).__name__}"
        self._listed[registration.engine] = registration.url
        return None


def _model_ids(answer: httpx.Response) -> list[str]:
    data: Any = answer.json()
    rows = data.get("data") if isinstance(data, dict) else None
    return [row["id"] for row in rows or [] if isinstance(row, dict) and isinstance(row.get("id"), str)]
