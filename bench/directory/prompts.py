"""Prompts whose chunks are held by a fleet: what is loaded, what is looked up, and what must come of it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.members import INCARNATION_BYTES
from directory.placements import Reach, pack_holders
from directory.tiers import Tier

HOST_MASKS = (int(Tier.DRAM), int(Tier.NVME), int(Tier.DRAM) | int(Tier.NVME))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of equally many chunks, each chunk held by every incarnation of the fleet.

    `keys` are each prompt's directory keys, `records` theirs in the same order, all of one length; `reaches` are the
    fleet's engines. So each engine's matched prefix is the whole prompt.
    """

    keys: tuple[tuple[bytes, ...], ...]
    records: tuple[tuple[bytes, ...], ...]
    reaches: tuple[Reach, ...]


def prompts_of(chance: random.Random, prompts: int, chunks: int, holders: int, varied: bool) -> Prompts:
    """`holders` incarnations: pairs of an engine and its host, or one engine alone.

    `varied`: the holders of each chunk stand in an order of their own with tiers of their own, as when writers announce
    at the same time; else all records of a prompt have equal bytes, as when one after the other announces it.
    """
    engines = [chance.randbytes(INCARNATION_BYTES) for _ in range((holders + 1) // 2)]
    hosts = [chance.randbytes(INCARNATION_BYTES) for _ in range(holders // 2)]
    reaches = [
        Reach(f"engine-{place}", frozenset({engine}), frozenset(hosts[place : place + 1]))
        for place, engine in enumerate(engines)
    ]
    keys, records = [], []
    for _ in range(prompts):
        keys.append(random_keys(chance, chunks))
        record = _record(chance, engines, hosts)
        records.append(tuple(_record(chance, engines, hosts) if varied else record for _ in range(chunks)))
    return Prompts(tuple(keys), tuple(records), tuple(reaches))


def random_keys(chance: random.Random, count: int) -> tuple[bytes, ...]:
    """As evenly spread as digests are."""
    packed = chance.randbytes(DIRECTORY_KEY_BYTES * count)
    return tuple(packed[start : start + DIRECTORY_KEY_BYTES] for start in range(0, len(packed), DIRECTORY_KEY_BYTES))


def _record(chance: random.Random, engines: Sequence[bytes], hosts: Sequence[bytes]) -> bytes:
    holders = [(engine, int(Tier.GPU)) for engine in engines] + [(host, chance.choice(HOST_MASKS)) for host in hosts]
    chance.shuffle(holders)
    return pack_holders(holders)
