"""Resets an engine's prefix cache, so that the fleet knows at once: an idle vLLM tells with its next step only.

The reference engine is asked in the same way, and tells by itself.
"""

import asyncio
import json

import httpx

from nodeagent.engines.vllm.follower import VllmFollower
from nodeagent.http_api import ResetOutcome
from nodeagent.roster import Roster

RESET_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 64 * 2**10


async def reset_prefix_cache(roster: Roster, follower: VllmFollower, name: str) -> ResetOutcome:
    """Have the engine empty its prefix cache, and forget what its GPU held. Nothing is raised."""
    engine = next((each for each in roster.engines if each.name == name), None)
    if engine is None:
        return ResetOutcome.UNKNOWN
    try:
        async with asyncio.timeout(RESET_TIMEOUT_S), httpx.AsyncClient(timeout=None, trust_env=False) as http:
            is_done = await _has_reset(http, f"{engine.registration.url}/reset_prefix_cache")
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, AttributeError, RecursionError):
        return ResetOutcome.REFUSED
    if not is_done:
        return ResetOutcome.REFUSED
    if engine.events is not None:
        await follower.was_reset(name)
    return ResetOutcome.DONE


async def _has_reset(http: httpx.AsyncClient, url: str) -> bool:
    """Whether the engine says so. Raises `httpx.HTTPError`, and what reading its answer as JSON raises."""
    body = bytearray()
    async with http.stream("POST", url, headers={"accept-encoding": "identity"}) as answer:
        async for part in answer.aiter_raw():
            body += part
            if len(body) > ANSWER_BYTES_MAX:
                return False
        return answer.is_success and json.loads(body).get("success") is True
