"""What turns text into token ids: `tokenizers` itself, which is the reference, and fastokens, which is quick.

Token ids leave as little-endian u32 bytes. Both backends release the GIL in the calls used here (`encode` of
`tokenizers` doesn't: it freezes an event loop for half a second, and is never called).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Protocol

import fastokens
import tokenizers

from directory.chunks import pack_tokens


class Backend(Protocol):
    """Encodes text; special tokens in the text are recognised, and added only where it is asked for."""

    name: ClassVar[str]
    inline_chars_max: ClassVar[int]
    """Longer texts take it more than a millisecond or two: too long for an event loop."""
    piece_chars: ClassVar[int]
    """Pieces of about this length cost less to look up than to encode."""
    is_quick: ClassVar[bool]
    """Whether a text that nobody has seen costs so little that looking for its pieces first would show."""

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        """Token ids as little-endian u32."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, without special tokens around them."""
        ...


class HuggingFaceBackend:
    """The reference: `tokenizers` itself."""

    name: ClassVar[str] = "tokenizers"
    inline_chars_max: ClassVar[int] = 4_000
    piece_chars: ClassVar[int] = 256
    is_quick: ClassVar[bool] = False

    def __init__(self, pipeline: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(pipeline)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        """See `Backend`."""
        return pack_tokens(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        """See `Backend`."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [pack_tokens(encoding.ids) for encoding in encodings]

    def added_tokens(self) -> dict[str, int]:
        """The ids of all added tokens, by their contents. A file may name others than the library gives them."""
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    def longest_token_chars(self) -> int:
        """Characters in the longest token's spelling: a bound on the characters any token can stand for.

        Byte-level spellings have a character a byte, and no text has more characters than bytes.
        """
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))


class FastokensBackend:
    """fastokens: about twenty times faster on fresh text. Raises `ValueError` for pipelines it doesn't support."""

    name: ClassVar[str] = "fastokens"
    inline_chars_max: ClassVar[int] = 16_000
    piece_chars: ClassVar[int] = 1024
    is_quick: ClassVar[bool] = True

    def __init__(self, pipeline: str) -> None:
        self._tokenizer = fastokens.Tokenizer.from_json_str(pipeline)
        self._tokenizer.no_truncation()

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        """See `Backend`."""
        ids, _offsets = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        return bytes(ids)

    def encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        """See `Backend`."""
        ids, offsets = self._tokenizer.encode_batch_flat(list(texts), add_special_tokens=False)
        ends = memoryview(offsets).cast("Q").tolist()
        return [ids[start * 4 : end * 4] for start, end in pairwise(ends)]


BACKENDS: dict[str, type[HuggingFaceBackend] | type[FastokensBackend]] = {
    backend.name: backend for backend in (HuggingFaceBackend, FastokensBackend)
}
