"""Stands for the agents: registers the engines in a real directory, keeps them registered, and says what they hold."""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench.fleet.words import tokenizer_files
from bench.gateway.engine import CONTEXT_TOKENS, MODEL
from bench.gateway.prompts import Conversation
from directory.chunks import CHUNK_TOKENS_DEFAULT, chunk_keys, directory_key, pack_tokens
from directory.costs import ModelShape, Rates
from directory.identity import Identity
from directory.interface import Batch
from directory.members import (
    RENEW_INTERVAL_S,
    EngineRegistration,
    HostRegistration,
    Load,
    Registration,
    draw_incarnation,
)
from directory.placements import partition_of
from directory.redis_directory import RedisDirectory
from directory.tiers import Tier

HOST = "bench-host"
IDENTITY = Identity(MODEL, "bench", "bench", "bf16", "bench")
SHAPE = ModelShape(parameters=8e9, layers=32, d_model=4096, kv_bytes_per_token=131_072)
RATES = Rates(flops=4e14, bytes_per_s={Tier.DRAM: 2e10})
KEPT_S = 3600.0


def lay_down_files(folder: Path) -> dict[str, str]:
    """The tokenizer's files in a gateway's folder, as if an agent had been asked for them; digests by name."""
    folder.mkdir(parents=True, exist_ok=True)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer_files().items()}
    for name, content in tokenizer_files().items():
        (folder / digests[name]).write_bytes(content)
    return digests


class Announcer:
    """The writers' side of the fleet."""

    def __init__(self, directory: RedisDirectory, urls: Sequence[str], digests: dict[str, str]) -> None:
        self._directory = directory
        host_load, engine_load = Load(tier_bytes_limit={Tier.DRAM: 10**9}), Load(rates=RATES)
        self._rows: list[tuple[bytes, Registration, Load]] = [
            (draw_incarnation(), HostRegistration(HOST, "http://127.0.0.1:1"), host_load)
        ]
        for number, url in enumerate(urls):
            registration = EngineRegistration(
                engine=f"engine-{number}",
                host=HOST,
                url=url,
                models=(MODEL,),
                identity=IDENTITY,
                shape=SHAPE,
                chunk_tokens=CHUNK_TOKENS_DEFAULT,
                context_tokens=CONTEXT_TOKENS,
                renderer="vllm",
                tokenizer_files=digests,
            )
            self._rows.append((draw_incarnation(), registration, engine_load))
        self._attempts: Counter[tuple[int, bytes]] = Counter()

    @contextlib.asynccontextmanager
    async def registered(self) -> AsyncIterator[None]:
        """All are registered, and stay so, inside this block."""
        for life, registration, load in self._rows:
            await self._directory.register(life, registration, load)
        renewing = asyncio.create_task(self._renew_for_ever())
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})

    async def hold(self, conversations: Sequence[Conversation]) -> None:
        """Each conversation's chunks are held by one engine, in turn."""
        engines = self._rows[1:]
        for number, conversation in enumerate(conversations):
            life = engines[number % len(engines)][0]
            for key in chunk_keys(IDENTITY.fleet_digest(), pack_tokens(conversation.known_ids)):
                name = directory_key(key)
                place = partition_of(name), life
                self._attempts[place] += 1
                batch = Batch(life, place[0], self._attempts[place], ((name, int(Tier.GPU)),), KEPT_S)
                await self._directory.place(batch)

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_INTERVAL_S)
            for life, _, load in self._rows:
                await self._directory.renew(life, load)
