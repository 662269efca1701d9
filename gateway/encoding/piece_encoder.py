"""The ids of a text from the ids of its parts, of which most were seen before.

    prompt -> stretches: known? -> segments, at added tokens -> the gaps between them: known? -> pieces: known?
           -> all pieces that aren't, in one batch -> joined

Looking up and joining belong to one thread, the event loop's; the batch in between may run in any, and releases the
GIL.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from gateway.encoding.added_tokens import AddedTokenSplitter
from gateway.encoding.cuts import Cutter
from gateway.encoding.piece_cache import PieceCache
from gateway.encoding.pipeline import Pipeline, Prefix
from gateway.encoding.tokenizer import Backend


class Depth(IntEnum):
    """How far texts are taken apart."""

    WHOLE = 0
    SEGMENTS = 1
    """At added tokens."""
    PIECES = 2
    """And at safe places, before that and within the gaps."""


@dataclass(slots=True)
class PartialEncoding:
    """A text's ids as far as they are known.

    `places[is_first]` says where the ids of each missing piece belong; `wholes` are gaps and stretches that were taken
    apart, to be kept: (text, whether it is first, from where to where its parts are).
    """

    cache: PieceCache
    parts: list[bytes]
    places: tuple[dict[str, list[int]], dict[str, list[int]]] = field(default_factory=lambda: ({}, {}))
    wholes: list[tuple[str, bool, int, int]] = field(default_factory=list)
    missing_chars: list[int] = field(default_factory=lambda: [0, 0])
    """Of later pieces, and of first ones."""


class PieceEncoder:
    """Encodes for one tokenizer. `whole` is its backend; `rest` that of a gap's later pieces, where they differ.

    `depth` is how far texts are taken apart. Whoever sets it has the proof that ids are right that far.
    """

    def __init__(self, pipeline: Pipeline, cutter: Cutter, whole: Backend, rest: Backend, cache_bytes_max: int) -> None:
        self._backends = (rest, whole)
        self._splitter, self._cutter = AddedTokenSplitter(pipeline.added_tokens), cutter
        self._prefix, self._before, self._after = pipeline.prefix, pipeline.ids_before, pipeline.ids_after
        self._cache_bytes_max = cache_bytes_max
        self.cache = PieceCache(cache_bytes_max)
        self.depth = Depth.WHOLE

    def flush(self) -> None:
        """Forget all ids; what is being looked up meanwhile goes nowhere."""
        self.cache = PieceCache(self._cache_bytes_max)

    def certain_chars(self, text: str) -> int:
        """See `AddedTokenSplitter`."""
        return self._splitter.certain_chars(text)

    def look_up(self, text: str) -> PartialEncoding:
        """What is known of a text. Its depth must be `SEGMENTS` or more."""
        assert self.depth, "an encoder that takes nothing apart knows nothing"
        partial = PartialEncoding(self.cache, [])
        stretches = self._cutter.stretches(text) if self.depth is Depth.PIECES else (text,)
        if len(stretches) == 1:
            self._look_up_segments(text, True, partial)
            return partial
        uncut_chars_max = -1 if self._prefix is Prefix.GAPS else self._cutter.uncut_chars_max
        for number, stretch in enumerate(stretches):
            # The first one begins the text; every other one goes on with a gap, and so without a prefix.
            is_first, start = number == 0 and self._prefix is not Prefix.NONE, len(partial.parts)
            ids = partial.cache.get(stretch, is_first)
            if ids is not None:
                partial.parts.append(ids)
            elif len(stretch) <= uncut_chars_max:
                self._miss(stretch, is_first, partial)
            else:
                self._look_up_segments(stretch, number == 0, partial)
                partial.wholes.append((stretch, is_first, start, len(partial.parts)))
        return partial

    def _look_up_segments(self, stretch: str, begins: bool, partial: PartialEncoding) -> None:
        get, add = partial.cache.get, partial.parts.append
        every_gap, at_start = self._prefix is Prefix.GAPS, self._prefix is Prefix.START
        for segment, token, opens in self._splitter.split(stretch):
            if token is not None:
                add(token)
                continue
            is_first = (every_gap and (begins or not opens)) or (at_start and begins and opens)
            ids = get(segment, is_first)
            if ids is None:
                self._look_up_pieces(segment, is_first, partial)
            else:
                add(ids)

    def _look_up_pieces(self, gap: str, is_first: bool, partial: PartialEncoding) -> None:
        start = len(partial.parts)
        pieces = self._cutter.pieces(gap) if self.depth is Depth.PIECES else (gap,)
        if len(pieces) > 1:
            partial.wholes.append((gap, is_first, start, start + len(pieces)))
        for piece in pieces:
            ids = partial.cache.get(piece, is_first)
            if ids is None:
                self._miss(piece, is_first, partial)
            else:
                partial.parts.append(ids)
            is_first = False

    def _miss(self, piece: str, is_first: bool, partial: PartialEncoding) -> None:
        places = partial.places[is_first]
        if piece not in places:
            places[piece] = []
            partial.missing_chars[is_first] += len(piece)
        places[piece].append(len(partial.parts))
        partial.parts.append(b"")

    def is_quick(self, partial: PartialEncoding) -> bool:
        """Whether the missing pieces can be encoded without holding an event loop too long."""
        limits = (backend.inline_chars_max for backend in self._backends)
        return all(missing <= limit for missing, limit in zip(partial.missing_chars, limits, strict=True))

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
        for whole, is_first, start, end in partial.wholes:
            cache.put(whole, is_first, b"".join(parts[start:end]))
        if adds_special:
            return b"".join((self._before, *parts, self._after))
        return b"".join(parts)

    def encode(self, text: str, adds_special: bool = False) -> bytes:
        """All steps at once."""
        partial = self.look_up(text)
        return self.join(partial, self.encode_missing(partial), adds_special)
