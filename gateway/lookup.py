"""Who holds this prompt's chunks: keys for every way the fleet names them, one directory lookup, joined per engine."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from directory.chunks import usable_chunks
from directory.errors import DirectoryError, DirectoryUnavailable, IdentityRefused, PartitionUnavailable
from directory.identity import Identity, Scope
from directory.interface import DirectoryReader, Lookup
from directory.placements import PrefixMatch, Reach
from directory.schemes import KnownDigests, key_scheme
from gateway.encoding.model_files import ModelFiles
from gateway.fleet import EngineView
from gateway.known_chunks import KnownChunks
from gateway.lookup_breaker import LookupBreaker, SentLookup
from gateway.reach_matrix import ReachMatrix

logger = logging.getLogger(__name__)

CHAINS_MAX = 4
"""Distinct (model files, identity, scheme, chunk size) chains computed for one request."""
PEER_HOSTS_MAX = 64
"""Hosts, of those that give chunks to others, that are looked at for one request."""
GROUPINGS_MAX = 256
"""Models whose engines' grouping is remembered."""
HASHED_INLINE_PAGES_MAX = 4_000
"""Pages whose hashes may hold the event loop, 2 ms: a prompt of so many tokens where a page is a token."""
PARTIAL_SHOWN_S = 10.0
"""How long after a lookup's last unknown position it is said: a short prompt's keys may lie where it answers."""
DEADLINE_MIN_S, DEADLINE_MAX_S, DEADLINE_SHARE = 0.005, 0.05, 0.02


@dataclass(frozen=True, slots=True)
class NamingGroup:
    """Engines that encode prompts and name chunks alike, and whom their incarnations serve.

    Where they have no agent nobody announces what they hold (`is_announced`); gateways may assume something.
    """

    files: ModelFiles
    is_announced: bool
    fleet_digest: bytes
    key_scheme: str
    chunk_tokens: int
    page_tokens: int | None
    engines: tuple[EngineView, ...]
    reaches: ReachMatrix
    peers: ReachMatrix | None = None
    """What the hosts hold that give chunks to others, under their `peer_address`."""

    def is_adapter(self, model: str) -> bool:
        """Whether `model` is an adapter here, or may be one."""
        return not self.is_announced or any(model in view.adapters for view in self.engines)

    @property
    def is_told(self) -> bool:
        """Whether the directory may know what they hold."""
        return self.is_announced or any(view.reach.own for view in self.engines)


@dataclass(frozen=True, slots=True)
class ChunkChain:
    """The directory keys of a prompt's usable chunks for the engines that name them alike."""

    keys: tuple[bytes, ...]
    group: NamingGroup


@dataclass(frozen=True, slots=True)
class Holders:
    """What the directory said: each engine's match over its own keys (the chunks in its way of naming), and whether
    it answered. `degraded` says what was missing: `directory_unavailable` (nothing came in time), `directory_paused`
    (not asked), `gateway_late` (this process was too busy to see an answer in time), `partial_directory`.

    `peers`: for an engine the hosts whose agents give chunks to others, by their `peer_address`, and how many of its
    leading chunks each holds in DRAM or NVMe, the longest first. Empty where no engine's match can be lengthened so.
    """

    matches: dict[str, PrefixMatch] = field(default_factory=dict)
    keys: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    peers: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    is_known: bool = True
    degraded: str | None = None


def group_by_naming(views: Sequence[EngineView]) -> tuple[NamingGroup, ...]:
    """The distinct ways of naming among `views`, in the order in which they come."""
    groups: dict[_Naming, list[EngineView]] = {}
    for view in views:
        if (files := view.files) is not None:
            groups.setdefault(_naming(view, files), []).append(view)
    return tuple(
        NamingGroup(*naming, tuple(members), ReachMatrix([view.reach for view in members]), _peers_of(members))
        for naming, members in groups.items()
    )


def chain_chunks(
    groups: Sequence[NamingGroup], tokens: bytes, scope: Scope, known: KnownDigests | None = None
) -> list[ChunkChain]:
    """One chain for each way of naming, at most `CHAINS_MAX`; engines beyond have no match.

    `known` spares hashing again what earlier prompts had.
    """
    chains = []
    for group in groups[:CHAINS_MAX]:
        try:
            scheme = key_scheme(group.key_scheme, known)
            digests = scheme.digests(group.fleet_digest, scope, tokens, group.chunk_tokens, group.page_tokens)
            usable = digests[: usable_chunks(len(tokens) // 4, group.chunk_tokens)]
            keys = tuple(scheme.directory_keys(group.fleet_digest, scope, usable))
        except IdentityRefused as error:
            logger.warning("no keys for engines of the scheme %s: %s", group.key_scheme, error)
        except Exception:  # the edge of what others registered: a strange row costs its own engines their keys
            logger.exception("no keys for engines of the scheme %s", group.key_scheme)
        else:
            chains.append(ChunkChain(keys, group))
    return chains


def _scope_in(group: NamingGroup, scope: Scope, model: str) -> Scope:
    if not group.is_adapter(model):
        return scope
    return replace(scope, lora=hashlib.sha256(model.encode()).digest())


def keys_by_engine(chains: Sequence[ChunkChain]) -> dict[str, tuple[bytes, ...]]:
    """A prompt's directory keys in each engine's way of naming."""
    return {view.engine: chain.keys for chain in chains for view in chain.group.engines}


def lookup_deadline_s(expected_prefill_s: float) -> float:
    """How long a lookup may take: a small share of what a hit could save."""
    return min(DEADLINE_MAX_S, max(DEADLINE_MIN_S, DEADLINE_SHARE * expected_prefill_s))


class ChunkLookup:
    """Asks the directory, and leaves it alone for a while when it keeps failing (`LookupBreaker`). Never raises."""

    def __init__(
        self, directory: DirectoryReader, clock: Callable[[], float], on_pause: Callable[[], None] = lambda: None
    ) -> None:
        self._directory, self._clock, self._on_pause = directory, clock, on_pause
        self._breaker = LookupBreaker()
        self._has_answered = False
        self._refusal: DirectoryError | None = None
        self._partial_since = self._partial_at = float("-inf")
        self._known = KnownChunks()
        self._groupings: dict[str, tuple[Sequence[EngineView], tuple[NamingGroup, ...]]] = {}

    @property
    def state(self) -> str:
        """In plain words, for `/fleet`: `ok`, `partial since ...`, `none yet`, or how many in a row failed, and why."""
        if not self._breaker.failures:
            return self._answering_state()
        now, pause = self._clock(), ""
        if self._breaker.is_open(now):
            pause = ", none is tried for a moment"
        elif self._breaker.is_half_open(now):
            pause = ", one is tried at a time"
        trouble = "had no answer in time" if self._refusal is None else f"failed: {self._refusal}"
        return f"{self._breaker.failures} in a row {trouble}{pause}"

    def _answering_state(self) -> str:
        now = self._clock()
        if now - self._partial_at <= PARTIAL_SHOWN_S:
            return f"partial since {now - self._partial_since:.0f} s ago: a shard doesn't answer"
        return "ok" if self._has_answered else "none yet"

    @property
    def pauses(self) -> int:
        """How often lookups were paused since the start."""
        return self._breaker.pauses

    def grouped(self, model: str, views: Sequence[EngineView]) -> tuple[NamingGroup, ...]:
        """`group_by_naming`, remembered as long as a model's views are the same object (`FleetTable.serving`)."""
        seen, groups = self._groupings.get(model, (None, ()))
        if seen is not views:
            groups = group_by_naming(views)
            if len(self._groupings) >= GROUPINGS_MAX:
                self._groupings.clear()
            self._groupings[model] = views, groups
        return groups

    async def chained(
        self, named: Sequence[tuple[NamingGroup, bytes]], scope: Scope, model: str = ""
    ) -> list[ChunkChain]:
        """`chain_chunks` of each group's own ids, with what earlier prompts had; in a thread where much is hashed.

        An adapter's chunks have names of their own, which no agent announces; of an engine without an agent nobody may
        say whether `model` is an adapter, so it counts as one.
        """

        def chains() -> list[ChunkChain]:
            return [
                chain
                for group, tokens in named
                for chain in chain_chunks([group], tokens, _scope_in(group, scope, model), self._known)
            ]

        pages = sum(len(tokens) // (4 * (group.page_tokens or group.chunk_tokens)) for group, tokens in named)
        return chains() if pages <= HASHED_INLINE_PAGES_MAX else await asyncio.to_thread(chains)

    async def find(self, chains: Sequence[ChunkChain], deadline_s: float) -> Holders:
        """Every engine's matched prefix over its chain's keys."""
        asked = [chain for chain in chains if chain.keys]
        if not asked:
            return Holders()
        lookup = self._breaker.send(self._clock())
        if lookup is None:
            return Holders(is_known=False, degraded="directory_paused")
        try:
            answers = await self._answers(asked, deadline_s)
        except BaseException:
            self._breaker.abandoned(lookup)
            raise
        if any(isinstance(answer, PartitionUnavailable) for answer in answers) and not _has_lookup(answers):
            self._breaker.abandoned(lookup)  # a short prompt's keys lie on a shard that is down: the others may serve
            return self._joined(asked, answers)
        if not _has_lookup(answers):
            return self._failed(lookup, answers, deadline_s)
        self._breaker.answered()
        self._has_answered = True
        return self._joined(asked, answers)

    def _joined(self, chains: Sequence[ChunkChain], answers: Sequence[Lookup | DirectoryError]) -> Holders:
        """What the answers say together; that a part was missing is noted for `state`."""
        holders, now = _join(chains, answers), self._clock()
        if holders.degraded is not None:
            if now - self._partial_at > PARTIAL_SHOWN_S:
                self._partial_since = now
            self._partial_at = now
        return holders

    async def _answers(self, chains: Sequence[ChunkChain], deadline_s: float) -> list[Lookup | DirectoryError]:
        """What each chain's lookup came to: one that fails doesn't lose the others' answers."""
        if len(chains) == 1:
            return [await self._ask(chains[0], deadline_s)]
        return list(await asyncio.gather(*(self._ask(chain, deadline_s) for chain in chains)))

    async def _ask(self, chain: ChunkChain, deadline_s: float) -> Lookup | DirectoryError:
        try:
            return await self._directory.lookup(chain.keys, deadline_s)
        except DirectoryError as error:
            logger.debug("lookup failed: %s", error)
            return error

    def _failed(self, lookup: SentLookup, answers: Sequence[Lookup | DirectoryError], deadline_s: float) -> Holders:
        refusals = [
            answer
            for answer in answers
            if isinstance(answer, DirectoryError) and not isinstance(answer, DirectoryUnavailable)
        ]
        is_timeout, self._refusal = not refusals, refusals[0] if refusals else None
        before = self._breaker.pauses
        is_excused = self._breaker.failed(lookup, self._clock(), deadline_s, is_timeout)
        if self._breaker.pauses > before:
            self._on_pause()
        return Holders(is_known=False, degraded="gateway_late" if is_excused else "directory_unavailable")


def _has_lookup(answers: Sequence[Lookup | DirectoryError]) -> bool:
    return any(isinstance(answer, Lookup) for answer in answers)


def _join(chains: Sequence[ChunkChain], answers: Sequence[Lookup | DirectoryError]) -> Holders:
    matches: dict[str, PrefixMatch] = {}
    peers: dict[str, tuple[tuple[str, int], ...]] = {}
    is_partial = False
    for chain, answer in zip(chains, answers, strict=True):
        if isinstance(answer, Lookup):
            found = chain.group.reaches.match(answer.records)
            matches |= found
            peers |= _peer_runs(chain.group, answer, found)
        is_partial = is_partial or not isinstance(answer, Lookup) or answer.is_partial
    degraded = "partial_directory" if is_partial else None
    return Holders(matches, keys_by_engine(chains), peers, degraded=degraded)


def _peers_of(views: Sequence[EngineView]) -> ReachMatrix | None:
    """The first `PEER_HOSTS_MAX` hosts that give chunks to others; `None` where there are none."""
    lives = {view.peer_address: view.reach.host for view in views if view.peer_address is not None}
    reaches = [Reach(address, frozenset(), host) for address, host in sorted(lives.items()) if host]
    return ReachMatrix(reaches[:PEER_HOSTS_MAX]) if reaches else None


def _peer_runs(
    group: NamingGroup, answer: Lookup, found: Mapping[str, PrefixMatch]
) -> dict[str, tuple[tuple[str, int], ...]]:
    """See `Holders`. Where all engines match alike no host can add anything: it serves one of them already."""
    lengths = {found[view.engine].chunks if view.engine in found else 0 for view in group.engines}
    if group.peers is None or len(lengths) == 1:
        return {}
    runs = {address: match.chunks for address, match in group.peers.match(answer.records).items()}
    longest_first = tuple(sorted(runs.items(), key=lambda run: (-run[1], run[0])))
    return {view.engine: longest_first for view in group.engines}


_Naming = tuple[ModelFiles, bool, bytes, str, int, int | None]


def _naming(view: EngineView, files: ModelFiles) -> _Naming:
    registration = view.registration
    if registration is None:
        unknown = Identity("*", "unknown", hashlib.sha256(repr(files).encode()).hexdigest(), "unknown", "unknown")
        return files, False, unknown.fleet_digest(), "warmroute", view.chunk_tokens, None
    return (
        files,
        True,
        registration.identity.fleet_digest(),
        registration.key_scheme,
        registration.chunk_tokens,
        registration.page_tokens,
    )
