"""EngineModel: one engine's queue, prefill and replies in simulated time.

Between two events nothing changes, so time goes from event to event, and what happened between is arithmetic:

- *Prefill queue*: first come, first served, one prompt at a time, in chunks of `prefill_chunk_tokens`. A prompt starts
  when its KV and its reply's fit beside those of the running requests, or when nothing else runs. What the tiers hold
  is looked up then, the cheapest cut of it is loaded, and the rest computed; both take the seconds of
  `directory.costs`, times the engine's own slowness, times 1 + interference for every running reply.
- *Continuous batching*: all running replies get a token at a time, one every `step_s`; while a prefill runs, one with
  each of its chunks, however long that takes. The first token comes with the end of the prefill.
"""

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field

from directory.chunks import usable_chunks
from directory.costs import best_cut
from directory.tiers import Tier
from warmroute.replay.hardware import FleetPlan
from warmroute.replay.node_tiers import NodeTiers, TierChanges
from warmroute.replay.trace import BLOCK_TOKENS, TracedRequest


@dataclass(eq=False, slots=True)
class Job:
    """One request on one engine, and when what happened to it."""

    number: int
    request: TracedRequest
    submitted_at: float = math.nan
    started_at: float = math.nan
    first_token_at: float = math.nan
    ended_at: float = math.nan
    service_s: float = 0.0
    loaded_blocks: int = 0
    tier_tokens: Counter[Tier] = field(default_factory=Counter)

    @property
    def ttft_s(self) -> float:
        """Seconds from when it was sent to its first token."""
        return self.first_token_at - self.submitted_at

    @property
    def missed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.request.prompt_tokens - self.tier_tokens.total()

    @property
    def kv_blocks(self) -> int:
        """Blocks of `gpu` that the prompt and its reply need."""
        return math.ceil((self.request.prompt_tokens + self.request.output_tokens) / BLOCK_TOKENS)

    @property
    def private_blocks(self) -> int:
        """Those of them that are no full block of the prompt."""
        return self.kv_blocks - len(self.request.keys)


@dataclass(slots=True)
class Happened:
    """What an advance brought: first tokens, ends, and changes in the tiers with their moment."""

    first_tokens: list[Job] = field(default_factory=list)
    ends: list[Job] = field(default_factory=list)
    changes: list[tuple[float, TierChanges]] = field(default_factory=list)


class EngineModel:
    """`slowness` multiplies what the costs say: 1 for an engine that is exactly as fast as it registered."""

    def __init__(self, plan: FleetPlan, slowness: float = 1.0) -> None:
        self._plan, self._slowness = plan, slowness
        self.tiers = NodeTiers(plan.blocks, plan.write_policy)
        self._waiting: deque[Job] = deque()
        self._prefilling: Job | None = None
        self._left_s = 0.0
        self._chunk_s = 0.0
        self._replies: list[tuple[float, int, Job]] = []
        self._tokens = 0.0
        self._blocks_used = 0
        self._now = 0.0
        self.busy_s = 0.0
        """Seconds of prefill and loading, slowed as they were."""

    @property
    def tokens(self) -> float:
        """Tokens that a reply would have by now that had run since the start: replies grow as this does."""
        return self._tokens

    def submit(self, job: Job, now: float) -> Happened:
        """A request arrives, after all before `now` was taken by `advance`."""
        happened = self.advance(now)
        self._waiting.append(job)
        self._start_next(happened)
        return happened

    def next_at(self) -> float:
        """When something happens next by itself; infinity for never."""
        return self._now + min(self._prefill_in_s(), self._reply_in_s())

    def advance(self, now: float) -> Happened:
        """Let all happen that is due until `now`."""
        happened = Happened()
        while (due := self.next_at()) <= now:
            prefill_s, reply_s = self._prefill_in_s(), self._reply_in_s()
            self._pass(min(prefill_s, reply_s))
            self._now = due
            if prefill_s <= reply_s:
                self._end_prefill(happened)
            else:
                self._tokens = self._replies[0][0]
                self._end_reply(heapq.heappop(self._replies)[2], happened)
            self._start_next(happened)
        self._pass(now - self._now)
        self._now = now
        return happened

    def _slowdown(self) -> float:
        return 1.0 + self._plan.interference * len(self._replies)

    def _token_s(self) -> float:
        """Seconds between two tokens of every running reply."""
        if self._prefilling is None:
            return self._plan.model.step_s
        return max(self._plan.model.step_s, self._chunk_s * self._slowdown())

    def _prefill_in_s(self) -> float:
        return self._left_s * self._slowdown() if self._prefilling is not None else math.inf

    def _reply_in_s(self) -> float:
        return (self._replies[0][0] - self._tokens) * self._token_s() if self._replies else math.inf

    def _pass(self, seconds: float) -> None:
        if self._replies:
            self._tokens += seconds / self._token_s()
        if self._prefilling is not None:
            self._left_s = max(0.0, self._left_s - seconds / self._slowdown())
            self.busy_s += seconds

    def _start_next(self, happened: Happened) -> None:
        """Start the next prompt, if none runs and its KV fits."""
        if self._prefilling is not None or not self._waiting:
            return
        job = self._waiting[0]
        if self._blocks_used and self._blocks_used + job.kv_blocks > self._plan.blocks.gpu:
            return
        self._waiting.popleft()
        prompt, keys = job.request.prompt_tokens, job.request.keys
        hit = self.tiers.match(keys[: usable_chunks(prompt, BLOCK_TOKENS)])
        cut = best_cut(self._plan.model.shape, self._plan.model.rates, prompt, BLOCK_TOKENS, hit)
        job.started_at = self._now
        job.tier_tokens.update({tier: BLOCK_TOKENS * hit[: cut.chunks].count(tier) for tier in set(hit[: cut.chunks])})
        job.service_s = cut.total_s * self._slowness
        self._blocks_used += job.kv_blocks
        self.tiers.hold(keys)
        self.tiers.reserve_private(job.private_blocks)
        job.loaded_blocks = cut.chunks
        self._note(self.tiers.open(keys[: cut.chunks]), happened)
        self._prefilling, self._left_s = job, job.service_s
        self._chunk_s = job.service_s / math.ceil(job.missed_tokens / self._plan.prefill_chunk_tokens)

    def _end_prefill(self, happened: Happened) -> None:
        job, self._prefilling = self._prefilling, None
        assert job is not None, "a prefill ends that has begun"
        job.first_token_at = self._now
        happened.first_tokens.append(job)
        keys = job.request.keys
        self._note(self.tiers.store(keys, len(keys) - job.loaded_blocks), happened)
        if job.request.output_tokens == 1:
            self._end_reply(job, happened)
        else:
            heapq.heappush(self._replies, (self._tokens + job.request.output_tokens - 1, job.number, job))

    def _end_reply(self, job: Job, happened: Happened) -> None:
        job.ended_at = self._now
        self._blocks_used -= job.kv_blocks
        self.tiers.release(job.request.keys)
        self.tiers.reserve_private(-job.private_blocks)
        happened.ends.append(job)

    def _note(self, changes: TierChanges, happened: Happened) -> None:
        if changes:
            happened.changes.append((self._now, changes))
