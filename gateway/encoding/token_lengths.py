"""The ids of a text's pieces from the ids of the whole text, by how many bytes of text each token stands for.

Cutting a list of ids is many times cheaper than encoding the pieces again. It is exact where both sides agree: the
lengths of all tokens give the length of the text, and each place where the text is cut is a token's end. A token may
stand for more text than its length here says (an unknown character, a "▁" that was one before), never for less: so two
errors can't make up for each other, and where there is one, nothing is said.
"""

import unicodedata
from collections.abc import Sequence
from itertools import pairwise

import numpy

from directory.chunks import TOKEN_BYTES


class TokenLengths:
    """`token_bytes` and `composes` are a pipeline's, which puts nothing before a text. Immutable; safe to share."""

    def __init__(self, token_bytes: bytes, composes: bool) -> None:
        self._lengths = numpy.frombuffer(token_bytes, "<u4")
        self._composes = composes

    def split(self, pieces: Sequence[str], ids: bytes) -> list[bytes] | None:
        """The ids of each of the `pieces`, which joined are the text that has these `ids`; `None` if they can't be
        told. Texts must be cut where that changes nothing.
        """
        if self._composes and not all(unicodedata.is_normalized("NFC", piece) for piece in pieces):
            return None  # what composes and what comes apart could make up for each other
        tokens = numpy.frombuffer(ids, "<u4")
        if not pieces or not len(tokens) or int(tokens.max()) >= len(self._lengths):
            return None
        token_ends = numpy.cumsum(self._lengths[tokens], dtype=numpy.int64)
        piece_ends = numpy.cumsum([len(piece) if piece.isascii() else len(piece.encode()) for piece in pieces])
        if token_ends[-1] != piece_ends[-1]:
            return None
        last_tokens = numpy.searchsorted(token_ends, piece_ends)
        if not numpy.array_equal(token_ends[last_tokens], piece_ends):
            return None
        ends = ((last_tokens + 1) * TOKEN_BYTES).tolist()
        return [ids[start:end] for start, end in pairwise([0, *ends])]
