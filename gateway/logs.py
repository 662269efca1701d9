"""How log lines look: text, or a JSON object a line. A line that is about a request has its id; none has its prompt."""

import logging
import time
from contextvars import ContextVar
from typing import Any

import orjson

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the running task serves; empty in tasks that serve none."""
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
FIELDS = "fields"
"""The name in a record's `extra` of what a line says in fields."""


class TextLines(logging.Formatter):
    """Time, level, logger and message; then the fields, and the request's id, as `name=value`."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See `logging.Formatter`."""
        said = {**_fields(record), **_request()}
        return " ".join([super().formatMessage(record), *(f"{name}={_written(said[name])}" for name in said)])


class JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`; the fields and `request_id`, where there are any; `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        row: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
            **_request(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(row).decode()
        except TypeError:  # lone surrogates, as names of files may have: JSON has none
            return orjson.dumps({name: _told(value) for name, value in row.items()}).decode()


LINES = {"text": TextLines, "json": JsonLines}
"""By what `logs.format` says."""


def use_lines(kind: str) -> None:
    """Log in this form from now on, wherever the process logs to."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(LINES[kind]())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, FIELDS, {})


def _request() -> dict[str, str]:
    request_id = REQUEST_ID.get()
    return {"request_id": request_id} if request_id else {}


def _written(value: Any) -> str:
    """A value that can't be mistaken for two."""
    text = str(value)
    is_plain = text.isascii() and text.isprintable() and not set(text) & set(" \"'=")
    return text if is_plain and text else repr(text)


def _told(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
