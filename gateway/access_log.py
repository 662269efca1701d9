"""The access log: one line a request, if it is wanted; what was asked and answered, never a word of it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from gateway.audit import Usage
from gateway.config import LogsConfig
from gateway.errors import QUOTED_CHARS_MAX
from gateway.logs import FIELDS

SERVER_ERRORS = 500
"""Statuses from here on are logged whatever `access_every` is."""
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestNote:
    """What becomes known of a request on its way: by which model and engine it is served, the attempts it took."""

    arrived_at: float = 0.0
    model: str = ""
    engine: str = ""
    attempts: int = 0
    usage: Usage | None = None


class AccessLog:
    """Writes the lines. `clock` gives monotonic seconds."""

    def __init__(self, config: LogsConfig, clock: Callable[[], float]) -> None:
        self._clock, self._count = clock, 0
        self.configure(config)

    def configure(self, config: LogsConfig) -> None:
        """This is in force from now on."""
        self._is_on, self._every = config.access, config.access_every

    def add(self, endpoint: str, asked: str, status: int, started_at: float | None, note: RequestNote) -> None:
        """A request is over that asked for the model `asked`. `started_at`: when its answer's head was sent."""
        if not self._is_on:
            return
        self._count += 1
        if status < SERVER_ERRORS and self._count % self._every:
            return
        usage = note.usage
        fields = {
            "endpoint": endpoint,
            "model": asked[:QUOTED_CHARS_MAX],
            "served_model": note.model if note.model not in ("", asked) else None,
            "engine": note.engine or None,
            "attempts": note.attempts,
            "status": status,
            "prompt_tokens": usage and usage.prompt_tokens,
            "cached_tokens": usage and usage.cached_tokens,
            "output_tokens": usage and usage.output_tokens,
            "first_byte_ms": None if started_at is None else round((started_at - note.arrived_at) * 1e3, 1),
            "duration_ms": round((self._clock() - note.arrived_at) * 1e3, 1),
        }
        said = {name: value for name, value in fields.items() if value is not None}
        logger.info("request", extra={FIELDS: said})
