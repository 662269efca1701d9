"""A prompt's text into token ids without holding the event loop: from pieces seen before, or whole."""

from typing import Protocol

from gateway.encoding.cuts import Cutter
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.examination import Examination
from gateway.encoding.examiner import examine_apart
from gateway.encoding.piece_encoder import Depth, PieceEncoder
from gateway.encoding.rendering import Uncertain
from gateway.encoding.self_check import Sample, SelfCheck
from gateway.encoding.tokenizer import BACKENDS, Backend


class PromptTokenizer(Protocol):
    """Encodes the prompts of one model."""

    @property
    def state(self) -> str:
        """In plain words, for `/fleet`: the backend, and how texts are encoded."""
        ...

    async def encode(self, text: str, adds_special: bool) -> bytes:
        """Exact ids (little-endian u32). Raises `PoolBusy`."""
        ...

    def certain_chars(self, text: str) -> int:
        """How many characters of `text` are known to have the same ids whatever follows it."""
        ...


class IdsOnly:
    """For engines whose tokenizer isn't known: prompts of token ids alone are."""

    state = "token ids only: the tokenizer isn't known"

    async def encode(self, text: str, adds_special: bool) -> bytes:
        """See `PromptTokenizer`. Raises `Uncertain`."""
        raise Uncertain("own_tokenizer")

    def certain_chars(self, text: str) -> int:
        """See `PromptTokenizer`."""
        return 0


class WholeTexts:
    """Every text as a whole through the backend: exact whatever the tokenizer does, and dearer."""

    def __init__(self, backend: Backend, pool: EncodePool, reason: str) -> None:
        self._backend, self._pool = backend, pool
        self.state = f"{backend.name}, whole texts: {reason}"

    async def encode(self, text: str, adds_special: bool) -> bytes:
        """See `PromptTokenizer`."""
        if len(text) <= self._backend.inline_chars_max:
            return self._backend.encode(text, adds_special)
        return await self._pool.run(self._backend.encode, text, adds_special)

    def certain_chars(self, text: str) -> int:
        """See `PromptTokenizer`: nothing is known of how this tokenizer takes texts apart."""
        return 0


class CachedPieces:
    """Only what wasn't seen before is encoded; a sample of the results is checked behind the request's back."""

    def __init__(
        self, encoder: PieceEncoder, whole: Backend, rest: Backend, pool: EncodePool, check: SelfCheck, reason: str = ""
    ) -> None:
        self._encoder, self._backend, self._rest, self._pool, self._check = encoder, whole, rest, pool, check
        self._whole = WholeTexts(whole, pool, "a check of encoded texts failed")
        self._reason = reason

    @property
    def state(self) -> str:
        """See `PromptTokenizer`."""
        if self._encoder.depth is Depth.WHOLE:
            return self._whole.state
        if self._encoder.depth is Depth.PIECES:
            return f"{self._rest.name}, cached pieces"
        return f"{self._rest.name}, cached segments: {self._reason or 'a check of encoded texts failed'}"

    async def encode(self, text: str, adds_special: bool) -> bytes:
        """See `PromptTokenizer`."""
        encoder = self._encoder
        if encoder.depth is Depth.WHOLE:
            return await self._whole.encode(text, adds_special)
        partial = encoder.look_up(text)
        if encoder.is_quick(partial):
            fresh = encoder.encode_missing(partial)
        else:
            fresh = await self._pool.run(encoder.encode_missing, partial)
        ids = encoder.join(partial, fresh, adds_special)
        self._check.consider(Sample(encoder, self._backend, text, adds_special, ids))
        return ids

    def certain_chars(self, text: str) -> int:
        """See `PromptTokenizer`."""
        return self._encoder.certain_chars(text) if self._encoder.depth is not Depth.WHOLE else 0


async def load_tokenizer(
    content: bytes, pool: EncodePool, check: SelfCheck, cache_bytes_max: int
) -> tuple[PromptTokenizer, int]:
    """A tokenizer for the content of a `tokenizer.json`, and the most characters that one of its tokens stands for.

    Takes seconds, and holds the event loop for none of them but what fastokens' own loading does. Raises `ValueError`
    if the content isn't a tokenizer.
    """
    verdict = await examine_apart(content)
    whole, rest = await pool.run_behind(_load_backends, verdict, content.decode())
    parts = verdict.parts
    if parts is None:
        return WholeTexts(whole, pool, verdict.reason), verdict.token_chars_max
    cutter = Cutter(parts.rules, rest.piece_chars)
    encoder = PieceEncoder(parts.pipeline, cutter, whole, rest, cache_bytes_max)
    encoder.depth = parts.depth
    return CachedPieces(encoder, whole, rest, pool, check, verdict.reason), verdict.token_chars_max


def _load_backends(verdict: Examination, content: str) -> tuple[Backend, Backend]:
    whole = BACKENDS[verdict.backend](content)
    if verdict.parts is None or not verdict.parts.pipeline.without_prefix:
        return whole, whole
    return whole, BACKENDS[verdict.parts.backend](verdict.parts.pipeline.without_prefix)
