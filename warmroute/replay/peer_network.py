"""PeerNetwork: blocks that nodes fetch from each other's DRAM and NVMe, as agents follow a gateway's hint.

A hint is judged by the agent's own rule (`nodeagent.peers.worth`). A node takes one block after the other from all its
peers, at the rate of the network; each is in its DRAM when it has come. No request waits for a fetch: what isn't there
when its prompt begins is computed, and lands all the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from directory.placements import NO_MATCH, PrefixMatch
from gateway.routing.query import PeerExtension
from nodeagent.peers.worth import Computing, PeerEstimate, judge
from warmroute.replay.hardware import FleetPlan
from warmroute.replay.trace import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block that will have come to a node: the one at `position` of a prompt's chain, at this moment."""

    position: int
    at: float


class PeerNetwork:
    """The links of all nodes. Rates are known: they have been measured before the replay begins."""

    def __init__(self, plan: FleetPlan) -> None:
        self._plan = plan
        self._block_bytes = BLOCK_TOKENS * plan.model.shape.kv_bytes_per_token
        self._free_at = [0.0] * plan.nodes
        self._engines = (Computing(plan.model.shape, plan.model.rates, BLOCK_TOKENS),)

    def extensions(self, engines: Sequence[str], hosts: Mapping[str, PrefixMatch]) -> dict[str, PeerExtension]:
        """For each engine the other host that holds most of a prompt; `hosts` says how much, by engine."""
        longest = sorted(hosts, key=lambda each: (-hosts[each].chunks, each))[:2]
        found = {}
        for engine in engines:
            best = next((each for each in longest if each != engine), None)
            if best is not None and hosts[best].chunks > hosts.get(engine, NO_MATCH).chunks:
                found[engine] = PeerExtension(best, hosts[best].chunks, self._plan.peer_bytes_per_s, self._plan.peer_s)
        return found

    def fetch(self, node: int, positions: Sequence[int], now: float) -> list[Arrival]:
        """When each of these blocks of a chain will have come to `node`, as far as fetching them pays."""
        free_at, block_s = max(now, self._free_at[node]), self._block_bytes / self._plan.peer_bytes_per_s
        queued = round((free_at - now) / block_s)
        rate = PeerEstimate(self._plan.peer_bytes_per_s, self._plan.peer_s, probed_at_s=now)
        verdict = judge(len(positions), queued, self._block_bytes, rate, self._engines, now)
        begun_at = free_at + self._plan.peer_s
        arrivals = [Arrival(each, begun_at + number * block_s) for number, each in enumerate(positions, 1)]
        arrivals = arrivals[: verdict.chunks]
        if arrivals:
            self._free_at[node] = arrivals[-1].at
        return arrivals
