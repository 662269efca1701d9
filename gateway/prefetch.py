"""Hints to agents: have these chunks in DRAM, from NVMe or from another host, while the request still waits.

A hint that is late, lost or dropped costs a slower load and nothing else. One that is no longer wanted is taken back:
agents count who wants a chunk. Of each agent one question is under way at a time, so a hint is never overtaken by its
withdrawal, and what waits meanwhile is sent together.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from directory.placements import PrefixMatch
from directory.tiers import Tier
from gateway.routing.query import PeerExtension, Score

logger = logging.getLogger(__name__)

HINTS_WAITING_MAX = 256
KEYS_MAX = 1024
"""Keys of one prompt's hint."""
BODY_KEYS_MAX, BODY_PEERS_MAX = 4096, 16
"""What an agent takes at once."""
SENDERS = 16
TIMEOUT_S = 1.0
REFUSED = frozenset({400, 422})
"""What an agent answers that doesn't know of peers."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Directory keys that an agent is asked to have in DRAM soon: those on its own drives, and those of peers."""

    agent_url: str
    keys: tuple[bytes, ...] = ()
    peers: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many keys it names."""
        return len(self.keys) + sum(map(len, self.peers.values()))


def hint_for(
    agent_url: str,
    keys: Sequence[bytes],
    match: PrefixMatch,
    score: Score,
    chunk_tokens: int,
    peer: PeerExtension | None = None,
) -> Hint | None:
    """The hint for a decision: of a prompt's `keys` those that will be loaded and aren't in reach at once.

    Of the engine's own `match` they are those in NVMe only; what was counted on beyond it comes from `peer`. `None`
    where there are none.
    """
    if not agent_url:
        return None
    chunks = score.matched_tokens // chunk_tokens
    wanted = [key for key, tier in zip(keys[:chunks], match.tiers, strict=False) if tier is Tier.NVME][:KEYS_MAX]
    elsewhere = tuple(keys[match.chunks : chunks])[: KEYS_MAX - len(wanted)] if peer else ()
    if not wanted and not elsewhere:
        return None
    return Hint(agent_url, tuple(wanted), {peer.address: elsewhere} if peer and elsewhere else {})


@dataclass(eq=False, slots=True)
class Wish:
    """A hint on its way; the prefetcher's, not to be changed by others."""

    hint: Hint
    is_sent: bool = False
    is_withdrawn: bool = False


class Prefetcher:
    """Sends hints in the background; when too many wait, new ones are dropped."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._waiting: dict[str, list[Wish]] = {}
        self._count = 0
        self._agents: asyncio.Queue[str] = asyncio.Queue()
        self._scheduled: set[str] = set()

    def send(self, hint: Hint | None) -> Wish | None:
        """Send soon. Never waits. What is returned belongs to `release`; `None` where nothing will be sent."""
        if hint is None or self._count >= HINTS_WAITING_MAX:
            return None
        wish = Wish(hint)
        self._add(wish)
        return wish

    def release(self, wish: Wish | None, is_used: bool) -> None:
        """The request doesn't wait any more. What wasn't sent by now won't be; what was is taken back unless used."""
        if wish is None:
            return
        if not wish.is_sent:
            self._remove(wish)
        elif not is_used and not wish.is_withdrawn and self._count < HINTS_WAITING_MAX:
            wish.is_withdrawn = True
            self._add(wish)

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SENDERS):
                tasks.create_task(self._send_for_ever())

    def _add(self, wish: Wish) -> None:
        agent = wish.hint.agent_url
        self._waiting.setdefault(agent, []).append(wish)
        self._count += 1
        self._schedule(agent)

    def _remove(self, wish: Wish) -> None:
        waiting = self._waiting.get(wish.hint.agent_url, [])
        if wish in waiting:
            waiting.remove(wish)
            self._count -= 1

    def _schedule(self, agent: str) -> None:
        if agent not in self._scheduled:
            self._scheduled.add(agent)
            self._agents.put_nowait(agent)

    async def _send_for_ever(self) -> None:
        while True:
            agent = await self._agents.get()
            batch = self._take(agent)
            try:
                if batch:
                    await self._say(agent, batch)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # an agent's URL may be none
                logger.debug("a prefetch hint was lost: %r", error)
            self._scheduled.discard(agent)
            if self._waiting.get(agent):
                self._schedule(agent)
            else:
                self._waiting.pop(agent, None)

    def _take(self, agent: str) -> list[Wish]:
        """The oldest of what waits for an agent that says the same: as much as it takes at once."""
        waiting = self._waiting.get(agent, [])
        batch: list[Wish] = []
        size, peers = 0, set[str]()
        for wish in waiting:
            size, peers = size + wish.hint.size, peers | wish.hint.peers.keys()
            is_other = batch and wish.is_withdrawn is not batch[0].is_withdrawn
            if is_other or size > BODY_KEYS_MAX or len(peers) > BODY_PEERS_MAX:
                break
            batch.append(wish)
        del waiting[: len(batch)]
        self._count -= len(batch)
        for wish in batch:
            wish.is_sent = True
        return batch

    async def _say(self, agent: str, batch: Sequence[Wish]) -> None:
        method = "DELETE" if batch[0].is_withdrawn else "POST"
        keys = [key.hex() for wish in batch for key in wish.hint.keys]
        peers = _peer_rows(wish.hint for wish in batch)
        status = await self._ask(method, agent, {"keys": keys, "peers": peers} if peers else {"keys": keys})
        if peers and keys and status in REFUSED:
            await self._ask(method, agent, {"keys": keys})

    async def _ask(self, method: str, agent: str, body: Mapping[str, Any]) -> int:
        answer = await self._client.request(method, f"{agent}/prefetch", json=body, timeout=TIMEOUT_S)
        return answer.status_code


def _peer_rows(hints: Iterable[Hint]) -> list[dict[str, Any]]:
    rows: dict[str, list[str]] = {}
    for hint in hints:
        for address, keys in hint.peers.items():
            rows.setdefault(address, []).extend(key.hex() for key in keys)
    return [{"address": address, "keys": keys} for address, keys in rows.items()]
