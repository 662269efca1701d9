"""Prefetch hints: what is asked of an agent, what is taken back, and that nothing depends on it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import orjson
import pytest

from directory.placements import PrefixMatch
from directory.tiers import Tier
from gateway.prefetch import BODY_KEYS_MAX, HINTS_WAITING_MAX, Hint, Prefetcher, hint_for
from gateway.routing.query import PeerExtension, Score
from tests.gateway.assembly import eventually

AGENT = "http://agent:1"
PEER = PeerExtension("other:8301", 5, 1e9)
KEYS = tuple(bytes([number]) * 16 for number in range(5))
TEXTS = [key.hex() for key in KEYS]


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
    hint = hint_for(AGENT, KEYS, PrefixMatch(tiers), score(chunks, nvme=4), 4)
    assert hint == Hint(AGENT, tuple(KEYS[number] for number in wanted))


def test_nothing_in_nvme_asks_for_nothing() -> None:
    held = PrefixMatch((Tier.DRAM,))
    assert hint_for(AGENT, KEYS, held, score(1, dram=4), 4) is None
    assert hint_for(AGENT, (), PrefixMatch(), score(0), 4) is None
    assert hint_for("", KEYS, PrefixMatch((Tier.NVME,)), score(1, nvme=4), 4) is None, "an engine without an agent"


@pytest.mark.parametrize(
    ("chunks", "own", "of_peer"),
    [(5, (1,), (2, 3, 4)), (3, (1,), (2,)), (2, (1,), ()), (1, (), ())],
    ids=["all", "a part of what the peer has", "the own ones", "neither"],
)
def test_of_a_peer_only_what_was_counted_on_beyond_the_own_match_is_asked_for(
    chunks: int, own: tuple[int, ...], of_peer: tuple[int, ...]
) -> None:
    hint = hint_for(AGENT, KEYS, PrefixMatch((Tier.DRAM, Tier.NVME)), score(chunks), 4, PEER)
    if not own:
        assert hint is None
        return
    elsewhere = {PEER.address: tuple(KEYS[number] for number in of_peer)} if of_peer else {}
    assert hint == Hint(AGENT, tuple(KEYS[number] for number in own), elsewhere)


class Agents:
    """What agents were asked, in order. Those in `refusing` don't know of peers, `gate` holds answers back."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, object]]] = []
        self.refusing: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == "dead":
            raise httpx.ConnectError("refused")
        body = orjson.loads(request.content)
        self.asked.append((request.method, request.url.host, body))
        await self.gate.wait()
        return httpx.Response(422 if request.url.host in self.refusing and "peers" in body else 202)


@asynccontextmanager
async def prefetching(agents: Callable[..., object]) -> AsyncIterator[Prefetcher]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(agents)) as client:  # type: ignore[arg-type]
        prefetcher = Prefetcher(client)
        running = asyncio.create_task(prefetcher.run())
        try:
            yield prefetcher
        finally:
            running.cancel()
            await asyncio.wait({running})


async def test_hints_are_sent_in_the_background_and_survive_an_agent_that_fails() -> None:
    agents = Agents()
    async with prefetching(agents) as prefetcher:
        for _ in range(HINTS_WAITING_MAX):
            prefetcher.send(Hint("http://dead:1", KEYS))
        assert prefetcher.send(Hint(AGENT, KEYS)) is None, "one too many: dropped"
        await eventually(lambda: prefetcher.send(Hint(AGENT, KEYS[:1])) is not None)
        await eventually(lambda: agents.asked)
    assert agents.asked[0] == ("POST", "agent", {"keys": TEXTS[:1]})


async def test_what_waits_for_an_agent_meanwhile_is_sent_together() -> None:
    agents = Agents()
    agents.gate.clear()
    async with prefetching(agents) as prefetcher:
        prefetcher.send(Hint(AGENT, KEYS[:1]))
        await eventually(lambda: agents.asked)
        prefetcher.send(Hint(AGENT, KEYS[1:3], {"p:1": KEYS[3:4]}))
        prefetcher.send(Hint(AGENT, KEYS[3:4], {"p:1": KEYS[4:]}))
        prefetcher.send(Hint("http://another:1", KEYS[:1]))
        await eventually(lambda: len(agents.asked) == 2)
        agents.gate.set()
        await eventually(lambda: len(agents.asked) == 3)
    body = {"keys": TEXTS[1:4], "peers": [{"address": "p:1", "keys": TEXTS[3:]}]}
    assert agents.asked[1:] == [("POST", "another", {"keys": TEXTS[:1]}), ("POST", "agent", body)]


async def test_no_more_is_sent_at_once_than_an_agent_takes() -> None:
    agents = Agents()
    agents.gate.clear()
    async with prefetching(agents) as prefetcher:
        prefetcher.send(Hint(AGENT, KEYS[:1]))
        await eventually(lambda: agents.asked)
        for _ in range(5):
            prefetcher.send(Hint(AGENT, KEYS[:1] * 1024))
        agents.gate.set()
        await eventually(lambda: len(agents.asked) == 3)
    assert [len(body["keys"]) for _, _, body in agents.asked] == [1, BODY_KEYS_MAX, 1024]  # type: ignore[arg-type]


async def test_a_hint_whose_request_failed_is_taken_back_after_it_was_given() -> None:
    agents = Agents()
    agents.gate.clear()
    async with prefetching(agents) as prefetcher:
        failed, used = (prefetcher.send(Hint(AGENT, KEYS[n : n + 1], {"p:1": KEYS[4:]})) for n in range(2))
        await eventually(lambda: agents.asked)
        never_sent = prefetcher.send(Hint(AGENT, KEYS[2:3]))
        for wish in (failed, failed, never_sent):
            prefetcher.release(wish, is_used=False)
        prefetcher.release(used, is_used=True)
        prefetcher.release(None, is_used=False)
        agents.gate.set()
        await eventually(lambda: len(agents.asked) == 2)
        prefetcher.send(Hint(AGENT, KEYS[3:4]))
        await eventually(lambda: len(agents.asked) == 3)
    assert [(method, body["keys"]) for method, _, body in agents.asked] == [
        ("POST", TEXTS[:2]),
        ("DELETE", TEXTS[:1]),
        ("POST", TEXTS[3:4]),
    ]
    assert agents.asked[1][2]["peers"] == [{"address": "p:1", "keys": TEXTS[4:]}]


async def test_an_agent_that_does_not_know_of_peers_is_asked_for_its_own_chunks() -> None:
    agents = Agents()
    agents.refusing = {"agent"}
    async with prefetching(agents) as prefetcher:
        prefetcher.send(Hint(AGENT, KEYS[:2], {"p:1": KEYS[2:]}))
        await eventually(lambda: len(agents.asked) == 2)
    assert agents.asked[1] == ("POST", "agent", {"keys": TEXTS[:2]})
