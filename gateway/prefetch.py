"""Hints to agents: load these chunks from NVMe into DRAM while the request still waits for its engine.

A hint that is late, lost or dropped costs a slower load and nothing else.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from directory.tiers import Tier
from gateway.lookup import Holders
from gateway.routing.query import Score

logger = logging.getLogger(__name__)

HINTS_WAITING_MAX = 256
KEYS_MAX = 1024
SENDERS = 4
TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Hint:
    """Directory keys that an agent is asked to have in DRAM soon."""

    agent_url: str
    keys: tuple[bytes, ...]


def hint_for(agent_url: str, holders: Holders, score: Score, chunk_tokens: int) -> Hint | None:
    """The hint for a decision: the chunks that will be loaded and lie in NVMe only; `None` where there are none."""
    match, keys = holders.matches.get(score.engine), holders.keys.get(score.engine)
    if match is None or keys is None or not agent_url or Tier.NVME not in score.tier_tokens:
        return None
    chunks = score.matched_tokens // chunk_tokens
    wanted = [key for key, tier in zip(keys[:chunks], match.tiers, strict=False) if tier is Tier.NVME]
    return Hint(agent_url, tuple(wanted[:KEYS_MAX])) if wanted else None


class Prefetcher:
    """Sends hints in the background; when too many wait, new ones are dropped."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._waiting: asyncio.Queue[Hint] = asyncio.Queue(HINTS_WAITING_MAX)

    def send(self, hint: Hint | None) -> None:
        """Send soon. Never waits."""
        if hint is not None and not self._waiting.full():
            self._waiting.put_nowait(hint)

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SENDERS):
                tasks.create_task(self._send_for_ever())

    async def _send_for_ever(self) -> None:
        while True:
            hint = await self._waiting.get()
            try:
                answer = await self._client.post(
                    f"{hint.agent_url}/prefetch", json={"keys": _hex(hint.keys)}, timeout=TIMEOUT_S
                )
                answer.raise_for_status()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # an agent's URL may be none
                logger.debug("a prefetch hint was lost: %r", error)


def _hex(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]
