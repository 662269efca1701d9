"""The ids of a text from the ids of its parts, of which most were seen before.

    prompt -> its opening: known? -> stretches of the rest: known? -> segments, at added tokens -> the gaps between
           them: known? -> pieces: known? -> all pieces that aren't, in one batch -> joined

Looking up may run in any thread, and so may the batch, which releases the GIL. Joining belongs to the event loop's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate

from gateway.encoding.added_tokens import AddedTokenSplitter
from gateway.encoding.cuts import Cutter
from gateway.encoding.known_openings import BLOCK_CHARS, KnownOpenings, Opening
from gateway.encoding.piece_cache import PieceCache
from gateway.encoding.pipeline import Pipeline, Prefix
from gateway.encoding.token_lengths import TokenLengths
from gateway.encoding.tokenizer import Backend

NEW_CHARS_MIN = 16_000
"""Shorter texts are looked up in full, which costs next to nothing."""
LOOKS, LOOK_CHARS = 2, 4_500
"""How many places of a long text are looked at before it is taken for new, and how much there: more than isn't cut."""
SEEN_SHARE_MIN = 0.25
"""Where less than this share of what is looked at was seen before, as prose and code have lines in common, a text is
new."""


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
    apart, to be kept: (text, whether it is first, from where to where its parts are). `ends` are safe places after the
    known `opening`, with how many parts come before each.
    """

    cache: PieceCache
    parts: list[bytes]
    places: tuple[dict[str, list[int]], dict[str, list[int]]] = field(default_factory=lambda: ({}, {}))
    wholes: list[tuple[str, bool, int, int]] = field(default_factory=list)
    text: str = ""
    opening: Opening = field(default_factory=Opening)
    ends: list[tuple[int, int]] = field(default_factory=list)
    missing_chars: list[int] = field(default_factory=lambda: [0, 0])
    """Of later pieces, and of first ones."""


@dataclass(frozen=True, slots=True)
class NewText:
    """A long text that was encoded at once: what its first `opening_chars` gave, and the others."""

    cache: PieceCache
    openings: KnownOpenings
    text: str
    opening_chars: int
    opening_ids: bytes
    other_ids: bytes

    @property
    def ids(self) -> bytes:
        """The text's."""
        return self.opening_ids + self.other_ids if self.opening_ids else self.other_ids


class PieceEncoder:
    """Encodes for one tokenizer. `whole` is its backend; `rest` that of a gap's later pieces, where they differ.

    `depth` is how far texts are taken apart. Whoever sets it has the proof that ids are right that far.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        cutter: Cutter,
        whole: Backend,
        rest: Backend,
        cache_bytes_max: int,
        block_chars: int = BLOCK_CHARS,
    ) -> None:
        self._backends = (rest, whole)
        self._splitter, self._cutter = AddedTokenSplitter(pipeline.added_tokens), cutter
        self._prefix, self._before, self._after = pipeline.prefix, pipeline.ids_before, pipeline.ids_after
        self._cache_bytes_max, self._block_chars = cache_bytes_max, block_chars
        self.cache, self.openings = PieceCache(cache_bytes_max // 2), KnownOpenings(cache_bytes_max // 2, block_chars)
        self.depth = Depth.WHOLE
        can_split = rest.is_quick and pipeline.token_bytes and pipeline.prefix is not Prefix.GAPS
        self._lengths = TokenLengths(pipeline.token_bytes, pipeline.composes) if can_split else None

    def flush(self) -> None:
        """Forget all ids; what is being looked up meanwhile goes nowhere."""
        self.cache = PieceCache(self._cache_bytes_max // 2)
        self.openings = KnownOpenings(self._cache_bytes_max // 2, self._block_chars)

    @property
    def cache_bytes(self) -> int:
        """What is remembered takes, about."""
        return self.cache.bytes_used + self.openings.bytes_used

    def certain_chars(self, text: str) -> int:
        """See `AddedTokenSplitter`."""
        return self._splitter.certain_chars(text)

    def look_up(self, text: str, opening: Opening | None = None) -> PartialEncoding:
        """What is known of a text, for any thread; `opening` is how it was recalled, if it was. Not for an encoder
        that takes nothing apart; what is looked up while it ceases to is finished.
        """
        opening = self.recall(text) if opening is None else opening
        partial = PartialEncoding(self.cache, opening.parts.copy(), text=text, opening=opening)
        rest, goes_on = text[opening.place :], opening.place > 0
        stretches = self._cutter.stretches(rest, goes_on) if self.depth is Depth.PIECES else (rest,)
        if len(stretches) == 1 and not goes_on:
            self._look_up_segments(text, True, partial)
            return partial
        uncut_chars_max = -1 if self._prefix is Prefix.GAPS else self._cutter.uncut_chars_max
        end = opening.place
        for number, stretch in enumerate(stretches, start=goes_on):
            if end > opening.place:
                partial.ends.append((end, len(partial.parts)))
            end += len(stretch)
            is_first, start = self.is_first(number), len(partial.parts)
            ids = partial.cache.get(stretch, is_first)
            if ids is not None:
                partial.parts.append(ids)
            elif len(stretch) <= uncut_chars_max:
                self._miss(stretch, is_first, partial)
            else:
                self._look_up_segments(stretch, number == 0, partial)
                partial.wholes.append((stretch, is_first, start, len(partial.parts)))
        return partial

    def recall(self, text: str) -> Opening:
        """What is known of how a text begins, for any thread."""
        return self.openings.find(text) if self.depth is Depth.PIECES else Opening()

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
        partial.opening.go_on(partial.text, self._stretches_of(partial))
        if adds_special:
            return b"".join((self._before, *parts, self._after))
        return b"".join(parts)

    def _stretches_of(self, partial: PartialEncoding) -> Iterator[tuple[int, bytes]]:
        """The stretches behind the known opening, but for the last one: where each ends, and its ids."""
        before = len(partial.opening.parts)
        for end, count in partial.ends:
            yield end, b"".join(partial.parts[before:count])
            before = count

    def looks_new(self, text: str, known_chars: int = 0) -> bool:
        """Whether a text had better be encoded at once: it is long, and little of it was seen before; of its beginning
        `known_chars` are known.
        """
        if known_chars >= len(text) * SEEN_SHARE_MIN:
            return False
        if self._lengths is None or self.depth is not Depth.PIECES or len(text) < NEW_CHARS_MIN:
            return False
        chars = seen_chars = 0
        for start in range(0, len(text), len(text) // LOOKS + 1):
            # What touches an end of the look would be cut elsewhere in the whole text; all else is cut alike.
            for number, stretch in enumerate(self._cutter.stretches(text[start : start + LOOK_CHARS])[start > 0 : -1]):
                chars += len(stretch)
                if self.cache.get(stretch, self.is_first(start + number)) is not None:
                    seen_chars += len(stretch)
        return seen_chars < chars * SEEN_SHARE_MIN and self.goes_at_once(text)

    def goes_at_once(self, text: str) -> bool:
        """Whether it can be encoded at once, and taken apart later."""
        return self._lengths is not None and (self._prefix is Prefix.NONE or self._cutter.opening_chars(text) > 0)

    def encode_at_once(self, text: str) -> NewText:
        """The ids of a text that goes at once, with nothing looked up or kept: for any thread."""
        rest, whole = self._backends
        opening_chars = 0 if self._prefix is Prefix.NONE else self._cutter.opening_chars(text)
        opening_ids = whole.encode(text[:opening_chars]) if opening_chars else b""
        return NewText(self.cache, self.openings, text, opening_chars, opening_ids, rest.encode(text[opening_chars:]))

    def take_apart(self, new: NewText) -> list[tuple[str, bytes]] | None:
        """The text's stretches with their ids, to be kept; `None` where they must be encoded to be known: for any
        thread.
        """
        assert self._lengths is not None, "without it no text goes at once"
        stretches = self._cutter.stretches(new.text)
        head = stretches[0][new.opening_chars :]  # the opening ends with the first stretch or within it
        found = self._lengths.split([head, *stretches[1:]] if head else stretches[1:], new.other_ids)
        if found is None:
            return None
        found = [new.opening_ids + found[0], *found[1:]] if head else [new.opening_ids, *found]
        return list(zip(stretches, found, strict=True))

    def keep(self, new: NewText, stretches: Sequence[tuple[str, bytes]]) -> None:
        """Keep what `take_apart` found."""
        for number, (stretch, ids) in enumerate(stretches):
            new.cache.put(stretch, self.is_first(number), ids)
        ends = accumulate(len(stretch) for stretch, _ in stretches[:-1])
        new.openings.nothing().go_on(new.text, zip(ends, (ids for _, ids in stretches), strict=False))

    def with_special(self, ids: bytes) -> bytes:
        """A text's ids with the tokenizer's special tokens around them."""
        return b"".join((self._before, ids, self._after))

    def is_first(self, number: int) -> bool:
        """Whether a stretch begins the text; every other one goes on with a gap, and so without a prefix."""
        return number == 0 and self._prefix is not Prefix.NONE

    def encode(self, text: str, adds_special: bool = False) -> bytes:
        """What is known, encoding what isn't, and joining: all steps at once."""
        partial = self.look_up(text)
        return self.join(partial, self.encode_missing(partial), adds_special)
