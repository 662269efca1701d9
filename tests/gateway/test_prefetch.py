"""Prefetch hints: what is asked of an agent, and that nothing depends on it."""

import asyncio

import httpx
import orjson
import pytest

from directory.placements import PrefixMatch
from directory.tiers import Tier
from gateway.lookup import Holders
from gateway.prefetch import HINTS_WAITING_MAX, Hint, Prefetcher, hint_for
from gateway.routing.query import Score

AGENT = "http://agent:1"
KEYS = tuple(bytes([number]) * 16 for number in range(5))


def score(chunks: int, **tiers: int) -> Score:
    return Score("e", 1.0, 0.0, 0.0, 1.0, chunks * 4, {Tier[name.upper()]: tokens for name, tokens in tiers.items()})


@pytest.mark.parametrize(
    ("tiers", "chunks", "wanted"),
    [
        ((Tier.GPU, Tier.NVME, Tier.DRAM, Tier.NVME, Tier.NVME), 5, (1, 3, 4)),
        ((Tier.GPU, Tier.NVME, Tier.DRAM, Tier.NVME, Tier.NVME), 2, (1,)),
        ((Tier.NVME, None, Tier.NVME), 3, (0, 2)),
    ],
    ids=["all", "the cut", "unknown ones"],
)
def test_only_chunks_that_will_be_loaded_and_lie_in_nvme_are_asked_for(
    tiers: tuple[Tier | None, ...], chunks: int, wanted: tuple[int, ...]
) -> None:
    holders = Holders({"e": PrefixMatch(tiers)}, {"e": KEYS})
    hint = hint_for(AGENT, holders, score(chunks, nvme=4), 4)
    assert hint == Hint(AGENT, tuple(KEYS[number] for number in wanted))


def test_nothing_in_nvme_asks_for_nothing() -> None:
    holders = Holders({"e": PrefixMatch((Tier.DRAM,))}, {"e": KEYS})
    assert hint_for(AGENT, holders, score(1, dram=4), 4) is None
    assert hint_for(AGENT, Holders(), score(0), 4) is None


async def test_hints_are_sent_in_the_background_and_survive_an_agent_that_fails() -> None:
    asked: list[list[str]] = []
    done = asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "dead":
            raise httpx.ConnectError("refused")
        asked.append(orjson.loads(request.content)["keys"])
        done.set()
        return httpx.Response(202)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        prefetcher = Prefetcher(client)
        for _ in range(HINTS_WAITING_MAX):
            prefetcher.send(Hint("http://dead:1", KEYS))
        prefetcher.send(Hint(AGENT, KEYS))  # one too many: dropped
        running = asyncio.create_task(prefetcher.run())
        while not done.is_set():
            prefetcher.send(Hint(AGENT, KEYS[:1]))
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
    assert asked[0] == [KEYS[0].hex()]
