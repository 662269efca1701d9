"""Who holds this prompt's chunks: keys for every way the fleet names them, one directory lookup, joined per engine."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from directory.chunks import usable_chunks
from directory.errors import DirectoryError, IdentityRefused
from directory.identity import Scope
from directory.interface import DirectoryReader
from directory.members import EngineRegistration
from directory.placements import PrefixMatch, matched_prefixes
from directory.schemes import key_scheme
from gateway.fleet import EngineView

logger = logging.getLogger(__name__)

CHAINS_MAX = 4
"""Distinct (identity, scheme, chunk size) chains computed for one request."""
FAILURES_MAX = 3
PAUSE_S = 1.0
"""After `FAILURES_MAX` failed lookups in a row none is tried for this long: a dead directory costs no waiting."""
DEADLINE_MIN_S, DEADLINE_MAX_S, DEADLINE_SHARE = 0.005, 0.05, 0.02


@dataclass(frozen=True, slots=True)
class ChunkChain:
    """The directory keys of a prompt's usable chunks for the engines that name them alike."""

    keys: tuple[bytes, ...]
    engines: tuple[EngineView, ...]


@dataclass(frozen=True, slots=True)
class Holders:
    """What the directory said: each engine's match over its own keys (the chunks in its way of naming), and whether
    it answered (`degraded` says what was missing).
    """

    matches: dict[str, PrefixMatch] = field(default_factory=dict)
    keys: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    is_known: bool = True
    degraded: str | None = None


def chain_chunks(views: Sequence[EngineView], tokens: bytes, scope: Scope) -> list[ChunkChain]:
    """One chain per distinct way of naming among `views`, at most `CHAINS_MAX`; engines beyond have no match."""
    groups: dict[tuple[bytes, str, int, int | None], list[EngineView]] = {}
    for view in views:
        if view.registration is not None:
            groups.setdefault(_naming(view.registration), []).append(view)
    chains = []
    for (digest, scheme_name, chunk_tokens, page_tokens), members in list(groups.items())[:CHAINS_MAX]:
        try:
            scheme = key_scheme(scheme_name)
            digests = scheme.digests(digest, scope, tokens, chunk_tokens, page_tokens)
        except IdentityRefused as error:
            logger.warning("no keys for engines of the scheme %s: %s", scheme_name, error)
            continue
        usable = digests[: usable_chunks(len(tokens) // 4, chunk_tokens)]
        chains.append(ChunkChain(tuple(scheme.directory_keys(digest, scope, usable)), tuple(members)))
    return chains


def lookup_deadline_s(expected_prefill_s: float) -> float:
    """How long a lookup may take: a small share of what a hit could save."""
    return min(DEADLINE_MAX_S, max(DEADLINE_MIN_S, DEADLINE_SHARE * expected_prefill_s))


class ChunkLookup:
    """Asks the directory, and leaves it alone for a while when it keeps failing. Never raises."""

    def __init__(self, directory: DirectoryReader, clock: Callable[[], float]) -> None:
        self._directory, self._clock = directory, clock
        self._failures = 0
        self._has_answered = False
        self._paused_until = float("-inf")

    @property
    def state(self) -> str:
        """In plain words, for `/fleet`: `ok`, `none yet`, or how many lookups in a row had no answer in time."""
        if not self._failures:
            return "ok" if self._has_answered else "none yet"
        pause = ", none is tried for a moment" if self._clock() < self._paused_until else ""
        return f"{self._failures} in a row had no answer in time{pause}"

    async def find(self, chains: Sequence[ChunkChain], deadline_s: float) -> Holders:
        """Every engine's matched prefix over its chain's keys."""
        asked = [chain for chain in chains if chain.keys]
        if not asked:
            return Holders()
        if self._clock() < self._paused_until:
            return Holders(is_known=False, degraded="directory_paused")
        try:
            answers = await asyncio.gather(*(self._directory.lookup(chain.keys, deadline_s) for chain in asked))
        except DirectoryError as error:
            self._failures += 1
            if self._failures >= FAILURES_MAX:
                self._paused_until = self._clock() + PAUSE_S
            logger.debug("lookup failed: %s", error)
            return Holders(is_known=False, degraded="directory_unavailable")
        self._failures, self._has_answered = 0, True
        matches: dict[str, PrefixMatch] = {}
        for chain, found in zip(asked, answers, strict=True):
            matches |= matched_prefixes(found.records, [view.reach for view in chain.engines])
        keys = {view.engine: chain.keys for chain in asked for view in chain.engines}
        return Holders(
            matches, keys, degraded="partial_directory" if any(each.is_partial for each in answers) else None
        )


def _naming(registration: EngineRegistration) -> tuple[bytes, str, int, int | None]:
    return (
        registration.identity.fleet_digest(),
        registration.key_scheme,
        registration.chunk_tokens,
        registration.page_tokens,
    )
