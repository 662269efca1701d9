"""The demo: a conversation over a document, a second reader of it, and a restart; shows what was warm, and where."""

import importlib.resources
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from warmroute.directory_tables import as_table
from warmroute.local_fleet import MODEL, LocalFleet

ANSWER_TOKENS = 40
REQUEST_TIMEOUT_S = 300.0

Message = dict[str, str]


class DemoFailed(Exception):
    """A request of the demo wasn't answered as it should; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class DemoRow:
    """What one request met: predicted by the gateway (`tier_tokens`), reported by the engine (`cached_tokens`)."""

    request: str
    engine: str
    prompt_tokens: int
    tier_tokens: str
    cached_tokens: int
    ttft_s: float
    reason: str
    text: str


async def play(fleet: LocalFleet, say: Callable[[str], None]) -> list[DemoRow]:
    """Play the script and return a row for each request. Raises `DemoFailed`."""
    document = importlib.resources.files("warmroute").joinpath("demo_document.txt").read_text(encoding="utf-8")
    rows: list[DemoRow] = []
    async with httpx.AsyncClient(base_url=fleet.url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:

        async def ask(request: str, messages: list[Message]) -> DemoRow:
            say(f"demo: {request} ...")
            row = await _ask(client, request, messages)
            rows.append(row)
            return row

        first: list[Message] = [_user(f"{document}\n\nIn one sentence: what is a prefix cache?")]
        answer = await ask("1  reader A, a document", first)
        second = [*first, _assistant(answer.text), _user("And what happens when two requests share a prefix?")]
        answer = await ask("2  reader A, second turn", second)
        await ask("3  reader B, same document", [_user(f"{document}\n\nWho looked after the harbour's lamps?")])
        say(f"demo: kill -9 {answer.engine}; waiting for it to come back ...")
        await fleet.kill_engine(answer.engine)
        third = [*second, _assistant(answer.text), _user("Name one thing the document warns of.")]
        await ask(f"4  reader A, {answer.engine} restarted", third)
    return rows


async def _ask(client: httpx.AsyncClient, request: str, messages: list[Message]) -> DemoRow:
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_at = time.monotonic()
    ttft_s, text, usage = None, "", None
    try:
        headers = {"x-warmroute-explain": "1"}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise DemoFailed(
                    f"request {request!r} was answered with {answer.status_code}: {await answer.aread()!r}"
                )
            async for event in _events(answer):
                if "error" in event:
                    raise DemoFailed(f"request {request!r} broke off: {event['error']['message']}")
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    piece = choice["delta"].get("content") or ""
                    if piece and ttft_s is None:
                        ttft_s = time.monotonic() - started_at
                    text += piece
            explained = answer.headers
    except httpx.HTTPError as error:
        raise DemoFailed(f"request {request!r} failed: {error!r}") from error
    if ttft_s is None or usage is None:
        raise DemoFailed(f"request {request!r} was answered with nothing")
    return DemoRow(
        request=request,
        engine=explained["x-warmroute-engine"],
        prompt_tokens=usage["prompt_tokens"],
        tier_tokens=explained["x-warmroute-tier-tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        ttft_s=ttft_s,
        reason=explained["x-warmroute-reason"],
        text=text,
    )


async def _events(answer: httpx.Response) -> Any:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def as_report(rows: list[DemoRow], width: int | None = None) -> str:
    """The rows as a table, fitted to a terminal of `width` characters, then the answers."""
    cells: list[dict[str, Any]] = [
        {
            "request": row.request,
            "engine": row.engine,
            "prompt tokens": row.prompt_tokens,
            "matched by tier": row.tier_tokens,
            "reported cached": row.cached_tokens,
            "first token": f"{row.ttft_s:.2f} s",
            "why there": row.reason,
        }
        for row in rows
    ]
    answers = [f"{row.request}: {' '.join(row.text.split())}" for row in rows]
    return "\n".join([as_table(cells, "", width), "", *answers])


def as_json(rows: list[DemoRow]) -> str:
    """The rows as a JSON list."""
    return json.dumps([asdict(row) for row in rows], ensure_ascii=False, indent=1)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
