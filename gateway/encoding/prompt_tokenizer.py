"""A prompt's text into token ids without holding the event loop: from pieces seen before, or whole."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.encoding.cuts import Cutter
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.examination import Examination
from gateway.encoding.examiner import examine_apart
from gateway.encoding.piece_encoder import Depth, PieceEncoder
from gateway.encoding.piece_learner import PieceLearner
from gateway.encoding.rendering import Uncertain
from gateway.encoding.self_check import Sample, SelfCheck
from gateway.encoding.tokenizer import BACKENDS, Backend

LOOKED_UP_INLINE_CHARS_MAX = 100_000
"""Longer texts are looked up in a thread where their pieces are small: up to 20 ms for 100k tokens."""


class PromptTokenizer(Protocol):
    """Encodes the prompts of one model."""

    @property
    def state(self) -> str:
        """In plain words, for `/fleet`: the backend, and how texts are encoded."""
        ...

    @property
    def cache_bytes(self) -> int:
        """What the ids of known text take, about."""
        ...

    async def encode(self, text: str, adds_special: bool) -> bytes:
        """Exact ids (little-endian u32). Raises `PoolBusy`."""
        ...

    def certain_chars(self, text: str) -> int:
        """How many characters of `text` are known to have the same ids whatever follows it."""
        ...


@dataclass(frozen=True, slots=True)
class Shared:
    """What the tokenizers of a gateway share. `on_encoded` is told of each text how many characters were known, and how
    many had to be encoded.
    """

    pool: EncodePool
    check: SelfCheck
    learner: PieceLearner
    on_encoded: Callable[[int, int], object]

    @classmethod
    def of(
        cls,
        pool: EncodePool,
        check: SelfCheck | None = None,
        on_encoded: Callable[[int, int], object] = lambda hit_chars, miss_chars: None,
    ) -> "Shared":
        """Around a pool, with a check that tells nobody where none is given. Whoever wants the loops runs them."""
        return cls(pool, check or SelfCheck(pool, lambda: None), PieceLearner(pool), on_encoded)


class IdsOnly:
    """For engines whose tokenizer isn't known: prompts of token ids alone are."""

    state = "token ids only: the tokenizer isn't known"
    cache_bytes = 0

    async def encode(self, text: str, adds_special: bool) -> bytes:
        """See `PromptTokenizer`. Raises `Uncertain`."""
        raise Uncertain("own_tokenizer")

    def certain_chars(self, text: str) -> int:
        """See `PromptTokenizer`."""
        return 0


class WholeTexts:
    """Every text as a whole through the backend: exact whatever the tokenizer does, and dearer."""

    cache_bytes = 0

    def __init__(self, backend: Backend, shared: Shared, reason: str) -> None:
        self._backend, self._shared = backend, shared
        self.state = f"{backend.name}, whole texts: {reason}"

    async def encode(self, text: str, adds_special: bool) -> bytes:
        """See `PromptTokenizer`."""
        self._shared.on_encoded(0, len(text))
        if len(text) <= self._backend.inline_chars_max:
            return self._backend.encode(text, adds_special)
        return await self._shared.pool.run(self._backend.encode, text, adds_special)

    def certain_chars(self, text: str) -> int:
        """See `PromptTokenizer`: nothing is known of how this tokenizer takes texts apart."""
        return 0


class CachedPieces:
    """Only what wasn't seen before is encoded; a sample of the results is checked behind the request's back."""

    def __init__(self, encoder: PieceEncoder, whole: Backend, rest: Backend, shared: Shared, reason: str = "") -> None:
        self._encoder, self._backend, self._rest, self._shared = encoder, whole, rest, shared
        self._whole = WholeTexts(whole, shared, "a check of encoded texts failed")
        self._reason = reason

    @property
    def state(self) -> str:
        """See `PromptTokenizer`."""
        if self._encoder.depth is Depth.WHOLE:
            return self._whole.state
        if self._encoder.depth is Depth.PIECES:
            return f"{self._rest.name}, cached pieces"
        return f"{self._rest.name}, cached segments: {self._reason or 'a check of encoded texts failed'}"

    @property
    def cache_bytes(self) -> int:
        """See `PromptTokenizer`."""
        return self._encoder.cache_bytes

    async def encode(self, text: str, adds_special: bool) -> bytes:
        """See `PromptTokenizer`."""
        encoder = self._encoder
        depth = encoder.depth
        if depth is Depth.WHOLE:
            return await self._whole.encode(text, adds_special)
        opening = encoder.recall(text)
        if encoder.looks_new(text, opening.place):
            ids = await self._encode_new(text, adds_special)
        else:
            is_long = len(text) - opening.place > LOOKED_UP_INLINE_CHARS_MAX and not self._rest.is_quick
            partial = (
                await self._shared.pool.run(encoder.look_up, text, opening)
                if is_long
                else encoder.look_up(text, opening)
            )
            missing = sum(partial.missing_chars)
            self._shared.on_encoded(len(text) - missing, missing)
            if encoder.is_quick(partial):
                fresh = encoder.encode_missing(partial)
            else:
                fresh = await self._shared.pool.run(encoder.encode_missing, partial)
            ids = encoder.join(partial, fresh, adds_special)
        self._shared.check.consider(Sample(encoder, depth, self._backend, text, adds_special, ids))
        return ids

    async def _encode_new(self, text: str, adds_special: bool) -> bytes:
        """Its pieces are kept later: this request doesn't need them."""
        self._shared.on_encoded(0, len(text))
        new = await self._shared.pool.run(self._encoder.encode_at_once, text)
        self._shared.learner.consider(self._encoder, new)
        return self._encoder.with_special(new.ids) if adds_special else new.ids

    def certain_chars(self, text: str) -> int:
        """See `PromptTokenizer`."""
        return self._encoder.certain_chars(text) if self._encoder.depth is not Depth.WHOLE else 0


async def load_tokenizer(content: bytes, shared: Shared, cache_bytes_max: int) -> tuple[PromptTokenizer, int]:
    """A tokenizer for the content of a `tokenizer.json`, and the most characters that one of its tokens stands for.

    Takes seconds, and holds the event loop for none of them but what fastokens' own loading does. Raises `ValueError`
    if the content isn't a tokenizer.
    """
    verdict = await examine_apart(content)
    whole, rest = await shared.pool.run_behind(_load_backends, verdict, content.decode())
    parts = verdict.parts
    if parts is None:
        return WholeTexts(whole, shared, verdict.reason), verdict.token_chars_max
    cutter = Cutter(parts.rules, rest.piece_chars)
    encoder = PieceEncoder(parts.pipeline, cutter, whole, rest, cache_bytes_max)
    encoder.depth = parts.depth
    return CachedPieces(encoder, whole, rest, shared, verdict.reason), verdict.token_chars_max


def _load_backends(verdict: Examination, content: str) -> tuple[Backend, Backend]:
    whole = BACKENDS[verdict.backend](content)
    if verdict.parts is None or not verdict.parts.pipeline.without_prefix:
        return whole, whole
    return whole, BACKENDS[verdict.parts.backend](verdict.parts.pipeline.without_prefix)
