"""What another host can add to an engine's match: found in the lookup, measured rates only, and hinted at."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import httpx
import pytest

from directory.chunks import pack_tokens
from directory.identity import UNSCOPED
from directory.interface import Batch
from directory.members import HostRegistration, Load, draw_incarnation
from directory.memory import MemoryDirectory
from directory.placements import Reach, partition_of
from directory.tiers import Tier
from gateway.dispatcher import PEER_FIXED_S, PROBE_CHUNKS, PROBE_INTERVAL_S, Dispatcher
from gateway.encoding.encoder import Encoding
from gateway.fleet import EngineView, Fleet
from gateway.health import HealthCheck
from gateway.ledger import Ledger
from gateway.lookup import PEER_HOSTS_MAX, ChunkLookup, Holders, chain_chunks, group_by_naming
from gateway.metrics import GatewayMetrics
from gateway.prefetch import Hint, Prefetcher, Wish
from gateway.prefill_watch import PrefillWatch
from gateway.preparation import Prepared
from gateway.prompts import EncodedPrompt
from gateway.rates import ObservedRates
from gateway.routing.assumed import AssumedPlacements
from gateway.routing.overlay import Overlay
from gateway.routing.query import Candidate, PeerExtension, RoutingDecision, RoutingQuery, Score
from gateway.sent_prompts import SentPrompts
from gateway.shared_load import EngineLoads
from tests.gateway.samples import engine_registration
from tests.gateway.views import view

TOKENS = pack_tokens(range(41))
CHUNKS = 10


def on_host(engine: str, peer_address: str | None, rates: Mapping[str, float] | None = None) -> EngineView:
    reach = Reach(engine, frozenset({draw_incarnation()}), frozenset({draw_incarnation()}))
    return replace(
        view(engine),
        reach=reach,
        agent_url=f"http://agent-{engine}:1",
        peer_address=peer_address,
        peer_bytes_per_s=rates or {},
    )


async def holders_of(views: Sequence[EngineView], held: Mapping[str, tuple[Tier, int]]) -> Holders:
    """What a lookup finds where engines, or their hosts, hold so many of the prompt's leading chunks."""
    directory = MemoryDirectory(lambda: 0.0)
    chains = chain_chunks(group_by_naming(views), TOKENS, UNSCOPED)
    (keys,) = (chain.keys for chain in chains)
    assert len(keys) == CHUNKS
    for each in views:
        tier, chunks = held.get(each.engine, (Tier.GPU, 0))
        (life,) = each.reach.own if tier is Tier.GPU else each.reach.host
        for number, key in enumerate(keys[:chunks]):
            await directory.place(Batch(life, partition_of(key), number, ((key, int(tier)),), 60.0))
    return await ChunkLookup(directory, lambda: 0.0).find(chains, 0.05)


class FirstCandidate:
    """A policy that sends everything to the first candidate and counts on all that is promised."""

    def __init__(self) -> None:
        self.candidates: dict[str, Candidate] = {}

    def route(self, query: RoutingQuery) -> RoutingDecision:
        self.candidates = {each.engine: each for each in query.candidates}
        scores = [
            Score(each.engine, 1, 0, 0, 1, 4 * max(each.match.chunks, each.peer.chunks if each.peer else 0))
            for each in query.candidates
        ]
        return RoutingDecision(tuple(scores), "test")


class Hints(Prefetcher):
    """Hints that would be sent."""

    def __init__(self) -> None:
        super().__init__(httpx.AsyncClient(trust_env=False))
        self.sent: list[Hint | None] = []

    def send(self, hint: Hint | None) -> Wish | None:
        self.sent.append(hint)
        return None


class Stand:
    """A dispatcher of which policy, hints and time are a test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.policy, self.hints, ledger = FirstCandidate(), Hints(), Ledger(self.clock)
        loads, sent = EngineLoads(ledger, self.clock), SentPrompts(Overlay(), AssumedPlacements(0.0), self.clock)
        metrics = GatewayMetrics()
        watch = PrefillWatch(ObservedRates(self.clock), metrics)
        self.dispatcher = Dispatcher(self.policy, ledger, loads, sent, watch, self.hints, metrics, self.clock)

    def clock(self) -> float:
        return self.now

    def send(self, holders: Holders, views: Sequence[EngineView]) -> Hint | None:
        """Send a prompt to the first of the views; the hint that its agent is given."""
        prepared = Prepared(EncodedPrompt(Encoding(TOKENS, 41)), b"a", holders)
        decision = self.dispatcher.decide(prepared, views)
        self.dispatcher.send_off(prepared, decision, views[0], is_streamed=True).release()
        return self.hints.sent[-1]


async def test_a_candidates_match_is_lengthened_by_the_host_that_has_most_at_its_measured_rate() -> None:
    rates = {"b:1": 1e9, "c:1": 2e9, "d:1": 9e9}
    views = [on_host("a", "a:1", rates), on_host("b", "b:1"), on_host("c", "c:1"), on_host("d", "d:1", {"c:1": 5e8})]
    found = {"a": (Tier.DRAM, 2), "b": (Tier.NVME, 8), "c": (Tier.DRAM, 8), "d": (Tier.DRAM, 5)}
    holders = await holders_of(views, found)
    stand = Stand()
    hint = stand.send(holders, views)
    peers = {engine: each.peer for engine, each in stand.policy.candidates.items()}
    assert peers["a"] == PeerExtension("c:1", 8, 2e9, PEER_FIXED_S), "of equally long ones the fastest"
    assert peers["d"] == PeerExtension("c:1", 8, 5e8, PEER_FIXED_S)
    assert peers["b"] is None, "nothing was measured"
    keys = holders.keys["a"]
    assert hint == Hint("http://agent-a:1", (), {"c:1": keys[2:8]})


@pytest.mark.parametrize(
    ("views", "held"),
    [
        ([on_host("a", None, {"b:1": 1e9}), on_host("b", None)], {"b": (Tier.DRAM, 8)}),
        ([on_host("a", "a:1", {"b:1": 1e9}), on_host("b", "b:1")], {"b": (Tier.GPU, 8)}),
        ([on_host("a", "a:1", {"a:1": 1e9}), on_host("b", None)], {"a": (Tier.DRAM, 8)}),
        ([on_host("a", "a:1", {"b:1": 1e9}), on_host("b", "b:1")], {"a": (Tier.GPU, 8), "b": (Tier.DRAM, 7)}),
        ([on_host("a", "a:1", {"b:1": 1e9}), on_host("b", "b:1")], {}),
    ],
    ids=["it gives nothing", "in GPU memory", "the host itself", "no more than the engine has", "nobody has anything"],
)
async def test_nothing_is_added_where_no_other_host_can(
    views: Sequence[EngineView], held: Mapping[str, tuple[Tier, int]]
) -> None:
    stand = Stand()
    assert stand.send(await holders_of(views, held), views) is None
    assert stand.policy.candidates["a"].peer is None


async def test_a_host_that_was_never_measured_is_probed_with_a_few_chunks_now_and_then() -> None:
    views = [on_host("a", "a:1"), on_host("b", "b:1")]
    holders = await holders_of(views, {"a": (Tier.DRAM, 1), "b": (Tier.DRAM, 8)})
    stand = Stand()
    probe = Hint("http://agent-a:1", (), {"b:1": holders.keys["a"][1 : 1 + PROBE_CHUNKS]})
    assert stand.send(holders, views) == probe
    assert stand.policy.candidates["a"].peer is None, "nothing is counted on"
    stand.now = PROBE_INTERVAL_S - 1
    assert stand.send(holders, views) is None
    stand.now = PROBE_INTERVAL_S
    assert stand.send(holders, views) == probe


async def test_a_bounded_number_of_hosts_is_looked_at() -> None:
    views = [on_host(f"e{number:03}", f"h{number:03}:1") for number in range(PEER_HOSTS_MAX + 2)]
    holders = await holders_of(views, {each.engine: (Tier.DRAM, 3) for each in views[1:]})
    assert len(holders.peers["e000"]) == PEER_HOSTS_MAX - 1


async def test_the_fleet_tells_where_hosts_give_chunks_and_what_they_measured() -> None:
    directory = MemoryDirectory(lambda: 0.0)
    host = HostRegistration("h", "http://agent:1", "h:8301")
    await directory.register(draw_incarnation(), host, Load(peer_bytes_per_s={"other:8301": 1e9}), 60.0)
    await directory.register(draw_incarnation(), engine_registration("a"), Load(), 60.0)
    async with httpx.AsyncClient(trust_env=False) as client:
        fleet = Fleet(directory, HealthCheck(client), lambda: 0.0)
        await fleet.refresh()
    found = fleet.table.engines["a"]
    assert (found.peer_address, found.peer_bytes_per_s) == ("h:8301", {"other:8301": 1e9})
