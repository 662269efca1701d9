"""Health checks: which engines may serve. An engine joins when it is well *and* lists the model it registered.

An engine without an agent registers nothing: the models it lists are those it serves. One that has no `/health` is well
while it lists its models.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
CHECK_TIMEOUT_S = 2.0
"""For one question, all of its answer included: an engine that answers a byte at a time is too slow, too."""
ANSWER_BYTES_MAX = 4 * 2**20
CHECKS_AT_ONCE_MAX = 32
FAILURES_MAX = 2
"""Checks that must fail in a row before a ready engine is left: one slow answer isn't an outage."""


NO_SUCH_PATH = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True)
class Target:
    """An engine to ask: `models` must be listed for it to join; none means whatever it lists."""

    engine: str
    url: str
    models: tuple[str, ...]
    api_key: str | None = None

    def headers(self) -> dict[str, str]:
        """The engine's credentials."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class Health:
    """`ready`, or why not in plain words, and the models the engine listed when it joined.

    `context_tokens` is the largest `max_model_len` that it listed for them, if it did. `adapters` are the models that
    it listed with another one as their `parent`, and that one.
    """

    state: str
    models: tuple[str, ...] = ()
    context_tokens: int | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Listed:
    """What an engine at `url` listed."""

    url: str | None
    models: tuple[str, ...] = ()
    context_tokens: int | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)

    def as_health(self, state: str) -> Health:
        """How an engine is that listed this."""
        return Health(state, self.models, self.context_tokens, self.adapters)


class HealthCheck:
    """Asks engines how they are, at most `CHECKS_AT_ONCE_MAX` at a time."""

    interval_s = CHECK_INTERVAL_S

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(CHECKS_AT_ONCE_MAX)
        self._listed: dict[str, _Listed] = {}
        self._failures: dict[str, int] = {}

    async def check(self, targets: Sequence[Target]) -> dict[str, Health]:
        """How each engine is."""
        known = {target.engine for target in targets}
        for gone in self._listed.keys() - known:
            del self._listed[gone]
        for gone in self._failures.keys() - known:
            del self._failures[gone]
        found = await asyncio.gather(*(self._check_one(target) for target in targets))
        return {target.engine: health for target, health in zip(targets, found, strict=True)}

    def distrust(self, engine: str) -> None:
        """Forget that this engine was well: its next failed check counts at once."""
        self._failures[engine] = FAILURES_MAX

    def list_again(self, engine: str) -> None:
        """Ask this engine for its models with the next check, though it is well."""
        self._listed.pop(engine, None)

    async def _check_one(self, target: Target) -> Health:
        async with self._slots:
            problem = await self._problem(target)
        listed = self._listed.get(target.engine, _Listed(None))
        if problem is None:
            self._failures[target.engine] = 0
            return listed.as_health("ready")
        self._failures[target.engine] = self._failures.get(target.engine, 0) + 1
        if listed.url == target.url and self._failures[target.engine] < FAILURES_MAX:
            return listed.as_health("ready")
        self._listed.pop(target.engine, None)
        return listed.as_health(problem)

    async def _problem(self, target: Target) -> str | None:
        try:
            status, _ = await self._get(target, "/health")
            before = self._listed.get(target.engine)
            if status == 200 and before is not None and before.url == target.url:
                return None
            if status != 200 and status not in NO_SUCH_PATH:
                return f"unhealthy: status {status}"
            status, content = await self._get(target, "/v1/models")
            if status != 200:
                return f"unhealthy: status {status} at /v1/models"
            listed = _models(content)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            return f"unreachable: {type(error).__name__}"
        except ValueError:
            return "answers /v1/models with what isn't a list of models"
        if target.models and not listed.keys() & set(target.models):
            return f"doesn't list its model {target.models[0]}"
        if not listed:
            return "lists no model"
        models = target.models or tuple(listed)
        context_tokens = max((listed[model].context_tokens for model in models if model in listed), default=0)
        parents = {model: row.parent for model, row in listed.items() if model not in target.models}
        adapters = {model: parent for model, parent in parents.items() if parent in (target.models or listed)}
        self._listed[target.engine] = _Listed(target.url, models, context_tokens or None, adapters)
        return None

    async def _get(self, target: Target, path: str) -> tuple[int, bytes]:
        """Status and body. Raises `httpx.HTTPError`, `httpx.InvalidURL`, `TimeoutError`, `ValueError` (too large)."""
        content, headers = bytearray(), target.headers()
        async with (
            asyncio.timeout(CHECK_TIMEOUT_S),
            self._client.stream("GET", target.url + path, headers=headers, timeout=None) as answer,
        ):
            async for piece in answer.aiter_bytes():
                content += piece
                if len(content) > ANSWER_BYTES_MAX:
                    raise ValueError(f"larger than {ANSWER_BYTES_MAX} bytes")
            return answer.status_code, bytes(content)


@dataclass(frozen=True, slots=True)
class _ListedModel:
    """Its `max_model_len` (0 without one) and `parent` (empty without one)."""

    context_tokens: int
    parent: str


def _models(content: bytes) -> dict[str, _ListedModel]:
    """What is listed, by id; raises `ValueError` for what isn't JSON."""
    data: Any = orjson.loads(content)
    rows = data.get("data") if isinstance(data, dict) else None
    rows = rows if isinstance(rows, list) else []
    return {
        row["id"]: _ListedModel(_context_tokens(row.get("max_model_len")), _text(row.get("parent")))
        for row in rows
        if isinstance(row, dict) and isinstance(row.get("id"), str)
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _context_tokens(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
