"""KV events as vLLM 0.32 publishes them: numbered msgpack batches over ZeroMQ, and a replay of the last ones.

live      PUB     [topic, sequence (u64, big-endian), payload]
replay    ROUTER  asked [identity, "", first sequence]; answers [identity, "", topic, sequence, payload] each, then
                  a sequence of -1
payload           [seconds since 1970, [event, ...], data-parallel rank]
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

TOPIC = b""
"""vLLM's default, and the one that vllm-router takes: from static sources with another it hears nothing."""
REPLAYED_BATCHES_MAX = 10_000
BATCHES_QUEUED_MAX = 100_000
_END = (-1).to_bytes(8, "big", signed=True)

Event = dict[str, object]
BlockHash = int | bytes


def stored_event(
    hashes: Sequence[BlockHash], parent: BlockHash | None, token_ids: Sequence[int], block_size: int
) -> Event:
    """A run of full blocks, each the parent of the next."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(token_ids),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed_event(block_hash: BlockHash) -> Event:
    """One block whose memory is used for another."""
    return {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": "GPU", "group_idx": 0}


class KvEventPublisher:
    """Publishes one engine's events at two endpoints, which it binds."""

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: str, replay_endpoint: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._sequence = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAYED_BATCHES_MAX)
        # Sending never waits: what a subscriber is too slow for is dropped, and it asks for a replay.
        self._live: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER)
        for socket, where in ((self._live, endpoint), (self._replay, replay_endpoint)):
            socket.setsockopt(zmq.SNDHWM, BATCHES_QUEUED_MAX)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(where)

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch, at once."""
        payload = msgspec.msgpack.encode([self._clock(), events, 0])
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._sent.append((number, payload))
        self._live.send_multipart([TOPIC, number, payload], zmq.NOBLOCK)

    async def answer_replays(self) -> None:
        """Until cancelled."""
        while True:
            asker, _, first = await self._replay.recv_multipart()
            for number, payload in list(self._sent):
                if number >= first:
                    await self._replay.send_multipart([asker, b"", TOPIC, number, payload])
            await self._replay.send_multipart([asker, b"", b"", _END, b""])

    def close(self) -> None:
        """Let the sockets go."""
        self._live.close()
        self._replay.close()
