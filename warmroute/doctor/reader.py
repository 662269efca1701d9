"""How the doctor asks: HTTP with a bound on every question's time and every answer's size, and what an answer tells."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from warmroute.directory_tables import printable

CONNECT_S = 3.0
LOOK_S = 10.0
"""What a page may take."""
ANSWER_S = 90.0
"""What an answer may take; an engine on a busy CPU computes a few hundred tokens in it."""
ANSWER_BYTES_MAX = 16 * 2**20
SAID_CHARS_MAX = 200


class Unanswered(Exception):
    """Nobody answered, or not as such a part does; the message says where and how."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `value` is its JSON, or `None`; `date_s` its Date header in Unix seconds, `at_s` our own time then."""

    url: str
    status: int
    text: str
    value: Any
    at_s: float
    date_s: float | None

    @property
    def is_ok(self) -> bool:
        """Whether it is a 200."""
        return self.status == 200

    def table(self) -> dict[str, Any]:
        """The JSON object in it. Raises `Unanswered`."""
        if self.is_ok and isinstance(self.value, dict):
            return self.value
        raise Unanswered(f"{self.url} answered {self.status}: {self.said}")

    @property
    def said(self) -> str:
        """Its error's message, or else the beginning of its text, fit for a terminal."""
        error = self.value.get("error") if isinstance(self.value, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        text = message if isinstance(message, str) else self.text
        return printable(" ".join(text[: 2 * SAID_CHARS_MAX].split()))[:SAID_CHARS_MAX] or "nothing"


class Reader:
    """Asks over one client, which its caller opens and closes; `headers` go with every question.

    Raises `Unanswered` where there is no answer at all.
    """

    def __init__(self, http: httpx.AsyncClient, headers: Mapping[str, str] | None = None) -> None:
        self.http, self._headers = http, dict(headers or {})

    async def get(self, url: str, wait_s: float = LOOK_S) -> Reply:
        """Ask for a page, for at most `wait_s`."""
        return await self._bounded("GET", url, None, wait_s)

    async def post(self, url: str, body: Mapping[str, Any], wait_s: float = ANSWER_S) -> Reply:
        """Send a JSON object, and wait for at most `wait_s`."""
        return await self._bounded("POST", url, json.dumps(body).encode(), wait_s)

    async def _bounded(self, method: str, url: str, content: bytes | None, wait_s: float) -> Reply:
        try:
            async with asyncio.timeout(wait_s):
                return await self._ask(method, url, content)
        except TimeoutError:
            raise Unanswered(f"{url} doesn't answer within {wait_s:g} s") from None

    async def _ask(self, method: str, url: str, content: bytes | None) -> Reply:
        headers = self._headers | ({"content-type": "application/json"} if content is not None else {})
        sent_s, data = time.time(), bytearray()
        wait = httpx.Timeout(None, connect=CONNECT_S)
        try:
            async with self.http.stream(method, url, content=content, headers=headers, timeout=wait) as answer:
                at_s = (sent_s + time.time()) / 2
                async for part in answer.aiter_bytes():
                    data += part
                    if len(data) > ANSWER_BYTES_MAX:
                        raise Unanswered(f"{url} answered with more than {ANSWER_BYTES_MAX} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise Unanswered(f"{url} doesn't answer: {printable(str(error)) or type(error).__name__}") from error
        return Reply(url, answer.status_code, data.decode(errors="replace"), _json(data), at_s, _date(answer.headers))


def _json(data: bytearray) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _date(headers: httpx.Headers) -> float | None:
    try:
        return parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError, OverflowError):
        return None
