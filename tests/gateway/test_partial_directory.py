"""A part of the directory that doesn't answer: the rest is used, runs go on over what is unknown, and it is said."""

import time
from collections.abc import Sequence

import httpx

from directory.interface import Lookup
from directory.memory import MemoryDirectory
from directory.placements import partition_of
from directory.tiers import Tier
from gateway.config import RoutingConfig
from gateway.openai_schema import COMPLETIONS
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

TEXT = "a long shared prefix " * 20
CHUNK_TOKENS = 4


class PartialDirectory(MemoryDirectory):
    """Partitions in `silent` don't answer."""

    silent: frozenset[int] = frozenset()

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> Lookup:
        found = await super().lookup(keys, deadline_s)
        pairs = zip(keys, found.records, strict=True)
        return Lookup(tuple(None if partition_of(key) in self.silent else record for key, record in pairs))


async def test_a_prefix_is_followed_over_silent_partitions_and_that_is_counted() -> None:
    directory = PartialDirectory(time.monotonic)
    async with (
        MockEngine("a") as a,
        MockEngine("b") as b,
        gateway_for([a, b], writer=directory, reader=directory, routing=RoutingConfig(on_its_way_s=0)) as gateway,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        await gateway.hold(TEXT, "host-b", Tier.DRAM)

        async def matched(silent: Sequence[int]) -> tuple[str, int, float]:
            directory.silent = frozenset(silent)
            answer = await client.post(
                gateway.url + COMPLETIONS,
                json={"model": MODEL, "prompt": TEXT + "?"},
                headers={"x-warmroute-explain": "1"},
            )
            said, degraded = answer.headers, gateway.count("warmroute_degraded_total", reason="partial_directory")
            return said["x-warmroute-engine"], int(said["x-warmroute-matched-tokens"]), degraded

        whole = len(TEXT) // CHUNK_TOKENS * CHUNK_TOKENS
        assert await matched([]) == ("b", whole, 0)
        for number in range(1, 4):
            engine, tokens, degraded = await matched(range(number))
            assert (engine, degraded) == ("b", number)
            assert whole / 2 < tokens <= whole
        engine, tokens, degraded = await matched(range(16))
        assert (tokens, degraded) == (0, 4), "nothing is known: nothing is made up"
