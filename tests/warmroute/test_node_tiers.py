"""A replayed node's tiers: what is where after opens and stores, under the agent's eviction and write policies."""

import random

import pytest

from directory.tiers import Tier
from nodeagent.tiers.write_policy import WRITE_POLICIES
from warmroute.replay.hardware import TierBlocks
from warmroute.replay.node_tiers import NodeTiers
from warmroute.replay.trace import block_key

G, D, N = Tier.GPU, Tier.DRAM, Tier.NVME


def chain(first: int, length: int) -> tuple[bytes, ...]:
    return tuple(block_key(first + number) for number in range(length))


def serve(tiers: NodeTiers, keys: tuple[bytes, ...]) -> list[Tier]:
    """One prompt from its begin to its end; the tiers its hit came from."""
    hit = tiers.match(keys)
    tiers.open(keys[: len(hit)])
    tiers.store(keys, len(keys) - len(hit))
    return hit


def test_what_was_computed_is_in_gpu_and_dram() -> None:
    tiers = NodeTiers(TierBlocks(2, 4, 0))
    serve(tiers, chain(0, 2))
    assert (tiers.size(G), tiers.size(D)) == (2, 2)
    serve(tiers, chain(10, 2))
    assert (tiers.size(G), tiers.size(D)) == (2, 4)
    assert serve(tiers, chain(0, 2)) == [D, D]
    assert tiers.match(chain(0, 2)) == [G, G]


@pytest.mark.parametrize(
    ("write", "after_store", "after_hit", "after_eviction"),
    [("through", 2, 2, 4), ("hit", 0, 2, 2), ("reuse", 0, 2, 2), ("demote", 0, 0, 2)],
)
def test_a_block_is_written_to_nvme_at_its_policy_s_moment(
    write: str, after_store: int, after_hit: int, after_eviction: int
) -> None:
    tiers = NodeTiers(TierBlocks(2, 2, 10), write)
    serve(tiers, chain(0, 2))
    assert tiers.size(N) == after_store
    tiers = NodeTiers(TierBlocks(2, 4, 10), write)
    serve(tiers, chain(0, 2))
    serve(tiers, chain(10, 2))
    serve(tiers, chain(0, 2))
    assert tiers.size(N) == after_hit + (2 if write == "through" else 0)
    tiers = NodeTiers(TierBlocks(2, 2, 10), write)
    serve(tiers, chain(0, 2))
    serve(tiers, chain(10, 2))
    assert tiers.size(N) == after_eviction - (2 if write in ("hit", "reuse") else 0)
    assert tiers.written_blocks == tiers.size(N)


def test_reuse_writes_what_is_stored_again() -> None:
    tiers = NodeTiers(TierBlocks(2, 2, 10), "reuse")
    serve(tiers, chain(0, 2))
    serve(tiers, chain(10, 2))
    assert serve(tiers, chain(0, 2)) == []
    assert tiers.size(N) == 2
    serve(tiers, chain(20, 2))
    assert serve(tiers, chain(0, 2)) == [N, N]


def test_what_is_read_from_nvme_is_in_dram_too_and_stays_on_disk() -> None:
    tiers = NodeTiers(TierBlocks(2, 2, 10), "through")
    serve(tiers, chain(0, 2))
    serve(tiers, chain(10, 2))
    changes = tiers.open(chain(0, 2))
    assert {changes.host[key] for key in chain(0, 2)} == {int(D | N)}
    assert {changes.own[key] for key in chain(0, 2)} == {int(G)}
    assert {changes.host[key] for key in chain(10, 2)} == {int(N)}


def test_without_dram_nothing_reaches_nvme() -> None:
    tiers = NodeTiers(TierBlocks(2, 0, 10), "through")
    serve(tiers, chain(0, 2))
    serve(tiers, chain(10, 2))
    assert tiers.match(chain(0, 2)) == []


def test_a_block_from_another_host_is_in_dram() -> None:
    tiers = NodeTiers(TierBlocks(2, 4, 0))
    assert tiers.receive(chain(0, 3), 0).host == {block_key(0): int(D)}
    tiers.receive(chain(0, 3), 1)
    assert serve(tiers, chain(0, 3)) == [D, D]


@pytest.mark.parametrize("write", WRITE_POLICIES)
def test_no_tier_exceeds_its_limit_and_announcements_tell_what_is_held(write: str) -> None:
    drawn, tiers = random.Random(5), NodeTiers(TierBlocks(6, 10, 14), write)
    told: dict[bytes, int] = {}
    chains = [chain(100 * number, 6) for number in range(8)]
    for _ in range(300):
        keys = drawn.choice(chains)[: drawn.randrange(1, 7)]
        hit = tiers.match(keys)
        for changes in (tiers.open(keys[: len(hit)]), tiers.store(keys, len(keys) - len(hit))):
            for key in changes.own.keys() | changes.host.keys():
                own, host = told.get(key, 0) & G, told.get(key, 0) & (D | N)
                told[key] = changes.own.get(key, own) | changes.host.get(key, host)
    assert (tiers.size(G), tiers.size(D)) == (6, 10)
    assert tiers.size(N) <= 14
    for tier in (G, D, N):
        assert sum(bool(mask & tier) for mask in told.values()) == tiers.size(tier)
    assert {key for keys in chains for key in keys if tiers.match([key])} == {key for key, mask in told.items() if mask}
