"""The ids of a text from the ids of its pieces, of which most were seen before.

    text -> segments, at added tokens -> each gap between them: known? else cut by its content -> each piece: known?
         -> all pieces that aren't, in one batch -> joined

Looking up and joining belong to one thread, the event loop's; the batch in between may run in any, and releases the
GIL.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from gateway.encoding.added_tokens import AddedTokenSplitter
from gateway.encoding.cuts import UNCUT_CHARS_MAX, CutRules, pieces_by_content
from gateway.encoding.piece_cache import PieceCache
from gateway.encoding.pipeline import Pipeline, Prefix
from gateway.encoding.tokenizer import Backend

Cut = Callable[[str, CutRules], Sequence[str]]


class Depth(IntEnum):
    """How far texts are taken apart."""

    WHOLE = 0
    SEGMENTS = 1
    """At added tokens."""
    PIECES = 2
    """And the gaps between them, at safe places."""


@dataclass(slots=True)
class PartialEncoding:
    """A text's ids as far as they are known.

    `places[is_first]` says where the ids of each missing piece belong; `gaps` are (text, whether it is first, from
    where to where its pieces are), to be kept as wholes.
    """

    cache: PieceCache
    parts: list[bytes]
    places: tuple[dict[str, list[int]], dict[str, list[int]]] = field(default_factory=lambda: ({}, {}))
    gaps: list[tuple[str, bool, int, int]] = field(default_factory=list)
    missing_chars: int = 0


class PieceEncoder:
    """Encodes for one tokenizer. `whole` is its backend; `rest` that of a gap's later pieces, where they differ.

    `depth` is how far texts are taken apart. Whoever sets it has the proof that ids are right that far.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rules: CutRules,
        whole: Backend,
        rest: Backend,
        cache_bytes_max: int,
        cut: Cut = pieces_by_content,
        uncut_chars_max: int = UNCUT_CHARS_MAX,
    ) -> None:
        self._backends = (rest, whole)
        self._splitter = AddedTokenSplitter(pipeline.added_tokens)
        self._rules = rules
        self._prefix, self._before, self._after = pipeline.prefix, pipeline.ids_before, pipeline.ids_after
        self._cut, self._uncut_chars_max = cut, uncut_chars_max
        self._cache_bytes_max = cache_bytes_max
        self.cache = PieceCache(cache_bytes_max)
        self.depth = Depth.WHOLE

    def flush(self) -> None:
        """Forget all ids; what is being looked up meanwhile goes nowhere."""
        self.cache = PieceCache(self._cache_bytes_max)

    def look_up(self, text: str) -> PartialEncoding:
        """What is known of a text. Its depth must be `SEGMENTS` or more."""
        assert self.depth, "an encoder that takes nothing apart knows nothing"
        cache, parts = self.cache, list[bytes]()
        partial = PartialEncoding(cache, parts)
        get, add = cache.get, parts.append
        always, at_start = self._prefix is Prefix.GAPS, self._prefix is Prefix.START
        for segment, token, begins in self._splitter.split(text):
            if token is not None:
                add(token)
                continue
            is_first = always or (at_start and begins)
            ids = get(segment, is_first)
            if ids is None:
                self._look_up_pieces(segment, is_first, partial)
            else:
                add(ids)
        return partial

    def _look_up_pieces(self, gap: str, is_first: bool, partial: PartialEncoding) -> None:
        parts, start, begins_first = partial.parts, len(partial.parts), is_first
        pieces: Sequence[str] = (gap,)
        if self.depth is Depth.PIECES and len(gap) > self._uncut_chars_max:
            pieces = self._cut(gap, self._rules)
        for piece in pieces:
            ids = partial.cache.get(piece, is_first)
            if ids is None:
                places = partial.places[is_first]
                if piece not in places:
                    places[piece] = []
                    partial.missing_chars += len(piece)
                places[piece].append(len(parts))
                ids = b""
            parts.append(ids)
            is_first = False
        if len(pieces) > 1:
            partial.gaps.append((gap, begins_first, start, len(parts)))

    def encode_missing(self, partial: PartialEncoding) -> tuple[list[bytes], list[bytes]]:
        """The ids of the missing pieces, in order: for any thread."""
        rest, first = (
            backend.encode_batch(list(places)) if places else []
            for backend, places in zip(self._backends, partial.places, strict=True)
        )
        return rest, first

    def join(self, partial: PartialEncoding, fresh: tuple[list[bytes], list[bytes]], adds_special: bool) -> bytes:
        """The text's ids, from what was known and what was missing; all of it is kept."""
        cache, parts = partial.cache, partial.parts
        for is_first, places_of, found in zip((False, True), partial.places, fresh, strict=True):
            for (piece, places), ids in zip(places_of.items(), found, strict=True):
                for place in places:
                    parts[place] = ids
                cache.put(piece, is_first, ids)
        for gap, is_first, start, end in partial.gaps:
            cache.put(gap, is_first, b"".join(parts[start:end]))
        if adds_special:
            return b"".join((self._before, *parts, self._after))
        return b"".join(parts)

    def encode(self, text: str, adds_special: bool = False) -> bytes:
        """All steps at once."""
        partial = self.look_up(text)
        return self.join(partial, self.encode_missing(partial), adds_special)
