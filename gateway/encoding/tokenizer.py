"""Text into token ids, exactly as Hugging Face `tokenizers` would: fastokens where it proves itself, else the real one.

Token ids leave as little-endian u32 bytes. Both backends release the GIL in the calls used here (`encode` of
`tokenizers` doesn't: it freezes an event loop for half a second, and is never called).
"""

import logging
import random
from typing import Protocol

import fastokens
import tokenizers

from directory.chunks import pack_tokens

logger = logging.getLogger(__name__)

PARITY_TEXTS = 300
_PARITY_PIECES = (
    "the quick brown fox", "def f(x):\n    return x", "Straße café naïve", "汉字漢字。かな", "שלום עולם", "مرحبا",
    "12345", "3.14159", "\uff11\uff12\uff13", "don't", "I'LL", "  ", "\t", "\n\n", "\r\n", "\u00a0", "\u2028",
    "\x1c\x1f\x85", "e\u0301", "\U0001f469\u200d\U0001f467", "🎉🎉", "\u200d", "▁", "Ġ", "<|", "|>", "</s>",
    "<s>", "\ufffd", "\x00", "...", "!?", "a" * 60, "://x.y/z?q=1&r=2",
)  # fmt: skip


class Backend(Protocol):
    """Encodes text; special tokens in the text are recognised, and added only where it is asked for."""

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        """Token ids as little-endian u32."""
        ...


class HuggingFaceBackend:
    """The reference: `tokenizers` itself."""

    name = "tokenizers"

    def __init__(self, pipeline: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(pipeline)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        """See `Backend`."""
        return pack_tokens(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def added_tokens(self) -> list[str]:
        """The contents of all added tokens."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]


class FastokensBackend:
    """fastokens: about twenty times faster on fresh text. Raises `ValueError` for pipelines it doesn't support."""

    name = "fastokens"

    def __init__(self, pipeline: str) -> None:
        self._tokenizer = fastokens.Tokenizer.from_json_str(pipeline)
        self._tokenizer.no_truncation()

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        """See `Backend`."""
        ids, _offsets = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        return bytes(ids)


def load_tokenizer(pipeline: bytes) -> HuggingFaceBackend | FastokensBackend:
    """A tokenizer from the content of a `tokenizer.json`; takes a second or two, so call it off the event loop.

    fastokens is used if it loads the pipeline and agrees with `tokenizers` on `PARITY_TEXTS` nasty texts made from a
    fixed seed. Raises `ValueError` if the content isn't a tokenizer.
    """
    try:
        text = pipeline.decode()
        reference = HuggingFaceBackend(text)
    except Exception as error:  # the library raises bare Exception for content it can't read
        raise ValueError(f"not a tokenizer.json: {error}") from error
    try:
        fast = FastokensBackend(text)
    except Exception as error:  # noqa: BLE001 - whatever it doesn't support, the reference serves
        logger.info("fastokens doesn't support this tokenizer, using tokenizers: %s", error)
        return reference
    for sample in parity_texts(reference.added_tokens()):
        if any(fast.encode(sample, special) != reference.encode(sample, special) for special in (False, True)):
            logger.warning("fastokens disagrees with tokenizers on this tokenizer, using tokenizers")
            return reference
    return fast


def longest_token_chars(pipeline: bytes) -> int:
    """Characters in the longest token's spelling: a bound on the characters any token can stand for.

    Byte-level spellings have a character a byte, and no text has more characters than bytes.
    """
    return max(map(len, tokenizers.Tokenizer.from_str(pipeline.decode()).get_vocab(with_added_tokens=True)))


def parity_texts(added_tokens: list[str], seed: int = 0) -> list[str]:
    """Texts that tokenizers get wrong: scripts, spaces, digits, added tokens whole and cut, random code points."""
    choose = random.Random(seed)
    texts = []
    for _ in range(PARITY_TEXTS):
        pieces = []
        for _ in range(choose.randrange(1, 12)):
            kind = choose.random()
            if kind < 0.2 and added_tokens:
                token = choose.choice(added_tokens)
                pieces.append(token if choose.random() < 0.7 else token[: choose.randrange(len(token) + 1)])
            elif kind < 0.3:
                point = choose.randrange(0x2FFFF)
                pieces.append("" if 0xD800 <= point < 0xE000 else chr(point))
            else:
                pieces.append(choose.choice(_PARITY_PIECES))
        texts.append(choose.choice(("", " ", "\n")).join(pieces))
    return texts
