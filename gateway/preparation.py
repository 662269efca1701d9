"""What routing needs to know of a request: its encoding, its chunk keys, who holds them. Nothing is decided here."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from directory.costs import prefill_s
from directory.identity import Scope
from gateway.access_log import RequestNote
from gateway.affinity import named_session, session_key
from gateway.context_guard import refuse_too_long
from gateway.encoding.encoder import Encoding
from gateway.encoding.encoding_class import encoding_class
from gateway.encoding.vllm_fields import XARGS, refuse_reserved
from gateway.fleet import EngineView, Fleet
from gateway.header_rules import Headers
from gateway.lookup import ChunkChain, ChunkLookup, Holders, keys_by_engine, lookup_deadline_s
from gateway.metrics import GatewayMetrics
from gateway.openai_schema import InferenceRequest
from gateway.parity.parity import Parity, without
from gateway.prompts import EncodedPrompt, Prompts
from gateway.response_homes import ResponseHomes


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it arrived: what was read of it, its headers with a request id among them, and its query string."""

    request: InferenceRequest
    headers: Headers
    arrived_at: float
    query: bytes = b""
    wants_explanation: bool = False
    note: RequestNote = field(default_factory=RequestNote)
    """For the access log."""

    @property
    def path(self) -> str:
        """The path and query to ask an engine for."""
        return f"{self.request.endpoint}?{self.query.decode('latin-1')}" if self.query else self.request.endpoint


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that routing needs, however many attempts it takes. `keys` are what the first chain's chunks are named.

    Of the engines in `approximate` it isn't believed that their token ids are these.
    """

    prompt: EncodedPrompt
    affinity: bytes
    holders: Holders
    without_placements: str = ""
    keys: tuple[bytes, ...] = ()
    approximate: frozenset[str] = frozenset()

    def encoding_class(self, view: EngineView | None) -> str:
        """How well an engine's prompt is known: `exact`, `up-to`, `affinity`, or `approximate`: its answers differ."""
        own = None if view is None else self.prompt.of(view)
        known = "affinity" if own is None else encoding_class(own)
        return "approximate" if known != "affinity" and view and view.engine in self.approximate else known

    @property
    def encoding(self) -> Encoding:
        """The encoding that most is known of; an engine's own is `prompt.of(view)`."""
        return self.prompt.best


class Preparation:
    """Encodes a request, names its chunks, and asks the directory who holds them."""

    def __init__(
        self,
        fleet: Fleet,
        prompts: Prompts,
        lookup: ChunkLookup,
        parity: Parity,
        homes: ResponseHomes,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        are_assumed: bool = True,
    ) -> None:
        self._fleet, self._prompts, self._lookup, self._parity = fleet, prompts, lookup, parity
        self._homes, self._metrics, self._clock, self._are_assumed = homes, metrics, clock, are_assumed

    async def prepare(self, incoming: Incoming, views: Sequence[EngineView]) -> Prepared:
        """Everything about `incoming` that doesn't change between attempts. Raises `GatewayError`."""
        request = incoming.request
        if XARGS in request.fields and any(each.files and each.files.renderer.startswith("vllm") for each in views):
            refuse_reserved(request.fields)
        with self._metrics.stage("encode", self._clock):
            prompt = await self._prompts.encode(request, views)
        refuse_too_long(prompt, request, views, self._fleet.table.engines.values())
        for shortfall in prompt.shortfalls:
            self._metrics.degraded.labels(shortfall).inc()
        if prompt.best.tokens is None:
            home = self._homes.view_of(request, self._fleet.table)
            reason = "response-affinity" if home else "session-affinity"
            return Prepared(prompt, session_key(request, incoming.headers), Holders(), reason)
        with self._metrics.stage("keys", self._clock):
            chains = await self._lookup.chained(prompt.named(), Scope(salt=request.cache_salt), request.model)
        approximate = self._parity.approximate(request, views)
        with self._metrics.stage("lookup", self._clock):
            read, holders = [chain for chain in chains if prompt.reads_cache(chain)], Holders()
            asked = [chain for chain in read if chain.group.is_told]
            if asked and len(approximate) < len(views):
                holders = await self._find_holders(asked, views, prompt.best.prompt_tokens)
            holders = without(replace(holders, keys=keys_by_engine(read)), approximate)
        if holders.degraded:
            self._metrics.degraded.labels(holders.degraded).inc()
        first_key = next((chain.keys[0] for chain in chains if chain.keys), None)
        affinity = first_key or hashlib.sha256(prompt.best.tokens).digest()
        is_announced = any(chain.group.is_announced for chain in chains)
        unplaced = ""
        if first_key is None and not (prompt.best.is_whole and is_announced):
            # So little is known that many prompts have it in common, and nothing says where the session's engine is.
            affinity, unplaced = session_key(request, incoming.headers), "session-affinity"
        elif not is_announced and not self._are_assumed:
            unplaced = "prefix-affinity"
        elif len(approximate) == len(views):
            unplaced = "approximate"
        elif is_announced and not holders.is_known:  # what is assumed here is known nevertheless
            unplaced = "directory-unavailable"
        else:
            affinity = named_session(request, incoming.headers) or affinity
        return Prepared(prompt, affinity, holders, unplaced, chains[0].keys if chains else (), approximate)

    async def _find_holders(
        self, chains: Sequence[ChunkChain], views: Sequence[EngineView], prompt_tokens: int
    ) -> Holders:
        if not any(chain.keys for chain in chains):
            return Holders(is_known=True)
        if not self._fleet.is_directory_known():
            return Holders(is_known=False, degraded="directory_unavailable")
        rates = views[0].rates  # of an engine whose speed isn't known a lookup may take as long as any
        expected_s = math.inf if rates is None else prefill_s(views[0].shape, rates, prompt_tokens)
        started_at = self._clock()
        holders = await self._lookup.find(chains, lookup_deadline_s(expected_s))
        self._metrics.lookup.observe(self._clock() - started_at)
        if holders.degraded in ("directory_unavailable", "gateway_late"):
            self._metrics.directory_errors.labels("lookup").inc()
        return holders
