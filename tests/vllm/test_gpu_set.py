"""What the directory says of an engine's GPU, under pressure and after everything that empties it behind our back.

The truth is counted here anew, from the engine's own replay and nothing else: plain sets, plain loops.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import msgspec
import pytest
import redis
import zmq

from directory.chunks import DIRECTORY_KEY_BYTES, chunk_keys, directory_key, pack_tokens
from directory.members import EngineRegistration
from directory.placements import unpack_holders
from directory.redis_directory import RedisDirectory
from directory.tiers import Tier
from tests.directory.stands import running_valkey
from tests.vllm.engines import RunningEngine, running_engines
from tests.vllm.fleet import BLOCK_TOKENS, CHUNK_TOKENS, MODEL, AgentProcess
from tests.warmroute.fleets import until

pytestmark = pytest.mark.timeout(900)
GPU_BLOCKS = 70
BUFFER_BATCHES = 40
REQUESTS = 500


@dataclass(frozen=True)
class Host:
    agent: AgentProcess
    engine: RunningEngine
    redis_url: str

    def claimed(self) -> set[bytes]:
        """The directory keys that the engine's living incarnations hold in `gpu`, by the records themselves."""
        lives = {bytes.fromhex(each) for each in self.agent.engine("one")["incarnations"]}
        with redis.Redis.from_url(self.redis_url) as server:
            named = {key.split(b":", 3)[-1]: key for key in server.scan_iter(count=1_000)}
            records = {key: server.get(name) for key, name in named.items() if len(key) == DIRECTORY_KEY_BYTES}
        return {
            key
            for key, record in records.items()
            if any(life in lives and mask & Tier.GPU for life, mask in unpack_holders(record or b""))
        }

    def digest(self) -> bytes:
        async def read() -> bytes:
            directory = RedisDirectory.connect(self.redis_url)
            try:
                members = await directory.members()
            finally:
                await directory.aclose()
            registrations = [each.registration for each in members]
            return next(each.identity.fleet_digest() for each in registrations if isinstance(each, EngineRegistration))

        return asyncio.run(read())


class Truth:
    """What the engine's GPU holds, from its batches, all of which must be in its replay buffer."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.copies: Counter[bytes] = Counter()
        self.prompts: dict[bytes, tuple[bytes, ...]] = {}
        self.tokens: dict[bytes, list[int]] = {}

    def take(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                self.copies.clear()
            elif event.get("medium") == "GPU" and event["type"] == "BlockRemoved":
                self.copies.subtract(event["block_hashes"])
            elif event.get("medium") == "GPU":
                parent = event["parent_block_hash"]
                for index, name in enumerate(event["block_hashes"]):
                    self.tokens[name] = event["token_ids"][index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                    self.prompts[name] = (*(self.prompts[parent] if parent is not None else ()), name)
                    self.copies[name] += 1
                    parent = name

    def chunks(self) -> set[bytes]:
        held = set()
        per_chunk = CHUNK_TOKENS // BLOCK_TOKENS
        for prompt in self.prompts.values():
            if len(prompt) % per_chunk == 0 and all(self.copies[block] > 0 for block in prompt[-per_chunk:]):
                tokens = pack_tokens(token for block in prompt for token in self.tokens[block])
                held.add(directory_key(chunk_keys(self.digest, tokens, CHUNK_TOKENS)[-1]))
        return held


class Recorder:
    """Records an engine's batches from their first, by asking for replays often enough."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.next = 0

    def new(self) -> list[bytes]:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._endpoint)
            socket.send_multipart([b"", self.next.to_bytes(8, "big")])
            payloads = []
            while True:
                assert socket.poll(10_000), "the engine answers"
                *_, sequence, payload = socket.recv_multipart()
                if sequence == b"\xff" * 8:
                    return payloads
                assert int.from_bytes(sequence, "big") == self.next, "no batch is missing"
                self.next += 1
                payloads.append(payload)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("v")
    flags = ("--num-gpu-blocks-override", str(GPU_BLOCKS), "--max-model-len", "1024")
    with running_valkey() as server:
        agent = AgentProcess("h1", folder, server.connection_url, dram_gb=0.03, nvme_gb=0.03)
        try:
            doors = {"one": agent.door}
            with running_engines(folder, doors, flags=flags, events={"buffer_steps": BUFFER_BATCHES}) as engines:
                until(lambda: agent.is_attached("one"), 60, "the engine is attached")
                yield Host(agent, engines["one"], server.connection_url)
        finally:
            agent.end()


def tokens_of(choose: random.Random) -> list[int]:
    """A prompt from a small tree: common openings, then turns, so that blocks are shared, evicted and stored again."""
    tokens: list[int] = []
    for depth in range(choose.randrange(1, 4)):
        branch = choose.randrange(3)
        tokens += [100 + 1_000 * depth + 50 * branch + number % 40 for number in range(choose.choice((96, 160, 256)))]
    return tokens[: 900 + choose.randrange(60)]


def complete(engine: RunningEngine, tokens: list[int]) -> None:
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text


def test_under_pressure_the_gpu_set_is_the_engines_and_a_reset_or_restart_leaves_nothing_stale(host: Host) -> None:
    truth, recorder = Truth(host.digest()), Recorder(host.engine.launch.replay_endpoint)

    def count() -> None:
        for payload in recorder.new():
            truth.take(payload)

    def agrees() -> bool:
        # An engine publishes with its next step, which may come after its answer.
        count()
        return host.claimed() == truth.chunks()

    def settle() -> set[bytes]:
        with contextlib.suppress(AssertionError):
            until(agrees, 30, "the directory says what the engine holds")
        claimed, held = host.claimed(), truth.chunks()
        assert claimed == held, f"{len(claimed - held)} stale, {len(held - claimed)} unclaimed of {len(held)}"
        return held

    choose = random.Random(5)
    for number in range(REQUESTS):
        complete(host.engine, tokens_of(choose))
        if number % 10 == 9:
            count()
    assert settle()
    assert sum(truth.copies.values()) <= GPU_BLOCKS
    assert len(truth.prompts) > GPU_BLOCKS, "blocks were evicted"

    # A reset through the agent is known at once, though the engine is idle.
    answer = httpx.post(f"{host.agent.url}/engines/one/reset_prefix_cache", timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    until(lambda: host.claimed() == set(), 30, "nothing is claimed after a reset")
    complete(host.engine, tokens_of(choose))
    settle()

    # An agent that was away for longer than the engine's replay reaches claims nothing that it can't know.
    for _ in range(10):
        complete(host.engine, tokens_of(choose))
    settle()
    host.agent.kill()
    for _ in range(2 * BUFFER_BATCHES):
        complete(host.engine, tokens_of(choose))
        count()
    host.agent.start()
    until(lambda: host.agent.is_attached("one"), 60, "the engine is attached again")
    until(lambda: host.agent.metric("warmroute_degraded_total") >= 1, 30, "the gap is counted")
    for number in range(40):
        complete(host.engine, tokens_of(choose))
        if number % 10 == 9:
            count()
    until(lambda: not host.agent.engine("one")["pending_keys"], 30, "all is announced")
    count()
    assert host.claimed() <= truth.chunks(), "under-reported, never over-reported"

    # Another life of the engine begins empty.
    host.engine.kill()
    until(lambda: host.agent.engine("one") == {}, 30, "the killed engine is detached")
    host.engine.start()
    until(lambda: host.agent.is_attached("one"), 60, "the engine is attached again")
    assert host.claimed() == set()
    truth, recorder.next = Truth(host.digest()), 0
    complete(host.engine, tokens_of(choose))
    settle()
