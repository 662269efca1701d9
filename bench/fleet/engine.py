"""One simulated engine: the replay's engine model in real time, with vLLM's blocks, KV events and counters.

Between events the model is arithmetic, so what an engine answers is due at exact moments; a late event loop delays when
they are told, not when they were. `lateness` says by how much. Only the `gpu` tier is simulated. A request whose client
leaves runs on to its end.
"""

import asyncio
import hashlib
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.fleet.kv_events import BlockHash, Event, removed_event, stored_event
from bench.fleet.scale import Scale
from directory.tiers import Tier
from warmroute.replay.engine_model import EngineModel, Happened, Job
from warmroute.replay.hardware import FleetPlan
from warmroute.replay.node_tiers import TierChanges
from warmroute.replay.trace import TracedRequest

KEY_BYTES = 16
LATENESS_KEPT_MAX = 100_000


@dataclass(eq=False, slots=True)
class Reply:
    """One answer under way: `pieces` brings how many more tokens there are, and 0 at the end."""

    job: Job
    prompt_tokens: int
    output_tokens: int
    pieces: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    told: int = 0
    from_tokens: float = math.nan
    submitted_at: float = 0.0

    def tell(self, tokens: int) -> None:
        """There are so many tokens by now."""
        tokens = min(tokens, self.output_tokens)
        if tokens > self.told:
            self.pieces.put_nowait(tokens - self.told)
            self.told = tokens


@dataclass(slots=True)
class Counters:
    """What vLLM's `/metrics` counts of requests that have ended: real seconds, and bench tokens."""

    ttft_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0


class SimulatedEngine:
    """`clock` is in real seconds. `publish` takes the events of one step, which name blocks by 64 bits or 32 bytes."""

    def __init__(
        self,
        plan: FleetPlan,
        scale: Scale,
        slowness: float,
        publish: Callable[[Sequence[Event]], None],
        clock: Callable[[], float],
        has_long_hashes: bool = False,
    ) -> None:
        self._model = EngineModel(plan, slowness)
        self._plan, self._scale, self._publish = plan, scale, publish
        self._clock, self._started_at = clock, clock()
        self._has_long_hashes = has_long_hashes
        self._blocks: dict[bytes, tuple[bytes | None, Sequence[int]]] = {}
        self._open: dict[Job, Reply] = {}
        self._wake = asyncio.Event()
        self._submitted = 0
        self.counters = Counters()
        self.lateness_s: deque[float] = deque(maxlen=LATENESS_KEPT_MAX)
        """Real seconds between the moment when something was due and when it was told."""

    @property
    def running(self) -> int:
        """Requests in prefill or decode."""
        return sum(not math.isnan(job.started_at) for job in self._open)

    @property
    def waiting(self) -> int:
        """Requests whose prefill hasn't begun."""
        return len(self._open) - self.running

    @property
    def kv_use(self) -> float:
        """The part of the KV cache that running requests have, 0 to 1."""
        used = sum(job.kv_blocks for job in self._open if not math.isnan(job.started_at))
        return min(1.0, used / self._plan.blocks.gpu)

    def submit(self, token_ids: Sequence[int], output_tokens: int) -> Reply:
        """A request arrives."""
        factor = self._scale.trace_tokens
        keys = self._name_blocks(token_ids)
        request = TracedRequest(0.0, len(token_ids) * factor, max(1, output_tokens) * factor, keys)
        job = Job(self._submitted, request)
        self._submitted += 1
        now = self._now()
        reply = self._open[job] = Reply(job, len(token_ids), max(1, output_tokens), submitted_at=now)
        self._take(self._model.submit(job, now))
        self._wake.set()
        return reply

    def catch_up(self) -> None:
        """Let all happen that is due by now, and tell how far replies have come."""
        now, due = self._now(), self._model.next_at()
        if due <= now:
            self.lateness_s.append((now - due) * self._scale.real_s)
        self._take(self._model.advance(now))
        self._tell_progress()

    def cached_tokens(self, job: Job) -> int:
        """Bench tokens of the prompt that were in the cache."""
        return job.tier_tokens[Tier.GPU] // self._scale.trace_tokens

    async def run(self) -> None:
        """Let time pass, until cancelled."""
        while True:
            self.catch_up()
            wait_s = (self._next_look() - self._now()) * self._scale.real_s
            if wait_s > 0:
                try:
                    async with asyncio.timeout(None if wait_s == math.inf else wait_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            else:
                await asyncio.sleep(0)
            self._wake.clear()

    def _now(self) -> float:
        """Seconds of the trace since the start."""
        return (self._clock() - self._started_at) / self._scale.real_s

    def _next_look(self) -> float:
        """When something is due, or a running reply has its next bench token."""
        step_s = self._plan.model.step_s * self._scale.trace_tokens
        is_replying = any(not math.isnan(reply.from_tokens) for reply in self._open.values())
        return min(self._model.next_at(), self._now() + step_s if is_replying else math.inf)

    def _name_blocks(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The chained keys of the prompt's full blocks, whose tokens are kept for their events."""
        size, parent, keys = self._scale.block_tokens, None, []
        for start in range(0, len(token_ids) - size + 1, size):
            ids = array("I", token_ids[start : start + size])
            key = hashlib.blake2b((parent or b"") + ids.tobytes(), digest_size=KEY_BYTES).digest()
            self._blocks.setdefault(key, (parent, ids))
            keys.append(key)
            parent = key
        return tuple(keys)

    def _take(self, happened: Happened) -> None:
        for _, changes in happened.changes:
            events = self._events(changes)
            if events:
                self._publish(events)
        for job in happened.first_tokens:
            reply = self._open[job]
            reply.from_tokens = self._model.tokens
            reply.tell(1)
        for job in happened.ends:
            reply = self._open.pop(job)
            reply.tell(reply.output_tokens)
            reply.pieces.put_nowait(0)
            self._count(reply)

    def _tell_progress(self) -> None:
        for reply in self._open.values():
            if not math.isnan(reply.from_tokens):
                made = int((self._model.tokens - reply.from_tokens) / self._scale.trace_tokens)
                reply.tell(min(1 + made, reply.output_tokens - 1))

    def _count(self, reply: Reply) -> None:
        job, counters, cached = reply.job, self.counters, self.cached_tokens(reply.job)
        counters.requests += 1
        counters.ttft_s += (job.first_token_at - reply.submitted_at) * self._scale.real_s
        counters.prompt_tokens += reply.prompt_tokens
        counters.cached_tokens += cached
        counters.prefill_tokens += reply.prompt_tokens - cached
        counters.prefill_s += (job.first_token_at - job.started_at) * self._scale.real_s

    def _events(self, changes: TierChanges) -> list[Event]:
        """Removals first, as vLLM does; then runs of stored blocks, each as one event."""
        size = self._scale.block_tokens
        events: list[Event] = [removed_event(self._hash(key)) for key, mask in changes.own.items() if not mask]
        runs: list[list[bytes]] = []
        for key in (key for key, mask in changes.own.items() if mask):
            if runs and self._blocks[key][0] == runs[-1][-1]:
                runs[-1].append(key)
            else:
                runs.append([key])
        for run in runs:
            parent = self._blocks[run[0]][0]
            ids = [token for key in run for token in self._blocks[key][1]]
            above = None if parent is None else self._hash(parent)
            events.append(stored_event([self._hash(key) for key in run], above, ids, size))
        return events

    def _hash(self, key: bytes) -> BlockHash:
        """As vLLM says it: 64 bits by default, and the whole 32 bytes where the launch line asks for them."""
        return key + key if self._has_long_hashes else int.from_bytes(key[:8], "big")
